"""LLM.int8 (Dettmers et al. 2022): 8-bit products, with outlier channels in full precision.

A handful of input channels of a large model hold values many times larger than the rest, always
the same few. Rounded with the others they would spoil every token's scale; taken out of the
integer product and multiplied in full precision they cost next to nothing (section 3.2). Which
channels these are is seen at run time, so no calibration is needed: here every row of a weight
is rounded to -127 … 127 by its largest value, and the threshold is noted.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.config import QuantConfig, Scheme
from llmbench.quant.layer_report import LayerReport, LayerResult
from llmbench.quant.rtn import rtn_quantize, weight_error

OUTLIER_THRESHOLD = 6.0
"""Magnitude from which an input value is an outlier (section 3.2; transformers' default)."""


class LLMInt8:
    """Rounds the layers of a block to 8 bits, a scale a row."""

    def __init__(self, config: QuantConfig) -> None:
        self._config = config

    def quantize_block(
        self, block: Block, calibration: BlockCalibration | None, schemes: Mapping[str, Scheme]
    ) -> dict[str, LayerResult]:
        """Quantize the layers that `schemes` names; calibration is not looked at."""
        results = {}
        for name, scheme in schemes.items():
            W = block.weight(name)
            # float32 scales of the largest value: no other can be written as bitsandbytes' SCB.
            weight = replace(
                rtn_quantize(
                    W,
                    scheme,
                    scale_dtype=torch.float32,
                    scale_search=False,
                    code_range="restricted",
                ),
                outlier_threshold=OUTLIER_THRESHOLD,
            )
            block.set_weight(name, weight.dequantize())
            report = LayerReport(relative_mse=weight_error(W, weight))
            results[name] = LayerResult(weight=weight, report=report)
        return results
