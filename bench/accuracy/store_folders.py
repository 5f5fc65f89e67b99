"""Folders of stored baselines: who uses one, which was used longest ago, and what they take.

A folder is in use while a process holds its lock, which ends with the process however it ends.
Dropping one takes its lock first, so nobody loses answers under his hands; whoever waits for a
folder that was dropped meanwhile finds that the lock file in its place is another one, and begins
anew.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import IO

from llmbench.bench.errors import BenchError

logger = logging.getLogger(__name__)

LOCK = ".lock"
DEFAULT_LIMIT_BYTES = 20 * 2**30
"""All models together: the six suites of the Open LLM Leaderboard have about 1.3 million scored
tokens, 11 GB of an 8-billion model's hidden states (4,096 numbers of 2 bytes each)."""


def lock(folder: Path) -> IO[str]:
    """Make a folder and lock it; closing the result gives it up.

    Raises:
        BenchError: another process has it, or it cannot be made.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / LOCK).open("a+", encoding="utf-8")
        except FileNotFoundError:  # dropped between making and opening it
            continue
        except OSError as cause:
            error = BenchError(f"cannot write to {folder}: {cause.strerror or cause}")
            error.add_note("set LLMBENCH_CACHE to a folder that can be written")
            raise error from cause
        if not _try_lock(file):
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            error = BenchError(
                f"the stored answers in {folder} are in use by another run (process {holder})"
            )
            error.add_note("wait for it to finish, or set LLMBENCH_CACHE to another folder")
            raise error
        if _is_in_place(file, folder):
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            return file
        file.close()  # dropped between opening and locking


def mark_used(folder: Path) -> None:
    """Remember that a folder is used now."""
    os.utime(folder / LOCK)


def drop_least_recent(keep: Path, allowed: int) -> int:
    """Drop folders beside `keep` until the others take at most `allowed` bytes, if they can.

    Those used longest ago go first, those in use stay. Returns what the others take then.
    """
    others = [path for path in keep.parent.iterdir() if path != keep and (path / LOCK).is_file()]
    sizes = {path: _size(path) for path in others}
    total = sum(sizes.values())
    for path in sorted(others, key=_last_used):
        if total <= allowed:
            break
        if _drop(path):
            logger.info("dropped the stored answers in %s (%d bytes)", path, sizes[path])
            total -= sizes[path]
    return total


def free_bytes(folder: Path) -> int:
    """Free space on a folder's disk."""
    return shutil.disk_usage(folder).free


def _drop(folder: Path) -> bool:
    """Remove a folder unless somebody uses it."""
    try:
        with (folder / LOCK).open("a+", encoding="utf-8") as file:
            if not _try_lock(file) or not _is_in_place(file, folder):
                return False
            for path in folder.iterdir():
                if path.name != LOCK:
                    path.unlink()
            (folder / LOCK).unlink()  # last: a drop that is cut short is finished by the next
            folder.rmdir()
    except OSError as cause:
        logger.warning("cannot drop the stored answers in %s: %s", folder, cause)
        return False
    return True


def _try_lock(file: IO[str]) -> bool:
    import fcntl  # here, so that importing needs no POSIX

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_in_place(file: IO[str], folder: Path) -> bool:
    """Whether an open lock file still is the folder's."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat())
    except FileNotFoundError:
        return False


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:  # dropped by another run
        return 0


def _last_used(folder: Path) -> float:
    try:
        return (folder / LOCK).stat().st_mtime
    except FileNotFoundError:
        return 0.0
