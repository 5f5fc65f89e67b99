"""Moving scales from a layer's inputs into what makes them, without changing the block.

The output channels of the first module of a pair are divided by the scales, the input channels of
the linears behind it are multiplied by them. In full precision the block computes the same
function (Lin et al. 2023, equation 4).

Norm weights are stored in 16 bits and are not quantized, so their rounding would remain as an
error of the model; a Gemma norm suffers most, since it stores weight - 1 and 16-bit numbers near
-1 are coarse. Hence the linears are multiplied by what the norm was really divided by.

Shapes: `C` output channels of the previous module · `P` input channels of the next linears, C
times `repeats` · `N` rows of a linear.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from llmbench.quant.adapters import ScalingPair
from llmbench.quant.errors import QuantError


class FoldableBlock(Protocol):
    """What folding needs of a block."""

    @property
    def name(self) -> str:
        """Module name of the block, such as `model.layers.0`."""

    def weight(self, name: str) -> Tensor:
        """[N, P] float32, by the full module name of a linear."""

    def set_weight(self, name: str, weight: Tensor) -> None:
        """Replace it."""

    def get(self, relative_name: str) -> nn.Module:
        """A module by its name inside the block."""


def spread(pair: ScalingPair, scales: Tensor) -> Tensor:
    """[C] of the previous module's channels to [P] of the next linears' inputs."""
    if pair.repeats == 1:
        return scales
    return scales.view(-1, pair.head_dim).repeat_interleave(pair.repeats, dim=0).flatten()


def gather(pair: ScalingPair, values: Tensor) -> Tensor:
    """[P] of the next linears' inputs to [repeats, C]: what each previous channel turns into."""
    return values.view(-1, pair.repeats, pair.head_dim).transpose(0, 1).reshape(pair.repeats, -1)


def num_channels(block: FoldableBlock, pair: ScalingPair) -> int:
    """Channels of the previous module that the pair scales, C."""
    return block.weight(f"{block.name}.{pair.next[0]}").shape[1] // pair.repeats


@torch.no_grad()
def fold(block: FoldableBlock, pair: ScalingPair, scales: Tensor) -> Tensor:
    """Divide the previous module's output by scales [C] and multiply the next linears by them.

    Returns the scales [C] that were applied: a 16-bit norm cannot be divided by just any number.
    """
    scales = scales.float()
    where = f"{block.name}.{pair.previous}"
    expected = num_channels(block, pair)
    if scales.shape != (expected,):
        raise QuantError(f"{where} has {list(scales.shape)} scales, expected [{expected}]")
    if not (torch.isfinite(scales) & (scales > 0)).all():
        raise QuantError(f"the scales of {where} are not all positive and finite")
    if pair.kind == "linear":
        _divide_rows(block, pair, scales)
    else:
        scales = _divide_norm(block.get(pair.previous), pair, scales)
    columns = spread(pair, scales)
    for following in pair.next:
        name = f"{block.name}.{following}"
        block.set_weight(name, block.weight(name) * columns)
    return scales


def _divide_rows(block: FoldableBlock, pair: ScalingPair, scales: Tensor) -> None:
    name = f"{block.name}.{pair.previous}"
    weight = block.weight(name).clone()
    start, stop = pair.rows or (0, weight.shape[0])
    weight[start:stop] /= scales[:, None]
    block.set_weight(name, weight)
    bias = block.get(pair.previous).bias
    if isinstance(bias, Tensor):
        bias[start:stop] = (bias[start:stop].float() / scales).to(bias.dtype)


def _divide_norm(norm: nn.Module, pair: ScalingPair, scales: Tensor) -> Tensor:
    """Divide a norm's gain and bias; the scales that its stored type could express."""
    offset = 1.0 if pair.kind == "offset_norm" else 0.0
    weight = norm.weight
    assert isinstance(weight, Tensor)
    gain = weight.float() + offset
    stored = (gain / scales - offset).to(weight.dtype)
    divided = stored.float() + offset
    ratio = gain / divided
    # A gain of 0 can be divided by anything; one that rounding would turn to 0 stays as it is.
    is_dead = gain == 0
    is_lost = ~is_dead & ~(torch.isfinite(ratio) & (ratio > 0))
    applied = torch.where(is_dead, scales, torch.where(is_lost, torch.ones_like(ratio), ratio))
    weight.copy_(torch.where(is_lost, weight, stored))
    bias = getattr(norm, "bias", None)
    if isinstance(bias, Tensor):
        bias.copy_(bias.float() / applied)
    return applied
