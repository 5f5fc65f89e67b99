"""A fingerprint of a checkpoint, cheap enough to take before every run.

Reading 140 GB of weights to hash them would cost minutes, so a weights file enters with its size,
its first and its last mebibyte. The first holds the header of a safetensors file (names, types,
shapes, offsets), the last the end of its data: a requantized, retrained or truncated checkpoint
differs there. Small text files (configuration, tokenizer, chat template) enter whole.
"""

import hashlib
from pathlib import Path

from llmbench.bench.errors import ResultsError

_SAMPLE_BYTES = 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TEXTS = (".json", ".jinja", ".model", ".txt")


def model_digest(folder: Path) -> str:
    """Return the sha256 over a checkpoint's files, by name; other files do not count."""
    try:
        files = sorted(
            path for path in folder.iterdir() if path.suffix in _WEIGHTS + _TEXTS and path.is_file()
        )
        digest = hashlib.sha256()
        for path in files:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                if path.suffix in _TEXTS or size <= 2 * _SAMPLE_BYTES:
                    digest.update(file.read())
                else:
                    digest.update(file.read(_SAMPLE_BYTES))
                    file.seek(-_SAMPLE_BYTES, 2)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as cause:
        raise ResultsError(f"cannot read checkpoint {folder}: {cause.strerror}") from cause
    if not files:
        raise ResultsError(f"expected a checkpoint, found none of its files in {folder}")
    return digest.hexdigest()
