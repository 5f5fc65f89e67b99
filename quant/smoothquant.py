"""SmoothQuant (Xiao et al. 2022): 8-bit weights and activations, with outliers shared out fairly.

Each token's input is rounded to 8 bits by its largest value, so a channel that is 100 times larger
than the others leaves them two bits. Weights have no such channels. Dividing channel j of a
norm's output by s_j and multiplying column j of the linears behind it by s_j moves part of the
difficulty over (equation 4):

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

At alpha = 0.5 activations and weights end up equally hard. Only inputs that come from a norm are
smoothed, as in the paper: theirs are the persistent outliers.

Shapes: `C` channels of a norm · `N` out features.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmbench.quant.adapters import ScalingPair, adapter_for, refusal
from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.config import QuantConfig, Scheme
from llmbench.quant.errors import CalibrationError, ConfigError
from llmbench.quant.folding import fold
from llmbench.quant.layer_inputs import LayerInputs, layer_inputs
from llmbench.quant.layer_report import LayerReport, LayerResult
from llmbench.quant.rtn import rtn_quantize, weight_error

SCALE_FLOOR = 1e-5
"""Smallest scale, as the paper's own code has it."""


def smoothing_scales(channel_max: Tensor, weights: list[Tensor], alpha: float) -> Tensor:
    """[C], equation 4, from the largest magnitude of each channel [C] and the weights [N, C].

    A channel that is always 0, or that no weight reads, keeps the scale 1.
    """
    weight_max = torch.cat(weights).abs().amax(dim=0)
    scales = channel_max.pow(alpha) / weight_max.pow(1 - alpha)
    is_live = (channel_max > 0) & (weight_max > 0) & torch.isfinite(scales)
    return torch.where(is_live, scales.clamp(min=SCALE_FLOOR), 1.0)


class SmoothQuant:
    """Smooths the norms of a block, then rounds its layers to 8 bits, a scale a row."""

    def __init__(self, config: QuantConfig, scale_dtype: torch.dtype, hf_text_config: Any) -> None:
        """Raises ConfigError for a family without an adapter."""
        adapter = adapter_for(hf_text_config)
        if adapter is None:
            raise ConfigError(str(refusal(hf_text_config, "smoothquant")))
        self._alpha = config.smooth_alpha
        self._scale_dtype = scale_dtype
        pairs = adapter.pairs(hf_text_config)
        self._pairs = [pair for pair in pairs if pair.kind != "linear"]
        self._notes = {
            name: f"not smoothed: {part.reason}"
            for part in adapter.unscaled(hf_text_config)
            for name in part.linears
        }

    def quantize_block(
        self, block: Block, calibration: BlockCalibration | None, schemes: Mapping[str, Scheme]
    ) -> dict[str, LayerResult]:
        """Quantize the layers that `schemes` names; norms in front of them change."""
        if calibration is None:
            raise CalibrationError("SmoothQuant needs calibration tokens, none were given")
        inputs = layer_inputs(calibration.observe(hessian=True))
        notes = dict(self._notes)
        for pair in self._pairs:
            notes |= dict.fromkeys(pair.next, self._smooth(block, pair, schemes, inputs))
        results = {}
        for name, scheme in schemes.items():
            note = notes.get(block.relative(name), "not smoothed: no norm is in front of it")
            results[name] = self._round(block, name, scheme, inputs.get(name), note)
        return results

    def _smooth(
        self,
        block: Block,
        pair: ScalingPair,
        schemes: Mapping[str, Scheme],
        inputs: Mapping[str, LayerInputs],
    ) -> str:
        """Fold one norm's scales; what was done, for the report."""
        names = [f"{block.name}.{name}" for name in pair.next]
        rounded = [name for name in names if name in schemes]
        if not rounded:
            return "not smoothed: no layer behind the norm is quantized"
        seen = inputs.get(names[0])
        if seen is None or not seen.is_usable:
            return "not smoothed: no usable calibration tokens"
        weights = [block.weight(name) for name in rounded]
        scales = smoothing_scales(seen.abs_max, weights, self._alpha)
        before = float(seen.abs_max.max())
        seen.divide(fold(block, pair, scales))
        return f"largest input {before:.4g} smoothed to {float(seen.abs_max.max()):.4g}"

    def _round(
        self, block: Block, name: str, scheme: Scheme, inputs: LayerInputs | None, note: str
    ) -> LayerResult:
        W = block.weight(name)
        weight = rtn_quantize(
            W,
            scheme,
            scale_dtype=self._scale_dtype,
            scale_search=False,
            code_range="restricted",
        )
        block.set_weight(name, weight.dequantize())
        if inputs is None or not inputs.is_usable:
            report = LayerReport(relative_mse=weight_error(W, weight), notes=(note,))
        else:
            report = inputs.report(W, weight, notes=(note,))
        return LayerResult(weight=weight, report=report)
