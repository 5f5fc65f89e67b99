"""Random weights from an architecture alone, for speed work without a checkpoint.

Matrices have variance 1 / inputs, which keeps the scale of what flows through them (Glorot and
Bengio 2010), so that the values that kernels meet look like those of a model. The text means
nothing. All come from one pool of normal numbers, read round and round: drawing each number anew
would take a minute for two billion of them. The pool's length is a prime, so that no two rows
of a matrix are the same.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.decoder import expected_shapes

POOL_SIZE = 2**20 - 3
"""A prime, above the rows of any vocabulary."""


def draw_weights(
    arch: DecoderArchitecture, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the decoder by name; up to rounding the same on every device and dtype."""
    pool = torch.randn(POOL_SIZE, generator=torch.Generator().manual_seed(seed)).to(device)
    offset = 0
    for name, shape in expected_shapes(arch).items():
        weight = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) > 1:
            offset = _fill(weight.view(-1), pool, offset, 1.0 / math.sqrt(shape[-1]))
        elif name.endswith(".weight"):  # of a norm
            weight.fill_(1.0 - arch.norm_weight_offset)
        else:
            weight.zero_()
        yield name, weight


def _fill(flat: Tensor, pool: Tensor, offset: int, deviation: float) -> int:
    """Fill from the pool's numbers, starting at `offset`; returns where the next one starts."""
    done = 0
    while done < len(flat):
        count = min(len(pool) - offset, len(flat) - done)
        flat[done : done + count] = pool[offset : offset + count] * deviation
        done += count
        offset = (offset + count) % len(pool)
    return offset
