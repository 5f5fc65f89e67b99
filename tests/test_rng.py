"""The noise is uniform, and a function of seed, position and stream alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from llmbench.engine.sampling import rng

NUM_DRAWS = 20_000
words = st.integers(min_value=-(2**70), max_value=2**70)


@pytest.mark.parametrize(
    "draws",
    [
        pytest.param([rng.uniform(42, p) for p in range(NUM_DRAWS)], id="positions of a request"),
        pytest.param([rng.uniform(s, 7) for s in range(NUM_DRAWS)], id="requests at a position"),
        pytest.param([rng.uniform(3, 5, s) for s in range(NUM_DRAWS)], id="streams"),
        pytest.param(
            [rng.uniform(rng.request_seed(0, 42, 0, i), 0) for i in range(NUM_DRAWS)], id="answers"
        ),
        pytest.param(
            [rng.uniform(rng.request_seed(0, None, f"r{i}", 0), 0) for i in range(NUM_DRAWS)],
            id="unseeded requests",
        ),
    ],
)
def test_draws_are_uniform(draws: list[float]) -> None:
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    counts, _ = np.histogram(draws, bins=100, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("lag", [1, 2, 3, 16])
def test_positions_are_uncorrelated(lag: int) -> None:
    draws = [rng.uniform(42, position) for position in range(NUM_DRAWS + lag)]
    assert abs(stats.pearsonr(draws[:-lag], draws[lag:]).statistic) < 4 / NUM_DRAWS**0.5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((42, rng.TARGET), (43, rng.TARGET), id="seeds 42 and 43"),
        pytest.param((42, rng.TARGET), (42, rng.ACCEPT), id="target and accept"),
        pytest.param((42, rng.RESIDUAL), (42, rng.DRAFT), id="residual and draft"),
    ],
)
def test_seeds_and_streams_are_independent(first: tuple[int, int], second: tuple[int, int]) -> None:
    draws = [
        [rng.uniform(seed, position, stream) for position in range(NUM_DRAWS)]
        for seed, stream in (first, second)
    ]
    assert abs(stats.pearsonr(*draws).statistic) < 4 / NUM_DRAWS**0.5


def test_streams_are_distinct() -> None:
    assert len({rng.TARGET, rng.ACCEPT, rng.RESIDUAL, rng.DRAFT}) == 4


@given(seed=words, position=words, stream=words)
def test_draw_is_an_odd_multiple_inside_the_open_interval(
    seed: int, position: int, stream: int
) -> None:
    draw = rng.uniform(seed, position, stream)
    assert 0.0 < draw < 1.0
    assert (draw * 2**53) % 2 == 1
    assert draw == rng.uniform(seed, position, stream)


@given(seed=words, position=st.integers(0, 2**40))
def test_flipping_one_bit_of_the_position_moves_the_draw(seed: int, position: int) -> None:
    assert rng.uniform(seed, position) != rng.uniform(seed, position ^ 1)


def test_known_values_do_not_change() -> None:
    """Stored texts of seeded requests stay reproducible from release to release."""
    draws = [rng.uniform(42, 0), rng.uniform(42, 1), rng.uniform(43, 0, rng.DRAFT)]
    assert draws == [0.3869742762400409, 0.1752956097232744, 0.7976707221058105]
    assert rng.request_seed(0, 42, "any", 0) == 8314204923799953617
    assert rng.request_seed(0, None, 3, 1) == 9854927975511011478


def test_seeded_request_depends_on_nothing_but_its_seed() -> None:
    keys = {rng.request_seed(e, 42, r, 0) for e in (0, 1) for r in ("a", "b", 3)}
    assert len(keys) == 1


def test_unseeded_requests_differ_by_engine_seed_and_id() -> None:
    keys = {rng.request_seed(e, None, r, 0) for e in (0, 1) for r in ("a", "b", 3, 4)}
    assert len(keys) == 8


@pytest.mark.parametrize("seed", [42, None])
def test_answers_of_one_request_have_their_own_noise(seed: int | None) -> None:
    assert len({rng.request_seed(0, seed, "a", answer) for answer in range(8)}) == 8
