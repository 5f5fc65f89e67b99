"""One item's answers turned into metrics, by the rules of lm-evaluation-harness 0.4.13.

A multiple-choice question is answered by the likelihoods of its choices: `acc` takes the likeliest,
`acc_norm` the likeliest per character of the choice (Unicode characters, without the delimiter in
front of it), `acc_norm_bytes` per byte of its UTF-8. The last two pick differently wherever choices
mix scripts, and both are called "normalized accuracy" in print. `mc2` is the share of probability
on the true answers (Lin et al. 2022, TruthfulQA, section 3); it is taken in log space, because the
probabilities of long answers are all 0 as floating-point numbers.

Of equal choices the first is taken, as the harness does, and the tie is counted. An item without a
usable likelihood has no pick: NaN compares as the largest value in numpy's argmax, so a broken
model would score 100 % wherever the right choice stands first. Such an item is invalid, every
metric of it is 0, and it is left out of the mean and counted.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from llmbench.bench.accuracy.answers import INVALID, ExactMatch, Extractor
from llmbench.bench.errors import BenchConfigError

PICK_METRICS = ("acc", "acc_norm", "acc_norm_bytes", "acc_bytes")
"""`acc_bytes` is the harness's name of `acc_norm_bytes`."""

CHOICE_METRICS = (*PICK_METRICS, "mc2", "exact_match", "f1")
ROLLING_METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScore:
    """What one item's answers are worth.

    Attributes:
        metrics: Value of each metric; "metric,filter" for generated answers. F1 is no metric of an
            item: it follows from `pick` and the gold index of all of them.
        pick: Index of the likeliest choice, or the answer by the first filter.
        is_tied: Another choice is exactly as likely, for one of the rules that were asked for.
        invalid: Why the item cannot be scored; every metric is then 0.
        filtered: The answer by each filter.
    """

    metrics: Mapping[str, float]
    pick: int | str | None = None
    is_tied: bool = False
    invalid: str | None = None
    filtered: Mapping[str, str] = field(default_factory=dict)


def score_choices(
    loglikelihoods: Sequence[float],
    choices: Sequence[str],
    gold: int | Sequence[int],
    metrics: Collection[str],
    *,
    is_greedy: Sequence[bool] = (),
) -> ItemScore:
    """Score a multiple-choice item; `gold` is one index, or those of all right choices.

    `exact_match` asks whether a right choice is what greedy decoding would have said and needs
    `is_greedy`, one a choice.

    Raises:
        BenchConfigError: a metric that is not in `CHOICE_METRICS`.
    """
    if unknown := [name for name in metrics if name not in CHOICE_METRICS]:
        error = BenchConfigError(f"unknown metric of a multiple-choice task: {', '.join(unknown)}")
        error.add_note("known: " + ", ".join(CHOICE_METRICS))
        raise error
    golds = (gold,) if isinstance(gold, int) else tuple(gold)
    kept = [name for name in metrics if name != "f1"]
    if reason := _why_invalid(loglikelihoods, choices, golds):
        return ItemScore(metrics=dict.fromkeys(kept, 0.0), invalid=reason)

    pick, is_tied = _first_largest(loglikelihoods)
    values: dict[str, float] = {}
    for name in kept:
        if name == "mc2":
            values[name] = true_share(loglikelihoods, golds)
        elif name == "exact_match":
            values[name] = float(any(is_greedy[index] for index in golds))
        else:
            scores = _normalized(loglikelihoods, choices, name)
            chosen, is_name_tied = _first_largest(scores)
            values[name] = float(chosen in golds)
            is_tied |= is_name_tied
    return ItemScore(metrics=values, pick=pick, is_tied=is_tied)


def pick_choice(loglikelihoods: Sequence[float], choices: Sequence[str], metric: str) -> int:
    """Return the choice that one of `PICK_METRICS` takes of usable likelihoods; first of equals."""
    return _first_largest(_normalized(loglikelihoods, choices, metric))[0]


def true_share(loglikelihoods: Sequence[float], true: Collection[int]) -> float:
    """Return the share of the choices' probability that is on the true ones (mc2).

    At least one log-likelihood must be finite, and none NaN.
    """
    largest = max(loglikelihoods)
    weights = [math.exp(value - largest) for value in loglikelihoods]
    return math.fsum(weights[index] for index in sorted(set(true))) / math.fsum(weights)


def score_rolling(loglikelihood: float, words: int, num_bytes: int) -> ItemScore:
    """Score one whole text from its log-likelihood and the size of the original text."""
    reason = None
    if not math.isfinite(loglikelihood):
        reason = f"the text's log-likelihood is {loglikelihood}"
    elif words <= 0 or num_bytes <= 0:
        reason = f"a text of {words} words and {num_bytes} bytes has no perplexity"
    if reason:
        return ItemScore(metrics=dict.fromkeys(ROLLING_METRICS, 0.0), invalid=reason)
    return ItemScore(
        metrics={
            "word_perplexity": perplexity(loglikelihood, words),
            "byte_perplexity": perplexity(loglikelihood, num_bytes),
            "bits_per_byte": -loglikelihood / num_bytes / math.log(2),
        }
    )


def perplexity(loglikelihood: float, weight: float) -> float:
    """Return exp(-loglikelihood / weight); infinity where that is beyond a float."""
    try:
        return math.exp(-loglikelihood / weight)
    except OverflowError:
        return math.inf


def score_generation(
    response: str,
    target: str | Sequence[str],
    filters: Sequence[Extractor],
    match: ExactMatch | None = None,
) -> ItemScore:
    """Score a generated answer by exact match, once by each filter; any of several targets counts.

    `response` is the text in front of the stops. The metrics are "exact_match,<filter>".
    """
    match = match or ExactMatch()
    targets = (target,) if isinstance(target, str) else tuple(target)
    filtered = {each.name: each.answer(response) for each in filters}
    metrics = {
        f"exact_match,{each.name}": float(
            any(each.is_right(filtered[each.name], right, match) for right in targets)
        )
        for each in filters
    }
    pick = next(iter(filtered.values()), INVALID)
    return ItemScore(metrics=metrics, pick=pick, filtered=filtered)


def _why_invalid(
    loglikelihoods: Sequence[float], choices: Sequence[str], golds: Sequence[int]
) -> str | None:
    if len(loglikelihoods) != len(choices):
        return f"{len(loglikelihoods)} log-likelihoods for {len(choices)} choices"
    if not golds or any(not 0 <= index < len(choices) for index in golds):
        return f"gold {list(golds)} is no index of {len(choices)} choices"
    if any(math.isnan(value) or value == math.inf for value in loglikelihoods):
        return f"log-likelihoods are not numbers: {[str(value) for value in loglikelihoods]}"
    if max(loglikelihoods) == -math.inf:
        return "every choice has probability 0"
    return None


def _normalized(
    loglikelihoods: Sequence[float], choices: Sequence[str], metric: str
) -> Sequence[float]:
    """Return what a metric compares; an empty choice has no length and is never taken."""
    if metric == "acc":
        return loglikelihoods
    sizes = [len(text if metric == "acc_norm" else text.encode()) for text in choices]
    return [
        value / size if size else -math.inf
        for value, size in zip(loglikelihoods, sizes, strict=True)
    ]


def _first_largest(values: Sequence[float]) -> tuple[int, bool]:
    """Return the first index of the largest value, and whether another one is equal to it."""
    largest = max(values)
    return values.index(largest), sum(value == largest for value in values) > 1
