"""Rows of a local file: JSON lines, a JSON list, CSV or Parquet, compressed or not.

The kind is told by the name: .jsonl, .json, .csv, .parquet, with .gz, .bz2 or .xz behind it. Lines
end at the line feed alone: text may hold the other characters that Unicode calls line breaks.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmbench.bench.errors import WorkloadError

_OPENERS: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
}
KINDS = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class DataFile:
    """The rows of a file, which nobody may change: they are shared by all tasks that read it."""

    rows: tuple[dict[str, Any], ...]
    sha256: str  # of the file's bytes as they lie on the disk


def read_data_file(path: Path) -> DataFile:
    """Read a file, once for as long as it does not change.

    Raises:
        WorkloadError: it cannot be read, or a line is not a row; with its path and line.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise WorkloadError(f"no data file {path}: {error.strerror}") from error
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)  # MMLU's 57 tasks share four files
def _read(path: Path, _mtime_ns: int, _size: int) -> DataFile:
    try:
        raw = path.read_bytes()
        suffixes = path.suffixes
        opener = _OPENERS.get(suffixes[-1]) if suffixes else None
        data = opener(raw) if opener else raw
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise WorkloadError(f"cannot read {path}: {error}") from error
    kind = next((suffix for suffix in reversed(suffixes) if suffix not in _OPENERS), "")
    if kind not in KINDS:
        raise WorkloadError(
            f"cannot tell what {path} holds: its name should end in {', '.join(KINDS)}"
        )
    if kind == ".parquet":
        rows = _parquet(data, path)
    elif kind == ".csv":
        rows = _csv(_decoded(data, path), path)
    elif kind == ".json" and data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        rows = _json_list(data, path)
    else:
        rows = _json_lines(data, path)
    if not rows:
        raise WorkloadError(f"{path} holds no rows")
    return DataFile(tuple(_aligned(rows)), hashlib.sha256(raw).hexdigest())


def _json_lines(data: bytes, path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # bad JSON or bad UTF-8
            raise WorkloadError(f"{path}:{number} is not JSON: {error}") from error
        rows.append(_checked(row, f"{path}:{number}"))
    return rows


def _json_list(data: bytes, path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(_decoded(data, path))
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}:{error.lineno} is not JSON: {error}") from error
    return [_checked(row, f"{path}, row {index}") for index, row in enumerate(found)]


def _csv(text: str, path: Path) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[dict[str, Any]] = []
    try:
        for row in reader:
            if None in row or None in row.values():
                width = len(reader.fieldnames or ())
                raise WorkloadError(f"{path}:{reader.line_num} has not the {width} columns")
            rows.append(dict(row))
    except csv.Error as error:
        raise WorkloadError(f"{path}:{reader.line_num + 1} is not CSV: {error}") from error
    return rows


def _parquet(data: bytes, path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise WorkloadError(f"{path} is not Parquet: {error}") from error


def _aligned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put fields into the order in which the file first has them, as in a table's columns.

    The hash of a row is over its printed form, and the harness reads rows out of such a table.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    if any(list(row) != names for row in rows):
        rows = [{name: row[name] for name in names if name in row} for row in rows]
    for name in names:
        inner = [row.get(name) for row in rows]
        if all(isinstance(value, dict) for value in inner):
            aligned = _aligned([value for value in inner if isinstance(value, dict)])
            rows = [{**row, name: value} for row, value in zip(rows, aligned, strict=True)]
    return rows


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise WorkloadError(f"{path}:{line} is not UTF-8: {error.reason}") from error


def _checked(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise WorkloadError(f"{where} is no object with fields, found {type(row).__name__}")
    return row
