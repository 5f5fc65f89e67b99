"""Intervals beside scores: what a run of n items lets one say about a model.

Shares of right answers get Wilson's interval (Wilson 1927; Brown, Cai & DasGupta 2001, section 3):
the usual value +- 1.96 standard errors has no width at all where every answer is right, and too
little near either end. Other means are bootstrapped (`llmbench.bench.stats`).

A perplexity is no mean of items but a ratio of sums, exp(-sum of log-likelihoods / sum of words),
and words of one page depend on each other. Its interval is a jackknife over whole pages (Efron &
Tibshirani 1993, chapter 11): each page is left out once, and the spread of the n ratios gives the
standard error. It is taken of the logarithm, where the statistic is close to normal, with Student's
quantile for few pages. F1 depends on counts of (gold, answer) pairs, so resampling items is drawing
those counts from a multinomial distribution.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from llmbench.bench.stats import (
    BOOTSTRAP_SEED,
    CONFIDENCE,
    MIN_INTERVAL_SIZE,
    NUM_RESAMPLES,
    Interval,
    summarize,
)

Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def standard_error(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (divisor n - 1) over sqrt(n); None below two values."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def wilson_interval(num_right: float, n: int) -> Interval:
    """Return Wilson's 95 % interval of a share of n > 0 answers, without continuity correction."""
    share, spread = num_right / n, Z * Z / n
    centre = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def normal_interval(value: float, stderr: float) -> Interval:
    """Return value +- 1.96 standard errors."""
    return value - Z * stderr, value + Z * stderr


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the bootstrapped 95 % interval of a mean; None below six values."""
    return summarize(values).mean_ci


def ratio_interval(sums: Sequence[float], weights: Sequence[float]) -> Interval | None:
    """Return the jackknife 95 % interval of sum(sums) / sum(weights); None below two units.

    One sum and one weight a unit that was drawn as a whole, such as a page.
    """
    n = len(sums)
    if n < 2:
        return None
    values = np.asarray(sums, dtype=np.float64)
    parts = np.asarray(weights, dtype=np.float64)
    ratio = float(values.sum() / parts.sum())
    without = (values.sum() - values) / (parts.sum() - parts)
    variance = (n - 1) / n * float(((without - without.mean()) ** 2).sum())
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return ratio - half, ratio + half


def macro_f1(golds: Sequence[int], picks: Sequence[int]) -> float:
    """Return the unweighted mean of each label's F1, over the labels of either list.

    F1 of a label is 2 TP / (2 TP + FP + FN); a label that is never hit counts as 0.
    """
    return float(_macro_f1_of(_confusion(golds, picks)[None])[0])


def macro_f1_interval(golds: Sequence[int], picks: Sequence[int]) -> Interval | None:
    """Return the bootstrapped 95 % interval of `macro_f1`; None below six items."""
    n = len(golds)
    if n < MIN_INTERVAL_SIZE:
        return None
    counts = _confusion(golds, picks)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = rng.multinomial(n, counts.ravel() / n, size=NUM_RESAMPLES)
    scores = _macro_f1_of(drawn.reshape(NUM_RESAMPLES, *counts.shape))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(scores, [tail, 1 - tail])
    return float(low), float(high)


def _confusion(golds: Sequence[int], picks: Sequence[int]) -> NDArray[np.int64]:
    """Return how often each label was answered with each: [gold, pick]."""
    labels = sorted({*golds, *picks})
    index = {label: row for row, label in enumerate(labels)}
    counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for gold, pick in zip(golds, picks, strict=True):
        counts[index[gold], index[pick]] += 1
    return counts


def _macro_f1_of(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the macro F1 of each table of [R, gold, pick]; labels that it lacks do not count."""
    hits = np.diagonal(counts, axis1=1, axis2=2)  # [R, label]
    support = counts.sum(axis=2) + counts.sum(axis=1)  # 2 TP + FP + FN
    is_there = support > 0
    scores = np.where(is_there, 2 * hits / np.maximum(support, 1), 0.0)
    means: NDArray[np.float64] = scores.sum(axis=1) / is_there.sum(axis=1)
    return means
