"""The device that the engine computes on, and how much of its memory is free.

On CPU the answer is the smaller of the machine's available memory and what the control group of
this process (a container's limit) leaves; page cache that the kernel would give back counts as
free in both.
"""

import math
from pathlib import Path

import numpy as np
import psutil
import torch

from llmbench.engine.config import Device
from llmbench.engine.errors import ConfigError, OutOfMemoryError

MIB = 1024**2
CGROUP = Path("/sys/fs/cgroup")
"""Control group v2 of a container, as it sees itself."""


def resolve_device(device: Device) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        error = ConfigError("device cuda was asked for, and torch finds no CUDA device")
        error.add_note("`llmbench doctor` says what is missing; --device cpu runs without one")
        raise error
    return torch.device("cuda" if device != "cpu" and has_cuda else "cpu")


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    available = int(psutil.virtual_memory().available)
    left = _cgroup_headroom(CGROUP)
    return available if left is None else min(available, left)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory only where they are written, as the KV pool is.

    torch fills its zeros; numpy asks the system for pages that are zero by themselves, and a CPU
    process does not hold those that no token has reached.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def check_fits(
    num_parameters: int, dtype: torch.dtype, device: torch.device, *, quantized_bytes: int = 0
) -> None:
    """Refuse weights that are larger than the free memory, with the sum.

    `num_parameters` are those in full precision, quantized layers add `quantized_bytes`.
    """
    needed, free = num_parameters * dtype.itemsize + quantized_bytes, free_memory_bytes(device)
    if needed <= free:
        return
    quantized = f" + {quantized_bytes / MIB:,.0f} MiB quantized" if quantized_bytes else ""
    error = OutOfMemoryError(
        f"the weights do not fit: {num_parameters:,} parameters x {dtype.itemsize} bytes "
        f"({dtype}){quantized} = {needed / MIB:,.0f} MiB, and {free / MIB:,.0f} MiB are free on "
        f"{device.type}"
    )
    narrower = "" if dtype.itemsize == 2 else "--dtype bfloat16, or "
    error.add_note(f"use {narrower}a smaller or quantized model")
    raise error


def _cgroup_headroom(folder: Path) -> int | None:
    """Bytes below the control group's limit; None where there is no limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        reclaimable = sum(
            int(line.split()[1]) for line in lines if line.startswith("inactive_file ")
        )
        return max(0, int(limit) - used + reclaimable)
    except (OSError, ValueError, IndexError):
        return None
