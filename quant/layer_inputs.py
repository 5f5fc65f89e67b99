"""What methods that fold scales know of a layer's input, before and after folding.

H = sum of x x^T over all calibration tokens gives the squared output error of any change to a
weight, so nothing else has to be kept of the activations. When channels of the input are divided
by scales, H is divided on both sides, and no token is run again.

Shapes: `C` in features · `N` out features.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbench.quant.block import LinearGroup
from llmbench.quant.layer_report import LayerReport
from llmbench.quant.quantized_weight import QuantizedWeight
from llmbench.quant.refinement import row_errors
from llmbench.quant.statistics import InputStatistics


@dataclass(slots=True, eq=False)
class LayerInputs:
    """The input that one or more linear layers share.

    Attributes:
        hessian: [C, C] float32, the sum over tokens of x x^T.
        abs_mean: [C] float32, the mean magnitude of each channel.
        abs_max: [C] float32, its largest magnitude.
    """

    hessian: Tensor
    abs_mean: Tensor
    abs_max: Tensor
    num_tokens: int

    @property
    def is_usable(self) -> bool:
        """Whether tokens came, all of them finite."""
        return self.num_tokens > 0 and bool(torch.isfinite(self.hessian).all())

    def divide(self, scales: Tensor) -> None:
        """Follow an input that is divided by scales [C] from now on."""
        self.hessian = self.hessian / scales[:, None] / scales
        self.abs_mean = self.abs_mean / scales
        self.abs_max = self.abs_max / scales

    def report(
        self, W: Tensor, weight: QuantizedWeight, *, notes: tuple[str, ...] = ()
    ) -> LayerReport:
        """What rounding W [N, C] to `weight` does to the layer's output."""
        error = float(row_errors(W - weight.dequantize(), self.hessian).sum())
        energy = float(row_errors(W, self.hessian).sum())
        return LayerReport(
            relative_mse=max(error, 0.0) / energy if energy > 0 else 0.0,
            loss=error / self.num_tokens,
            num_tokens=self.num_tokens,
            notes=notes,
        )


def layer_inputs(observed: Mapping[LinearGroup, InputStatistics]) -> dict[str, LayerInputs]:
    """By the full name of a layer; layers over the same tensor have one object in common."""
    found: dict[str, LayerInputs] = {}
    for group, statistics in observed.items():
        shared = LayerInputs(
            hessian=statistics.hessian,
            abs_mean=statistics.abs_mean,
            abs_max=torch.maximum(-statistics.low, statistics.high),
            num_tokens=statistics.num_tokens,
        )
        found |= dict.fromkeys(group.names, shared)
    return found
