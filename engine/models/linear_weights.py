"""The weight of one of the decoder's linear layers, in any form, and the layer that it becomes.

The decoder runs query, key and value as one layer, and gate and up as another. Where a checkpoint
holds their weights apart they are stacked on their output rows: tensors with tensors, and
quantized weights that share bits, groups and the order of their channels. What cannot be stacked,
such as a 4-bit query beside an 8-bit value, stays apart and runs part by part, which is slower.

Shapes: `T` tokens · `C` in features · `N` out features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmbench.engine.kernels.reference import ActivatedLinear, TorchOps
from llmbench.engine.layers.linear import Linear
from llmbench.engine.models.architecture import Activation
from llmbench.quant.quantized_weight import QuantizedWeight, can_concatenate, concatenate

StoredWeight = Tensor | QuantizedWeight
"""A weight [N, C] as a checkpoint holds it."""
LinearWeight = StoredWeight | tuple[StoredWeight, ...]
"""The same, or parts of its rows that could not become one."""


def stack(parts: Sequence[StoredWeight]) -> LinearWeight:
    """Parts over the same input as one weight where that is possible."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and can_concatenate(quantized):
        return concatenate(quantized)
    return tuple(parts)


def shape_of(weight: LinearWeight) -> tuple[int, ...]:
    """(N, C)."""
    if isinstance(weight, QuantizedWeight):
        return weight.out_features, weight.in_features
    if isinstance(weight, Tensor):
        return tuple(weight.shape)
    shapes = [shape_of(part) for part in weight]
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def move(weight: LinearWeight, device: torch.device, dtype: torch.dtype) -> LinearWeight:
    """The weight on a device; full-precision parts in `dtype`, scales as they are stored."""
    if isinstance(weight, Tensor):
        return weight.to(device=device, dtype=dtype)
    if isinstance(weight, QuantizedWeight):
        return weight.to(device)
    return tuple(_move_part(part, device, dtype) for part in weight)


def make_linear(
    ops: TorchOps,
    weight: LinearWeight,
    bias: Tensor | None,
    activation: Activation | None = None,
    *,
    gated: bool = False,
) -> Linear:
    """The layer of a weight by the kernels of `ops`, with its output activated if asked for."""
    if isinstance(weight, QuantizedWeight):
        return ops.make_quantized_linear(weight, bias, activation=activation, gated=gated)
    if isinstance(weight, tuple):
        rows = [shape_of(part)[0] for part in weight]
        biases = [None] * len(rows) if bias is None else list(torch.split(bias, rows))
        split = SplitLinear([make_linear(ops, *pair) for pair in zip(weight, biases, strict=True)])
        return split if activation is None else ActivatedLinear(ops, split, activation, gated=gated)
    if activation is None:
        return ops.make_linear(weight, bias)
    return ops.make_activated_linear(weight, bias, activation, gated=gated)


class SplitLinear:
    """Layers over the same input, run one after another."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        kernels = dict.fromkeys(part.kernel for part in parts)
        self.kernel = f"split({','.join(kernels)})"
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, N]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, N] plus the layer's output."""
        return residual + self(x)


def _move_part(part: StoredWeight, device: torch.device, dtype: torch.dtype) -> StoredWeight:
    return part.to(device=device, dtype=dtype) if isinstance(part, Tensor) else part.to(device)
