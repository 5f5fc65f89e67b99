"""One number of an evaluation, and how far it can be trusted.

A score is the mean of its items' metrics, a perplexity (a ratio of sums over whole texts), or an F1
(of all answers together). Beside it stand the standard error by the harness's rule, which has none
for the last two, and a 95 % interval: Wilson's for shares of right answers, a bootstrap for other
means and F1, a jackknife over texts for perplexities, and a normal one for means over tasks. How an
interval was made is part of the record; a score of few items says what it is worth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from llmbench.bench import strict_json
from llmbench.bench.accuracy.intervals import (
    macro_f1,
    macro_f1_interval,
    mean_interval,
    normal_interval,
    ratio_interval,
    standard_error,
    wilson_interval,
)
from llmbench.bench.accuracy.scoring import perplexity
from llmbench.bench.errors import BenchError
from llmbench.bench.stats import Interval

if TYPE_CHECKING:
    from llmbench.bench.accuracy.items import ItemRecord

IntervalKind = Literal["wilson", "bootstrap", "jackknife", "normal"]

FEW_ITEMS = 100  # below: +-10 points at best, as Wilson's interval is 0.19 wide at half of 100
TOO_FEW_ITEMS = 30  # below: +-17 points; nothing that quantization does is as large


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricScore:
    """One number and how far it can be trusted; what cannot be said is None.

    Attributes:
        stderr: By the harness's rule, which has none for F1 and perplexities.
        low: End of the 95 % interval, as `high`; `interval` says how it was made.
        n: Items that the value rests on.
        unit: "share" (0 to 1), "perplexity", or "bits/byte".
        note: What a reader must know before comparing; empty if nothing.
    """

    value: float | None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    interval: IntervalKind | None = None
    n: int
    unit: str = "share"
    higher_is_better: bool = True
    note: str = ""

    def to_record(self) -> dict[str, Any]:
        """Return strict JSON types."""
        record: dict[str, Any] = strict_json.strict(self)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_record` wrote."""
        return cls(**record)


def mean(values: Sequence[float]) -> MetricScore:
    """Return the mean of item values; shares of right answers get Wilson's interval."""
    n = len(values)
    if not n:
        return MetricScore(value=None, n=0)
    total = math.fsum(values)
    is_binary = all(value in (0.0, 1.0) for value in values)
    interval = wilson_interval(total, n) if is_binary else mean_interval(values)
    kind: IntervalKind = "wilson" if is_binary else "bootstrap"
    score = MetricScore(value=total / n, stderr=standard_error(values), n=n)
    return _bounded(score, interval, kind)


def f1(items: "Sequence[ItemRecord]") -> MetricScore:
    """Return the macro F1 of the picks, as the harness has it for KoBEST."""
    if not items:
        return MetricScore(value=None, n=0)
    golds = [item.gold for item in items if isinstance(item.gold, int)]
    picks = [item.pick for item in items if isinstance(item.pick, int)]
    if not len(golds) == len(picks) == len(items):
        raise BenchError("F1 needs one gold index and one pick of every item")
    score = MetricScore(value=macro_f1(golds, picks), n=len(items))
    return _bounded(score, macro_f1_interval(golds, picks), "bootstrap")


def weighted(name: str, items: "Sequence[ItemRecord]") -> MetricScore:
    """Return a perplexity over all texts, or bits per byte."""
    is_bits = name == "bits_per_byte"
    score = MetricScore(
        value=None,
        n=len(items),
        unit="bits/byte" if is_bits else "perplexity",
        higher_is_better=False,
    )
    if not items:
        return score
    sums = [math.fsum(item.loglikelihoods or (math.nan,)) for item in items]
    sizes = [item.text_size or (0, 0) for item in items]
    weights = [words if name == "word_perplexity" else num_bytes for words, num_bytes in sizes]
    if is_bits:
        per_bit = [-value / math.log(2) for value in sums]
        value, interval = math.fsum(per_bit) / sum(weights), ratio_interval(per_bit, weights)
    else:
        value, interval = weighted_perplexity(sums, weights)
    if not math.isfinite(value):
        return replace(score, note="too large for a number")
    return _bounded(replace(score, value=value), interval, "jackknife")


def over_items(metrics: Sequence[MetricScore]) -> MetricScore:
    """Return the mean over all items, with the harness's pooled standard error."""
    scored = _blank(metrics)
    if scored.note:
        return scored
    value = math.fsum(metric.n * (metric.value or 0.0) for metric in metrics) / scored.n
    stderr = _pooled_stderr(metrics, scored.n)
    if all(metric.interval == "wilson" for metric in metrics):
        interval: Interval | None = wilson_interval(value * scored.n, scored.n)
        return _bounded(replace(scored, value=value, stderr=stderr), interval, "wilson")
    return _bounded(replace(scored, value=value, stderr=stderr), _normal(value, stderr), "normal")


def over_tasks(metrics: Sequence[MetricScore]) -> MetricScore:
    """Return the plain mean of members, which are independent of each other."""
    scored = _blank(metrics)
    if scored.note:
        return scored
    value = math.fsum(metric.value or 0.0 for metric in metrics) / len(metrics)
    errors = [metric.stderr for metric in metrics]
    stderr = None
    if None not in errors:
        stderr = math.sqrt(math.fsum((error or 0.0) ** 2 for error in errors)) / len(metrics)
    return _bounded(replace(scored, value=value, stderr=stderr), _normal(value, stderr), "normal")


def _blank(metrics: Sequence[MetricScore]) -> MetricScore:
    """Return a score without value, of the members' common kind; with a note if there is none."""
    n = sum(metric.n for metric in metrics)
    first = metrics[0] if metrics else MetricScore(value=None, n=0)
    blank = MetricScore(value=None, n=n, unit=first.unit, higher_is_better=first.higher_is_better)
    if any(metric.unit != first.unit for metric in metrics):
        return replace(blank, note="members are measured in different units")
    if not metrics or any(metric.value is None for metric in metrics):
        return replace(blank, note="not every member has a score")
    return blank


def _pooled_stderr(metrics: Sequence[MetricScore], total: int) -> float | None:
    """Return sqrt(sum (n_i - 1) n_i se_i^2 / (N - k) / N); a single item has no spread of its own.

    n_i se_i^2 is the sample variance within task i.
    """
    degrees = total - len(metrics)
    if degrees <= 0 or any(metric.stderr is None and metric.n > 1 for metric in metrics):
        return None
    spread = math.fsum((m.n - 1) * m.n * (m.stderr or 0.0) ** 2 for m in metrics)
    return math.sqrt(spread / degrees / total)


def _normal(value: float, stderr: float | None) -> Interval | None:
    """Return a normal interval; none without spread, which would promise certainty."""
    return normal_interval(value, stderr) if stderr else None


def _bounded(score: MetricScore, interval: Interval | None, kind: IntervalKind) -> MetricScore:
    if interval is None or not all(map(math.isfinite, interval)):
        return score
    low, high = interval
    if score.unit == "share":
        low, high = max(0.0, low), min(1.0, high)
    return replace(score, low=low, high=high, interval=kind)


def noted(score: MetricScore) -> MetricScore:
    """Say what a score of few items is worth."""
    n = score.n
    if score.value is None or n >= FEW_ITEMS:
        return score if score.value is not None or score.note else replace(score, note="no items")
    things = "items" if score.unit == "share" else "texts"
    width = ""
    if score.low is not None and score.high is not None:
        spread = score.high - score.low
        width = (
            f": the interval is {100 * spread:.0f} points wide"
            if score.unit == "share"
            else f": the interval is {spread:.3g} {score.unit} wide"
        )
    few = f"only {n} {things}" if n >= TOO_FEW_ITEMS else f"too few {things} to compare ({n})"
    return replace(score, note=few + width)


def weighted_perplexity(
    loglikelihoods: Sequence[float], weights: Sequence[float]
) -> tuple[float, Interval | None]:
    """Return exp(-sum of log-likelihoods / sum of weights), and its interval from whole texts.

    A weight is the number of words, bytes or tokens that a log-likelihood was summed over. The mean
    of the texts' own perplexities is another, larger number, and no perplexity.
    """
    losses = [-value for value in loglikelihoods]
    interval = ratio_interval(losses, weights)
    value = perplexity(math.fsum(loglikelihoods), math.fsum(weights))
    if interval is None:
        return value, None
    return value, (perplexity(-interval[0], 1), perplexity(-interval[1], 1))
