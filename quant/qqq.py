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

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from llmbench.quant.affine import MIN_SCALE, Range
from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.config import PER_CHANNEL, QuantConfig, Scheme
from llmbench.quant.errors import CalibrationError
from llmbench.quant.gptq import GPTQResult, gptq_quantize
from llmbench.quant.layer_report import LayerReport, LayerResult
from llmbench.quant.plan import chosen_transform
from llmbench.quant.quantized_weight import INT8_MAX, QuantizedWeight
from llmbench.quant.refinement import row_errors
from llmbench.quant.rtn import rtn_quantize, weight_error
from llmbench.quant.smoothing import smooth_block
from llmbench.quant.statistics import InputStatistics

logger = logging.getLogger(__name__)


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
        self._config = config
        self._scale_dtype = torch.float32 if is_two_level else scale_dtype
        self._is_two_level = is_two_level
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
        results: dict[str, LayerResult] = {}
        groups = calibration.sequential(is_true_sequential=self._config.true_sequential)
        for group, statistics in groups:
            asked = [name for name in group.names if name in schemes]
            for scheme, names in groupby(asked, key=schemes.__getitem__):
                results |= self._quantize(block, list(names), scheme, statistics)
        for name in schemes.keys() - results.keys():
            results[name] = self._round(block, name, schemes[name], "no calibration tokens")
        return {name: _with_note(result, notes.get(name)) for name, result in results.items()}

    def _quantize(
        self, block: Block, names: Sequence[str], scheme: Scheme, statistics: InputStatistics
    ) -> dict[str, LayerResult]:
        """Quantize layers that share input and scheme, as one matrix with all their rows."""
        H = statistics.hessian
        reason = None
        if statistics.num_tokens == 0:
            reason = "no calibration tokens"
        elif not torch.isfinite(H).all():
            reason = "calibration inputs that are not finite"
        if reason is not None:
            return {name: self._round(block, name, scheme, reason) for name in names}
        weights = [block.weight(name) for name in names]
        found = gptq_quantize(
            torch.cat(weights),
            H,
            scheme,
            scale_dtype=self._scale_dtype,
            damp_percent=self._config.damp_percent,
            act_order=self._config.act_order,
            scale_search=self._config.scale_search,
            code_range=code_range(scheme),
        )
        if found.is_diagonal:
            logger.warning("%s: no damping made the Hessian invertible", ", ".join(names))
        quantized = self._finished(found.weight)
        results, start = {}, 0
        for name, W in zip(names, weights, strict=True):
            weight = quantized.rows(start, start + len(W))
            start += len(W)
            block.set_weight(name, weight.dequantize())
            report = _report(W, weight, H, found, statistics.num_tokens)
            results[name] = LayerResult(weight=weight, report=report)
        return results

    def _finished(self, weight: QuantizedWeight) -> QuantizedWeight:
        if self._is_two_level and weight.group_size != PER_CHANNEL:
            return two_level(weight)
        return weight

    def _round(self, block: Block, name: str, scheme: Scheme, reason: str) -> LayerResult:
        logger.warning("%s: rounded to nearest, it has %s", name, reason)
        W = block.weight(name)
        weight = self._finished(
            rtn_quantize(
                W,
                scheme,
                scale_dtype=self._scale_dtype,
                scale_search=self._config.scale_search,
                code_range=code_range(scheme),
            )
        )
        block.set_weight(name, weight.dequantize())
        report = LayerReport(relative_mse=weight_error(W, weight), fallback=f"rtn: {reason}")
        return LayerResult(weight=weight, report=report)


def _report(
    W: Tensor, weight: QuantizedWeight, H: Tensor, found: GPTQResult, num_tokens: int
) -> LayerReport:
    """Errors are those of the weight as it is stored, second level included."""
    error = max(float(row_errors(W - weight.dequantize(), H).sum()), 0.0)
    energy = float(row_errors(W, H).sum())
    return LayerReport(
        relative_mse=error / energy if energy > 0 else 0.0,
        loss=error / num_tokens,
        damp=found.damp,
        fallback="diagonal: the Hessian could not be factored" if found.is_diagonal else None,
        num_tokens=num_tokens,
    )


def _with_note(result: LayerResult, note: str | None) -> LayerResult:
    if note is None:
        return result
    return replace(result, report=replace(result.report, notes=(*result.report.notes, note)))
