"""A results folder: what one run leaves behind, written as it happens.

    manifest.json           what was run, on what, with which seeds and digests
    results.jsonl           one record a cell, appended and synced when the cell ends
    events-<cell>.parquet   the raw event log of a cell
    steps-<cell>.parquet    the engine's step records of a cell

Nothing finished is ever lost or repeated. A record is on the disk before the next cell starts; a
line that a crash tore off is dropped on the next start, and its cell runs again. A folder is
resumed only by the run that began it: everything that a figure depends on (IDENTITY_KEYS) goes
into one digest, and another digest is refused with the list of what differs. A lock keeps two
runs out of one folder. All of this is checked before any work.
"""

import contextlib
import dataclasses
import datetime
import errno
import io
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self, get_args

from llmbench.bench import strict_json
from llmbench.bench.environment import hardware_identity, software_identity
from llmbench.bench.errors import ResultsError

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
IDENTITY_KEYS = (
    "kind",
    "config",
    "workload_digest",
    "model_digest",
    "seed",
    "hardware",
    "software",
)
"""Keys of the manifest that a figure depends on: runs that differ in one do not share a folder."""

CellStatus = Literal["complete", "interrupted", "failed"]

_MANIFEST, _RECORDS, _LOCK = "manifest.json", "results.jsonl", ".lock"
_CELL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")
_MAX_DIFFERENCES = 8  # lines of a refusal that still fit a terminal


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """A folder as read: the manifest, and the last record of each cell in order of first start."""

    path: Path
    manifest: dict[str, Any]
    records: list[dict[str, Any]]


def build_manifest(
    *,
    kind: str,
    config: Any,
    workload_digest: str | None,
    model_digest: str | None,
    seed: int,
    environment: dict[str, Any],
    plan: Any = None,
) -> dict[str, Any]:
    """Assemble a manifest.

    `config` holds what fixes a cell's figures besides its own coordinates. `plan` is the grid and
    all else that may change between a run and its continuation, so a sweep can be extended.
    """
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "created_at": utc_now(),
        "config": config,
        "workload_digest": workload_digest,
        "model_digest": model_digest,
        "seed": seed,
        "hardware": hardware_identity(environment),
        "software": software_identity(environment),
        "plan": plan,
        "environment": environment,
        "resumed": [],
    }
    manifest["config_digest"] = strict_json.digest({key: manifest[key] for key in IDENTITY_KEYS})
    plain: dict[str, Any] = strict_json.strict(manifest)
    return plain


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_results(path: Path) -> Results:
    """Read a folder without changing it; also while a run still writes to it."""
    manifest = _read_manifest(path)
    if manifest is None:
        error = ResultsError(f"expected a results folder with a {_MANIFEST}, found none in {path}")
        error.add_note("a results folder is what `--output` named in an earlier run")
        raise error
    records, _ = _read_records(path / _RECORDS)
    return Results(path, manifest, records)


def check_same_run(path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a folder that another run began; writes nothing. A folder without one is free.

    Raises:
        ResultsError: what differs from the run of `manifest`.
    """
    path = path.expanduser()
    existing = _read_manifest(path)
    if existing is not None:
        _refuse_another(path, existing, manifest)


class ResultsFolder:
    """The folder of a run in progress; a context manager that holds the folder's lock."""

    def __init__(self, path: Path, manifest: dict[str, Any], lock: IO[str]) -> None:
        """Internal: use `create_or_resume`."""
        self.path = path
        self.manifest = manifest
        self._lock = lock
        self._records, good_bytes = _read_records(path / _RECORDS)
        self._file = _open_at(path / _RECORDS, good_bytes)

    @classmethod
    def create_or_resume(cls, path: Path, manifest: dict[str, Any]) -> "ResultsFolder":
        """Start a folder, or continue one that the same run began; ResultsError otherwise."""
        path = path.expanduser()
        lock = _acquire(path)
        try:
            existing = _read_manifest(path)
            if existing is None:
                if (path / _RECORDS).exists():
                    raise ResultsError(f"found {_RECORDS} without its {_MANIFEST} in {path}")
                write_json(path / _MANIFEST, manifest)
            else:
                manifest = _continue(path, existing, manifest)
            return cls(path, manifest, lock)
        except BaseException:
            lock.close()
            raise

    @property
    def records(self) -> list[dict[str, Any]]:
        """The last record of each cell, in order of first start."""
        return list(self._records)

    @property
    def finished_cell_ids(self) -> set[str]:
        """Cells that need not run again."""
        return {record["cell_id"] for record in self._records if record["status"] == "complete"}

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record of a cell and return it as written; it is on the disk on return.

        A later record of the same cell replaces an earlier one for readers.
        """
        plain: dict[str, Any] = strict_json.strict({"schema_version": SCHEMA_VERSION, **record})
        _check_record(plain, "record to append")
        line = strict_json.dumps(plain).encode() + b"\n"
        size = self._file.tell()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as cause:
            with contextlib.suppress(OSError):  # leave no half line for the next record to join
                self._file.truncate(size)
            raise _unwritable(self.path / _RECORDS, cause) from cause
        _put(self._records, plain)
        return plain

    def events_path(self, cell_id: str) -> Path:
        """Where a cell's event log belongs."""
        return self.path / f"events-{_checked(cell_id)}.parquet"

    def steps_path(self, cell_id: str) -> Path:
        """Where a cell's step records belong."""
        return self.path / f"steps-{_checked(cell_id)}.parquet"

    def close(self) -> None:
        """Release the folder."""
        self._file.close()
        self._lock.close()  # closing the file gives the lock up

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON; the file appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(strict_json.dumps(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as cause:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _unwritable(path, cause) from cause


def _acquire(path: Path) -> IO[str]:
    """Make the folder and lock it; the lock ends with the process, however it ends."""
    import fcntl  # here, so that reading results needs no POSIX

    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("a+", encoding="utf-8")
    except OSError as cause:
        raise _unwritable(path, cause) from cause
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        error = ResultsError(f"{path} is in use by another run (process {holder})")
        error.add_note("wait for it to finish, or choose another folder with --output")
        raise error from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _continue(path: Path, existing: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a resumed run, or refuse to mix two runs."""
    _refuse_another(path, existing, manifest)
    resumed = [*existing.get("resumed", []), {"at": manifest["created_at"]}]
    if existing["environment"] != manifest["environment"]:
        changed = _differences(existing["environment"], manifest["environment"])
        logger.info("resuming in another environment: %s", "; ".join(changed))
        resumed[-1]["environment_changes"] = changed
    continued = existing | {"plan": manifest["plan"], "resumed": resumed}
    write_json(path / _MANIFEST, continued)
    return continued


def _refuse_another(path: Path, existing: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    if existing.get("config_digest") != manifest["config_digest"]:
        differences = _differences(
            {key: existing.get(key) for key in IDENTITY_KEYS},
            {key: manifest[key] for key in IDENTITY_KEYS},
        )
        shown = differences[:_MAX_DIFFERENCES]
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown)} more")
        error = ResultsError(f"{path} holds another run's results: " + "; ".join(shown))
        error.add_note("choose another folder with --output, or repeat the settings of that run")
        raise error


def _differences(before: Any, after: Any, name: str = "") -> list[str]:
    """Name the leaves in which two JSON values differ, by dotted path."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in _differences(
                before.get(key), after.get(key), f"{name}.{key}" if name else key
            )
        ]
    if before == after:
        return []
    return [f"{name} was {strict_json.dumps(before)}, now {strict_json.dumps(after)}"]


def _read_manifest(path: Path) -> dict[str, Any] | None:
    file = path / _MANIFEST
    try:
        manifest = strict_json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise ResultsError(f"expected a folder, found a file: {path}") from None
    except OSError as cause:
        raise ResultsError(f"cannot read {file}: {cause.strerror}") from cause
    except ValueError as cause:
        raise ResultsError(f"expected strict JSON in {file}: {cause}") from cause
    if not isinstance(manifest, dict):
        raise ResultsError(f"expected a JSON object in {file}, found {type(manifest).__name__}")
    _check_version(manifest, str(file))
    return manifest


def _read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the last record of each cell, and the bytes up to the end of the last whole line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as cause:
        raise ResultsError(f"cannot read {path}: {cause.strerror}") from cause
    # Only b"\n" ends a line; what follows the last one was torn off by a crash.
    good_bytes = content.rfind(b"\n") + 1
    if torn := len(content) - good_bytes:
        logger.warning(
            "%s ends in a torn record of %d bytes; its cell counts as not run", path, torn
        )
    records: list[dict[str, Any]] = []
    for number, line in enumerate(content[:good_bytes].split(b"\n")[:-1], start=1):
        where = f"line {number} of {path}"
        try:
            record = strict_json.loads(line)
        except ValueError as cause:
            error = ResultsError(f"expected strict JSON in {where}: {cause}")
            error.add_note("the file was changed or damaged; remove the line to run its cell again")
            raise error from cause
        _check_record(record, where)
        _put(records, record)
    return records, good_bytes


def _put(records: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Let a record take the place of an earlier one of its cell."""
    for index, earlier in enumerate(records):
        if earlier["cell_id"] == record["cell_id"]:
            records[index] = record
            return
    records.append(record)


def _check_record(record: Any, where: str) -> None:
    if not isinstance(record, dict):
        raise ResultsError(f"expected a JSON object in {where}, found {type(record).__name__}")
    _check_version(record, where)
    if missing := {"kind", "cell_id", "status"} - record.keys():
        raise ResultsError(f"{where} lacks {', '.join(sorted(missing))}")
    _checked(record["cell_id"])
    if record["status"] not in get_args(CellStatus):
        expected = ", ".join(get_args(CellStatus))
        raise ResultsError(f"expected status {expected}, found {record['status']!r} in {where}")


def _check_version(document: dict[str, Any], where: str) -> None:
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        error = ResultsError(
            f"expected schema_version {SCHEMA_VERSION}, found {version} in {where}"
        )
        if isinstance(version, int) and version > SCHEMA_VERSION:
            error.add_note("it was written by a newer llmbench; upgrade to read it")
        raise error


def _checked(cell_id: str) -> str:
    if not isinstance(cell_id, str) or not _CELL_ID.fullmatch(cell_id):
        raise ResultsError(f"expected a cell id of letters, digits and `._=-`, found {cell_id!r}")
    return cell_id


def _open_at(path: Path, size: int) -> io.FileIO:
    """Open for appending after `size` bytes; what follows them is cut off."""
    try:
        file = path.open("ab", buffering=0)
        file.truncate(size)
        file.seek(size)
    except OSError as cause:
        raise _unwritable(path, cause) from cause
    return file


def _unwritable(path: Path, cause: OSError) -> ResultsError:
    error = ResultsError(f"cannot write to {path}: {cause.strerror or cause}")
    error.add_note("choose another folder with --output")
    return error
