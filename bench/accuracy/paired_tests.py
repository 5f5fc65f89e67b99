"""Tests and intervals for two models that answered the same items.

Pairs say more than two scores: items that both models get right, or both wrong, tell nothing about
which is better and drop out. For right and wrong answers there remain b items that only the base
gets right and c that only the candidate does. If neither model is better, each of the b + c is as
likely to be of either sort: McNemar's test (1947), here exact, a binomial one. The interval of the
difference (c - b) / n is Tango's (1998, Statistics in Medicine 17:891), which inverts McNemar's
score test; the usual (c - b) / n +- 1.96 se has no width at all where no answer flipped.

For other values (probability shares, log-likelihoods of pages) the test flips the signs of the
paired differences, which is exact when neither model is better, and the interval is a bootstrap
over items. Several tasks are several chances of a false alarm: Holm (1979) raises the p-values so
that the chance of *any* is at most 5 %.

A test that finds nothing may have been too small to. `detectable` is the smallest true difference
that it finds four times out of five (power 80 %). Imports no torch.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from llmbench.bench.stats import BOOTSTRAP_SEED, CONFIDENCE, MIN_INTERVAL_SIZE, Interval

Floats = NDArray[np.float64]

ALPHA = 1 - CONFIDENCE
POWER = 0.8
NUM_RESAMPLES = 4000
NUM_SIGN_FLIPS = 9999
"""Random sign patterns; the smallest p they can give is then 1 / 10,000."""
MAX_EXACT_ITEMS = 13
"""Up to here all 2^n sign patterns are fewer than the random ones would be."""
_CHUNK = 4_000_000  # signs or draws at a time


def mcnemar_exact(num_losses: int, num_gains: int) -> float:
    """Return the two-sided p-value of b losses against c gains, given their sum."""
    if num_losses + num_gains == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(num_gains, num_losses + num_gains, 0.5).pvalue)


def tango_interval(n: int, num_losses: int, num_gains: int) -> Interval:
    """Return the 95 % interval of (gains - losses) / n for n > 0 pairs; it is never without width.

    The ends are where the score statistic of a supposed difference is 1.96, found by bisection.
    """
    z = _z(1 - ALPHA / 2)

    def statistic(delta: float) -> float:
        """Positive where `delta` is below what was seen."""
        b_term = -(num_gains + num_losses) + (2 * n - num_gains + num_losses) * delta
        c_term = -num_losses * delta * (1 - delta)
        # The likeliest share of losses, were the difference `delta`.
        losses = (math.sqrt(max(0.0, b_term**2 - 8 * n * c_term)) - b_term) / (4 * n)
        variance = n * (2 * losses + delta * (1 - delta))
        gap = num_gains - num_losses - n * delta
        if variance <= 0:
            return math.copysign(math.inf, gap) if gap else 0.0
        return gap / math.sqrt(variance)

    seen = (num_gains - num_losses) / n
    low = _crossing(lambda delta: statistic(delta) > z, -1.0, seen)
    high = _crossing(lambda delta: statistic(delta) > -z, seen, 1.0)
    return low, high


def sign_flip_p(differences: Sequence[float] | Floats, seed: int = BOOTSTRAP_SEED) -> float:
    """Return the two-sided p-value of the sum of paired differences, by flipping their signs."""
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]  # they move no sum
    if not len(values):
        return 1.0
    seen = abs(float(values.sum()))
    # Sums in another order differ by rounding, and the pattern that was seen must count.
    least = seen - 1e-12 * float(np.abs(values).sum())
    if len(values) <= MAX_EXACT_ITEMS:
        patterns = np.arange(2 ** len(values))[:, None] >> np.arange(len(values))
        sums = (1 - 2 * (patterns & 1)) @ values
        return float(np.mean(np.abs(sums) >= least))
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // len(values))
    num_as_large = 0
    for start in range(0, NUM_SIGN_FLIPS, chunk):
        rows = min(chunk, NUM_SIGN_FLIPS - start)
        signs = rng.integers(2, size=(rows, len(values)), dtype=np.int8) * 2 - 1
        num_as_large += int(np.sum(np.abs(signs @ values) >= least))
    return (num_as_large + 1) / (NUM_SIGN_FLIPS + 1)


def bootstrap_ratio_interval(
    sums: Sequence[float] | Floats,
    weights: Sequence[float] | Floats | None = None,
    seed: int = BOOTSTRAP_SEED,
) -> Interval | None:
    """Return the 95 % interval of sum(sums) / sum(weights) over items; None below six of them.

    Without weights it is the mean. Percentile bootstrap (Efron & Tibshirani 1993, chapter 13).
    """
    values = np.asarray(sums, dtype=np.float64)
    n = len(values)
    if n < MIN_INTERVAL_SIZE:
        return None
    parts = np.ones(n) if weights is None else np.asarray(weights, dtype=np.float64)
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // n)
    ratios = []
    for start in range(0, NUM_RESAMPLES, chunk):
        drawn = rng.integers(n, size=(min(chunk, NUM_RESAMPLES - start), n))
        ratios.append(values[drawn].sum(axis=1) / parts[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(ratios), [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number, in their order."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    ranked = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(ranked):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def detectable_mean(standard_error: float, alpha: float = ALPHA) -> float:
    """Return the smallest mean difference that a test of this error finds with 80 % power."""
    return (_z(1 - alpha / 2) + _z(POWER)) * standard_error


def detectable_share(n: int, num_flips: int, alpha: float = ALPHA) -> float | None:
    """Return the same for right and wrong answers; None where none could be found, not even 1.

    From the rate of flips psi that was seen: delta = (z_alpha + z_power) sqrt(psi / n) (Connor
    1987, to first order). A difference takes as many flips at least, hence psi >= delta; and the
    exact test needs enough flips, all one way, to get below alpha.
    """
    reach = _z(1 - alpha / 2) + _z(POWER)
    flips = num_flips / n
    delta = reach * math.sqrt(flips / n)
    if delta >= flips:
        delta = reach**2 / n  # the solution for psi = delta
    delta = max(delta, least_flips(alpha) / n)
    return delta if delta <= 1 else None


def least_flips(alpha: float = ALPHA) -> int:
    """Return how many flips, all one way, the exact test takes to get to `alpha`."""
    return math.ceil(math.log2(2 / alpha))


def _z(share: float) -> float:
    return NormalDist().inv_cdf(share)


def _crossing(is_above: Callable[[float], bool], low: float, high: float) -> float:
    """Return where a falling predicate of [low, high] turns false, to float precision."""
    for _ in range(100):
        middle = (low + high) / 2
        if is_above(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2
