"""Service-level objectives: what is read, and what is refused."""

import pytest

from llmbench.bench.errors import BenchConfigError
from llmbench.bench.slo import Goodput


@pytest.mark.parametrize(
    "text",
    [
        "ttft:200 tpot:50 e2el:2000",
        "ttft:200,tpot:50,e2el:2000",
        ["ttft:200", "tpot:50", "e2el:2000"],
    ],
)
def test_objectives_are_read_in_milliseconds(text: str | list[str]) -> None:
    assert Goodput.parse(text) == Goodput(ttft_s=0.2, tpot_s=0.05, e2el_s=2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one objective"),
        ("ttft", "expected NAME:MILLISECONDS, found `ttft`"),
        ("ttft=200", "expected NAME:MILLISECONDS, found `ttft=200`"),
        ("itl:20", "unknown objective `itl`"),
        ("TTFT:20", "unknown objective `TTFT`"),
        ("ttft:fast", "positive number of ms, found `ttft:fast`"),
        ("ttft:", "positive number of ms, found `ttft:`"),
        ("ttft:-5", "positive number of ms"),
        ("ttft:0", "positive number of ms"),
        ("tpot:nan", "positive number of ms"),
        ("tpot:inf", "positive number of ms"),
        ("ttft:5 ttft:6", "`ttft` is given twice"),
    ],
)
def test_wrong_objective_names_itself(text: str, message: str) -> None:
    with pytest.raises(BenchConfigError, match=message):
        Goodput.parse(text)


def test_misspelt_objective_gets_the_near_one_as_a_hint() -> None:
    with pytest.raises(BenchConfigError) as caught:
        Goodput.parse("ttfft:200")
    assert "did you mean `ttft`?" in caught.value.__notes__


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_limit_that_is_no_positive_time_is_refused(limit: float) -> None:
    with pytest.raises(BenchConfigError, match="positive time for ttft_s"):
        Goodput(ttft_s=limit)


def test_time_that_nobody_saw_does_not_meet_its_objective() -> None:
    assert not Goodput(ttft_s=1.0).is_met(ttft_s=None, tpot_s=0.1, e2el_s=0.1)
    assert not Goodput(e2el_s=1.0).is_met(ttft_s=0.1, tpot_s=0.1, e2el_s=None)
    assert Goodput(tpot_s=1.0).is_met(ttft_s=None, tpot_s=None, e2el_s=None)
