"""The header of a safetensors file, read and checked before anything is believed.

A file is 8 bytes of header length (little-endian), that many bytes of JSON naming each tensor's
dtype, shape and byte range, then the tensors back to back. Every number in it is somebody else's
claim: the length is held against the file's size before memory is taken for it, each range
against dtype x shape and against the file's end, and all ranges together must cover the data
without holes or overlaps. So a download that broke off, or a file that was made to do harm, is
named within milliseconds, however large it is.

Source: the format's specification, huggingface/safetensors README, "Format".
"""

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbench.quant.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Limit of the reference implementation (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""
GIT_LFS_START = b"version "
"""A file that Git LFS has not fetched begins so (git-lfs specification, "The Pointer")."""

DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
}
"""Safetensors dtype → torch's name of it and bytes an element."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `start` counts from the beginning of the file."""

    path: Path
    dtype: str
    """torch's name, such as `bfloat16`."""
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header: its tensors, its raw bytes and the size of the file it belongs to."""

    path: Path
    tensors: dict[str, TensorEntry]
    raw: bytes
    file_size: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of one file; no tensor is touched.

    Raises:
        CheckpointError: the file is absent, cut short or contradicts itself; names the tensor.
    """
    try:
        # Looked at before it is opened: opening a named pipe would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            start = file.read(LENGTH_BYTES)
            if start == GIT_LFS_START:
                raise _git_lfs_pointer(path)
            length = int.from_bytes(start, "little")
            _check_length(path, length, file_size)
            raw = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return SafetensorsHeader(path, _parse(path, raw, file_size), raw, file_size)


def _check_length(path: Path, length: int, file_size: int) -> None:
    if file_size < LENGTH_BYTES:
        raise _broken(path, f"a safetensors file starts with 8 bytes of length; it has {file_size}")
    room = file_size - LENGTH_BYTES
    if length > room:
        raise _broken(path, f"its header claims {length} bytes, {room} follow in the file")
    if length > MAX_HEADER_BYTES:
        raise _broken(path, f"its header claims {length} bytes, above {MAX_HEADER_BYTES}")


def _parse(path: Path, raw: bytes, file_size: int) -> dict[str, TensorEntry]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise _broken(path, f"its header names {repeated!r} twice")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, f"its header is a JSON {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    data_start = LENGTH_BYTES + len(raw)
    tensors = {name: _entry(path, name, claim, data_start) for name, claim in header.items()}
    _check_coverage(path, tensors, data_start, file_size)
    return tensors


def _entry(path: Path, name: str, claim: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = claim["dtype"], claim["shape"], claim["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"tensor {name} lacks dtype, shape or data_offsets") from error
    # type() and not isinstance(): True is an int too.
    if any(type(number) is not int or number < 0 for number in numbers):
        raise _broken(path, f"tensor {name} has shape {shape} at bytes {begin} to {end}")
    if dtype not in DTYPES:
        raise _broken(path, f"tensor {name} is of the unknown dtype {dtype!r}")
    torch_name, itemsize = DTYPES[dtype]
    expected = math.prod(shape) * itemsize
    if end - begin != expected:
        raise _broken(
            path,
            f"tensor {name} ({dtype} {shape}) needs {expected} bytes, its range {begin} to {end} "
            f"holds {end - begin}",
        )
    return TensorEntry(path, torch_name, tuple(shape), data_start + begin, expected)


def _check_coverage(
    path: Path, tensors: dict[str, TensorEntry], data_start: int, file_size: int
) -> None:
    reached = data_start
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    for name, entry in ordered:
        if entry.start + entry.num_bytes > file_size:
            raise _broken(
                path,
                f"tensor {name} ends at byte {entry.start + entry.num_bytes}, the file at "
                f"{file_size}: it is cut short",
            )
        if entry.start != reached:
            fault = "overlaps the one before it" if entry.start < reached else "leaves a hole"
            raise _broken(path, f"tensor {name} starts at byte {entry.start}, which {fault}")
        reached += entry.num_bytes
    if reached != file_size:
        raise _broken(path, f"{file_size - reached} bytes follow its last tensor")


def _git_lfs_pointer(path: Path) -> CheckpointError:
    error = CheckpointError(f"{path} is a Git LFS pointer: its weights were not fetched")
    error.add_note("run `git lfs pull` in that folder")
    return error


def _broken(path: Path, fault: str) -> CheckpointError:
    error = CheckpointError(f"{path} is broken: {fault}")
    error.add_note("fetch or save this file again; it was not written to its end, or was altered")
    return error
