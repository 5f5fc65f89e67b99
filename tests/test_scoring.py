"""One item's answers are worth what the harness says, and a broken model is worth nothing."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.bench.accuracy.answers import ExactMatch, build_filters
from llmbench.bench.accuracy.scoring import (
    perplexity,
    score_choices,
    score_generation,
    score_rolling,
    true_share,
)
from llmbench.bench.errors import BenchConfigError

NAN, INF = math.nan, math.inf
FINITE = st.floats(-1e4, 0)


def test_likeliest_choice_is_taken() -> None:
    score = score_choices([-3.0, -1.0, -2.0], ["a", "b", "c"], 1, ("acc",))
    assert (score.metrics, score.pick, score.is_tied, score.invalid) == (
        {"acc": 1.0},
        1,
        False,
        None,
    )


def test_characters_and_bytes_normalize_differently() -> None:
    metrics = ("acc", "acc_norm", "acc_norm_bytes", "acc_bytes")
    for gold in (0, 1):
        score = score_choices([-9.0, -6.0], ["yes indeed", "그렇습니다"], gold, metrics)
        assert score.pick == 1
        assert score.metrics == {
            "acc": float(gold == 1),
            "acc_norm": float(gold == 0),
            "acc_norm_bytes": float(gold == 1),
            "acc_bytes": float(gold == 1),
        }


@given(
    items=st.lists(st.tuples(FINITE, st.text("ab가나 ", min_size=1)), min_size=1, max_size=6),
    data=st.data(),
)
def test_picks_are_numpys(items: list[tuple[float, str]], data: st.DataObject) -> None:
    logs, choices = [log for log, _ in items], [text for _, text in items]
    gold = data.draw(st.integers(0, len(items) - 1))
    score = score_choices(logs, choices, gold, ("acc", "acc_norm", "acc_norm_bytes"))
    by_length = np.array(logs) / [len(text) for text in choices]
    by_bytes = np.array(logs) / [len(text.encode()) for text in choices]
    assert score.metrics == {
        "acc": float(np.argmax(logs) == gold),
        "acc_norm": float(np.argmax(by_length) == gold),
        "acc_norm_bytes": float(np.argmax(by_bytes) == gold),
    }


@pytest.mark.parametrize(
    ("logs", "metrics", "is_tied"),
    [
        ([-1.0, -1.0], ("acc",), True),
        ([-2.0, -1.0, -2.0], ("acc",), False),
        ([-2.0, -4.0, -9.0], ("acc",), False),
        ([-2.0, -4.0, -9.0], ("acc", "acc_norm"), True),  # per character: -2, -2, -3
    ],
)
def test_ties_are_said_of_the_rules_in_use(
    logs: list[float], metrics: tuple[str, ...], is_tied: bool
) -> None:
    choices = ["a", "ab", "abc"][: len(logs)]
    assert score_choices(logs, choices, 0, metrics).is_tied == is_tied


def test_first_of_equal_choices_is_taken() -> None:
    assert score_choices([-1.0, -0.5, -0.5], ["a", "b", "c"], 1, ("acc",)).metrics["acc"] == 1
    assert score_choices([-1.0, -0.5, -0.5], ["a", "b", "c"], 2, ("acc",)).metrics["acc"] == 0


@pytest.mark.parametrize(
    "logs", [[NAN, -5.0], [-5.0, NAN], [NAN, NAN], [INF, -1.0], [-INF, -INF], [-1.0]]
)
def test_item_without_usable_likelihoods_is_invalid_and_never_right(logs: list[float]) -> None:
    for gold in (0, 1):
        score = score_choices(logs, ["a", "b"], gold, ("acc", "acc_norm", "mc2", "f1"))
        assert score.invalid
        assert score.pick is None
        assert score.metrics == {"acc": 0.0, "acc_norm": 0.0, "mc2": 0.0}


@pytest.mark.parametrize("gold", [2, -1, (0, 5), ()])
def test_gold_that_is_no_choice_is_invalid(gold: int | tuple[int, ...]) -> None:
    assert "no index of 2 choices" in str(
        score_choices([-1.0, -2.0], ["a", "b"], gold, ("acc",)).invalid
    )


def test_impossible_choice_is_not_invalid() -> None:
    assert score_choices([-INF, -5.0], ["a", "b"], 1, ("acc",)).metrics["acc"] == 1.0


def test_empty_choice_is_never_the_likeliest_per_character() -> None:
    score = score_choices([-1.0, -50.0], ["", "b"], 1, ("acc", "acc_norm"))
    assert score.metrics == {"acc": 0.0, "acc_norm": 1.0}


def test_several_right_choices_count_alike() -> None:
    for logs, right in (([-1.0, -2.0, -3.0], 1.0), ([-3.0, -1.0, -2.0], 0.0)):
        assert score_choices(logs, ["a", "b", "c"], (0, 2), ("acc",)).metrics["acc"] == right


def test_exact_match_of_a_choice_is_greedy_decoding() -> None:
    for greedy, value in (((False, True), 1.0), ((True, False), 0.0)):
        score = score_choices([-1.0, -2.0], ["a", "b"], 1, ("exact_match",), is_greedy=greedy)
        assert score.metrics["exact_match"] == value


def test_unknown_metric_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BenchConfigError, match=r"task: bleu") as caught:
        score_choices([-1.0], ["a"], 0, ("bleu",))
    assert "acc_norm" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("logs", "true", "share"),
    [
        ([-1000, -1001], (0,), 0.7310585786300049),
        ([-2000, -2000, -2000, -2000], (0, 1), 0.5),
        ([-3.0, -2.0, -1.0], (0,), 0.09003057317038046),
        ([-1e30, -5.0], (0,), 0.0),
    ],
)
def test_mc2_does_not_underflow(logs: list[float], true: tuple[int, ...], share: float) -> None:
    score = score_choices(logs, ["x"] * len(logs), true, ("mc2",))
    assert score.metrics["mc2"] == pytest.approx(share, rel=1e-12)
    assert score.invalid is None


@given(
    logs=st.lists(st.floats(-30, 0), min_size=2, max_size=6),
    shift=st.floats(-1e5, 0),
    data=st.data(),
)
def test_mc2_is_a_share_that_shifts_and_order_do_not_change(
    logs: list[float], shift: float, data: st.DataObject
) -> None:
    true = data.draw(st.sets(st.integers(0, len(logs) - 1)))
    value = true_share(logs, true)
    assert 0 <= value <= 1
    rest = set(range(len(logs))) - true
    assert value + true_share(logs, rest) == pytest.approx(1)
    assert value == pytest.approx(true_share([log + shift for log in logs], true), abs=1e-9)
    backwards = {len(logs) - 1 - index for index in true}
    assert value == pytest.approx(true_share(logs[::-1], backwards))
    direct = sum(math.exp(logs[index]) for index in true) / sum(map(math.exp, logs))
    assert value == pytest.approx(direct)


def test_whole_text_is_weighed_by_its_original_size() -> None:
    score = score_rolling(-100.0, 20, 100)
    assert score.metrics == pytest.approx(
        {
            "word_perplexity": math.exp(5),
            "byte_perplexity": math.e,
            "bits_per_byte": 1 / math.log(2),
        }
    )


@pytest.mark.parametrize(
    ("log", "words", "num_bytes"), [(NAN, 5, 5), (-INF, 5, 5), (-1.0, 0, 5), (-1.0, 5, 0)]
)
def test_text_without_perplexity_is_invalid(log: float, words: int, num_bytes: int) -> None:
    score = score_rolling(log, words, num_bytes)
    assert score.invalid
    assert set(score.metrics.values()) == {0.0}


def test_perplexity_beyond_a_float_is_infinite() -> None:
    assert perplexity(-1e6, 1) == INF


def test_generated_answer_is_scored_by_each_filter() -> None:
    filters = build_filters(
        [
            {"name": "strict-match", "filter": [{"function": "regex"}]},
            {"name": "numeric", "filter": [{"function": "numeric"}]},
        ]
    )
    score = score_generation("It is 29.00", "#### 29", filters)
    assert score.metrics == {"exact_match,strict-match": 0.0, "exact_match,numeric": 1.0}
    assert score.filtered == {"strict-match": "[invalid]", "numeric": "29"}
    assert score.pick == "[invalid]"


def test_any_of_several_targets_counts() -> None:
    filters = build_filters([])
    match = ExactMatch(ignore_case=True)
    assert score_generation("Yes", ["no", "yes"], filters, match).metrics == {
        "exact_match,none": 1.0
    }
