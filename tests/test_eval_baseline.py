"""A candidate held against its baseline on the same items: distances, flips, and what is cached."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbench.bench.accuracy.baseline_store import BaselineStore
from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_costs import count_costs
from llmbench.bench.accuracy.eval_plan import PreparedEval, prepare
from llmbench.bench.accuracy.eval_result import EvalResult, compare
from llmbench.bench.accuracy.evaluation import evaluate
from llmbench.bench.accuracy.items import read_items
from llmbench.bench.errors import BenchError, ResultsError

TASKS = ("sums", "spoken", "letters")


@pytest.fixture(scope="module")
def prepared(small_tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedEval:
    """Every kind of question."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(
        "The quick brown fox jumps over the lazy dog. 빠른 여우. " * 3, encoding="utf-8"
    )
    config = EvalConfig(
        tasks=(*TASKS, "perplexity"), include=(small_tasks,), text=str(text), window=64
    )
    return prepare(config)


@pytest.fixture(scope="module")
def compared(
    doubles: ModuleType,
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[EvalResult, Path]:
    """A candidate with other weights, and the cache that its baseline left."""
    folder = tmp_path_factory.mktemp("compared")
    result = evaluate(
        prepared,
        doubles.CountingModel(byte_llama(1)),
        folder / "run",
        baseline=doubles.CountingModel(byte_llama()),
        store_root=folder / "cache",
    )
    return result, folder


def test_a_baseline_changes_no_answer(
    doubles: ModuleType,
    compared: tuple[EvalResult, Path],
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
) -> None:
    alone = evaluate(prepared, doubles.CountingModel(byte_llama(1)), tmp_path / "run")
    doubles.assert_same_answers(compared[0].items, alone.items)


def test_divergence_is_that_of_both_models_side_by_side(
    doubles: ModuleType,
    compared: tuple[EvalResult, Path],
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
) -> None:
    base, candidate = (doubles.reference_model(byte_llama(seed)) for seed in (0, 1))
    tokenizer = doubles.CountingModel(byte_llama()).tokenizer
    (sums,) = [each for each in prepared.tasks if each.task.name == "sums"]
    item = compared[0].items["sums"][3]
    assert item.divergence is not None
    expected = []
    for context, continuation in sums.prompts[3].pairs:
        ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
        start = len(tokenizer(context)["input_ids"])
        with torch.no_grad():
            p, q = (model(ids).logits[0].log_softmax(-1) for model in (base, candidate))
        expected += (p.exp() * (p - q)).sum(-1)[start - 1 : -1].tolist()
    assert item.divergence.kl == pytest.approx(expected, abs=1e-5)


def test_every_scored_item_has_a_divergence_and_no_other(
    compared: tuple[EvalResult, Path],
) -> None:
    for task, items in compared[0].items.items():
        for item in items:
            assert (item.divergence is not None) == (task != "spoken")


def test_the_comparison_counts_flips_and_says_a_verdict(
    compared: tuple[EvalResult, Path],
) -> None:
    comparison = compared[0].comparison
    assert comparison is not None
    assert [score.task for score in comparison.paired] == [*TASKS, "perplexity"]
    base_items = read_items(compared[1] / "run" / "baseline" / "items-sums.jsonl")
    base = [item.metrics["acc"] for item in base_items]
    ours = [item.metrics["acc"] for item in compared[0].items["sums"]]
    flips = comparison.paired[0].flips
    assert flips is not None
    assert flips.num_right_to_wrong == sum(a > b for a, b in zip(base, ours, strict=True))
    assert comparison.divergence is not None
    assert comparison.divergence.kl_mean is not None
    assert comparison.verdict.endswith(".")
    record = json.loads((compared[1] / "run" / "scores.json").read_text())
    assert record["comparison"]["verdict"] == comparison.verdict


def test_a_second_candidate_asks_the_baseline_nothing(
    doubles: ModuleType,
    compared: tuple[EvalResult, Path],
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
) -> None:
    base = doubles.CountingModel(byte_llama())
    result = evaluate(
        prepared,
        doubles.CountingModel(byte_llama(2)),
        tmp_path / "run",
        baseline=base,
        store_root=compared[1] / "cache",
    )
    assert not base.asked
    assert not base.is_loaded
    assert result.comparison is not None
    first, second = (folder / "run" / "baseline" for folder in (compared[1], tmp_path))
    for task in (*TASKS, "perplexity"):
        name = f"items-{task}.jsonl"
        assert (second / name).read_bytes() == (first / name).read_bytes()


def test_a_model_is_no_distance_from_itself(
    doubles: ModuleType,
    compared: tuple[EvalResult, Path],
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
) -> None:
    result = evaluate(
        prepared,
        doubles.CountingModel(byte_llama()),
        tmp_path / "run",
        baseline=doubles.CountingModel(byte_llama()),
        store_root=compared[1] / "cache",
    )
    assert result.comparison is not None
    assert result.comparison.divergence is not None
    assert result.comparison.divergence.kl_max == pytest.approx(0, abs=1e-9)
    assert result.comparison.divergence.top1_agreement == 1
    for score in result.comparison.paired:
        assert score.difference == pytest.approx(0, abs=1e-9)


def test_a_baseline_may_come_later(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(prepared.config, tasks=("sums", "spoken"), text=None, limits=3)
    questions = prepare(config)
    first = evaluate(questions, doubles.CountingModel(byte_llama(1)), tmp_path / "run")
    again = evaluate(
        questions,
        doubles.CountingModel(byte_llama(1)),
        tmp_path / "run",
        baseline=doubles.CountingModel(byte_llama()),
        store_root=tmp_path / "cache",
    )
    doubles.assert_same_answers(again.items, first.items)
    assert all(item.divergence is not None for item in again.items["sums"])


def test_models_are_not_in_memory_together(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    base = doubles.CountingModel(byte_llama())
    candidate = doubles.CountingModel(byte_llama(1))
    both: list[bool] = []
    evaluate(
        prepared,
        candidate,
        tmp_path / "run",
        baseline=base,
        store_root=tmp_path / "cache",
        on_progress=lambda *_: both.append(base.is_loaded and candidate.is_loaded),
    )
    assert both
    assert not any(both)


@pytest.fixture
def other_words(byte_llama: Callable[..., Path], tmp_path: Path) -> Path:
    """The same model behind a tokenizer that begins texts with BOS."""
    return byte_llama(1, adds_bos=True)


def test_models_with_different_tokenizers_are_compared_by_answers_alone(
    doubles: ModuleType,
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    other_words: Path,
    tmp_path: Path,
) -> None:
    base, candidate = doubles.CountingModel(byte_llama()), doubles.CountingModel(other_words)
    with pytest.raises(BenchError, match="different tokenizers") as refusal:
        evaluate(prepared, candidate, tmp_path / "a", baseline=base, store_root=tmp_path / "cache")
    assert "--no-divergence" in refusal.value.__notes__[0]
    assert not base.is_loaded
    result = evaluate(prepared, candidate, tmp_path / "b", baseline=base, with_divergence=False)
    assert result.comparison is not None
    assert result.comparison.divergence is None
    assert [score.task for score in result.comparison.paired] == list(TASKS)


def test_a_baseline_without_room_on_disk_is_refused_before_it_is_loaded(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    base = doubles.CountingModel(byte_llama())
    with pytest.raises(BenchError, match="limit is 2,000 bytes"):
        evaluate(
            prepared,
            doubles.CountingModel(byte_llama(1)),
            tmp_path / "run",
            baseline=base,
            store_root=tmp_path / "cache",
            store_limit_bytes=2000,
        )
    assert not base.is_loaded


def test_what_the_cache_lost_is_computed_again(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(prepared.config, tasks=("sums",), text=None, limits=4)
    questions = prepare(config)

    def run(folder: str) -> Any:
        base = doubles.CountingModel(byte_llama())
        evaluate(
            questions,
            doubles.CountingModel(byte_llama(1)),
            tmp_path / folder,
            baseline=base,
            store_root=tmp_path / "cache",
        )
        return base

    run("a")
    with BaselineStore(
        doubles.CountingModel(byte_llama()).identity, root=tmp_path / "cache"
    ) as store:
        index = store.folder / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:1]))
    assert len(run("b").asked) == 3


@pytest.mark.parametrize("has_run_before", [False, True])
def test_what_was_damaged_in_the_cache_is_computed_again(
    doubles: ModuleType,
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
    has_run_before: bool,
) -> None:
    config = dataclasses.replace(prepared.config, tasks=("sums",), text=None, limits=4)
    questions = prepare(config)

    def run(folder: str, seed: int) -> tuple[Any, EvalResult]:
        base = doubles.CountingModel(byte_llama())
        result = evaluate(
            questions,
            doubles.CountingModel(byte_llama(seed)),
            tmp_path / folder,
            baseline=base,
            store_root=tmp_path / "cache",
        )
        return base, result

    _, expected = run("a", 1)
    with BaselineStore(
        doubles.CountingModel(byte_llama()).identity, root=tmp_path / "cache"
    ) as store:
        rows = store.folder / "rows.bin"
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)
    if has_run_before:  # the folder has the base's records, and the cache has lost its states
        (tmp_path / "a" / "items-sums.jsonl").unlink()
    base, result = run("a" if has_run_before else "b", 1)
    assert len(base.asked) == 1
    assert [item.divergence for item in result.items["sums"]] == [
        item.divergence for item in expected.items["sums"]
    ]


def test_a_folder_of_another_model_is_refused_before_the_baseline_is_asked(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(prepared.config, tasks=("spoken",), text=None, limits=1)
    evaluate(prepare(config), doubles.CountingModel(byte_llama(2)), tmp_path / "run")
    base = doubles.CountingModel(byte_llama())
    with pytest.raises(ResultsError, match="model_digest"):
        evaluate(
            prepare(config),
            doubles.CountingModel(byte_llama(1)),
            tmp_path / "run",
            baseline=base,
            store_root=tmp_path / "cache",
        )
    assert not base.is_loaded


def small_run(prepared: PreparedEval, folder: Path, **models: Any) -> EvalResult:
    """Four choices alone."""
    config = dataclasses.replace(prepared.config, tasks=("sums",), text=None, limits=4)
    models.setdefault("store_root", folder.parent / "cache")
    return evaluate(prepare(config), models.pop("model"), folder, **models)


def test_divergence_that_is_not_asked_for_is_not_told(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """Though the folder's items still hold what an earlier run measured."""
    for with_divergence in (True, False):
        result = small_run(
            prepared,
            tmp_path / "run",
            model=doubles.CountingModel(byte_llama(1)),
            baseline=doubles.CountingModel(byte_llama()),
            with_divergence=with_divergence,
        )
        assert result.comparison is not None
        assert (result.comparison.divergence is not None) == with_divergence
    assert all(item.divergence is not None for item in result.items["sums"])
    others = {
        task: [dataclasses.replace(item, key="0") for item in items]
        for task, items in result.items.items()
    }
    against_others = compare(prepared, result, others, "another").comparison
    assert against_others is not None
    assert against_others.divergence is None


def test_another_baseline_is_refused_before_anything_is_overwritten(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    candidate = doubles.CountingModel(byte_llama(1))
    base = doubles.CountingModel(byte_llama())
    small_run(prepared, tmp_path / "run", model=candidate, baseline=base)
    files = sorted((tmp_path / "run").rglob("*.json*"))
    before = [file.read_bytes() for file in files]
    with pytest.raises(ResultsError, match="model_digest"):
        small_run(
            prepared,
            tmp_path / "run",
            model=doubles.CountingModel(byte_llama(1)),
            baseline=doubles.CountingModel(byte_llama(2)),
        )
    assert [file.read_bytes() for file in files] == before


def test_vocabularies_of_other_sizes_are_refused_before_anything_runs(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """As of a head that was padded: the tokenizers are the same."""
    folder = tmp_path / "padded"
    shutil.copytree(byte_llama(1), folder)
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and len(tensor) == 258:
            tensors[name] = torch.cat([tensor, tensor.new_zeros(6, tensor.shape[1])])
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 264}))
    base, padded = doubles.CountingModel(byte_llama()), doubles.CountingModel(folder)
    with pytest.raises(BenchError, match=r"expected the 258 logits .* found 264") as refusal:
        small_run(prepared, tmp_path / "run", model=padded, baseline=base)
    assert "--no-divergence" in refusal.value.__notes__[0]
    assert not base.is_loaded
    assert not (tmp_path / "run").exists()


def test_room_is_asked_for_what_is_stored(
    doubles: ModuleType,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Choices of one token share a state, and the second of two identical documents is known."""
    rows = [{"a": a, "choices": ["A", "B", "no"], "gold": 0} for a in (1, 2, 1)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters_only.yaml").write_text(
        "task: letters_only\nsummary: t\nlocal_files: {test: t.jsonl}\ntest_split: test\n"
        'output_type: multiple_choice\nnum_fewshot: 0\ndoc_to_text: "{{a}} ="\n'
        'doc_to_choice: choices\ndoc_to_target: gold\ntarget_delimiter: ""\n'
        "metric_list: [{metric: acc}]\nmetadata: {version: 1.0}\n"
    )
    questions = prepare(EvalConfig(tasks=("letters_only",), include=(tmp_path,)))
    asked: list[dict[str, Any]] = []
    require = BaselineStore.require_room

    def listen(self: BaselineStore, **needed: Any) -> None:
        asked.append(needed)
        require(self, **needed)

    monkeypatch.setattr(BaselineStore, "require_room", listen)
    base = doubles.CountingModel(byte_llama())
    evaluate(
        questions,
        doubles.CountingModel(byte_llama(1)),
        tmp_path / "run",
        baseline=base,
        store_root=tmp_path / "cache",
    )
    (needed,) = asked
    (stored,) = (tmp_path / "cache").rglob("rows.bin")
    assert needed["num_answers"] == 2
    assert needed["num_tokens"] == 2 * (1 + 2)
    assert stored.stat().st_size == needed["num_tokens"] * 32 * 4  # 32 numbers of float32
    cost = count_costs(questions, base)["letters_only"]
    assert (cost.num_scored_tokens, cost.num_stored_rows) == (3 * 4, 3 * 3)


def test_dry_run_cuts_prompts_to_what_the_baseline_reads(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path]
) -> None:
    config = dataclasses.replace(prepared.config, tasks=("sums",), text=None)
    questions = prepare(config)
    model = doubles.CountingModel(byte_llama(1))
    base = doubles.CountingModel(byte_llama(max_positions=30))
    assert count_costs(questions, model)["sums"].num_truncated == 0
    cost = count_costs(questions, model, baseline=base)["sums"]
    assert cost.num_truncated == 12
    assert cost.longest <= 31  # the last token is scored and not read
