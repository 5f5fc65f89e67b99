"""A candidate against its baseline, item by item: flips, tests, and a verdict in plain words.

Equal scores may hide that a tenth of the answers changed, half for the better and half for the
worse (Dutta et al. 2024, "Accuracy is Not All You Need"): so flips are counted by their sort, and
not the difference alone. And a difference of scores has to be judged on pairs (see
`paired_tests.py`); two intervals that overlap say nothing about it.

Items are pairs only where both models answered the very same prompt to the same document; sets
that differ are refused. Generated answers are compared as they were extracted, and "[invalid]" is
an answer of its own. An item that one of the models gave no usable answer to is left out, as from
the scores, and counted. Imports no torch.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.paired_score import (
    Flips,
    PairedScore,
    Unit,
    detectable,
    relative_change,
)
from llmbench.bench.accuracy.paired_tests import (
    bootstrap_ratio_interval,
    detectable_share,
    mcnemar_exact,
    sign_flip_p,
    tango_interval,
)
from llmbench.bench.accuracy.scoring import PICK_METRICS, perplexity, pick_choice
from llmbench.bench.errors import BenchError

PairKey = tuple[str, int, str]
_SHOWN = 3  # differing items that a refusal names


@dataclass(frozen=True, slots=True)
class _Pair:
    base: ItemRecord
    candidate: ItemRecord


def compare_items(
    base: Sequence[ItemRecord],
    candidate: Sequence[ItemRecord],
    metric: str,
    *,
    name: str | None = None,
) -> PairedScore:
    """Compare two models by one metric over all items given, of one task or of a group's.

    `metric` is a name in the items' metrics, or "perplexity" (a token); a trailing ",none" does not
    count. `name` stands for the task in the result; it is the items' own by default.

    Raises:
        BenchError: the items are not pairs, or have no such metric.
    """
    metric = metric.removesuffix(",none")
    pairs = _pair(base, candidate)
    name = name or "+".join(sorted({pair.base.task for pair in pairs}))
    usable = [pair for pair in pairs if not (pair.base.invalid or pair.candidate.invalid)]
    num_left_out = len(pairs) - len(usable)
    if metric in _WEIGHTS:
        return _compare_texts(usable, metric, name, num_left_out)
    if not usable:
        return PairedScore(
            task=name,
            metric=metric,
            unit="share",
            higher_is_better=True,
            n=0,
            num_left_out=num_left_out,
        )
    values = [(_value(pair.base, metric), _value(pair.candidate, metric)) for pair in usable]
    # Shares of probability that happen to be whole are still no right and wrong answers.
    is_binary = metric != "mc2" and all(one in (0, 1) for both in values for one in both)
    n = len(values)
    first, second = (math.fsum(side) / n for side in zip(*values, strict=True))
    changes = [after - before for before, after in values]
    difference = math.fsum(changes) / n
    score = PairedScore(
        task=name,
        metric=metric,
        unit="share",
        higher_is_better=True,
        n=n,
        num_left_out=num_left_out,
        base=first,
        candidate=second,
        difference=difference,
        standard_error=_standard_error(changes),
    )
    if not is_binary:
        interval = bootstrap_ratio_interval(changes)
        return _tested_by_signs(score, changes, interval)
    flips = _count_flips(usable, values, metric)
    low, high = tango_interval(n, flips.num_right_to_wrong, flips.num_wrong_to_right)
    num_flips = flips.num_right_to_wrong + flips.num_wrong_to_right
    return dataclasses.replace(
        score,
        flips=flips,
        low=low,
        high=high,
        interval="Tango's score interval of paired shares",
        test="McNemar, exact",
        p_value=mcnemar_exact(flips.num_right_to_wrong, flips.num_wrong_to_right),
        detectable=detectable_share(n, num_flips),
    )


def _pair(base: Sequence[ItemRecord], candidate: Sequence[ItemRecord]) -> list[_Pair]:
    """Pair items by task, document and prompt, or refuse with what has no partner."""
    first, second = _by_key(base, "base"), _by_key(candidate, "candidate")
    if first.keys() != second.keys():
        only_base, only_candidate = first.keys() - second.keys(), second.keys() - first.keys()
        others = {key[:2] for key in only_candidate}
        reworded = sorted(key[:2] for key in only_base if key[:2] in others)
        words = [f"{len(first)} items of the base and {len(second)} of the candidate are no pairs"]
        if reworded:
            words.append(f"{len(reworded)} were asked with other prompts ({_named(reworded)})")
        for side, keys in (("base", only_base), ("candidate", only_candidate)):
            if alone := sorted({key[:2] for key in keys} - set(reworded)):
                words.append(f"{len(alone)} only of the {side} ({_named(alone)})")
        error = BenchError("; ".join(words))
        error.add_note(
            "compare runs with the same tasks, --limit, --num-fewshot, --seed, data and template"
        )
        raise error
    return [_Pair(first[key], second[key]) for key in sorted(first)]


def _by_key(items: Iterable[ItemRecord], side: str) -> dict[PairKey, ItemRecord]:
    found: dict[PairKey, ItemRecord] = {}
    for item in items:
        key = (item.task, item.doc_id, item.prompt_hash)
        if key in found:
            raise BenchError(
                f"document {item.doc_id} of {item.task} is twice in the {side}'s items"
            )
        found[key] = item
    return found


def _named(documents: Sequence[tuple[str, int]]) -> str:
    shown = ", ".join(f"{task} {doc_id}" for task, doc_id in documents[:_SHOWN])
    return shown + (", …" if len(documents) > _SHOWN else "")


def _value(item: ItemRecord, metric: str) -> float:
    for name in (metric, f"{metric},none"):  # the harness's name of the whole answer
        if name in item.metrics:
            return float(item.metrics[name])
    error = BenchError(
        f"document {item.doc_id} of {item.task} has no value of `{metric}`, found "
        f"{', '.join(item.metrics) or 'none at all'}"
    )
    error.add_note("F1 belongs to a whole task and has no pairs; compare `acc` instead")
    raise error


def _count_flips(
    pairs: Sequence[_Pair], values: Sequence[tuple[float, float]], metric: str
) -> Flips:
    losses = gains = others = 0
    for pair, (before, after) in zip(pairs, values, strict=True):
        losses += before > after
        gains += before < after
        if not before and not after:
            others += _answer(pair.base, metric) != _answer(pair.candidate, metric)
    return Flips(num_right_to_wrong=losses, num_wrong_to_right=gains, num_wrong_to_other=others)


def _answer(item: ItemRecord, metric: str) -> int | str | None:
    """What the model took for its answer, by this metric's rule."""
    rule, _, kind = metric.partition(",")
    if kind in item.filtered:
        return item.filtered[kind]
    if rule in PICK_METRICS and item.loglikelihoods and len(item.choices) > 1:
        return pick_choice(item.loglikelihoods, item.choices, rule)
    return item.pick


def _words(item: ItemRecord) -> float:
    return (item.text_size or (0, 0))[0]


def _bytes(item: ItemRecord) -> float:
    return (item.text_size or (0, 0))[1]


def _tokens(item: ItemRecord) -> float:
    return sum(item.num_tokens)


_WEIGHTS = {
    "word_perplexity": _words,
    "byte_perplexity": _bytes,
    "bits_per_byte": _bytes,
    "perplexity": _tokens,
}
"""What the log-likelihood of a text is divided by."""


def _compare_texts(
    pairs: Sequence[_Pair], metric: str, name: str, num_left_out: int
) -> PairedScore:
    """Compare log-likelihoods of whole texts by the logarithm of their perplexities' ratio."""
    weights = [_WEIGHTS[metric](pair.base) for pair in pairs]
    unit: Unit = "bits" if metric == "bits_per_byte" else "ratio"
    score = PairedScore(
        task=name,
        metric=metric,
        unit=unit,
        higher_is_better=False,
        n=len(pairs),
        num_left_out=num_left_out,
    )
    if not pairs:
        return score
    total = math.fsum(weights)
    if not total:
        raise BenchError(f"the items of {name} have no text whose `{metric}` could be compared")
    before, after = (
        [math.fsum(item.loglikelihoods or ()) for item in side]
        for side in ([pair.base for pair in pairs], [pair.candidate for pair in pairs])
    )
    losses = [first - second for first, second in zip(before, after, strict=True)]
    mean_loss = math.fsum(losses) / total
    interval = bootstrap_ratio_interval(losses, weights)
    # Linearized error of a ratio of sums, as in divergence_summary.py.
    residuals = [loss - mean_loss * weight for loss, weight in zip(losses, weights, strict=True)]
    error = _standard_error(residuals)
    if error is not None:
        error *= len(pairs) / total
    if unit == "ratio":
        values = [perplexity(math.fsum(side), total) for side in (before, after)]
        difference = relative_change(mean_loss)
        interval = interval and (relative_change(interval[0]), relative_change(interval[1]))
    else:
        scale = 1 / math.log(2)
        values = [-math.fsum(side) / total * scale for side in (before, after)]
        difference = mean_loss * scale
        interval = interval and (interval[0] * scale, interval[1] * scale)
        error = error and error * scale
    score = dataclasses.replace(
        score, base=values[0], candidate=values[1], difference=difference, standard_error=error
    )
    return _tested_by_signs(score, losses, interval)


def _tested_by_signs(
    score: PairedScore, changes: Sequence[float], interval: tuple[float, float] | None
) -> PairedScore:
    low, high = interval or (None, None)
    score = dataclasses.replace(
        score,
        low=low,
        high=high,
        interval="bootstrap over items" if interval else "",
        test="sign flips of paired differences",
        p_value=sign_flip_p(changes),
    )
    return dataclasses.replace(score, detectable=detectable(score))


def _standard_error(values: Sequence[float]) -> float | None:
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
