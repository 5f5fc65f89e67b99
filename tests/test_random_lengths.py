"""Laws of request lengths against their definitions."""

import numpy as np
import pytest

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.random_lengths import LengthLaw, draw_length_pairs
from llmbench.bench.workloads.workload import LengthDistribution

FIXED_1 = LengthLaw("fixed", 1, 0.0)


def draw(law: LengthLaw, num: int = 4000, room: int = 10**9) -> np.ndarray:
    pairs, _ = draw_length_pairs(law, FIXED_1, num, room, np.random.default_rng(0))
    return np.array([length for length, _ in pairs])


@pytest.mark.parametrize("law", [LengthLaw("fixed", 77, 0.0), LengthLaw("uniform", 77, 0.0)])
def test_length_without_spread_is_exact(law: LengthLaw) -> None:
    assert set(draw(law)) == {77}


@pytest.mark.parametrize(
    ("length", "ratio", "low", "high"),
    [
        (1024, 0.5, 512, 1536),
        (10, 0.1, 9, 11),  # 10 * 1.1 is a little over 11
        (5, 0.3, 3, 7),
        (1, 0.9, 1, 2),
    ],
)
def test_uniform_lengths_span_vllms_range(length: int, ratio: float, low: int, high: int) -> None:
    law = LengthLaw("uniform", length, ratio)
    assert law.bounds == (low, high)
    drawn = draw(law, num=20_000)
    assert (drawn.min(), drawn.max()) == (low, high)


@pytest.mark.parametrize(("distribution", "ratio"), [("normal", 0.2), ("lognormal", 0.8)])
def test_spread_lengths_have_the_mean_and_deviation_asked_for(
    distribution: LengthDistribution, ratio: float
) -> None:
    drawn = draw(LengthLaw(distribution, 500, ratio), num=20_000)
    assert drawn.mean() == pytest.approx(500, rel=0.02)
    assert drawn.std() == pytest.approx(500 * ratio, rel=0.05)


def test_lognormal_lengths_are_skewed_to_long_ones() -> None:
    drawn = draw(LengthLaw("lognormal", 500, 1.0), num=20_000)
    # The median of a log-normal is mean / sqrt(1 + r^2).
    assert np.median(drawn) == pytest.approx(500 / np.sqrt(2), rel=0.03)


@pytest.mark.parametrize("distribution", ["normal", "lognormal"])
def test_lengths_without_bounds_are_drawn_again_until_they_fit(
    distribution: LengthDistribution,
) -> None:
    law = LengthLaw(distribution, 50, 0.6)
    pairs, num_refused = draw_length_pairs(law, law, 3000, 120, np.random.default_rng(1))
    assert num_refused > 0
    assert max(map(sum, pairs)) <= 120
    assert min(map(min, pairs)) >= 1


@pytest.mark.parametrize(
    ("inputs", "outputs", "room"),
    [
        (LengthLaw("fixed", 100, 0.0), FIXED_1, 100),
        (LengthLaw("uniform", 100, 0.5), FIXED_1, 150),
        (LengthLaw("normal", 100, 0.1), FIXED_1, 90),
        (FIXED_1, LengthLaw("fixed", 100, 0.0), 0),
    ],
)
def test_lengths_that_cannot_fit_are_refused_with_both_numbers(
    inputs: LengthLaw, outputs: LengthLaw, room: int
) -> None:
    with pytest.raises(WorkloadError, match=rf"exceed the {room}") as caught:
        draw_length_pairs(inputs, outputs, 1, room, np.random.default_rng(0))
    assert "--random-input-len" in caught.value.__notes__[0]


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    law = LengthLaw("normal", 50, 0.6)
    short, _ = draw_length_pairs(law, law, 20, 120, np.random.default_rng(4))
    long, _ = draw_length_pairs(law, law, 200, 120, np.random.default_rng(4))
    assert long[:20] == short
