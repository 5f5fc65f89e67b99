"""What a figure was measured on: processor, memory, GPUs, versions, revision of the code.

A latency without its machine says nothing, so this stands in every manifest, and `llmbench
doctor` prints it. Facts come from the operating system's own tables (`/proc/cpuinfo`, `sysctl`,
control groups), from package metadata (nothing is imported to learn its version) and from NVIDIA's
management library. What cannot be learnt is None, never a guess.
"""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "llmbench",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pandas",
    "pyarrow",
    "gguf",
    "matplotlib",
    "typer",
    "rich",
)

CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
    "neon",
    "fp16",
    "dotprod",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
    "sme",
)
"""Processor features that decide which kernels run, in one spelling for all systems."""

_LINUX_ARM_NAMES = {
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "svebf16": "bf16",
}
_MACOS_NAMES = {
    "avx512vnni": "avx512_vnni",
    "advsimd": "neon",
    "feat_fp16": "fp16",
    "feat_dotprod": "dotprod",
    "feat_bf16": "bf16",
    "feat_i8mm": "i8mm",
    "feat_sme": "sme",
}

_TIMEOUT_S = 10  # nvidia-smi takes seconds where the driver has to wake the GPU

_CGROUP = Path("/sys/fs/cgroup")


def collect_environment() -> dict[str, Any]:
    """Return all facts, as JSON types; takes well under a second without a GPU."""
    return {
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "os": {
            "system": platform.system(),
            "release": platform.release(),
            "name": _os_name(),
        },
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
        },
        "packages": package_versions(),
        "gpus": gpu_facts(),
        "code": code_facts(),
    }


def hardware_identity(environment: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an environment that makes two machines the same for a benchmark."""
    cpu = environment["cpu"]
    return {
        "cpu_model": cpu["model"],
        "num_usable_cores": cpu["num_usable_cores"],
        "gpus": [gpu["name"] for gpu in environment["gpus"]],
    }


def software_identity(environment: dict[str, Any]) -> dict[str, Any]:
    """Return the versions that figures depend on: of what computes, not of what draws."""
    names = ("llmbench", "torch", "triton", "transformers")
    return {name: environment["packages"][name] for name in names}


def cpu_facts() -> dict[str, Any]:
    """Return model, cores and features of the processor."""
    cpuinfo = _read("/proc/cpuinfo")
    sysctl = "" if cpuinfo else _run(["sysctl", "machdep.cpu", "hw.optional"])
    return {
        "model": _cpu_model(cpuinfo or sysctl) or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "num_physical_cores": psutil.cpu_count(logical=False),
        "num_logical_cores": psutil.cpu_count(),
        "num_usable_cores": usable_cores(_read_cgroup("cpu.max")),
        "flags": cpu_flags(cpuinfo or sysctl),
    }


def usable_cores(cpu_max: str = "") -> float:
    """Return the cores that this process may use: its affinity, cut by a container's quota.

    `cpu_max` is the text of the control group's file, `QUOTA PERIOD` or `max PERIOD`.
    """
    try:
        available = float(len(os.sched_getaffinity(0)))  # type: ignore[attr-defined,unused-ignore]
    except AttributeError:  # macOS has no affinity
        available = float(os.cpu_count() or 1)
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        available = min(available, int(quota) / int(period))
    return available


def cpu_flags(text: str) -> list[str]:
    """Return which of CPU_FLAGS stand in `/proc/cpuinfo` or in `sysctl machdep.cpu hw.optional`."""
    found: set[str] = set()
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        is_list = key.startswith("machdep.cpu.") and key.endswith("features")
        if is_list or key in ("flags", "Features"):
            words = value.lower().split()
        elif key.startswith("hw.optional.") and value == "1":
            words = [key.rpartition(".")[2].lower()]
        else:
            continue
        found.update(_LINUX_ARM_NAMES.get(word, _MACOS_NAMES.get(word, word)) for word in words)
    return [flag for flag in CPU_FLAGS if flag in found]


def memory_facts() -> dict[str, int | None]:
    """Return the machine's memory, and the container's limit where there is one."""
    memory = psutil.virtual_memory()
    limit = _read_cgroup("memory.max").strip()
    return {
        "total_bytes": int(memory.total),
        "available_bytes": int(memory.available),
        "limit_bytes": int(limit) if limit.isdigit() else None,
    }


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return installed versions by distribution name; None for what is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def gpu_facts() -> list[dict[str, Any]]:
    """Return NVIDIA GPUs, through nvidia-ml-py where installed, else through `nvidia-smi`."""
    gpus = _gpus_from_library()
    if gpus is None:
        query = "name,memory.total,memory.free,driver_version,compute_cap"
        gpus = parse_nvidia_smi(
            _run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
        )
    return gpus


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """Read nvidia-smi's CSV of name, total and free MiB, driver, compute capability."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 5:
            continue
        name, total, free, driver, capability = fields
        gpus.append(
            {
                "name": name,
                "memory_total_bytes": int(total) * 2**20 if total.isdigit() else None,
                "memory_free_bytes": int(free) * 2**20 if free.isdigit() else None,
                "driver_version": driver,
                "compute_capability": capability,
            }
        )
    return gpus


def code_facts(folder: Path = Path(__file__).parent) -> dict[str, Any]:
    """Return the revision of the checkout that `folder` lies in; None outside of one."""
    folder = folder.resolve()
    unknown = {"git_revision": None, "git_has_changes": None}
    # An installed package may lie below somebody else's repository: only a tracked file counts.
    if not _run(["git", "-C", str(folder), "ls-files", "--", "."]):
        return unknown
    revision = _run(["git", "-C", str(folder), "rev-parse", "HEAD"]).strip()
    if not revision:
        return unknown
    changes = _run(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return {"git_revision": revision, "git_has_changes": bool(changes.strip())}


def _gpus_from_library() -> list[dict[str, Any]] | None:
    """Return None where the library is missing or finds no driver."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(
                {
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "memory_total_bytes": int(memory.total),
                    "memory_free_bytes": int(memory.free),
                    "driver_version": driver,
                    "compute_capability": f"{major}.{minor}",
                }
            )
        return gpus
    except pynvml.NVMLError:  # some devices answer in part only; nvidia-smi copes with them
        return None
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older versions give bytes


def _cpu_model(text: str) -> str | None:
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in ("model name", "machdep.cpu.brand_string") and value:
            return value
    return None


def _os_name() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _read_cgroup(name: str) -> str:
    """Read a file of this process's own control group (version 2), else of the container's root."""
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::/") and (text := _read(_CGROUP / line[4:] / name)):
            return text
    return _read(_CGROUP / name)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _run(command: Sequence[str]) -> str:
    """Return what a program prints; nothing where it is missing, fails or hangs."""
    # Inside a git hook, GIT_DIR and its like point to the hook's repository.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            env=outside,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
