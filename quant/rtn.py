"""Rounding to nearest: the baseline, and what is left where no calibration token came.

Every weight becomes the nearest code of its group. The group's range is its largest value, or
the one with the smallest squared error (`scale_search`). No activations are looked at, so the
result is the same whatever a model is used for, and quantizing takes seconds.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llmbench.quant.affine import Range, affine_params, grouped, quantize
from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.config import QuantConfig, Scheme
from llmbench.quant.layer_report import LayerReport, LayerResult
from llmbench.quant.quantized_weight import QuantizedWeight
from llmbench.quant.scale_search import search_params


def rtn_quantize(
    W: Tensor,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    scale_search: bool = True,
    code_range: Range = "full",
) -> QuantizedWeight:
    """Round a weight [N, C] to nearest."""
    choose = search_params if scale_search else affine_params
    groups = grouped(W.float(), scheme.group_size)
    params = choose(groups, scheme, dtype=scale_dtype, code_range=code_range)
    return quantize(W, scheme, params)


def weight_error(W: Tensor, weight: QuantizedWeight) -> float:
    """||W - Q||^2 / ||W||^2; 0 for a weight of zeros."""
    total = float(W.double().square().sum())
    return float((W - weight.dequantize()).double().square().sum()) / total if total else 0.0


class RTN:
    """Rounds the layers of a block to nearest."""

    def __init__(
        self,
        config: QuantConfig,
        scale_dtype: torch.dtype,
        *,
        code_range: Callable[[Scheme], Range] = lambda scheme: "full",
        finish: Callable[[QuantizedWeight], QuantizedWeight] = lambda weight: weight,
    ) -> None:
        """`finish` brings a weight into the form that is stored."""
        self._config = config
        self._scale_dtype = scale_dtype
        self._code_range = code_range
        self._finish = finish

    def quantize_block(
        self, block: Block, calibration: BlockCalibration | None, schemes: Mapping[str, Scheme]
    ) -> dict[str, LayerResult]:
        """Quantize the layers that `schemes` names; calibration is not looked at."""
        return {name: self.quantize_layer(block, name, scheme) for name, scheme in schemes.items()}

    def quantize_layer(
        self, block: Block, name: str, scheme: Scheme, *, fallback: str | None = None
    ) -> LayerResult:
        """Quantize one layer; `fallback` says why another method leaves it to this one."""
        W = block.weight(name)
        weight = self._finish(
            rtn_quantize(
                W,
                scheme,
                scale_dtype=self._scale_dtype,
                scale_search=self._config.searches_scales,
                code_range=self._code_range(scheme),
            )
        )
        report = LayerReport(relative_mse=weight_error(W, weight), fallback=fallback)
        block.set_weight(name, weight.dequantize())
        return LayerResult(weight=weight, report=report)
