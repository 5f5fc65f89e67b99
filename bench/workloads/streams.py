"""Random streams that one seed feeds and that do not disturb one another.

Each use of chance (lengths, tokens, order of rows, arrivals) has a name and draws from a stream of
its own, keyed by seed and name: another dataset, one more draw of lengths or a new arrival process
leaves all the others as they were. The name enters through SHA-256, so neither the process nor
PYTHONHASHSEED matters; numpy's SeedSequence keeps nearby seeds apart.
"""

import hashlib

import numpy as np

from llmbench.bench.errors import WorkloadError


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the stream `name` of `seed`; the same two always give the same draws."""
    if seed < 0:
        raise WorkloadError(f"seed must not be negative, not {seed}")
    digest = hashlib.sha256(name.encode()).digest()
    key = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
