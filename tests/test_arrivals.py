"""Arrival processes against their closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.arrivals import arrival_times

NUM = 50_000


def test_infinite_rate_sends_everything_at_once() -> None:
    assert arrival_times(5, math.inf) == [0.0] * 5


def test_infinite_burstiness_is_a_constant_gap() -> None:
    assert arrival_times(4, 2.0, math.inf) == [0.5, 1.0, 1.5, 2.0]


def test_no_requests_have_no_times() -> None:
    assert arrival_times(0, 3.0) == []


@given(
    num=st.integers(1, 200),
    rate=st.floats(1e-3, 1e5),
    burstiness=st.one_of(st.floats(0.05, 1e4), st.just(math.inf)),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=60, deadline=None)
def test_schedule_ascends_to_last_arrival_at_n_over_rate(
    num: int, rate: float, burstiness: float, seed: int
) -> None:
    offsets = arrival_times(num, rate, burstiness, seed)
    assert len(offsets) == num
    assert offsets[0] >= 0
    assert offsets == sorted(offsets)
    assert offsets[-1] == pytest.approx(num / rate, rel=1e-12)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_variance_of_a_stretched_gamma(burstiness: float) -> None:
    rate = 8.0
    gaps = np.diff(arrival_times(NUM, rate, burstiness, seed=3), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / rate, rel=1e-9)
    variance = (NUM - 1) / (NUM * burstiness + 1) / rate**2
    # The sample variance of N gammas of shape k has a relative deviation of
    # sqrt((2 + 6 / k) / N), 2.3 % at k = 0.25; the seed is fixed.
    assert gaps.var() == pytest.approx(variance, rel=0.07)


def test_burstiness_one_is_a_poisson_process() -> None:
    gaps = np.diff(arrival_times(NUM, 5.0, 1.0, seed=1), prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 0.2)).pvalue > 0.01


def test_few_arrivals_keep_the_variance_of_the_stretch() -> None:
    schedules = np.array([arrival_times(4, 1.0, 1.0, seed) for seed in range(4000)])
    gaps = np.diff(schedules, axis=1, prepend=0.0)
    assert gaps.var() == pytest.approx(3 / 5, rel=0.05)


def test_rate_only_scales_the_schedule() -> None:
    slow, fast = (np.array(arrival_times(50, rate, 0.7, seed=9)) for rate in (2.0, 8.0))
    np.testing.assert_allclose(slow, fast * 4, rtol=1e-12)


def test_seed_decides_the_schedule() -> None:
    assert arrival_times(20, 1.0, 1.0, seed=5) == arrival_times(20, 1.0, 1.0, seed=5)
    assert arrival_times(20, 1.0, 1.0, seed=5) != arrival_times(20, 1.0, 1.0, seed=6)


@pytest.mark.parametrize(
    ("num", "rate", "burstiness", "seed", "words"),
    [
        (-1, 1.0, 1.0, 0, "number of requests"),
        (3, 0.0, 1.0, 0, "request_rate"),
        (3, -2.0, 1.0, 0, "request_rate"),
        (3, math.nan, 1.0, 0, "request_rate"),
        (3, 1.0, 0.0, 0, "burstiness"),
        (3, 1.0, math.nan, 0, "burstiness"),
        (3, 1.0, 1e-9, 0, "no gap"),
        (3, 1.0, 1.0, -1, "seed"),
    ],
)
def test_impossible_process_is_refused(
    num: int, rate: float, burstiness: float, seed: int, words: str
) -> None:
    with pytest.raises(WorkloadError, match=words):
        arrival_times(num, rate, burstiness, seed)
