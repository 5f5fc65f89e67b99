"""Adaptive smoothing: move outliers of the activations into the weights, as far as it pays.

With each token rounded to 8 bits by its largest value, one large channel costs all others their
resolution. Dividing a channel by s and multiplying the weights' column by s moves the difficulty
over to the 4-bit weights, so s is searched and not given by a formula: every channel is brought
below a common threshold t, s = max(1, cmax / t), and t is swept from the largest channel, where
nothing changes, downwards; the best t is that with the least squared error of the output when
activations are rounded to 8 bits and weights to 4 (Zhang et al. 2024, QQQ, section 3.2; the sweep
over thresholds is Outlier Suppression+, Wei et al. 2023, section 4.2). QQQ looks at the first
texts of the calibration set only; here the error is taken over tokens spread over all of them.

Shapes: `R` sampled tokens · `P` input channels · `N` rows of all linears behind the pair ·
`C` channels of the module in front; P is C times the heads that share a value head.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbench.quant.adapters import ScalingPair, adapter_for
from llmbench.quant.affine import Range, affine_params, grouped, round_groups
from llmbench.quant.block import Block, LinearGroup
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.config import PER_CHANNEL, Scheme
from llmbench.quant.folding import fold, gather, spread
from llmbench.quant.linear import quantize_activations
from llmbench.quant.statistics import InputStatistics

SAMPLE_ROWS = 256
"""Tokens over which the error is taken; it is a sum over N outputs of each."""
NUM_THRESHOLDS = 20
LOWEST_THRESHOLD = 1 / 100
"""Of the largest channel; QQQ sweeps linearly, which spends most steps where nothing changes."""


@dataclass(frozen=True, slots=True, eq=False)
class Smoothing:
    """What the search found for one pair.

    Attributes:
        scales: [C] float32, all at least 1.
        threshold: Of the best candidate, over the largest channel: 1 leaves all as it is.
        error: Squared output error over the squared output, at the best threshold.
        error_before: The same without smoothing.
    """

    scales: Tensor
    threshold: float
    error: float
    error_before: float


def round_weight(weight: Tensor, scheme: Scheme) -> Tensor:
    """[N, P] to the nearest values of a scheme, float32; per channel in QQQ's restricted range."""
    groups = grouped(weight, scheme.group_size)
    is_restricted = scheme.group_size == PER_CHANNEL and scheme.sym
    code_range: Range = "restricted" if is_restricted else "full"
    params = affine_params(groups, scheme, dtype=torch.float32, code_range=code_range)
    return round_groups(groups, params).reshape(weight.shape)


def search_scales(
    pair: ScalingPair,
    weights: list[tuple[Tensor, Scheme]],
    sample: Tensor,
    channel_max: Tensor,
) -> Smoothing:
    """Sweep the threshold for linears [N, P] over a common input of sampled rows [R, P].

    `channel_max` [P] is the largest magnitude of each channel over all tokens.
    """
    wanted = torch.cat([sample @ weight.t() for weight, _ in weights], dim=1)
    power = wanted.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
    largest = gather(pair, channel_max).amax(dim=0)  # [C]
    top = float(largest.max())
    # Below the smallest channel that is ever active, a threshold only scales all of them alike.
    lowest = float(largest[largest > 0].min()) / top if top > 0 else 1.0
    best: Smoothing | None = None
    error_before = 0.0
    for step in range(NUM_THRESHOLDS):
        threshold = LOWEST_THRESHOLD ** (step / (NUM_THRESHOLDS - 1))
        if step and threshold < lowest:
            break
        scales = (largest / (threshold * top)).clamp(min=1) if step else torch.ones_like(largest)
        columns = spread(pair, scales)
        codes, token_scales = quantize_activations(sample / columns)
        rounded = codes.float() * token_scales
        found = torch.cat(
            [rounded @ round_weight(weight * columns, scheme).t() for weight, scheme in weights],
            dim=1,
        )
        error = float((found - wanted).square().sum() / power)
        if step == 0:
            error_before = error
        if best is None or error < best.error:
            best = Smoothing(scales, threshold, error, error_before)
    assert best is not None
    return best


def smooth_block(
    block: Block, calibration: BlockCalibration, schemes: Mapping[str, Scheme]
) -> dict[str, str]:
    """Search and fold the scales of every pair of a block; a note for each linear of the block.

    The notes also name the linears that no pair can smooth, and why.
    """
    adapter = adapter_for(block.config)
    if adapter is None:
        raise AssertionError(f"no adapter for {block.config.model_type}: the plan refuses it")
    statistics = calibration.observe(sample_rows=SAMPLE_ROWS)
    notes: dict[str, str] = {}
    for pair in adapter.pairs(block.config):
        names = [f"{block.name}.{name}" for name in pair.next]
        notes |= dict.fromkeys(names, _smooth_pair(block, pair, names, statistics, schemes))
    for unscaled in adapter.unscaled(block.config):
        notes |= {f"{block.name}.{n}": f"not smoothed: {unscaled.reason}" for n in unscaled.linears}
    return notes


def _smooth_pair(
    block: Block,
    pair: ScalingPair,
    names: list[str],
    statistics: Mapping[LinearGroup, InputStatistics],
    schemes: Mapping[str, Scheme],
) -> str:
    quantized = [name for name in names if name in schemes]
    if not quantized:
        return "not smoothed: it stays in full precision"
    seen = [stats for group, stats in statistics.items() if quantized[0] in group.names]
    if not seen or not len(seen[0].sample):
        return "not smoothed: no calibration token reached it"
    weights = [(block.weight(name), schemes[name]) for name in quantized]
    channel_max = torch.maximum(seen[0].low.abs(), seen[0].high.abs())
    found = search_scales(pair, weights, seen[0].sample, channel_max)
    if found.threshold < 1:
        fold(block, pair, found.scales)
    return (
        f"smoothed to {found.threshold:.3f} of the largest channel, "
        f"relative error {found.error_before:.3g} to {found.error:.3g}"
    )
