"""Compile the CPU kernels at first use, keep the library on disk, and load it.

The kernels are plain C++ without a header of torch's, so any C++17 compiler builds them in
seconds, its translation units side by side, and one library serves every torch version. The
file's name is a digest of the sources, the compiler and its flags, and the processor's features:
a change of any of them builds anew, and an old library is never taken for a new one. It is put in
place by one rename, so that processes which start together do not see half a file.

Parallel loops run on torch's own OpenMP pool: the library that torch has loaded is searched in
this process, and the address of its entry point is handed to the kernels (cpu_parallel.h).
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from llmbench.engine.errors import KernelBuildError
from llmbench.engine.models.catalog import cache_root

logger = logging.getLogger(__name__)

UNITS = ("cpu_kernels.cpp", "cpu_quantized.cpp")
SOURCES = (
    *UNITS,
    "cpu_activation.h",
    "cpu_attention.h",
    "cpu_cache.h",
    "cpu_codes.h",
    "cpu_linear.h",
    "cpu_parallel.h",
    "cpu_products.h",
    "cpu_quantized_dot.h",
    "cpu_quantized_inputs.h",
    "cpu_quantized_tiles.h",
    "cpu_tile_order.h",
    "cpu_tiles.h",
    "cpu_two_levels.h",
    "cpu_vector.h",
)
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",  # square roots as one instruction
    "-ffp-contract=fast",  # a * b + c as one instruction
    "-fvisibility=hidden",
    "-fPIC",
)
COMPILERS = ("c++", "g++", "clang++")


@functools.cache
def load_library() -> ctypes.CDLL:
    """The kernels' library, built if this machine's cache has none.

    Raises KernelBuildError where no compiler is found or it fails.
    """
    compiler = find_compiler()
    command = [*compiler, *FLAGS, _native_flag(platform.machine())]
    path = cache_root() / "kernels" / f"{_digest(command)}.so"
    if not path.exists():
        logger.info("compiling CPU kernels into %s", path)
        _build(command, path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        failure = KernelBuildError(f"the CPU kernels in {path} do not load: {error}")
        failure.add_note(f"delete {path}; it is built again at the next start")
        raise failure from error
    entry = openmp_entry()
    if entry is None:
        logger.warning("torch's OpenMP library was not found: CPU kernels run on one thread")
    else:
        library.set_parallel_entry(entry)
    return library


def find_compiler() -> list[str]:
    """Command of the C++ compiler: `$CXX`, else the first of c++, g++ and clang++."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in [configured] if configured else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    wanted = f"`{configured[0]}` (from $CXX)" if configured else ", ".join(COMPILERS)
    error = KernelBuildError(f"compiled CPU kernels need a C++ compiler, and found no {wanted}")
    error.add_note("install one (Debian: apt-get install g++; macOS: xcode-select --install)")
    error.add_note("or run without --compile")
    raise error


def openmp_entry() -> ctypes.c_void_p | None:
    """Address of GOMP_parallel in the OpenMP library that torch runs on; None if there is none."""
    for path in _loaded_libraries():
        name = path.name
        if not name.startswith(("libgomp", "libomp", "libiomp")):
            continue
        try:
            # Opening a loaded library again gives the loaded one.
            entry = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(entry, ctypes.c_void_p)
    return None


def _loaded_libraries() -> list[Path]:
    """Shared libraries of this process; where the system does not tell, those torch ships."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/" in line}
        found = [Path(path.strip()) for path in paths if ".so" in path]
    else:
        found = list((Path(torch.__file__).parent / "lib").glob("*omp*"))
    # Of several libraries, the one beside torch is the one that torch runs on.
    return sorted(found, key=lambda path: ("torch" not in path.parts, path))


def _native_flag(machine: str) -> str:
    return "-mcpu=native" if machine in ("arm64", "aarch64") else "-march=native"


def _digest(command: list[str]) -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256("\0".join([*command, _processor()]).encode())
    digest.update(_run([command[0], "--version"]).stdout.encode())
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """What this processor can do, as text that differs where code for one fails on another."""
    if sys.platform == "darwin":
        return _run(["sysctl", "-n", "machdep.cpu.brand_string"]).stdout
    wanted = ("flags", "Features")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in lines if line.startswith(wanted)), "")
    return f"{platform.machine()} {' '.join(sorted(features.split()))}"


def _build(command: list[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f"{path.stem}-", dir=path.parent)
    except OSError as error:
        failure = KernelBuildError(f"cannot keep compiled CPU kernels in {path.parent}: {error}")
        failure.add_note("name another folder in the variable LLMBENCH_CACHE")
        raise failure from error
    with folder as name:
        objects = [str(Path(name, unit).with_suffix(".o")) for unit in UNITS]
        sources = [str(Path(__file__).parent / unit) for unit in UNITS]
        steps = zip(sources, objects, strict=True)
        with ThreadPoolExecutor(len(UNITS)) as pool:
            list(pool.map(lambda pair: _compile([*command, "-c", pair[0], "-o", pair[1]]), steps))
        partial = Path(name, path.name)
        _compile([*command, "-shared", *objects, "-o", str(partial)])
        os.chmod(partial, 0o644)
        os.replace(partial, path)


def _compile(command: list[str]) -> None:
    result = _run(command)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line]
        reason = (lines or result.stderr.splitlines() or ["no message"])[0]
        failure = KernelBuildError(f"compiling the CPU kernels failed: {reason}")
        failure.add_note(f"the command was: {shlex.join(command)}")
        failure.add_note("GCC 9 or Clang 13 is needed; $CXX names another compiler")
        failure.add_note("or run without --compile")
        raise failure


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
