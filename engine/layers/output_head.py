"""The output head: from final hidden states to logits.

One matrix, and Gemma's soft cap where a model has it. It is a layer of its own because a model's
whole distribution over next tokens can be had from stored hidden states by the head alone,
without the layers below it (models/head.py).

A model multiplies its head in its type of computation. In bfloat16 that rounds each logit to 8
bits, an error of 1e-4 nats in a KL divergence that may itself be smaller; `Float32Linear` takes
the same weights and inputs and keeps what their product is worth.

Shapes: R rows, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmbench.engine.layers.linear import Linear
from llmbench.quant.linear import round_activations
from llmbench.quant.quantized_weight import QuantizedWeight

SLICE_ENTRIES = 1 << 19
"""Weights that are cast to float32 at once: 2 MiB, which a core's own cache holds, so that they
are multiplied where they were cast."""


class OutputHead:
    """A linear layer of any weight format, and the cap on what it yields."""

    def __init__(self, linear: Linear, softcap: float | None) -> None:
        self.linear, self.softcap = linear, softcap

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, H] behind the last norm."""
        logits = self.linear(hidden)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


class Float32Linear:
    """A linear layer that multiplies in float32, whatever type its weight has.

    The weight is cast, or dequantized, a few rows at a time: it never exists in float32 as a
    whole. Where a quantized layer rounds its inputs, this one does.
    """

    kernel = "float32"

    def __init__(
        self, parts: Sequence[Tensor | QuantizedWeight], bias: Tensor | None = None
    ) -> None:
        """`parts` [N, C] follow one another on N."""
        self.parts, self.bias = tuple(parts), None if bias is None else bias.float()
        self.weight_bytes = sum(part.nbytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] of any type to [T, N] float32."""
        x = x.float()
        rows = [
            part.shape[0] if isinstance(part, Tensor) else part.out_features for part in self.parts
        ]
        out = x.new_empty(x.shape[0], sum(rows))
        step = max(1, SLICE_ENTRIES // x.shape[1])
        done = 0
        for part, num_rows in zip(self.parts, rows, strict=True):
            inputs = _inputs(x, part)
            for start in range(0, num_rows, step):
                stop = min(start + step, num_rows)
                weight = _float32_rows(part, start, stop)
                out[:, done + start : done + stop] = F.linear(inputs, weight)
            done += num_rows
        return out if self.bias is None else out.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, N] plus the layer's output, in float32."""
        return residual + self(x)


def _inputs(x: Tensor, part: Tensor | QuantizedWeight) -> Tensor:
    """x [T, C] float32 as the layer takes it: rounded to 8 bits where its scheme says so."""
    if isinstance(part, Tensor) or part.activations == "none":
        return x
    return round_activations(x, part.outlier_threshold)


def _float32_rows(part: Tensor | QuantizedWeight, start: int, stop: int) -> Tensor:
    """Rows of a weight [stop - start, C], exact."""
    if isinstance(part, Tensor):
        return part[start:stop].float()
    rows = part.rows(start, stop)
    has_even_groups = rows.num_groups == 1 or (
        rows.in_features == rows.num_groups * rows.group_size
    )
    if rows.g_idx is not None or rows.channel_scales is not None or not has_even_groups:
        return rows.dequantize()
    # What `dequantize` computes, a scale for a whole group at once, which is several times faster.
    weight = rows.codes.float().view(len(rows.codes), rows.num_groups, -1)
    weight -= rows.middle if rows.zeros is None else rows.zeros.float()[..., None]
    weight *= rows.scales.float()[..., None]
    return weight.flatten(1)
