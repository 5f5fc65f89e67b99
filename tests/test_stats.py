"""Summaries of samples: against numpy, scipy and closed forms."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm, spearmanr

from llmbench.bench import stats
from llmbench.bench.stats import (
    PERCENTILES,
    Summary,
    percentiles_with_failures,
    required_sample_size,
    summarize,
    trend_z,
)


def has_order_statistic_interval(n: int, q: float) -> bool:
    """Whether ranks 1 <= l < u <= n exist that miss the quantile by 2.5 % at most on each side."""
    lower_misses = binom.cdf(0, n, q)  # no value below x_q, so even X_1 lies above it
    upper_misses = 1 - binom.cdf(n - 1, n, q)  # all values below x_q, so even X_n does
    return bool(lower_misses <= 0.025 and upper_misses <= 0.025)


@pytest.mark.parametrize("q", [0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.1])
def test_required_sample_size_is_the_least_with_an_order_statistic_interval(q: float) -> None:
    n = required_sample_size(q)
    assert has_order_statistic_interval(n, q)
    assert not has_order_statistic_interval(n - 1, q)


@pytest.mark.parametrize(("q", "n"), [(0.5, 6), (0.9, 36), (0.95, 72), (0.99, 368)])
def test_required_sample_sizes_of_the_reported_percentiles(q: float, n: int) -> None:
    assert required_sample_size(q) == n


@pytest.mark.parametrize(
    ("n", "withheld"),
    [
        (0, ("p90", "p95", "p99")),
        (35, ("p90", "p95", "p99")),
        (36, ("p95", "p99")),
        (71, ("p95", "p99")),
        (72, ("p99",)),
        (367, ("p99",)),
        (368, ()),
    ],
)
def test_percentile_that_the_sample_cannot_carry_is_withheld(
    n: int, withheld: tuple[str, ...]
) -> None:
    summary = summarize(np.arange(n, dtype=float))
    assert summary.withheld == withheld
    for name in ("p90", "p95", "p99"):
        assert (getattr(summary, name) is None) == (name in withheld)
        assert (getattr(summary, f"{name}_ci") is None) == (name in withheld)


def test_empty_sample_is_null_and_not_zero() -> None:
    record = summarize([]).to_record()
    assert record.pop("n") == 0
    assert record.pop("withheld") == ["p90", "p95", "p99"]
    assert set(record.values()) == {None}


def test_single_value_has_a_median_but_no_interval() -> None:
    summary = summarize([3.0])
    assert (summary.n, summary.mean, summary.median, summary.std) == (1, 3.0, 3.0, 0.0)
    assert (summary.min, summary.max) == (3.0, 3.0)
    assert summary.mean_ci is None
    assert summary.median_ci is None


@pytest.mark.parametrize(("n", "is_given"), [(5, False), (6, True)])
def test_intervals_need_six_values(n: int, is_given: bool) -> None:
    summary = summarize(np.arange(n, dtype=float))
    assert (summary.mean_ci is not None) == is_given
    assert (summary.median_ci is not None) == is_given


def test_points_are_numpys() -> None:
    sample = np.random.default_rng(1).lognormal(size=500)
    summary = summarize(sample)
    assert summary.mean == pytest.approx(np.mean(sample))
    assert summary.std == pytest.approx(np.std(sample))
    for name, q in PERCENTILES.items():
        assert getattr(summary, name) == pytest.approx(np.quantile(sample, q))


def test_same_sample_gives_the_same_digits() -> None:
    sample = np.random.default_rng(2).exponential(size=400)
    groups = np.arange(400) // 4
    assert summarize(sample) == summarize(sample)
    assert summarize(sample, groups=groups) == summarize(sample, groups=groups)


def test_constant_sample_has_an_interval_of_no_width() -> None:
    summary = summarize([2.0] * 400)
    for name in ("mean", *PERCENTILES):
        assert getattr(summary, f"{name}_ci") == (2.0, 2.0)


@pytest.mark.parametrize("size", [40, 1000])
def test_intervals_agree_with_a_bootstrap_that_draws_every_value(size: int) -> None:
    sample = np.random.default_rng(3).gamma(2.0, size=size)
    drawn = np.random.default_rng(4).choice(sample, size=(4000, size))
    summary = summarize(sample)
    for name, reduced in (
        ("mean", drawn.mean(axis=1)),
        ("median", np.median(drawn, axis=1)),
        ("p90", np.quantile(drawn, 0.9, axis=1)),
    ):
        low, high = np.quantile(reduced, [0.025, 0.975])
        found = getattr(summary, f"{name}_ci")
        # Both ends are themselves drawn: they differ by a fraction of the interval's width.
        assert found == pytest.approx((low, high), abs=0.12 * (high - low))


def test_interval_of_the_mean_agrees_with_the_normal_one_in_a_large_sample() -> None:
    sample = np.random.default_rng(5).exponential(size=6000)  # drawn in several chunks
    half_width = norm.ppf(0.975) * sample.std() / np.sqrt(sample.size)
    expected = (sample.mean() - half_width, sample.mean() + half_width)
    assert summarize(sample).mean_ci == pytest.approx(expected, abs=0.15 * half_width)


@pytest.mark.parametrize("name", ["mean", "median", "p90"])
def test_intervals_cover_the_truth_about_as_often_as_they_say(name: str) -> None:
    truth = {"mean": 1.0, "median": np.log(2), "p90": np.log(10)}[name]
    rng = np.random.default_rng(6)
    hits = 0
    for _ in range(200):
        low, high = getattr(summarize(rng.exponential(size=120)), f"{name}_ci")
        hits += low <= truth <= high
    assert 0.88 <= hits / 200 <= 0.99  # 95 %, less the bootstrap's known shortfall, +- 2 errors


def test_groups_of_one_value_give_the_interval_of_independent_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "NUM_RESAMPLES", 20_000)  # ends then differ by little noise
    sample = np.random.default_rng(7).exponential(size=400)
    alone, grouped = summarize(sample), summarize(sample, groups=np.arange(400))
    for name in ("mean", *PERCENTILES):
        low, high = getattr(alone, f"{name}_ci")
        found = getattr(grouped, f"{name}_ci")
        assert found == pytest.approx((low, high), abs=0.15 * (high - low))
        assert getattr(alone, name) == getattr(grouped, name)


def test_repeating_each_value_does_not_make_a_grouped_interval_narrower() -> None:
    sample = np.random.default_rng(8).exponential(size=100)
    repeated = np.repeat(sample, 50)
    independent = summarize(sample).mean_ci
    grouped = summarize(repeated, groups=np.repeat(np.arange(100), 50)).mean_ci
    naive = summarize(repeated).mean_ci
    assert independent is not None
    assert grouped is not None
    assert naive is not None
    width = independent[1] - independent[0]
    assert grouped[1] - grouped[0] == pytest.approx(width, rel=0.15)
    assert naive[1] - naive[0] < 0.3 * width


def test_grouped_quantiles_agree_with_drawing_whole_groups() -> None:
    rng = np.random.default_rng(9)
    sizes = rng.integers(1, 60, size=80)
    groups = np.repeat(np.arange(80), sizes)  # about 2,400 values, more than there are cells
    sample = rng.exponential(size=groups.size) * (1 + rng.random(80)[groups])
    members = [sample[groups == group] for group in range(80)]
    drawn = [
        np.concatenate([members[group] for group in rng.integers(80, size=80)]) for _ in range(1000)
    ]
    summary = summarize(sample, groups=groups)
    for name, q in PERCENTILES.items():
        low, high = np.quantile([np.quantile(values, q) for values in drawn], [0.025, 0.975])
        found = getattr(summary, f"{name}_ci")
        assert found == pytest.approx((low, high), abs=0.2 * (high - low))


def test_fewer_than_six_groups_have_no_interval() -> None:
    summary = summarize(np.arange(1000.0), groups=np.arange(1000) % 5)
    assert summary.p99 is not None
    assert summary.mean_ci is None
    assert summary.p99_ci is None


@given(
    values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=80),
    num_groups=st.integers(1, 20),
)
def test_every_interval_lies_inside_the_sample_and_is_strict_json(
    values: list[float], num_groups: int
) -> None:
    groups = [index % num_groups for index in range(len(values))]
    for summary in (summarize(values), summarize(values, groups=groups)):
        json.dumps(summary.to_record(), allow_nan=False)
        for name in PERCENTILES:
            if (interval := getattr(summary, f"{name}_ci")) is not None:
                low, high = interval
                assert min(values) <= low <= high <= max(values)


def test_record_has_every_field_and_lists_for_intervals() -> None:
    record = summarize(np.arange(400.0)).to_record()
    assert set(record) == set(Summary.__dataclass_fields__)
    assert isinstance(record["p99_ci"], list)
    assert record["withheld"] == []


def test_failures_push_percentiles_up_to_infinity() -> None:
    # 36 attempts, ranks of 0.5 and 0.9: 17.5 and 31.5. With 4 failures the values end at rank 31.
    record = percentiles_with_failures([float(i) for i in range(32)], 4)
    assert record["median"] == 17.5
    assert record["p90"] is None
    assert record["infinite"] == ["p90"]
    assert record["withheld"] == ["p95", "p99"]
    assert (record["n"], record["num_failures"]) == (36, 4)


def test_percentiles_without_failures_are_the_plain_ones() -> None:
    sample = np.random.default_rng(10).exponential(size=400)
    record, summary = percentiles_with_failures(sample, 0), summarize(sample)
    for name in PERCENTILES:
        assert record[name] == pytest.approx(getattr(summary, name))


def test_percentiles_of_failures_alone_are_infinite_and_of_nothing_are_null() -> None:
    assert percentiles_with_failures([], 3)["infinite"] == ["median"]
    nothing = percentiles_with_failures([], 0)
    assert nothing["median"] is None
    assert nothing["infinite"] == []


@pytest.mark.parametrize("seed", [0, 1])
def test_trend_is_spearmans_correlation_in_standard_errors(seed: int) -> None:
    sample = np.random.default_rng(seed).integers(0, 20, size=50).astype(float)  # with ties
    expected = spearmanr(np.arange(50), sample).statistic * np.sqrt(49)
    assert trend_z(sample) == pytest.approx(expected)


@pytest.mark.parametrize("values", [[], [1.0] * 5, [2.0] * 100])
def test_trend_of_too_few_or_equal_values_is_null(values: list[float]) -> None:
    assert trend_z(values) is None


def test_chunks_of_resamples_do_not_change_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = np.random.default_rng(11).exponential(size=200)
    whole = summarize(sample, groups=np.arange(200))
    monkeypatch.setattr(stats, "_CHUNK_ELEMENTS", 200 * 7)
    assert summarize(sample, groups=np.arange(200)) == whole
