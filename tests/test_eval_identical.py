"""Documents that are asked with the same tokens: each keeps its own, and all are counted."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmbench.bench.accuracy import eval_run
from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_plan import prepare
from llmbench.bench.accuracy.eval_result import EvalResult
from llmbench.bench.accuracy.evaluation import evaluate

Run = Callable[..., tuple[Any, EvalResult]]


@pytest.fixture
def run(
    doubles: ModuleType, byte_llama: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[Any, EvalResult]]:
    """Evaluate a candidate against the baseline, whose cache the runs of a test share."""

    def go(tasks: Path, name: str, **config: Any) -> tuple[Any, EvalResult]:
        base = doubles.CountingModel(byte_llama())
        result = evaluate(
            prepare(EvalConfig(tasks=("pairs",), include=(tasks,), **config)),
            doubles.CountingModel(byte_llama(1)),
            tmp_path / name,
            baseline=base,
            store_root=tmp_path / "cache",
        )
        return base, result

    return go


def write_task(folder: Path, texts: Sequence[str], shots: Sequence[str] = ()) -> Path:
    """A task of two choices behind a text, and of examples that are taken in their order."""
    folder.mkdir()
    for name, rows in (("test", texts), ("dev", shots)):
        lines = [json.dumps({"text": row, "choices": ["x", "y"], "gold": 0}) for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "pairs.yaml").write_text(
        "task: pairs\nsummary: pairs\nlocal_files: {test: test.jsonl, dev: dev.jsonl}\n"
        "test_split: test\nfewshot_split: dev\nfewshot_config: {sampler: first_n}\n"
        f"output_type: multiple_choice\nnum_fewshot: {len(shots)}\n"
        'doc_to_text: "{{text}} ="\ndoc_to_choice: choices\ndoc_to_target: gold\n'
        "metric_list: [{metric: acc}]\nmetadata: {version: 1.0}\n"
    )
    return folder


def test_identical_documents_count_for_every_candidate(run: Run, tmp_path: Path) -> None:
    tasks = write_task(tmp_path / "tasks", ["one", "two", "one"])
    for name in ("first", "second"):
        _, result = run(tasks, name)
        base = json.loads((tmp_path / name / "baseline" / "scores.json").read_text())
        assert base["tasks"]["pairs"]["num_items"] == 3
        assert [item.doc_id for item in result.items["pairs"]] == [0, 1, 2]
        assert result.comparison is not None
        assert result.comparison.paired[0].n == 3


def test_identical_documents_of_two_waves_are_asked_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_run, "WAVE_TOKENS", 1)
    tasks = write_task(tmp_path / "tasks", ["one", "two", "one"])
    base, result = run(tasks, "run")
    assert len(base.asked) == 2
    assert result.comparison is not None
    assert result.comparison.paired[0].n == 3
    assert result.comparison.divergence is not None
    assert result.comparison.divergence.num_items == 3


def test_stored_answer_to_a_prompt_cut_to_the_same_tokens_is_this_prompts(
    run: Run, tmp_path: Path
) -> None:
    """With three shots or two, a long document leaves room for none of them."""
    tasks = write_task(tmp_path / "tasks", ["z" * 300], ["y" * 200] * 4)
    run(tasks, "three", num_fewshot=3, max_length=128)
    base, result = run(tasks, "two", num_fewshot=2, max_length=128)
    assert not base.asked
    assert result.comparison is not None
    assert result.comparison.paired[0].n == 1
    (line,) = (tmp_path / "two" / "baseline" / "items-pairs.jsonl").read_text().splitlines()
    record = json.loads(line)
    (item,) = result.items["pairs"]
    assert record["fewshot_ids"] == list(item.fewshot_ids) == [0, 1]
    assert record["prompt_hash"] == item.prompt_hash
    assert record["num_truncated_tokens"] == item.num_truncated_tokens
