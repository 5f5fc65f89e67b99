"""The product of a quantized linear layer, written for reading: the specification of every
kernel that computes it faster.

Without activation quantization it is the dequantized weight's product. With it, each token's
input is rounded to 8 bits by its own largest value (Yao et al. 2022, token-wise quantization),
the product runs on integers, and both scales are applied to the sum. LLM.int8 takes outliers out
of the integer product (Dettmers et al. 2022, section 3.2): there every channel in which some token
has one, here each token's own, so that a token's result does not depend on its neighbours.

Shapes: `T` tokens · `C` in features · `N` out features.
"""

import torch
from torch import Tensor

from llmbench.quant.quantized_weight import INT8_MAX, QuantizedWeight

SCALE_FLOOR = 1e-10
"""A token of zeros has this scale, so that 0 / scale is 0 and not NaN."""


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token to int8 by its largest value: codes [T, C] int8, scales [T, 1] float32."""
    x = x.float()
    scales = (x.abs().amax(dim=-1, keepdim=True) / INT8_MAX).clamp(min=SCALE_FLOOR)
    return (x / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def round_activations(x: Tensor, outlier_threshold: float | None = None) -> Tensor:
    """What `quantized_linear` makes of its input [..., C], in x's type: rounded to 8 bits a token.

    Values of at least `outlier_threshold` stay as they are, and have no part in the scales.
    """
    if outlier_threshold is None:
        codes, scales = quantize_activations(x)
        return (codes.float() * scales).to(x.dtype)
    is_outlier = x.abs() >= outlier_threshold
    codes, scales = quantize_activations(x.masked_fill(is_outlier, 0.0))
    return torch.where(is_outlier, x, (codes.float() * scales).to(x.dtype))


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """[T, C] to [T, N] in x's type; all sums in float32 or exact integers."""
    x32 = x.float()
    if weight.activations == "none":
        out = x32 @ weight.dequantize().t()
    elif weight.outlier_threshold is None:
        out = _int8_product(x32, weight)
    else:
        is_outlier = x32.abs() >= weight.outlier_threshold  # [T, C]
        out = _int8_product(x32.masked_fill(is_outlier, 0.0), weight)
        out = out + x32.masked_fill(~is_outlier, 0.0) @ weight.dequantize().t()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def _int8_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """[T, C] to [T, N] float32: integer sums a group, then the scales."""
    codes, token_scales = quantize_activations(x)
    if weight.channel_scales is not None:
        sums = _integer_product(codes, weight.int8_weight())
        return sums * token_scales * weight.channel_scales
    groups = weight.group_of_channel()
    centered = weight.centered()
    out = x.new_zeros(x.shape[0], weight.out_features)
    for group in range(weight.num_groups):
        members = groups == group
        sums = _integer_product(codes[:, members], centered[:, members])
        out += sums * weight.scales[:, group].float()
    return out * token_scales


def _integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """[T, C] x [N, C] to [T, N]: float64 holds every such sum of integers exactly."""
    return (codes.double() @ weight.double().t()).float()
