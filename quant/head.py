"""The output head as a block of its own: one linear layer behind the last hidden states."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmbench.quant.block import Block, LinearGroup
from llmbench.quant.block_model import TensorSource
from llmbench.quant.linear_layers import LinearLayer
from llmbench.quant.statistics import InputStatistics


def head_block(layer: LinearLayer, source: TensorSource, config: Any) -> Block:
    """The head in a block without a name."""
    weight = source.get(f"{layer.name}.weight")
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    module = nn.Module()
    module.add_module(layer.name, linear)
    wide = source.wide(f"{layer.name}.weight", torch.bfloat16)
    return Block("", -1, module, [layer], config, lambda name: wide)


class HeadCalibration:
    """The normed hidden states behind the last block, in the shape of a `BlockCalibration`."""

    def __init__(self, block: Block, hidden: Sequence[Tensor]) -> None:
        self.groups = [LinearGroup(tuple(block.linears))]
        self.num_tokens = sum(batch.shape[0] * batch.shape[1] for batch in hidden)
        self._hidden = hidden

    def observe(
        self, *, hessian: bool = False, sample_rows: int = 0
    ) -> dict[LinearGroup, InputStatistics]:
        """Statistics of the head's input."""
        statistics = InputStatistics(
            self._hidden[0].shape[-1],
            hessian=hessian,
            sample_rows=sample_rows,
            total_tokens=self.num_tokens,
        )
        for batch in self._hidden:
            statistics.update(batch)
        return {self.groups[0]: statistics}

    def sequential(
        self, *, is_true_sequential: bool = True, hessian: bool = True, sample_rows: int = 0
    ) -> Iterator[tuple[LinearGroup, InputStatistics]]:
        """The head alone: no layer comes before it here."""
        yield from self.observe(hessian=hessian, sample_rows=sample_rows).items()
