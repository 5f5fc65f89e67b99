"""QQQ: weights of 4 bits and activations of 8, multiplied as integers (Zhang et al. 2024).

First outliers are dealt with: either the whole model is rotated before this file sees it
(rotation.py, what QQQ's authors came to recommend) or each block is smoothed (smoothing.py). Then
GPTQ finds symmetric codes, on inputs that are rounded to 8 bits as they will be at run time.

A product of integers can have one scale a row and one a token. Per-channel weights have just
that, with codes -7 to 7. Weights in groups get there in two levels (section 3.3): code times the
group's scale is rounded to an 8-bit integer, and one float32 scale a row brings the largest of
these integers, 127, to the row's largest weight. In compressed-tensors files the group scales
stay as they are, and the integer product is summed group by group.

Shapes: `N` out features · `C` in features · `G` groups of a row.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from llmbench.quant.affine import MIN_SCALE, Range
from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.config import PER_CHANNEL, QuantConfig, Scheme
from llmbench.quant.errors import CalibrationError
from llmbench.quant.gptq import GPTQ
from llmbench.quant.layer_report import LayerResult
from llmbench.quant.plan import chosen_transform
from llmbench.quant.quantized_weight import INT8_MAX, QuantizedWeight
from llmbench.quant.smoothing import smooth_block


def code_range(scheme: Scheme) -> Range:
    """QQQ's kernel takes per-channel codes of -7 to 7, and all codes in groups."""
    return "restricted" if scheme.group_size == PER_CHANNEL else "full"


def two_level(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight with float32 scales a group as one whose integers fit 8 bits.

    |code * scale| is at most 127 after rounding: by the choice of the scales a row it is at most
    127 with exact scales a group, and float16 rounds those by a share of 2^-11, which makes at
    most 127.06.
    """
    largest = weight.dequantize().abs().amax(dim=1)  # [N]
    channel_scales = (largest / INT8_MAX).clamp(min=MIN_SCALE)
    # A group whose codes are all zero may have any scale: it needs only fit float16.
    scales = (weight.scales.float() / channel_scales[:, None]).clamp(MIN_SCALE, INT8_MAX)
    return replace(weight, scales=scales.half(), channel_scales=channel_scales)


class QQQ:
    """Quantizes the blocks of a model that is rotated already, or smooths them first."""

    def __init__(
        self,
        config: QuantConfig,
        scale_dtype: torch.dtype,
        hf_text_config: Any,
        is_two_level: bool,
    ) -> None:
        """`is_two_level` is for QQQ's own file, which also holds scales a row in float32."""
        self._gptq = GPTQ(
            config,
            torch.float32 if is_two_level else scale_dtype,
            code_range=code_range,
            finish=stored_in_two_levels if is_two_level else None,
        )
        self._transform = chosen_transform(config, hf_text_config)

    def quantize_block(
        self, block: Block, calibration: BlockCalibration | None, schemes: Mapping[str, Scheme]
    ) -> dict[str, LayerResult]:
        """Smooth the block where the run asks for it, then quantize the layers of `schemes`.

        Layers without usable statistics are rounded to nearest, which is logged and reported.
        """
        if calibration is None:
            raise CalibrationError("QQQ needs calibration tokens, none were given")
        schemes = {name: replace(scheme, activations="int8") for name, scheme in schemes.items()}
        notes: dict[str, str] = {}
        if self._transform == "smooth":
            notes = smooth_block(block, calibration, schemes)
        results = self._gptq.quantize_block(block, calibration, schemes)
        return {name: _with_note(result, notes.get(name)) for name, result in results.items()}


def stored_in_two_levels(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight as QQQ's own file holds it: groups in two levels, rows as they are."""
    return weight if weight.group_size == PER_CHANNEL else two_level(weight)


def _with_note(result: LayerResult, note: str | None) -> LayerResult:
    if note is None:
        return result
    return replace(result, report=replace(result.report, notes=(*result.report.notes, note)))
