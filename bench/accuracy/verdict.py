"""What comparisons of a candidate with its baseline come to, in one plain sentence.

A test either finds a difference or finds none; it never finds that two models are equal. So a
verdict that nothing was found says how large a difference could have been missed, and where that is
nearly anything, it says that there were too few items. Imports no torch.
"""

from collections.abc import Sequence

from llmbench.bench.accuracy.divergence_summary import DivergenceSummary
from llmbench.bench.accuracy.paired_score import PairedScore, adjust
from llmbench.bench.accuracy.paired_tests import ALPHA, POWER

TOO_COARSE = 0.25
"""A test that can miss this much finds no difference between a model that knows half of the answers
and one that guesses among four."""
NEAR_LOSSLESS_KL = 0.01
"""Nats a token: 8-bit and 6-bit weights of an 8-billion Llama 3 are below (0.0014, 0.0055), 4-bit
ones above (0.031), by llama.cpp's own measurements."""
_SHOWN = 4  # tasks that are named


def verdict(
    paired: Sequence[PairedScore],
    divergence: DivergenceSummary | None = None,
    *,
    base: str = "the baseline",
) -> str:
    """Return one sentence: worse, better, or no difference found at this size.

    p-values are adjusted for their number, where that has not been done.
    """
    scores = [score for score in _adjusted(paired) if score.adjusted_p is not None]
    found = [score for score in scores if score.adjusted_p is not None and _is_found(score)]
    worse = [score for score in found if score.is_worse]
    better = [score for score in found if not score.is_worse]
    rest = [score for score in scores if score not in found]
    coarse = [score for score in rest if _is_coarse(score, len(scores))]
    fine = [score for score in rest if score not in coarse]
    parts = []
    for word, group in (("worse", worse), ("better", better)):
        if group:
            parts.append(f"{word} than {base} on {_described(group, len(scores))}")
    if fine:
        if not parts:
            where = f"from {base} found on {_of_tasks(fine, len(scores))}"
        elif not coarse:
            where = "found on the others" if len(fine) > 1 else "found on the other"
        else:
            where = f"found on {_of_tasks(fine, len(scores))}"
        sizes = "these sizes" if len(fine) > 1 else "this size"
        parts.append(
            f"no difference {where}, which at {sizes} could have missed up to {_missed(fine)}"
        )
    if coarse:
        counts = sorted(score.n for score in coarse)
        items = f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"
        where = f" on {_of_tasks(coarse, len(scores))}" if parts else ""
        parts.append(f"inconclusive{where}: too few items ({items})")
    if not scores:
        parts.append(f"no items to compare with {base}")
    if divergence is not None and (words := _diverges(divergence)):
        parts.append(words)
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."


def caveats(
    paired: Sequence[PairedScore], divergence: DivergenceSummary | None = None
) -> tuple[str, ...]:
    """Return what a reader of the verdict has to know, a sentence each."""
    scores = _adjusted(paired)
    num_tested = sum(score.p_value is not None for score in scores)
    notes = []
    if num_tested:
        many = f", adjusted for {num_tested} tasks (Holm)" if num_tested > 1 else ""
        notes.append(
            f"a difference counts as found at p ≤ {ALPHA:.2g}{many}; what could have been missed "
            f"is the smallest true difference that the test finds with {POWER:.0%} power"
        )
    for score in scores:
        if score.num_left_out:
            notes.append(
                f"{score.task}: {score.num_left_out:,} items without a usable answer of one of the "
                "models are left out"
            )
    if divergence is not None:
        if divergence.kl_mean is not None and divergence.kl_mean < NEAR_LOSSLESS_KL:
            notes.append(
                f"below about {NEAR_LOSSLESS_KL} nats a token KL divergence tells that models are "
                "close, but does not rank them by quality"
            )
        notes.extend(divergence.notes)
    return tuple(notes)


def _adjusted(paired: Sequence[PairedScore]) -> tuple[PairedScore, ...]:
    needs = any(score.p_value is not None and score.adjusted_p is None for score in paired)
    return adjust(paired) if needs else tuple(paired)


def _is_found(score: PairedScore) -> bool:
    return score.adjusted_p is not None and score.adjusted_p <= ALPHA and score.is_worse is not None


def _is_coarse(score: PairedScore, num_tests: int) -> bool:
    # The surest outcome of an exact test on n pairs, all of them one way, has p = 2 / 2^n.
    can_find = num_tests * 2.0 ** (1 - score.n) <= ALPHA
    return not can_find or score.detectable is None or score.detectable > TOO_COARSE


def _of_tasks(group: Sequence[PairedScore], num_scores: int) -> str:
    if len(group) == 1:
        return group[0].task
    return f"{'all' if len(group) == num_scores else f'{len(group)} of'} {num_scores} tasks"


def _described(group: Sequence[PairedScore], num_scores: int) -> str:
    """Name tasks with their differences, the surest first."""
    ranked = sorted(group, key=lambda score: (score.adjusted_p or 0.0, score.task))
    if num_scores == 1:
        return f"{ranked[0].task} ({_change(ranked[0])})"
    words = [f"{score.task} {_change(score)}" for score in ranked[:_SHOWN]]
    more = "; …" if len(ranked) > _SHOWN else ""
    return f"{len(group)} of {num_scores} tasks ({'; '.join(words)}{more})"


def _change(score: PairedScore) -> str:
    assert score.difference is not None  # a difference was found
    sign = "\u2212" if score.difference < 0 else "+"  # a minus, not a hyphen
    amount = _amount(score.unit, abs(score.difference))
    return f"{sign}{amount}, p {_p_text(score.adjusted_p or 0.0)}"


def _amount(unit: str, value: float) -> str:
    if unit == "share":
        return f"{100 * value:.1f} points"
    if unit == "ratio":
        return f"{value:.1%} of perplexity"
    return f"{value:.3f} bits per byte"


def _missed(scores: Sequence[PairedScore]) -> str:
    """Return the largest difference that each kind of test could have missed."""
    largest: dict[str, float] = {}
    for score in scores:
        largest[score.unit] = max(largest.get(score.unit, 0.0), score.detectable or 0.0)
    return " and ".join(_amount(unit, value) for unit, value in largest.items())


def _p_text(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}" if value < 0.01 else f"= {value:.2g}"


def _diverges(divergence: DivergenceSummary) -> str:
    if "kl_mean" in divergence.infinite:
        return "KL divergence infinite: the candidate excludes tokens that the base finds possible"
    if divergence.kl_mean is None or divergence.top1_agreement is None:
        return ""
    spread = "" if divergence.kl_se is None else f" ± {divergence.kl_se:.2g}"
    return (
        f"KL divergence {divergence.kl_mean:.3g}{spread} nats a token, the same likeliest token at "
        f"{divergence.top1_agreement:.1%}"
    )
