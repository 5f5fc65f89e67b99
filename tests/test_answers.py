"""Answers are read out of generated text by the harness's rules, and numbers by their value."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.bench.accuracy.answers import (
    ExactMatch,
    Extractor,
    build_filters,
    cut_at_stops,
    number_text,
    parse_number,
)
from llmbench.bench.errors import BenchConfigError

# Of lm_eval 0.4.13, tasks/gsm8k/gsm8k.yaml, and our filter beside them.
FILTERS = build_filters(
    [
        {
            "name": "strict-match",
            "filter": [
                {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"},
                {"function": "take_first"},
            ],
        },
        {
            "name": "flexible-extract",
            "filter": [
                {
                    "function": "regex",
                    "group_select": -1,
                    "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)",
                },
                {"function": "take_first"},
            ],
        },
        {"name": "numeric", "filter": [{"function": "numeric"}]},
    ]
)
STRICT, FLEXIBLE, NUMERIC = FILTERS
MATCH = ExactMatch.from_metric(
    {
        "metric": "exact_match",
        "ignore_case": True,
        "ignore_punctuation": False,
        "regexes_to_ignore": [",", r"\$", "(?s).*#### ", r"\.$"],
    }
)


def is_right(extractor: Extractor, response: str, gold: str) -> bool:
    return extractor.is_right(extractor.answer(response), gold, MATCH)


@pytest.mark.parametrize(
    ("response", "gold", "strict_ok", "numeric_ok"),
    [
        ("#### 29", "29", True, True),
        ("The total cost is $29.00.", "29", False, True),
        ("So she has 1,234 apples.\n#### 1,234", "1234", True, True),
        ("Net change:\n#### -5", "-5", True, True),
        ("The temperature drop is -5.", "-5", False, True),
        ("I do not know", "7", False, False),
        ("답은 1,050원입니다.", "1050", False, True),
        ("#### 42.", "42", True, True),
        ("Cost 3 then 4\n#### 12", "3", False, False),
        ("", "5", False, False),
        ("#### 12\nSo 3 more make 15", "12", True, True),
    ],
)
def test_numbers_count_by_value_and_strictly_by_text(
    response: str, gold: str, strict_ok: bool, numeric_ok: bool
) -> None:
    for target in (gold, f"8+9=<<8+9=17>>17\n#### {gold}"):
        assert is_right(STRICT, response, target) == strict_ok
        assert is_right(NUMERIC, response, target) == numeric_ok


def test_case_file_holds(cases_dir: Path) -> None:
    for line in (cases_dir / "C20_gsm8k.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if "gold_field" in case:
            assert MATCH.normalized(case["gold_field"]) == case["parsed_gold"]
            assert parse_number(case["gold_field"]) == Decimal(case["parsed_gold"])
        else:
            assert is_right(STRICT, case["response"], case["gold"]) == case["strict_ok"]
            assert is_right(NUMERIC, case["response"], case["gold"]) == case["flexible_ok"]


# What lm_eval 0.4.13's RegexFilter gave for these responses.
@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("#### 29", "29", "29"),
        ("#### 1,234 and #### 7", "1,234", "7"),
        ("The total is $29.00.", "[invalid]", "$29.00."),
        ("so 5 it is", "[invalid]", "5"),
        ("first 12, then", "[invalid]", "12,"),
        ("nothing, really.", "[invalid]", "[invalid]"),
        ("wait...", "[invalid]", "..."),
        ("", "[invalid]", "[invalid]"),
        ("#### -3.5%", "-3.5", "-3.5"),
    ],
)
def test_harness_filters_are_kept_to_the_letter(response: str, strict: str, flexible: str) -> None:
    assert STRICT.answer(response) == strict
    assert FLEXIBLE.answer(response) == flexible


def test_flexible_extract_compares_text_as_the_harness_does() -> None:
    assert is_right(FLEXIBLE, "about $29.", "29")
    assert not is_right(FLEXIBLE, "about $29.00.", "29")


def test_ignored_patterns_go_from_both_sides_in_order() -> None:
    assert MATCH.matches("$1,000.", "so\n#### 1000")
    in_order = ExactMatch(regexes_to_ignore=("b", "ac"))
    assert in_order.normalized("abc") == ""
    assert ExactMatch(regexes_to_ignore=("ac", "b")).normalized("abc") == "ac"


def test_case_punctuation_and_digits_are_ignored_only_when_asked() -> None:
    assert not ExactMatch().matches("Yes!", "yes")
    assert ExactMatch(ignore_case=True, ignore_punctuation=True).matches("Yes!", "yes")
    assert ExactMatch(ignore_numbers=True).matches("a1", "a22")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$-5", "-5"),
        ("-$1,234.50", "-1234.5"),
        ("\u22127", "-7"),
        ("10-5", "5"),
        ("(8)-3", "3"),
        ("3,4", "4"),
        ("1,234,567", "1234567"),
        (",.$-", None),
        ("ends in 7.", "7"),
        ("####", None),
        ("no. 4 ####", "4"),
        ("0.50", "0.5"),
        ("007", "7"),
    ],
)
def test_number_has_a_digit_at_both_ends(text: str, value: str | None) -> None:
    assert parse_number(text) == (None if value is None else Decimal(value))


@given(st.decimals(-(10**9), 10**9, places=3, allow_nan=False))
def test_number_survives_any_way_of_writing_it(value: Decimal) -> None:
    for text in (f"{value}", f"{value:,}", f"so $ {value}", number_text(value), f"#### {value:,}."):
        assert parse_number(text) == value
    assert NUMERIC.answer(f"{value}") == number_text(value)


@given(st.integers(-(10**7), 10**7), st.text(max_size=20))
def test_what_is_strictly_right_is_right_by_value(value: int, rest: str) -> None:
    response = f"#### {value:,} {rest}"
    assert is_right(STRICT, response, str(value))
    assert is_right(NUMERIC, response, str(value))


@given(st.text())
def test_any_text_has_an_answer(text: str) -> None:
    for extractor in FILTERS:
        assert isinstance(extractor.answer(text), str)
    assert is_right(NUMERIC, text, "no number") is False


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("18\n\nQuestion: next", ["Question:"], "18\n\n"),
        ("a Question b Question: c", ["Question:"], "a Question b "),
        ("x</s>y<|im_end|>z", ["<|im_end|>", "</s>"], "x"),
        ("whole", ["", "no"], "whole"),
        ("stop", ["stop"], ""),
    ],
)
def test_text_is_cut_at_whole_stops(text: str, stops: list[str], kept: str) -> None:
    assert cut_at_stops(text, stops) == kept


def test_no_filters_take_the_whole_response() -> None:
    (only,) = build_filters([])
    assert (only.name, only.answer(" as is ")) == ("none", " as is ")


@pytest.mark.parametrize(
    ("steps", "response", "answer"),
    [
        ([{"function": "lowercase"}, {"function": "remove_whitespace"}], " Ja ", "ja"),
        ([{"function": "uppercase"}], "ja", "JA"),
        ([{"function": "map", "mapping_dict": {"A": "0"}}], "A", "0"),
        ([{"function": "map", "mapping_dict": {"A": "0"}}], "B", "[invalid]"),
        ([{"function": "regex", "regex_pattern": "(a)|(b)", "group_select": 5}], "a", "[invalid]"),
        ([{"function": "regex", "regex_pattern": "x", "fallback": "?"}], "a", "?"),
    ],
)
def test_steps_follow_each_other(
    steps: list[dict[str, object]], response: str, answer: str
) -> None:
    (extractor,) = build_filters([{"name": "n", "filter": steps}])
    assert extractor.answer(response) == answer


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"function": "guess"}, "unknown function `guess`"),
        ({"function": "regex", "regex_pattern": "("}, "`regex` of filter `n`"),
        ({"function": "regex", "speed": 3}, "`regex` of filter `n`"),
    ],
)
def test_broken_filter_is_refused_by_name(step: dict[str, object], message: str) -> None:
    with pytest.raises(BenchConfigError, match=message):
        build_filters([{"name": "n", "filter": [step]}])
