"""Numbers and names as reports write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.reports.format import (
    BYTES,
    MICROSECONDS,
    MILLISECONDS,
    NULL,
    PERCENT,
    SECONDS,
    TOKENS_PER_SECOND,
    Unit,
    byte_unit,
    counted,
    header,
    number,
    percent,
    quantity,
    setting,
    shorten,
    size,
    time,
    time_unit,
    with_interval,
)
from llmbench.reports.glyphs import drawable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0412345, "0.0412"),
        (0.5, "0.500"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (41.234, "41.2"),
        (412.34, "412"),
        (1234.5, "1,234"),
        (41234.0, "41,234"),
        (-3.14159, "-3.14"),
        (0.0, "0"),
        (64, "64"),
        (1200, "1,200"),
        (1.5e-9, "1.50e-09"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, NULL),
        (None, NULL),
    ],
)
def test_numbers_have_three_digits_and_all_before_the_dot(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_a_number_reads_back_within_half_a_unit_of_its_third_digit(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=5.01e-3)


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        ([0.0412, 1.9], MILLISECONDS),
        ([0.0412, 12.0], SECONDS),
        ([2e-5, None], MICROSECONDS),
        ([0.0, None, math.nan, math.inf], MILLISECONDS),
        ([], MILLISECONDS),
    ],
)
def test_the_largest_time_decides_the_unit_of_all(values: list[float | None], unit: Unit) -> None:
    assert time_unit(values) == unit


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (3.5 * 2**30, "3.50 GiB"), (None, NULL)],
)
def test_sizes_are_binary(value: float | None, text: str) -> None:
    assert size(value) == text


def test_sizes_beyond_the_largest_unit_stay_in_it() -> None:
    assert byte_unit([2.0**60]) == BYTES[-1]


def test_stored_values_get_their_unit_once() -> None:
    assert time(0.0412) == "41.2 ms"
    assert percent(0.951) == "95.1 %"
    assert quantity(None, TOKENS_PER_SECOND) == NULL
    assert quantity(math.nan, TOKENS_PER_SECOND) == NULL
    assert with_interval(0.0412, (0.0398, 0.043), MILLISECONDS) == "41.2 [39.8, 43.0] ms"
    assert with_interval(0.0412, None, MILLISECONDS) == "41.2 ms"
    assert with_interval(None, None, PERCENT) == NULL
    assert header("TTFT p50", MILLISECONDS) == "TTFT p50 (ms)"


def test_settings_read_as_their_flags() -> None:
    assert [setting(value) for value in (4.0, 0.5, "inf", math.inf, None)] == [
        "4",
        "0.5",
        "inf",
        "inf",
        "none",
    ]


def test_counts_agree_with_their_noun() -> None:
    assert counted(1, "request") == "1 request"
    assert counted(1200, "request") == "1,200 requests"


@given(st.text(max_size=80), st.integers(3, 60))
def test_shortening_keeps_to_the_limit_and_both_ends(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit or short == text
    assert len(short) == min(len(text), limit)
    assert short[0:1] == text[0:1]
    assert short[-1:] == text[-1:]


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("SmolLM2-135M", "SmolLM2-135M"),
        ("모델-7b", "model-7b"),
        ("모델", "model"),
        ("模型", "<U+6A21><U+578B>"),
        ("a\nb\tc\x00", "a b c<U+0000>"),
        ("95 % ≤ → µs", "95 % ≤ → µs"),
        ("", ""),
    ],
)
def test_names_become_characters_that_the_font_has(text: str, drawn: str) -> None:
    assert drawable(text) == drawn
