"""K/V in 8 bits: a scale for every token and head, beside its codes in one tensor.

A key or value [D] is stored as codes = round(x / scale) with scale = max |x| / 127, as activations
are quantized per token (Yao et al. 2022). Each token is rounded by itself and once, when it is
written, so that blocks, reservations and shared prefixes hold the same numbers however the tokens
came. Half of a 16-bit cache's bytes remain, and four bytes a head for the scale.

A row of the cache is [D codes | filling | 4 bytes of a float32 scale] in int8, so that one copy
moves both. Zeroed rows read as zeros.

Shapes: `T` tokens · `M` key/value heads · `D` head dim · `W` width of a row.
"""

import torch
from torch import Tensor

from llmbench.engine.memory import INT8_SCALE_BYTES, int8_row_bytes
from llmbench.quant.linear import quantize_activations


def is_int8(kv_cache: Tensor) -> bool:
    """Whether a cache [S, 2 M, W] holds such rows."""
    return kv_cache.dtype is torch.int8


def quantize_rows(heads: Tensor) -> Tensor:
    """Keys and values [T, 2 M, D] as rows [T, 2 M, W]."""
    codes, scales = quantize_activations(heads)
    head_dim = heads.shape[-1]
    rows = torch.zeros(
        (*heads.shape[:-1], int8_row_bytes(head_dim)), dtype=torch.int8, device=heads.device
    )
    rows[..., :head_dim] = codes
    rows[..., -INT8_SCALE_BYTES:].view(torch.float32).copy_(scales)
    return rows


def dequantize_rows(rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows [..., W] as the numbers [..., D] that they stand for."""
    scales = rows[..., -INT8_SCALE_BYTES:].view(torch.float32)
    return (rows[..., :head_dim] * scales).to(dtype)
