"""Which model answered: a digest of every byte that its answers are computed from.

A stored answer is served again only to the very same model, so its identity may not rest on
samples: weights that were edited in the middle of a tensor are another model's. All weight files
are hashed as a whole (BLAKE2b, RFC 7693, about 1 GB/s), in the order of the index. For large ones
the result is remembered by the file's path, size, inode and times, down to the nanosecond, so
that it is read for this once; a file that was written to, or replaced, is hashed again.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmbench.engine.errors import CheckpointError
from llmbench.engine.models.catalog import cache_root
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.formats.quantized_checkpoint import SIDECARS

logger = logging.getLogger(__name__)

REMEMBERED_BYTES = 1 << 26
"""Files from here on are remembered: smaller ones are hashed in less time than it matters."""
TOLD_BYTES = 1 << 28
"""Files from here on take long enough to be announced."""
MAX_REMEMBERED = 4096
"""Files; the oldest entries go first."""
_MEMORY = Path("eval") / "digests.json"


def weights_digest(
    folder: Path,
    *,
    with_code: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> str:
    """Hash a checkpoint's config, its quantization's settings and its whole weight files.

    A copy or a renamed folder has the same digest. `with_code` adds the folder's own modelling
    code, for a model that is run by it; `on_progress` hears of large files before they are read.

    Raises:
        CheckpointError: the checkpoint is broken, or changes while it is read.
    """
    checkpoint = Checkpoint.open(folder)
    whole = hashlib.blake2b(json.dumps(checkpoint.config, sort_keys=True).encode())
    small = [path for name in SIDECARS if (path := folder / name).is_file()]
    small += sorted(folder.glob("*.py")) if with_code else []
    for path in small:
        whole.update(f"{path.name} {_hash(path)}\n".encode())
    for path in checkpoint.files:
        whole.update(f"{path.name} {file_digest(path, on_progress)}\n".encode())
    # Two files may hold a tensor of one name: the index decides.
    places = sorted((name, checkpoint.file(name).name) for name in checkpoint)
    whole.update(json.dumps(places).encode())
    return whole.hexdigest()


def dummy_digest(folder: Path, seed: int) -> str:
    """Stand in for the digest of weights that are drawn from a config and a seed."""
    content = (folder / "config.json").read_bytes()
    return hashlib.blake2b(content + f" drawn with seed {seed}".encode()).hexdigest()


def file_digest(path: Path, on_progress: Callable[[str], None] | None = None) -> str:
    """Hash a file's whole content, or remember it where the file has not changed since."""
    path = path.resolve()
    key, before = str(path), _stamp(path)
    is_large = before[0] >= REMEMBERED_BYTES
    if is_large:
        known = _read_memory().get(key)
        if isinstance(known, dict) and known.get("stamp") == before:
            return str(known["digest"])
    if on_progress is not None and before[0] >= TOLD_BYTES:
        on_progress(f"hashing {path.name} ({before[0] / 1e9:.1f} GB), once for this file")
    digest = _hash(path)
    if _stamp(path) != before:
        raise CheckpointError(f"{path} was changed while it was read")
    if is_large:
        _remember(key, {"stamp": before, "digest": digest})
    return digest


def _stamp(path: Path) -> list[int]:
    """Size first; the time of change cannot be set back, as that of modification can."""
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _hash(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _read_memory() -> dict[str, Any]:
    """What is remembered; nothing where the file is absent or broken: it is made again."""
    try:
        memory = json.loads((cache_root() / _MEMORY).read_bytes())
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _remember(key: str, entry: dict[str, Any]) -> None:
    """Add an entry; a run beside this one may lose its own, and hashes once more."""
    path = cache_root() / _MEMORY
    memory = _read_memory()
    memory.pop(key, None)
    memory[key] = entry
    kept = dict(list(memory.items())[-MAX_REMEMBERED:])
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            json.dump(kept, file)
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("cannot remember the digest of %s in %s: %s", key, path, error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
