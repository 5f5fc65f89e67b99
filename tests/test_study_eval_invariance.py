"""The study of what an evaluation's answers depend on: five ways of running, one set of answers."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench import strict_json
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.errors import BenchConfigError
from llmbench.bench.studies.eval_invariance import (
    VARIANTS,
    EvalInvarianceSettings,
    compare,
    conclude,
    measure,
)
from llmbench.bench.studies.study import Lab


def choice(doc_id: int, *loglikelihoods: float, **changes: Any) -> ItemRecord:
    item = ItemRecord(
        task="sums",
        doc_id=doc_id,
        key="",
        doc_hash="",
        prompt_hash="same",
        target_hash="",
        gold=0,
        loglikelihoods=loglikelihoods,
        num_tokens=(1,) * len(loglikelihoods),
        pick=max(range(len(loglikelihoods)), key=loglikelihoods.__getitem__),
    )
    return dataclasses.replace(item, **changes)


def test_another_pick_and_another_sum_are_counted() -> None:
    expected = [choice(0, -1.0, -2.0), choice(1, -3.0, -1.0)]
    assert compare(expected, [choice(0, -1.0, -2.5), choice(1, -1.0, -1.25)]) == {
        "num_answers": 2,
        "num_same_answers": 1,
        "max_logprob_difference": 2.0,
        "num_logprobs": 4,
        "num_equal_logprobs": 1,
        "num_unlike_logprobs": 0,
    }


def test_what_is_no_number_on_one_side_alone_is_counted_and_told() -> None:
    nan, inf = math.nan, math.inf
    expected = [choice(0, nan, -inf, -1.0, -2.0)]
    found = compare(expected, [choice(0, nan, -inf, nan, -2.5)])
    assert found["max_logprob_difference"] == 0.5
    assert (found["num_logprobs"], found["num_equal_logprobs"]) == (4, 2)
    assert found["num_unlike_logprobs"] == 1
    fixed = {"task": "sums", "num_items": 1, "duration_s": 1.0}
    rows = [{"variant": variant, **fixed, **found} for variant in VARIANTS]
    told = conclude(strict_json.loads(strict_json.dumps(rows))).finding
    assert "4 of 16 log-likelihoods are not finite on one side alone" in told


def test_a_text_differs_by_its_tokens_and_has_no_answer() -> None:
    text = choice(0, -10.0, num_tokens=(20,), text_size=(4, 9), pick=None)
    found = compare([text], [dataclasses.replace(text, loglikelihoods=(-10.5,))])
    assert found["max_logprob_difference"] == pytest.approx(0.5 / 20)
    assert found["num_answers"] == 0


def test_a_generated_answer_is_the_same_word_for_word() -> None:
    one = choice(0, -1.0, loglikelihoods=None, response="4", pick="4")
    found = compare([one], [dataclasses.replace(one, response="4.", pick="4")])
    assert (found["num_answers"], found["num_same_answers"]) == (1, 0)
    assert found["max_logprob_difference"] is None


def test_every_way_of_running_gives_the_same_answers_in_float32(
    byte_llama: Callable[..., Path], small_tasks: Path, tmp_path: Path
) -> None:
    settings = EvalInvarianceSettings(
        model=str(byte_llama()),
        dtype="float32",
        num_threads=1,
        compile=False,
        tasks=("sums", "spoken"),
        limit=6,
        data_dir=str(small_tasks),
        include=str(small_tasks),
    )
    rows = list(measure(settings, Lab(folder=tmp_path)))
    assert [(row["variant"], row["task"]) for row in rows] == [
        (variant, task) for variant in VARIANTS for task in ("sums", "spoken")
    ]
    assert {row["num_items"] for row in rows} == {6}
    assert all(row["num_same_answers"] == row["num_answers"] == 6 for row in rows)
    found = conclude(rows)
    assert 0 <= found.summary["max_logprob_difference"] < 1e-5
    assert found.summary["same_answer_share"] == 1.0
    assert "12 documents, run 5 ways: 48 of 48 answers are the same, " in found.finding
    assert found.table[0]["equal_logprob_share"] == 1.0


@pytest.mark.parametrize("changes", [{"limit": 0}, {"tasks": ()}, {"tasks": ("perplexity",)}])
def test_settings_that_ask_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BenchConfigError):
        EvalInvarianceSettings(**changes)
