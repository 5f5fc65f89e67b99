"""Lists of `name=value`: what may stand in a value, and what a wrong item is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from llmbench.cli.key_values import parse_key_values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The strings of case C41.
        (
            "pretrained=/m/run=3|step=7,dtype=float32",
            {"pretrained": "/m/run=3|step=7", "dtype": "float32"},
        ),
        (
            "until=Bob's,temperature=0,max_tokens=4",
            {"until": "Bob's", "temperature": 0, "max_tokens": 4},
        ),
        ("a=,b=1", {"a": "", "b": 1}),
        ("path=/데이터/모델 🙂/x", {"path": "/데이터/모델 🙂/x"}),
        ("seed=007", {"seed": "007"}),
        # Their kinds.
        ("", {}),
        ("a=1, b=2", {"a": 1, "b": 2}),
        ("a=-1.5e3,b=true,c=false,d=null", {"a": -1500.0, "b": True, "c": False, "d": None}),
        ("a=True,b=1e,c=0x10,d=-", {"a": "True", "b": "1e", "c": "0x10", "d": "-"}),
        (r"a=x\,y,b=1", {"a": "x,y", "b": 1}),
        ('a=["x,y","z"],b=1', {"a": ["x,y", "z"], "b": 1}),
        ('a="x,y",b={"k": [1, 2]}', {"a": "x,y", "b": {"k": [1, 2]}}),
        ('a="open,b=[1', {"a": '"open', "b": "[1"}),
        ('a="x"y,b=1', {"a": '"x"y', "b": 1}),
        ("a= Bob ,b=1", {"a": " Bob ", "b": 1}),
        ("a=\n\n,b=1", {"a": "\n\n", "b": 1}),
    ],
)
def test_list_is_read_by_its_rules(text: str, expected: dict[str, Any]) -> None:
    found = parse_key_values(text)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("flag", "`flag`"),
        ("a=1,flag", "`flag`"),
        ("a=x,y,b=1", "`y`"),
        ("=1", "`=1`"),
        ("a=1,", "behind the last comma"),
        ("a=1,,b=2", "found ``"),
        (" ", "found ` `"),
        ("a=1,a=2", "`a=2`"),
    ],
)
def test_wrong_item_is_named(text: str, named: str) -> None:
    with pytest.raises(typer.BadParameter) as refusal:
        parse_key_values(text)
    assert named in refusal.value.message


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(max_size=12)))
def test_any_text_survives_as_json(values: dict[str, str]) -> None:
    text = ",".join(f"{name}={json.dumps(value)}" for name, value in values.items())
    assert parse_key_values(text) == values


def test_case_file_holds_no_other_strings(cases_dir: Path) -> None:
    cases = json.loads((cases_dir / "C41_key_values.json").read_text(encoding="utf-8"))
    for case in cases:
        expected = case["expect"]
        if isinstance(expected, dict):
            assert parse_key_values(case["arg"]) == expected
        elif expected.startswith("error"):
            with pytest.raises(typer.BadParameter, match=case["arg"]):
                parse_key_values(case["arg"])
        else:
            assert parse_key_values(case["arg"])["seed"] in (7, "007")
