"""AWQ (Lin et al. 2023): protect the weights that matter by scaling, then round to nearest.

A weight matters as much as the input that it multiplies. Multiplying column c of a weight by
s_c > 1 before rounding makes its rounding error smaller by s_c, as long as the range of its group
does not grow; dividing the input channel by s_c undoes it, and is folded into whatever makes the
input (folding.py). The scales follow one formula with one free number (section 3.2, and the
authors' code, which lets the weights have a say):

    s = x_mean^r / w_mean^(1 - r)

with x_mean the mean magnitude of the input channel, w_mean the mean magnitude of the column
against the largest weight of each group, and r searched on a grid; leaving the layer as it is
always stands as a candidate. Then the range of every group is searched (clipping.py).

The paper measures a candidate by running tokens through the layer. Here it is the same number
from H = sum of x x^T alone: ||(W - Q(W s) / s) X||^2 = tr(D H D^T), with D the difference of the
weights. So every calibration token counts, in whatever order and batches, and one run of the
block serves all candidates.

Shapes: `N` out features · `C` channels of the previous module · `P` input channels (C times the
heads that share a value head).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmbench.quant.adapters import ScalingPair, adapter_for, refusal
from llmbench.quant.affine import affine_params, grouped, quantize, round_groups
from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.clipping import search_ranges
from llmbench.quant.config import QuantConfig, Scheme
from llmbench.quant.errors import CalibrationError, ConfigError, QuantError
from llmbench.quant.folding import fold, gather, spread
from llmbench.quant.layer_inputs import LayerInputs, layer_inputs
from llmbench.quant.layer_report import LayerResult
from llmbench.quant.rtn import RTN

logger = logging.getLogger(__name__)

NUM_RATIOS = 20
"""Steps of the grid over r (the authors' code)."""
SCALE_FLOOR = 1e-4
"""Smallest scale before normalizing, and what keeps w_mean from dividing by 0 (likewise)."""
CHUNK = 1 << 17
"""Weights that are rounded at once in the search, few enough for a core's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What the search found for one pair.

    Attributes:
        scales: [C] float32; all 1 where the layers are best left alone.
        ratio: r of the best candidate, None for leaving them alone.
        error: The best candidate's tr(D H D^T) over that of leaving them alone.
    """

    scales: Tensor
    ratio: float | None
    error: float


def search_scales(
    pair: ScalingPair,
    weights: Sequence[tuple[Tensor, Scheme]],
    inputs: LayerInputs,
    *,
    scale_dtype: torch.dtype,
) -> Scaling:
    """The best scales for linears [N, P] behind a pair, all over the same input."""
    x_mean = gather(pair, inputs.abs_mean).mean(dim=0)
    w_mean = gather(pair, column_magnitudes(weights)).mean(dim=0)
    unscaled = _output_error(weights, torch.ones_like(inputs.abs_mean), inputs.hessian, scale_dtype)
    best = Scaling(torch.ones_like(x_mean), None, 1.0)
    for ratio, scales in candidates(x_mean, w_mean):
        try:
            error = _output_error(weights, spread(pair, scales), inputs.hessian, scale_dtype)
        except QuantError:  # A group's scale does not fit the type it is stored in.
            continue
        if error < best.error * unscaled:
            best = Scaling(scales, ratio, error / unscaled)
    return best


def candidates(x_mean: Tensor, w_mean: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Pairs of r and scales [C].

    Channels without input or weights keep 1 and have no say in how the others are normalized.
    """
    is_live = (x_mean > 0) & (w_mean > 0)
    if not is_live.any():
        return
    for step in range(NUM_RATIOS + 1):
        ratio = step / NUM_RATIOS
        scales = x_mean.pow(ratio) / (w_mean.pow(1 - ratio) + SCALE_FLOOR)
        scales = scales.clamp(min=SCALE_FLOOR)
        live = scales[is_live]
        scales = scales / (live.max() * live.min()).sqrt()
        yield ratio, torch.where(is_live & torch.isfinite(scales) & (scales > 0), scales, 1.0)


def column_magnitudes(weights: Sequence[tuple[Tensor, Scheme]]) -> Tensor:
    """[P], each column's mean magnitude against the largest weight of its groups."""
    total, rows = torch.zeros(weights[0][0].shape[1], dtype=torch.float64), 0
    for W, scheme in weights:
        groups = grouped(W, scheme.group_size).abs()
        largest = groups.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        total += (groups / largest).sum(dim=0, dtype=torch.float64).flatten().cpu()
        rows += len(W)
    return (total / rows).float().to(weights[0][0].device)


def _output_error(
    weights: Sequence[tuple[Tensor, Scheme]], scales: Tensor, H: Tensor, dtype: torch.dtype
) -> float:
    """tr(D H D^T) of rounding W * scales, undone afterwards; summed over the layers."""
    total = 0.0
    for W, scheme in weights:
        num_rows = max(1, CHUNK // W.shape[1])
        for start in range(0, len(W), num_rows):
            rows = W[start : start + num_rows]
            groups = grouped(rows * scales, scheme.group_size)
            rounded = round_groups(groups, affine_params(groups, scheme, dtype=dtype))
            difference = rounded.reshape(rows.shape).div_(scales).sub_(rows)
            products = torch.mm(difference, H).mul_(difference)
            total += float(products.sum(dim=1).sum(dtype=torch.float64))
    return total


class AWQ:
    """Scales a block's layers by what makes their inputs, then rounds them."""

    def __init__(self, config: QuantConfig, scale_dtype: torch.dtype, hf_text_config: Any) -> None:
        """Raises ConfigError for a family without an adapter."""
        adapter = adapter_for(hf_text_config)
        if adapter is None:
            raise ConfigError(str(refusal(hf_text_config, "awq")))
        self._scale_dtype = scale_dtype
        self._rtn = RTN(config, scale_dtype)
        self._pairs = adapter.pairs(hf_text_config)
        self._unscaled = {
            name: part.reason for part in adapter.unscaled(hf_text_config) for name in part.linears
        }

    def quantize_block(
        self, block: Block, calibration: BlockCalibration | None, schemes: Mapping[str, Scheme]
    ) -> dict[str, LayerResult]:
        """Quantize the layers that `schemes` names; norms and biases in front of them change."""
        if calibration is None:
            raise CalibrationError("AWQ needs calibration tokens, none were given")
        inputs = layer_inputs(calibration.observe(hessian=True))
        notes = {name: f"input not scaled: {reason}" for name, reason in self._unscaled.items()}
        for pair in self._pairs:
            note = self._scale(block, pair, schemes, inputs)
            notes |= dict.fromkeys(pair.next, note)
        results = {}
        for name, scheme in schemes.items():
            note = notes.get(
                block.relative(name), "input not scaled: the adapter has no such layer"
            )
            results[name] = self._quantize(block, name, scheme, inputs.get(name), note)
        return results

    def _scale(
        self,
        block: Block,
        pair: ScalingPair,
        schemes: Mapping[str, Scheme],
        inputs: Mapping[str, LayerInputs],
    ) -> str:
        """Search and fold one pair; what was done, for the report."""
        names = [f"{block.name}.{name}" for name in pair.next]
        rounded = [name for name in names if name in schemes]
        if not rounded:
            return "input not scaled: no layer behind it is quantized"
        seen = inputs.get(names[0])
        if seen is None or not seen.is_usable:
            return "input not scaled: no usable calibration tokens"
        weights = [(block.weight(name), schemes[name]) for name in rounded]
        found = search_scales(pair, weights, seen, scale_dtype=self._scale_dtype)
        if found.ratio is None:
            return "input not scaled: no candidate is better"
        seen.divide(spread(pair, fold(block, pair, found.scales)))
        return f"input scaled with r = {found.ratio:g}, error x {found.error:.3f}"

    def _quantize(
        self, block: Block, name: str, scheme: Scheme, inputs: LayerInputs | None, note: str
    ) -> LayerResult:
        """Search a layer's ranges and round it."""
        if inputs is None or not inputs.is_usable:
            reason = "no usable calibration tokens"
            logger.warning("%s: rounded to nearest, it has %s", name, reason)
            return self._rtn.quantize_layer(block, name, scheme, fallback=f"rtn: {reason}")
        W = block.weight(name)
        params = search_ranges(W, inputs.hessian, scheme, dtype=self._scale_dtype)
        weight = quantize(W, scheme, params)
        block.set_weight(name, weight.dequantize())
        return LayerResult(weight=weight, report=inputs.report(W, weight, notes=(note,)))
