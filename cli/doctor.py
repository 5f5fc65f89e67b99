"""`llmbench doctor`: what this machine is, what it can run, and what to do about the rest.

A check answers for one feature: `ready`, `slow` (works, at a price that is named) or `missing`,
always with the fix. Checks change nothing and need no network. What no part of llmbench can do
without is required, and its absence is exit code 3.
"""

import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import typer

from llmbench.cli.options import Debug, Json, SectionedCommand, examples
from llmbench.cli.output import Output
from llmbench.engine.errors import EngineError
from llmbench.engine.models.catalog import CATALOG, cache_root, is_pulled

State = Literal["ready", "slow", "missing"]
GIB = 2**30
FAILED = 3

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
LEAST_MEMORY_BYTES = 2 * GIB  # torch and its libraries take about 0.7 GiB, the demo model 1 more
LEAST_DISK_BYTES = GIB  # the demo model and its download


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found about one feature."""

    feature: str
    state: State
    found: str
    fix: str = ""
    is_required: bool = False


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(
        "doctor",
        cls=SectionedCommand,
        epilog=examples("llmbench doctor", "llmbench doctor --json > machine.json"),
    )(doctor_command)


def doctor_command(json: Json = False, debug: Debug = False) -> None:
    """Say what this machine can do, and how to get what is missing."""
    from llmbench.bench.environment import collect_environment

    output = Output(as_json=json)
    environment = collect_environment()
    checks = run_checks(environment)
    output.document({"environment": environment, "checks": [asdict(check) for check in checks]})
    for label, text in machine_lines(environment):
        output.result(f"{label:10}{text}")
    output.result("")
    for check in checks:
        output.result(f"{check.state:10}{check.feature}: {check.found}")
        if check.fix:
            output.result(f"{'':10}fix: {check.fix}")
    if any(check.is_required and check.state == "missing" for check in checks):
        raise typer.Exit(FAILED)


def machine_lines(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """What the machine is, a label and a line each."""
    cpu, memory, packages = environment["cpu"], environment["memory"], environment["packages"]
    gpus = [_gpu_line(gpu) for gpu in environment["gpus"]] or ["none found"]
    versions = [f"{name} {version}" for name, version in packages.items() if version]
    return [
        ("CPU", f"{cpu['model']}, {cpu['num_usable_cores']:g} usable cores"),
        ("", " ".join(cpu["flags"]) or "no known vector features"),
        ("memory", _memory_line(memory)),
        *(("GPU", line) for line in gpus),
        ("system", f"{environment['os']['name']}, Python {environment['python']['version']}"),
        ("versions", ", ".join(versions)),
        ("cache", str(cache_root())),
    ]


def run_checks(environment: dict[str, Any]) -> list[Check]:
    """All checks, those of required things first."""
    checks: tuple[Callable[[dict[str, Any]], Check], ...] = (
        check_packages,
        check_torch,
        check_memory,
        check_disk,
        check_bfloat16,
        check_gpu,
        check_compiler,
        check_pip,
        check_demo_model,
    )
    return [check(environment) for check in checks]


def check_packages(environment: dict[str, Any]) -> Check:
    """Whether what llmbench requires is installed, new enough."""
    from packaging.requirements import Requirement

    wrong = []
    for line in importlib.metadata.requires("llmbench") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name}{requirement.specifier} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, needed is {requirement.specifier}")
    if wrong:
        return Check(
            feature="required packages",
            state="missing",
            found="; ".join(wrong),
            fix=f"{sys.executable} -m pip install --upgrade llmbench",
            is_required=True,
        )
    return Check(feature="required packages", state="ready", found="all there", is_required=True)


def check_torch(environment: dict[str, Any]) -> Check:
    """Whether torch loads: an installed package may still lack its libraries."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            feature="built-in engine",
            state="missing",
            found=f"torch does not load: {error}",
            fix="install torch again, for this Python and this processor",
            is_required=True,
        )
    return Check(
        feature="built-in engine",
        state="ready",
        found=f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        is_required=True,
    )


def check_memory(environment: dict[str, Any]) -> Check:
    """Whether the smallest model has room."""
    memory = environment["memory"]
    available = min(memory["available_bytes"], memory["limit_bytes"] or memory["available_bytes"])
    is_enough = available >= LEAST_MEMORY_BYTES
    return Check(
        feature="memory",
        state="ready" if is_enough else "missing",
        found=f"{available / GIB:.1f} GiB available",
        fix="" if is_enough else "free some: the demo model needs 2 GiB; --kv-cache-memory caps it",
    )


def check_disk(environment: dict[str, Any]) -> Check:
    """Whether the cache has room for the demo model."""
    folder = cache_root()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    is_enough = free >= LEAST_DISK_BYTES
    return Check(
        feature="disk for the cache",
        state="ready" if is_enough else "missing",
        found=f"{free / GIB:.1f} GiB free",
        fix="" if is_enough else "name a folder with room in the variable LLMBENCH_CACHE",
    )


def check_bfloat16(environment: dict[str, Any]) -> Check:
    """Whether the processor multiplies bfloat16 itself."""
    found = [flag for flag in environment["cpu"]["flags"] if flag in BF16_FLAGS]
    if found:
        return Check(feature="bfloat16 on CPU", state="ready", found=", ".join(found))
    return Check(
        feature="bfloat16 on CPU",
        state="slow",
        found="this processor has no bfloat16 instructions (avx512_bf16, amx_bf16, bf16)",
        fix="measure with --dtype float32, which may be faster here and takes twice the memory",
    )


def check_gpu(environment: dict[str, Any]) -> Check:
    """Whether torch sees the GPU that the driver sees."""
    feature = "GPU"
    gpus = environment["gpus"]
    version = environment["packages"].get("torch") or ""
    if not gpus:
        return Check(
            feature=feature,
            state="missing",
            found="no NVIDIA GPU or no driver; everything runs on the CPU",
            fix="none needed for a CPU; else install the NVIDIA driver, so that nvidia-smi answers",
        )
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return Check(
                feature=feature,
                state="ready",
                found=f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
            )
        if torch.version.cuda is not None:
            return Check(
                feature=feature,
                state="missing",
                found=f"torch is built for CUDA {torch.version.cuda} and finds no device",
                fix=f"update the driver, which is {gpus[0]['driver_version']}, and check "
                "CUDA_VISIBLE_DEVICES",
            )
    return Check(
        feature=feature,
        state="missing",
        found=f"a GPU is here, but torch {version} is a build without CUDA",
        fix="install torch again from an index of CUDA builds (pytorch.org, Get started)",
    )


def check_compiler(environment: dict[str, Any]) -> Check:
    """Whether a C++ compiler is at hand for the CPU kernels."""
    feature = "compiled CPU kernels"
    try:
        from llmbench.engine.kernels.cpu_build import find_compiler

        return Check(feature=feature, state="ready", found=" ".join(find_compiler()))
    except EngineError as error:
        notes = getattr(error, "__notes__", ())
        return Check(feature=feature, state="slow", found=str(error), fix="; ".join(notes))
    except (ImportError, OSError):
        return Check(feature=feature, state="missing", found="needs torch", fix="see above")


def check_pip(environment: dict[str, Any]) -> Check:
    """Whether `llmbench models pull` has its downloader."""
    feature = "llmbench models pull"
    if importlib.util.find_spec("pip") is None:
        return Check(
            feature=feature,
            state="missing",
            found="pip is not installed in this environment",
            fix=f"{sys.executable} -m ensurepip",
        )
    return Check(feature=feature, state="ready", found=f"pip {importlib.metadata.version('pip')}")


def check_demo_model(environment: dict[str, Any]) -> Check:
    """Whether there is a model to try things with."""
    for name in CATALOG:
        if is_pulled(name):
            return Check(feature="demo model", state="ready", found=name)
    name = next(iter(CATALOG))
    return Check(
        feature="demo model",
        state="missing",
        found=f"{name} is not in the cache",
        fix=f"llmbench models pull {name}",
    )


def _memory_line(memory: dict[str, Any]) -> str:
    available, total = memory["available_bytes"] / GIB, memory["total_bytes"] / GIB
    text = f"{available:.1f} of {total:.1f} GiB available"
    limit = memory["limit_bytes"]
    return f"{text}, limited to {limit / GIB:.1f} GiB by the container" if limit else text


def _gpu_line(gpu: dict[str, Any]) -> str:
    total = gpu["memory_total_bytes"]
    size = f", {total / GIB:.0f} GiB" if total else ""
    return f"{gpu['name']}{size}, driver {gpu['driver_version']}"
