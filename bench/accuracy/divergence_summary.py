"""What a candidate's divergence from its baseline amounts to, over many items.

Tokens of one item (a document with all its scored continuations, or a window of a text) depend on
one another, so the item is the unit of the errors here: an average over N tokens of I items is
the ratio m = sum S_i / sum n_i of item sums and item sizes, with the linearized (cluster-robust)
standard error

    se(m)^2 = I / (I - 1) * sum (S_i - m n_i)^2 / N^2

(Cochran 1977, Sampling Techniques, section 6.4). With items of one token it is the ordinary
standard error of a mean. The perplexity ratio is exp of the average of log p - log q, and the
error of that average over *paired* differences is what sqrt(var q + var p - 2 cov) says; its 95 %
interval is Student's with I - 1 degrees of freedom. The error of a root mean square follows from
that of the mean square: se(RMS) = se(MS) / (2 RMS).

Percentiles interpolate linearly at f (n - 1), as llama.cpp and numpy do; those that the tokens
cannot carry are withheld by the rule of bench/stats.py. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbench.bench import strict_json
from llmbench.bench.accuracy.items import ItemDivergence
from llmbench.bench.stats import CONFIDENCE, MIN_INTERVAL_SIZE, required_sample_size

Floats = NDArray[np.float64]

KL_PERCENTILES = {"kl_median": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p99_9": 0.999}


@dataclass(frozen=True, slots=True)
class ClusteredMean:
    """A mean over tokens, and its standard error over items; None for fewer than two items."""

    value: float
    se: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceSummary:
    """A candidate against its baseline: KL(base || candidate) in nats a token, and kin.

    What is infinite or cannot be said is None: `infinite` names the former, `withheld` the
    percentiles that the sample is too small for. Standard errors are over items, None for fewer
    than two.

    Attributes:
        num_tokens: Every scored token of every continuation of the items counted.
        num_undefined_items: Items left out since a model gave NaN for them.
        num_infinite_tokens: Where the candidate excludes a token that the base finds possible.
        mean_delta_p: Of the given token's probability, candidate's minus base's.
        top1_agreement: Share of tokens where both models find the same one likeliest.
        perplexity_ratio: Candidate's over base's, with its 95 % interval.
    """

    num_items: int
    num_tokens: int
    num_undefined_items: int = 0
    num_infinite_tokens: int = 0
    kl_mean: float | None = None
    kl_se: float | None = None
    kl_median: float | None = None
    kl_p90: float | None = None
    kl_p99: float | None = None
    kl_p99_9: float | None = None
    kl_max: float | None = None
    mean_delta_p: float | None = None
    mean_delta_p_se: float | None = None
    rms_delta_p: float | None = None
    rms_delta_p_se: float | None = None
    top1_agreement: float | None = None
    top1_agreement_se: float | None = None
    base_perplexity: float | None = None
    perplexity: float | None = None
    perplexity_ratio: float | None = None
    perplexity_ratio_low: float | None = None
    perplexity_ratio_high: float | None = None
    withheld: tuple[str, ...] = ()
    infinite: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Return the JSON form."""
        plain: dict[str, Any] = strict_json.strict(self)
        return plain

    @property
    def scope(self) -> str:
        """What was measured, in a sentence."""
        return (
            f"every scored token of every continuation: {self.num_tokens:,} tokens of "
            f"{self.num_items:,} items, the whole vocabulary at each; KL(base || candidate) in "
            "nats; standard errors over items"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers has to know, a sentence each."""
        notes = []
        if self.num_undefined_items:
            notes.append(
                f"{self.num_undefined_items:,} more items are left out: a model gave NaN for them"
            )
        if self.num_infinite_tokens:
            notes.append(
                f"at {self.num_infinite_tokens:,} tokens the candidate excludes what the base "
                f"finds possible; infinite, therefore: {', '.join(self.infinite)}"
            )
        if 0 < self.num_items < MIN_INTERVAL_SIZE:
            notes.append(
                f"{self.num_items} items are too few for standard errors to be relied on "
                f"(fewer than {MIN_INTERVAL_SIZE})"
            )
        if self.withheld:
            needed = required_sample_size(KL_PERCENTILES[self.withheld[0]])
            notes.append(
                f"withheld: {', '.join(self.withheld)}; {self.withheld[0]} takes {needed:,} "
                f"tokens, there are {self.num_tokens:,}"
            )
        if self.top1_agreement == 1 and self.num_items:
            # No disagreement in I independent items: at most 1 - 0.05^(1/I), about 3/I.
            most = 1 - (1 - CONFIDENCE) ** (1 / self.num_items)
            notes.append(
                "all likeliest tokens agree, so the standard error says nothing; of such items "
                f"up to {most:.1%} may still hold a disagreement (95 % bound)"
            )
        return tuple(notes)


def clustered_mean(sums: Sequence[float] | Floats, sizes: Sequence[int]) -> ClusteredMean:
    """Return the mean over all values, given each item's sum and number of values (not all 0)."""
    totals, counts = np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    value = float(totals.sum() / counts.sum())
    num_items = len(counts)
    if num_items < 2 or not math.isfinite(value):
        return ClusteredMean(value, None)
    spread = float(((totals - value * counts) ** 2).sum())
    se = math.sqrt(num_items / (num_items - 1) * spread) / float(counts.sum())
    return ClusteredMean(value, se)


def summarize_divergence(items: Sequence[ItemDivergence]) -> DivergenceSummary:
    """Summarize the divergence of any items: those of a task, or of a whole evaluation."""
    known = [item for item in items if len(item.kl) and not any(map(math.isnan, item.delta_p))]
    num_undefined = sum(any(map(math.isnan, item.delta_p)) for item in items)
    sizes = [len(item.kl) for item in known]
    num_tokens = sum(sizes)
    if not num_tokens:
        return DivergenceSummary(num_items=0, num_tokens=0, num_undefined_items=num_undefined)
    starts = np.cumsum([0, *sizes[:-1]])

    def mean(values: Floats) -> ClusteredMean:
        with np.errstate(invalid="ignore"):  # inf - inf, between two infinite log-probabilities
            return clustered_mean(np.add.reduceat(values, starts), sizes)

    # JSON has no infinity, so a record that was read back has NaN for it. Where a probability of
    # the row is known, nothing in it is undefined: the NaN stood for the infinity.
    kl = np.nan_to_num(_gather([item.kl for item in known]), nan=math.inf, posinf=math.inf)
    base, candidate = (
        np.nan_to_num(_gather(values), nan=-math.inf, neginf=-math.inf)
        for values in ([item.base_logprob for item in known], [item.logprob for item in known])
    )
    delta_p = _gather([item.delta_p for item in known])
    square = mean(delta_p**2)
    rms = math.sqrt(square.value)
    kl_mean, shift, same = mean(kl), mean(delta_p), mean(_gather([i.same_top for i in known]))
    log_ratio = mean(base - candidate)
    low, high = _log_interval(log_ratio, len(known))
    percentiles, withheld = _percentiles(kl)
    said: dict[str, float | None] = {
        "kl_mean": kl_mean.value,
        **percentiles,
        "kl_max": float(kl.max()),
        "base_perplexity": _exp(-mean(base).value),
        "perplexity": _exp(-mean(candidate).value),
        "perplexity_ratio": _exp(log_ratio.value),
        "perplexity_ratio_low": low,
        "perplexity_ratio_high": high,
    }
    infinite = tuple(name for name, value in said.items() if value == math.inf)
    return DivergenceSummary(
        num_items=len(known),
        num_tokens=num_tokens,
        num_undefined_items=num_undefined,
        num_infinite_tokens=int(np.isinf(kl).sum()),
        kl_se=kl_mean.se,
        mean_delta_p=shift.value,
        mean_delta_p_se=shift.se,
        rms_delta_p=rms,
        rms_delta_p_se=None if square.se is None else square.se / (2 * rms) if rms else 0.0,
        top1_agreement=same.value,
        top1_agreement_se=same.se,
        withheld=withheld,
        infinite=infinite,
        **{
            name: value if value is not None and math.isfinite(value) else None
            for name, value in said.items()
        },
    )


def _gather(values: Sequence[Sequence[float]]) -> Floats:
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in values])


def _percentiles(values: Floats) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """Return the percentiles by name, and the names of those that are withheld."""
    ordered = np.sort(values)
    found: dict[str, float | None] = {}
    withheld = []
    for name, share in KL_PERCENTILES.items():
        if name != "kl_median" and len(ordered) < required_sample_size(share):
            found[name] = None
            withheld.append(name)
            continue
        rank = share * (len(ordered) - 1)
        low, high = float(ordered[math.floor(rank)]), float(ordered[math.ceil(rank)])
        weight = rank - math.floor(rank)
        # No difference of infinities: a value among them is infinite itself.
        found[name] = low if weight == 0 else (1 - weight) * low + weight * high
    return found, tuple(withheld)


def _log_interval(mean: ClusteredMean, num_items: int) -> tuple[float | None, float | None]:
    """Return exp of the 95 % interval of a mean logarithm."""
    if mean.se is None or not math.isfinite(mean.se):
        return None, None
    from scipy.special import stdtrit  # reports import this module and need no scipy

    reach = float(stdtrit(num_items - 1, (1 + CONFIDENCE) / 2)) * mean.se
    return _exp(mean.value - reach), _exp(mean.value + reach)


def _exp(value: float) -> float:
    """Return e to the value; beyond the range of a number it is infinite."""
    return math.exp(value) if value < 709 else math.nan if math.isnan(value) else math.inf
