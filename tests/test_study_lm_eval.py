"""The study against the reference harness: what its rows conclude, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.aggregate import TaskScore
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.lm_eval_agreement import compare_answers
from llmbench.bench.accuracy.metric_scores import MetricScore
from llmbench.bench.errors import BenchConfigError, BenchError
from llmbench.bench.studies.study import Lab, Row
from llmbench.bench.studies.vs_lm_eval import VsLmEvalSettings, conclude, measure


def row(task: str, **changes: Any) -> Row:
    fields: Row = {
        "task": task,
        "num_items": 10,
        "llmbench_s": 2.0,
        "lm_eval_s": 9.0,
        "lm_eval_batch_size": 4,
        "speedup_ratio": 4.5,
        "max_logprob_difference": 2e-6,
        "same_answer_share": 1.0,
        "max_score_difference": 0.0,
        "has_equal_scores": True,
        "peak_resident_bytes": 1_500_000_000,
        "weight_bytes": 270_000_000,
        "kv_bytes": 1_000_000_000,
        "lm_eval_peak_resident_bytes": 3_000_000_000,
    }
    return fields | changes


def test_finding_weighs_tasks_by_their_time() -> None:
    rows = [row("hellaswag"), row("gsm8k", lm_eval_s=3.0, max_logprob_difference=None)]
    found = conclude(rows)
    assert found.summary["speedup_ratio"] == 3.0  # 12 s over 4 s, not the mean of 4.5 and 1.5
    assert "at most 2.0e-06 nats apart" in found.finding
    assert "2 of 2 have equal scores" in found.finding
    assert found.table[-1]["task"] == "all"
    assert "of them weights" in found.notes[0]


def test_scores_that_differ_are_shown() -> None:
    found = conclude([row("hellaswag", has_equal_scores=False, max_score_difference=0.02)])
    assert found.table == [found.table[0]]
    assert found.table[0]["scores"] == "differ by 0.02"
    assert "0 of 1 have equal scores" in found.finding


def test_limits_of_long_suites_are_their_own() -> None:
    settings = VsLmEvalSettings(limit=50, mmlu_limit=5, gsm8k_limit=16)
    found = [settings.limit_of(task) for task in ("winogrande", "mmlu", "mmlu_anatomy", "gsm8k")]
    assert found == [50, 5, 5, 16]


@pytest.mark.parametrize("changes", [{"limit": 0}, {"harness_batch_sizes": ()}, {"tasks": ()}])
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BenchConfigError):
        VsLmEvalSettings(**changes)


def test_missing_harness_is_told_before_anything_runs(tmp_path: Path) -> None:
    settings = VsLmEvalSettings(peer_python=str(tmp_path / "python"))
    with pytest.raises(BenchError, match="interpreter of lm-eval's environment") as refused:
        next(measure(settings, Lab(folder=tmp_path)))
    assert "make .peers/lm-eval/installed" in refused.value.__notes__[0]


# How far two programs are apart


def item(doc_id: int, logs: tuple[float, ...], pick: int) -> ItemRecord:
    return ItemRecord(
        task="piqa",
        doc_id=doc_id,
        key="",
        doc_hash="d",
        prompt_hash=f"p{doc_id}",
        target_hash="t",
        gold=0,
        choices=("a", "b"),
        loglikelihoods=logs,
        is_greedy=(False, False),
        pick=pick,
    )


def harness(*logs: tuple[float, ...], acc: float = 0.5, prompt: str = "p") -> dict[str, Any]:
    samples = [
        {"doc_id": number, "prompt_hash": f"{prompt}{number}", "loglikelihoods": list(values)}
        for number, values in enumerate(logs)
    ]
    return {"samples": {"piqa": samples}, "scores": {"piqa": {"acc,none": acc}}}


def scores(acc: float) -> dict[str, TaskScore]:
    metric = MetricScore(value=acc, n=2)
    return {
        "piqa": TaskScore(task="piqa", primary_metric="acc", metrics={"acc": metric}, num_items=2)
    }


def test_largest_difference_and_other_answers_are_found() -> None:
    items = {"piqa": [item(0, (-1.0, -2.0), 0), item(1, (-1.0, -1.5), 0)]}
    found = compare_answers(items, scores(0.5), harness((-1.0, -2.25), (-1.0, -0.5), acc=0.5))
    assert found.max_difference == 1.0
    assert (found.num_same_answers, found.num_answers) == (1, 2)
    assert found.has_equal_scores
    assert found.num_other_prompts == 0


def test_other_prompts_and_scores_are_counted() -> None:
    items = {"piqa": [item(0, (-1.0, -2.0), 0)]}
    found = compare_answers(items, scores(1.0), harness((-1.0, -2.0), acc=0.5, prompt="q"))
    assert found.num_other_prompts == 1
    assert not found.has_equal_scores
    assert found.max_score_difference == 0.5


def test_difference_that_is_no_number_is_the_largest() -> None:
    items = {"piqa": [item(0, (float("nan"), -2.0), 0)]}
    found = compare_answers(items, scores(1.0), harness((-1.0, -2.0), acc=1.0))
    assert found.max_difference != found.max_difference


def test_other_documents_are_refused() -> None:
    items = {"piqa": [item(0, (-1.0, -2.0), 0)]}
    with pytest.raises(BenchError, match="expected the same documents of piqa"):
        compare_answers(items, scores(1.0), harness((-1.0, -2.0), (-1.0, -2.0)))
