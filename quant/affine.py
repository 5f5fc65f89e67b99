"""Rounding weights to codes: the only place where a weight becomes an integer.

w is stored as code = clamp(round(w / scale) + zero, 0, 2 ** bits - 1) and read back as
(code - zero) * scale (Jacob et al. 2018, eq. 1). Scales are first rounded to the type in which
they are stored: a code must be the nearest one for the scale that the reader will see.

Symmetric ranges come in two kinds. `full` uses all codes, -8 to 7 at 4 bits, with the largest
value at half a step beyond the top: scale = absmax / 7.5 (as GPTQ and compressed-tensors do).
`restricted` uses -7 to 7, so that the largest value is met exactly: scale = absmax / 7 (QQQ's
per-channel weights, LLM.int8).

A group of zeros gets the smallest scale, never 0, and its codes are its zero point.

Shapes: `N` out features · `C` in features · `G` groups of a row · `S` channels of a group.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmbench.quant.config import PER_CHANNEL, Scheme
from llmbench.quant.errors import QuantError
from llmbench.quant.quantized_weight import QuantizedWeight

Range = Literal["full", "restricted"]

MIN_SCALE = 2.0**-24
"""Smallest scale: also float16 holds it (its smallest subnormal), and 1 / it stays finite."""


@dataclass(frozen=True, slots=True, eq=False)
class AffineParams:
    """Scale and zero of every group.

    Attributes:
        scales: [N, G] in the stored type, finite and at least MIN_SCALE.
        zeros: [N, G] float32 of whole numbers.
        min_code: 1 for a restricted range, else 0.
        max_code: 2 ** bits - 1.
    """

    scales: Tensor
    zeros: Tensor
    min_code: int
    max_code: int


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """[N, C] to [N, G, S]."""
    n, c = weight.shape
    return weight.reshape(n, -1, c if group_size == PER_CHANNEL else group_size)


def stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the type they are stored in, kept positive; what overflows it is refused."""
    stored = scales.clamp(min=MIN_SCALE).to(dtype)
    if not torch.isfinite(stored).all():
        error = QuantError(
            f"a scale of {float(scales.max()):.4g} does not fit {str(dtype).removeprefix('torch.')}"
        )
        error.add_note("the weights hold values that are not finite or far too large")
        raise error
    return stored


def affine_params(
    groups: Tensor,
    scheme: Scheme,
    *,
    dtype: torch.dtype,
    shrink: float | Tensor = 1.0,
    code_range: Range = "full",
) -> AffineParams:
    """Scale and zero of groups [N, G, S] from their smallest and largest value.

    `shrink` (a number, or [N, G]) narrows the range first; what lies outside is clipped.
    """
    max_code = (1 << scheme.bits) - 1
    middle = 1 << (scheme.bits - 1)
    if scheme.sym:
        absmax = groups.abs().amax(dim=-1).float() * shrink
        steps = max_code / 2 if code_range == "full" else middle - 1
        scales = stored_scales(absmax / steps, dtype)
        zeros = torch.full_like(absmax, middle)
        return AffineParams(scales, zeros, 0 if code_range == "full" else 1, max_code)
    low = groups.amin(dim=-1).float().clamp(max=0) * shrink
    high = groups.amax(dim=-1).float().clamp(min=0) * shrink
    scales = stored_scales((high - low) / max_code, dtype)
    zeros = (-low / scales.float()).round().clamp(0, max_code)
    return AffineParams(scales, zeros, 0, max_code)


def to_codes(weight: Tensor, scales: Tensor, zeros: Tensor, params: AffineParams) -> Tensor:
    """Nearest codes, whole float32 numbers; scales and zeros must broadcast against `weight`."""
    codes = torch.round(weight.float() / scales.float()) + zeros
    return codes.clamp_(params.min_code, params.max_code)


def round_groups(groups: Tensor, params: AffineParams) -> Tensor:
    """[N, G, S] to the values that the nearest codes stand for, float32."""
    scales, zeros = params.scales.float()[..., None], params.zeros[..., None]
    return (to_codes(groups, scales, zeros, params) - zeros) * scales


def quantize(weight: Tensor, scheme: Scheme, params: AffineParams) -> QuantizedWeight:
    """Round a whole weight [N, C] to nearest with these parameters, groups in order."""
    groups = grouped(weight, scheme.group_size)
    codes = to_codes(groups, params.scales.float()[..., None], params.zeros[..., None], params)
    return quantized_weight(codes.reshape(weight.shape), scheme, params)


def quantized_weight(
    codes: Tensor, scheme: Scheme, params: AffineParams, g_idx: Tensor | None = None
) -> QuantizedWeight:
    """Whole-number codes [N, C] with their parameters as a `QuantizedWeight`."""
    return QuantizedWeight(
        bits=scheme.bits,
        group_size=scheme.group_size,
        codes=codes.to(torch.uint8),
        scales=params.scales,
        zeros=None if scheme.sym else params.zeros.to(torch.uint8),
        g_idx=g_idx,
        activations=scheme.activations,
    )
