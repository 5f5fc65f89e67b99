"""JSON that every parser accepts."""

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.bench.strict_json import digest, dumps, loads, setting, strict


class Color(enum.Enum):
    """An enumeration."""

    RED = "red"


@dataclass(frozen=True, slots=True)
class Config:
    """A dataclass with slots, as all settings are."""

    request_rate: float
    path: Path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (np.float32("nan"), None),
        (np.float64(0.5), 0.5),
        (np.int32(3), 3),
        (np.bool_(True), True),
        (np.array([1.0, math.inf]), [1.0, None]),
        ((1, 2.0, "a", None, True), [1, 2.0, "a", None, True]),
        ({3, 1, 2}, [1, 2, 3]),
        (Color.RED, "red"),
        (Path("a/b"), "a/b"),
        ({1: math.nan}, {"1": None}),
    ],
)
def test_value_becomes_json_types_without_non_numbers(value: Any, expected: Any) -> None:
    assert strict(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"request_rate": math.inf}, {"request_rate": "inf"}),
        ({"request_rates": (1.0, math.inf)}, {"request_rates": [1.0, "inf"]}),
        ({"cell": {"burstiness": math.inf}}, {"cell": {"burstiness": "inf"}}),
        ({"request_rate": math.nan}, {"request_rate": None}),
        ({"request_rate": -math.inf}, {"request_rate": None}),
        ({"ttft_s": math.inf}, {"ttft_s": None}),
        (Config(math.inf, Path("x")), {"request_rate": "inf", "path": "x"}),
    ],
)
def test_infinite_setting_is_a_text_and_infinite_measurement_is_null(
    value: Any, expected: Any
) -> None:
    assert strict(value) == expected


@pytest.mark.parametrize("value", [math.inf, 4.0])
def test_setting_reads_back_what_was_written(value: float) -> None:
    assert setting(loads(dumps({"request_rate": value}))["request_rate"]) == value


@pytest.mark.parametrize(
    "text",
    ['{"acc": NaN, "ttft_p99_ms": 1}', '{"request_rate": Infinity}', "-Infinity", "1e999", "{"],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    """Case C38."""
    with pytest.raises(ValueError, match=r"not JSON|beyond the range|property name"):
        loads(text)


def test_value_without_a_json_form_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="no JSON form for object under `thing`"):
        strict({"thing": object()})


@pytest.mark.parametrize(
    "text", ["안녕 🙂", "line\u2028separator", "half \ud83d of a pair", "\x00"]
)
def test_any_text_survives_on_one_line(text: str) -> None:
    written = dumps({"text": text})
    assert "\n" not in written
    assert json.loads(written.encode()) == {"text": text}


def test_digest_depends_on_values_and_not_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": (1, 2), "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_values)
def test_every_value_makes_a_round_trip_through_a_strict_parser(value: Any) -> None:
    assert loads(dumps(value)) == strict(value)
