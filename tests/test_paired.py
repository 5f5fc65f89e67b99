"""Paired tests equal their closed forms, pairs are pairs, verdicts claim no more than they may."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.bench.accuracy.divergence_summary import DivergenceSummary
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.paired import compare_items
from llmbench.bench.accuracy.paired_score import PairedScore, adjust
from llmbench.bench.accuracy.paired_tests import (
    bootstrap_ratio_interval,
    detectable_share,
    holm,
    least_flips,
    mcnemar_exact,
    sign_flip_p,
    tango_interval,
)
from llmbench.bench.accuracy.verdict import caveats, verdict
from llmbench.bench.errors import BenchError

Z = 1.959963984540054


def item(doc_id: int, *, task: str = "arc", prompt: str = "p", **values: Any) -> ItemRecord:
    fields: dict[str, Any] = {"key": "k", "doc_hash": "d", "target_hash": "t", "gold": 0}
    return ItemRecord(task=task, doc_id=doc_id, prompt_hash=f"{prompt}{doc_id}", **fields | values)


def answers(
    picks: Sequence[int], golds: Sequence[int] | None = None, *, task: str = "arc"
) -> list[ItemRecord]:
    """Items that picked so; the right choice is 0 unless `golds` says otherwise."""
    golds = golds or [0] * len(picks)
    return [
        item(index, task=task, gold=gold, pick=pick, metrics={"acc": float(pick == gold)})
        for index, (pick, gold) in enumerate(zip(picks, golds, strict=True))
    ]


def flipped(
    losses: int, gains: int, same: int, *, task: str = "arc"
) -> tuple[list[ItemRecord], list[ItemRecord]]:
    """Two models' items with so many flips, and `same` right answers of both."""
    before = [0] * losses + [1] * gains + [0] * same
    after = [1] * losses + [0] * gains + [0] * same
    return answers(before, task=task), answers(after, task=task)


def compared(losses: int, gains: int, same: int, *, task: str = "arc") -> PairedScore:
    return compare_items(*flipped(losses, gains, same, task=task), "acc")


# McNemar


@pytest.mark.parametrize(("losses", "gains"), [(0, 0), (0, 5), (1, 9), (3, 3), (12, 4), (40, 21)])
def test_mcnemar_equals_its_closed_form(losses: int, gains: int) -> None:
    total = losses + gains
    tail = sum(math.comb(total, k) for k in range(min(losses, gains) + 1))
    assert mcnemar_exact(losses, gains) == pytest.approx(min(1, 2 * tail / 2**total), rel=1e-9)


@pytest.mark.parametrize(("losses", "gains"), [(0, 4), (1, 6), (2, 5), (4, 4)])
def test_mcnemar_equals_enumeration_of_all_flips(losses: int, gains: int) -> None:
    total = losses + gains
    as_far = [
        abs(2 * sum(signs) - total) >= abs(gains - losses)
        for signs in product((0, 1), repeat=total)
    ]
    assert mcnemar_exact(losses, gains) == pytest.approx(sum(as_far) / 2**total)


# Tango's interval


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
def test_interval_leaves_out_zero_just_where_mcnemars_score_does(
    losses: int, gains: int, same: int
) -> None:
    n = losses + gains + same
    if n == 0 or losses == gains:
        return
    statistic = abs(gains - losses) / math.sqrt(gains + losses)
    if abs(statistic - Z) < 1e-6:
        return
    low, high = tango_interval(n, losses, gains)
    assert -1 <= low <= (gains - losses) / n <= high <= 1
    assert (low > 0 or high < 0) == (statistic > Z)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 30))
def test_interval_turns_with_the_models(losses: int, gains: int, same: int) -> None:
    n = losses + gains + same
    low, high = tango_interval(n, losses, gains)
    assert tango_interval(n, gains, losses) == pytest.approx((-high, -low), abs=1e-9)


@pytest.mark.parametrize("n", [1, 8, 100])
def test_interval_without_flips_has_the_width_of_the_sample(n: int) -> None:
    """With no flips the statistic of d is d sqrt(n / (|d| (1 - |d|))): d = z^2 / (n + z^2)."""
    reach = Z * Z / (n + Z * Z)
    assert tango_interval(n, 0, 0) == pytest.approx((-reach, reach), abs=1e-9)


@pytest.mark.parametrize(
    ("n", "loss_rate", "gain_rate"), [(12, 0.1, 0.2), (20, 0, 0.05), (30, 0.05, 0.05)]
)
def test_interval_covers_in_small_samples(n: int, loss_rate: float, gain_rate: float) -> None:
    covered = 0.0
    for losses in range(n + 1):
        for gains in range(n + 1 - losses):
            ways = math.comb(n, losses) * math.comb(n - losses, gains)
            rest = (1 - loss_rate - gain_rate) ** (n - losses - gains)
            low, high = tango_interval(n, losses, gains)
            if low <= gain_rate - loss_rate <= high:
                covered += ways * loss_rate**losses * gain_rate**gains * rest
    assert covered >= 0.94


def test_interval_of_a_large_sample_is_the_usual_one() -> None:
    n, losses, gains = 10_000, 400, 550
    error = math.sqrt(losses + gains - (losses - gains) ** 2 / n) / n
    expected = ((gains - losses) / n - Z * error, (gains - losses) / n + Z * error)
    assert tango_interval(n, losses, gains) == pytest.approx(expected, abs=2e-4)


# Sign flips, bootstrap, Holm, power


def test_sign_flips_of_few_items_are_enumerated() -> None:
    """Of the 8 sums of ±1 ±2 ±4, only ±7 are as far from 0 as 7, and 4 as far as 5."""
    assert sign_flip_p([1, 2, 4]) == pytest.approx(2 / 8)
    assert sign_flip_p([-1, 2, 4]) == pytest.approx(4 / 8)


def test_sign_flips_of_equal_sizes_are_mcnemars_test() -> None:
    assert sign_flip_p([1.0] * 3 + [-1.0] * 9) == pytest.approx(mcnemar_exact(9, 3))
    many = sign_flip_p([0.1] * 15 + [-0.1] * 30)
    assert many == pytest.approx(mcnemar_exact(30, 15), abs=0.006)  # 9,999 patterns: se 0.002
    assert many == sign_flip_p([0.1] * 15 + [-0.1] * 30)


def test_models_without_differences_are_no_finding() -> None:
    assert sign_flip_p([0.0] * 20) == 1


def test_bootstrap_agrees_with_normal_theory() -> None:
    values = np.random.default_rng(3).normal(0.2, 1.0, size=400)
    low, high = bootstrap_ratio_interval(values) or (0, 0)
    half = Z * values.std(ddof=1) / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.01)
    assert high == pytest.approx(values.mean() + half, abs=0.01)


def test_bootstrap_weighs_items_by_their_size() -> None:
    """Every page loses 0.5 nats a word: whichever pages are drawn, so is their mean."""
    weights = [float(size) for size in range(1, 21)]
    interval = bootstrap_ratio_interval([0.5 * weight for weight in weights], weights)
    assert interval == pytest.approx((0.5, 0.5))


def test_bootstrap_of_five_items_is_withheld() -> None:
    assert bootstrap_ratio_interval([1.0] * 5) is None


def test_holm_multiplies_by_the_hypotheses_that_are_left() -> None:
    """Holm's own steps: 4 * 0.005, 3 * 0.01, 2 * 0.03 and, never smaller again, 1 * 0.04."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([]) == []


def test_fewest_flips_that_can_be_significant() -> None:
    assert least_flips(0.05) == 6
    assert mcnemar_exact(6, 0) <= 0.05 < mcnemar_exact(5, 0)
    assert mcnemar_exact(least_flips(0.01), 0) <= 0.01 < mcnemar_exact(least_flips(0.01) - 1, 0)


@pytest.mark.parametrize(("n", "num_flips"), [(1000, 100), (400, 0), (150, 60)])
def test_detectable_difference_is_found_four_times_out_of_five(n: int, num_flips: int) -> None:
    delta = detectable_share(n, num_flips)
    assert delta is not None
    flips = max(num_flips / n, delta)
    losses, gains = (flips + delta) / 2, (flips - delta) / 2
    drawn = np.random.default_rng(5).multinomial(n, [losses, gains, 1 - flips], size=400)
    power = np.mean([mcnemar_exact(b, c) <= 0.05 for b, c, _ in drawn.tolist()])
    assert 0.70 <= power <= 0.95


def test_too_few_items_can_detect_nothing() -> None:
    assert detectable_share(5, 0) is None


# Comparing items


def test_flips_are_counted_by_their_sort() -> None:
    base = answers([0, 0, 1, 1, 1, 0])
    candidate = answers([0, 1, 0, 1, 2, 0])
    found = compare_items(base, candidate, "acc")
    assert found.flips is not None
    assert found.flips.num_right_to_wrong == 1
    assert found.flips.num_wrong_to_right == 1
    assert found.flips.num_wrong_to_other == 1
    assert found.flip_rate == pytest.approx(2 / 6)
    assert found.agreement == pytest.approx(3 / 6)
    assert found.base == found.candidate == pytest.approx(0.5)
    assert found.difference == 0
    assert found.mcnemar_p == 1
    assert found.is_worse is None


def test_difference_is_the_candidates_minus_the_bases() -> None:
    found = compared(losses=9, gains=1, same=90)
    assert found.difference == pytest.approx(-0.08)
    assert found.is_worse
    assert found.low is not None
    assert found.high is not None
    assert found.low < -0.08 < found.high < 0
    assert found.mcnemar_p == pytest.approx(mcnemar_exact(9, 1))


def test_answers_under_normalized_accuracy_are_its_own() -> None:
    """`pick` is the likeliest choice; per character the candidate takes another wrong one."""
    shared: dict[str, Any] = {"gold": 2, "choices": ("ab", "abcdefgh", "xx"), "pick": 0}
    metrics = {"acc": 0.0, "acc_norm": 0.0}
    base = [item(0, loglikelihoods=(-1.0, -8.0, -9.0), metrics=metrics, **shared)]
    candidate = [item(0, loglikelihoods=(-2.0, -2.5, -9.0), metrics=metrics, **shared)]
    for metric, expected in (("acc", 0), ("acc_norm", 1)):
        found = compare_items(base, candidate, metric)
        assert found.flips is not None
        assert found.flips.num_wrong_to_other == expected


def test_generated_answers_are_compared_as_extracted() -> None:
    def response(index: int, answer: str, is_right: bool) -> ItemRecord:
        name = "strict-match"
        return item(
            index,
            task="gsm8k",
            gold="5",
            pick="ignored",
            filtered={name: answer, "flexible-extract": "0"},
            metrics={f"exact_match,{name}": float(is_right), "exact_match,flexible-extract": 0.0},
        )

    base = [
        response(0, "[invalid]", False),
        response(1, "[invalid]", False),
        response(2, "7", False),
    ]
    candidate = [response(0, "[invalid]", False), response(1, "4", False), response(2, "5", True)]
    found = compare_items(base, candidate, "exact_match,strict-match")
    assert found.flips is not None
    assert found.flips.num_wrong_to_other == 1  # "[invalid]" to "4"; twice "[invalid]" agrees
    assert found.flips.num_wrong_to_right == 1
    assert found.agreement == pytest.approx(1 / 3)


def test_items_without_a_usable_answer_are_left_out_and_counted() -> None:
    base, candidate = flipped(losses=1, gains=0, same=9)
    broken = item(10, invalid="log-likelihoods are not numbers", metrics={"acc": 0.0})
    found = compare_items([*base, item(10, metrics={"acc": 1.0})], [*candidate, broken], "acc")
    assert (found.n, found.num_left_out) == (10, 1)
    assert found.difference == pytest.approx(-0.1)
    assert "1 items without a usable answer" in " ".join(caveats([found]))


def test_nothing_usable_is_no_number() -> None:
    broken = [item(0, invalid="NaN", metrics={"acc": 0.0})]
    found = compare_items(broken, broken, "acc")
    assert (found.n, found.num_left_out) == (0, 1)
    assert found.difference is None
    assert found.p_value is None
    assert verdict([found]) == "No items to compare with the baseline."


def test_a_groups_items_are_compared_together() -> None:
    base, candidate = [], []
    for task, losses in (("mmlu_a", 8), ("mmlu_b", 0)):
        first, second = flipped(losses, 0, 20 - losses, task=task)
        base += first
        candidate += second
    found = compare_items(base, candidate, "acc", name="mmlu")
    assert (found.task, found.n) == ("mmlu", 40)
    assert found.difference == pytest.approx(-0.2)


def test_pairs_are_found_whatever_their_order() -> None:
    base, candidate = flipped(losses=3, gains=1, same=5)
    assert compare_items(base[::-1], candidate, "acc") == compare_items(base, candidate, "acc")


def test_sets_that_differ_are_refused_by_name() -> None:
    base, candidate = flipped(losses=0, gains=0, same=6)
    candidate = [*candidate[1:], item(9, metrics={"acc": 1.0})]
    candidate[0] = item(1, prompt="other", metrics={"acc": 1.0})
    with pytest.raises(BenchError) as caught:
        compare_items(base, candidate, "acc")
    message = str(caught.value)
    assert "1 were asked with other prompts (arc 1)" in message
    assert "1 only of the base (arc 0)" in message
    assert "1 only of the candidate (arc 9)" in message
    assert "--num-fewshot" in caught.value.__notes__[0]


def test_a_document_that_comes_twice_is_refused() -> None:
    base, candidate = flipped(losses=0, gains=0, same=2)
    with pytest.raises(BenchError, match="document 0 of arc is twice in the base's items"):
        compare_items([*base, base[0]], candidate, "acc")


def test_metric_that_items_lack_is_refused() -> None:
    with pytest.raises(BenchError, match=r"no value of `f1`, found acc"):
        compare_items(*flipped(1, 1, 1), "f1")


def test_name_of_the_harness_is_understood() -> None:
    pairs = flipped(2, 1, 5)
    assert compare_items(*pairs, "acc,none") == compare_items(*pairs, "acc")


def test_shares_of_probability_are_bootstrapped() -> None:
    rng = np.random.default_rng(7)
    shares = rng.uniform(0.2, 0.8, size=60)
    base = [item(i, metrics={"mc2": float(share)}) for i, share in enumerate(shares)]
    candidate = [
        item(i, metrics={"mc2": float(share - 0.1 + noise)})
        for i, (share, noise) in enumerate(zip(shares, rng.normal(0, 0.1, 60), strict=True))
    ]
    found = compare_items(base, candidate, "mc2")
    assert found.flips is None
    assert found.mcnemar_p is None
    assert found.agreement is None
    assert found.low is not None
    assert found.high is not None
    assert found.difference is not None
    assert found.low < found.difference < found.high < 0
    assert found.p_value is not None
    assert found.p_value < 0.01
    assert found == compare_items(base, candidate, "mc2")  # seeded


def text(index: int, loglikelihood: float) -> ItemRecord:
    return item(
        index,
        task="wikitext",
        gold="",
        loglikelihoods=(loglikelihood,),
        num_tokens=(130,),
        text_size=(100, 600),
    )


@pytest.mark.parametrize(
    ("metric", "weight"), [("word_perplexity", 100), ("byte_perplexity", 600), ("perplexity", 130)]
)
def test_perplexities_are_compared_by_their_ratio(metric: str, weight: int) -> None:
    base = [text(index, -300.0 - index) for index in range(20)]
    candidate = [text(index, -305.0 - index) for index in range(20)]
    found = compare_items(base, candidate, metric)
    assert found.unit == "ratio"
    assert found.base == pytest.approx(math.exp((300 * 20 + 190) / (20 * weight)))
    assert found.difference == pytest.approx(math.exp(5 / weight) - 1)
    assert (found.low, found.high) == pytest.approx((found.difference, found.difference))
    assert found.is_worse
    assert found.p_value is not None
    assert found.p_value < 0.001


def test_bits_per_byte_differ_by_bits() -> None:
    base = [text(index, -300.0) for index in range(8)]
    candidate = [text(index, -306.0) for index in range(8)]
    found = compare_items(base, candidate, "bits_per_byte")
    assert found.base == pytest.approx(0.5 / math.log(2))
    assert found.difference == pytest.approx(6 / 600 / math.log(2))


def test_record_has_no_number_that_json_lacks() -> None:
    record = compared(2, 1, 9).to_record()
    assert record["flips"]["num_right_to_wrong"] == 2
    assert record["agreement"] == pytest.approx(0.75)
    assert record["n"] == 12


# Several tasks, and the verdict


def test_adjusting_raises_p_values_and_what_could_be_missed() -> None:
    alone = compared(9, 1, 90)
    first, second, empty = adjust([alone, compared(5, 5, 90), compare_items([], [], "acc")])
    assert first.adjusted_p == pytest.approx(2 * (alone.p_value or 0))
    assert second.adjusted_p == 1
    assert empty.adjusted_p is None
    assert first.detectable is not None
    assert alone.detectable is not None
    assert first.detectable > alone.detectable


def test_verdict_names_what_got_worse_and_what_could_have_been_missed() -> None:
    scores = [
        compared(80, 19, 901, task="gsm8k"),
        compared(20, 22, 958, task="arc"),
        compared(30, 28, 942, task="piqa"),
    ]
    found = verdict(scores, base="BASE")
    assert found.startswith("Worse than BASE on 1 of 3 tasks (gsm8k \u22126.1 points, p < 0.001); ")
    missed = max(100 * (score.detectable or 0) for score in adjust(scores)[1:])
    assert "no difference found on the others, which at these sizes could have missed up to " in (
        found
    )
    assert f"up to {missed:.1f} points." in found


def test_verdict_of_one_task_says_it_once() -> None:
    found = verdict([compared(1, 19, 480, task="arc")])
    assert found == "Better than the baseline on arc (+3.6 points, p < 0.001)."


def test_verdict_without_findings_never_says_equal() -> None:
    found = verdict([compared(5, 5, 990), compared(0, 0, 500, task="piqa")])
    assert found.startswith("No difference from the baseline found on all 2 tasks, which at these")
    assert "equal" not in found.lower()
    assert "same" not in found.lower()


def test_too_few_items_are_inconclusive() -> None:
    assert verdict([compared(0, 0, 8)]) == "Inconclusive: too few items (8)."
    mixed = verdict([compared(5, 5, 990, task="arc"), compared(1, 0, 4, task="piqa")])
    assert mixed.startswith("No difference from the baseline found on arc, which at this size")
    assert mixed.endswith("inconclusive on piqa: too few items (5).")


@pytest.mark.parametrize(("n", "can_find"), [(2, False), (5, False), (6, True)])
def test_perplexity_of_fewer_windows_than_a_test_can_use_is_inconclusive(
    n: int, can_find: bool
) -> None:
    """All differences one way have p = 2 / 2^n: 0.0625 for five windows, whatever their size."""
    base = [text(index, -300.0 - index) for index in range(n)]
    candidate = [text(index, -305.0 - index) for index in range(n)]
    found = verdict([compare_items(base, candidate, "perplexity")])
    assert found.startswith("Worse" if can_find else "Inconclusive: too few items")


def test_finding_of_one_test_alone_does_not_survive_many() -> None:
    """p = 0.039 by itself; of eight tasks, one such is to be expected by chance."""
    alone = compared(8, 1, 991)
    assert (alone.p_value or 1) < 0.05
    others = [compared(0, 0, 1000, task=f"task{index}") for index in range(7)]
    assert "orse" in verdict([alone])
    assert "orse" not in verdict([alone, *others])


def test_verdict_tells_the_divergence() -> None:
    summary = DivergenceSummary(
        num_items=50, num_tokens=900, kl_mean=0.0312, kl_se=0.0021, top1_agreement=0.941
    )
    assert verdict([compared(5, 5, 990)], summary).endswith(
        "; KL divergence 0.0312 ± 0.0021 nats a token, the same likeliest token at 94.1%."
    )
    infinite = DivergenceSummary(
        num_items=50,
        num_tokens=900,
        num_infinite_tokens=2,
        top1_agreement=0.9,
        infinite=("kl_mean",),
    )
    assert "KL divergence infinite" in verdict([compared(5, 5, 990)], infinite)


def test_near_lossless_divergence_is_no_ranking() -> None:
    def notes(kl: float) -> str:
        summary = DivergenceSummary(num_items=50, num_tokens=900, kl_mean=kl)
        return " ".join(caveats([compared(5, 5, 990)], summary))

    assert "does not rank them" in notes(0.001)
    assert "does not rank them" not in notes(0.05)
