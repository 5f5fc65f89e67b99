"""An evaluation from tasks to scores, on tiny models and on real questions."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_plan import PreparedEval, prepare
from llmbench.bench.accuracy.eval_result import EvalResult, score_items
from llmbench.bench.accuracy.eval_run import in_order
from llmbench.bench.accuracy.evaluation import evaluate
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.questions import Question
from llmbench.bench.errors import BenchConfigError, ResultsError, WorkloadError
from llmbench.engine.config import EngineConfig
from llmbench.engine.scoring import ScoreRequest

TASKS = ("sums", "spoken", "letters")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "The quick brown fox jumps over the lazy dog. 빠른 여우. " * 6, encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def prepared(small_tasks: Path, text_file: Path) -> PreparedEval:
    """Every kind of question."""
    config = EvalConfig(
        tasks=(*TASKS, "perplexity"), include=(small_tasks,), text=str(text_file), window=64
    )
    return prepare(config)


@pytest.fixture(scope="module")
def whole(
    doubles: ModuleType,
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> EvalResult:
    """All of it, on the engine as it comes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return evaluate(prepared, doubles.CountingModel(byte_llama()), folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 24},
        {"prefix_cache": "none"},
        {"kv_manager": "contiguous"},
        {"policy": "prefill_first", "block_size": 8},
    ],
    ids=str,
)
def test_results_do_not_depend_on_batches_chunks_and_caches(
    doubles: ModuleType,
    prepared: PreparedEval,
    whole: EvalResult,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    result = evaluate(prepared, doubles.CountingModel(byte_llama(), **settings), tmp_path / "run")
    doubles.assert_same_answers(result.items, whole.items)


def test_real_questions_do_not_depend_on_batches_chunks_and_caches(
    doubles: ModuleType, data_dir: Path, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    names = ("arc_easy", "mmlu_anatomy", "winogrande", "truthfulqa_mc2", "kobest_boolq")
    config = EvalConfig(tasks=names, limits=2, num_fewshot=1, data_dir=data_dir)
    questions = prepare(config)
    model = doubles.CountingModel(byte_llama(max_positions=2048))
    expected = evaluate(questions, model, tmp_path / "a").items
    other = doubles.CountingModel(
        byte_llama(max_positions=2048),
        prefix_cache="none",
        max_num_seqs=2,
        max_num_batched_tokens=100,
    )
    doubles.assert_same_answers(evaluate(questions, other, tmp_path / "b").items, expected)


def test_likelihoods_are_those_of_transformers(
    doubles: ModuleType, whole: EvalResult, prepared: PreparedEval, byte_llama: Callable[..., Path]
) -> None:
    model = doubles.reference_model(byte_llama())
    tokenizer = EngineModel(EngineConfig(model=str(byte_llama()))).tokenizer
    (sums,) = [each for each in prepared.tasks if each.task.name == "sums"]
    for prompt, item in zip(sums.prompts, whole.items["sums"], strict=True):
        found = []
        for context, continuation in prompt.pairs:
            ids = tokenizer(context + continuation)["input_ids"]
            start = len(tokenizer(context)["input_ids"])
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            found.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids))))
        assert item.loglikelihoods == pytest.approx(found, abs=1e-4)
        assert item.pick == found.index(max(found))


def test_perplexity_is_that_of_a_plain_loop(
    doubles: ModuleType, whole: EvalResult, text_file: Path, byte_llama: Callable[..., Path]
) -> None:
    model = doubles.reference_model(byte_llama())
    ids = EngineModel(EngineConfig(model=str(byte_llama()))).tokenizer(text_file.read_text())
    losses = []
    for start in range(0, len(ids["input_ids"]) // 64 * 64, 64):
        window = torch.tensor([ids["input_ids"][start : start + 64]])
        with torch.no_grad():
            losses.append(float(model(window, labels=window).loss))
    assert whole.perplexity is not None
    assert whole.perplexity.token == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert any("protocol gptq" in notice for notice in whole.notices)


def test_scores_are_those_of_the_items(whole: EvalResult, prepared: PreparedEval) -> None:
    assert whole.is_complete
    assert {name: len(items) for name, items in whole.items.items()} == {
        "sums": 12,
        "spoken": 6,
        "letters": 3,
        "perplexity": len(whole.items["perplexity"]),
    }
    right = [item.metrics["acc"] for item in whole.items["sums"]]
    assert whole.tasks["sums"].metrics["acc"].value == pytest.approx(sum(right) / 12)
    again = score_items(prepared, whole.items, None, model="m")
    assert again.tasks == whole.tasks


def test_without_baseline_no_hidden_states_are_asked_for(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    model = doubles.CountingModel(byte_llama())
    evaluate(prepared, model, tmp_path / "run")
    assert not model.wanted_hidden


def test_a_limit_asks_what_the_whole_run_asks(
    doubles: ModuleType,
    whole: EvalResult,
    small_tasks: Path,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config = EvalConfig(
        tasks=TASKS, include=(small_tasks,), limits={"*": 2, "sums": 5, "letters": 1}
    )
    result = evaluate(prepare(config), doubles.CountingModel(byte_llama()), tmp_path / "run")
    assert {task: len(items) for task, items in result.items.items()} == {
        "sums": 5,
        "spoken": 2,
        "letters": 1,
    }
    expected = {task: whole.items[task][: len(items)] for task, items in result.items.items()}
    doubles.assert_same_answers(result.items, expected)


def test_a_folder_is_extended_by_a_larger_limit(
    doubles: ModuleType, small_tasks: Path, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    def run(limit: int) -> tuple[EvalResult, Any]:
        config = EvalConfig(tasks=("sums",), include=(small_tasks,), limits=limit)
        model = doubles.CountingModel(byte_llama())
        return evaluate(prepare(config), model, tmp_path / "run"), model

    run(4)
    result, model = run(7)
    assert len(result.items["sums"]) == 7
    assert len(model.asked) == 3
    result, model = run(2)
    assert result.tasks["sums"].num_items == 2
    assert not model.asked


def test_shards_together_are_the_whole(
    doubles: ModuleType,
    whole: EvalResult,
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Run into one folder one after another: the command without a shard then asks nothing."""
    for index in range(3):
        config = dataclasses.replace(prepared.config, shard=(index, 3))
        evaluate(prepare(config), doubles.CountingModel(byte_llama()), tmp_path)
    model = doubles.CountingModel(byte_llama())
    merged = evaluate(prepared, model, tmp_path)
    assert not model.asked
    doubles.assert_same_answers(merged.items, whole.items)


def test_group_without_items_of_a_member_has_no_score(
    doubles: ModuleType, small_tasks: Path, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """As of the subjects of MMLU, most of which a small limit's second shard knows nothing."""
    (tmp_path / "both.yaml").write_text(
        "group: both\nsummary: both\ntask: [sums, spoken]\n"
        "aggregate_metric_list: [{metric: primary, weight_by_size: false}]\n"
        "metadata: {version: 1}\n"
    )
    config = EvalConfig(
        tasks=("both",),
        include=(small_tasks, tmp_path),
        limits={"sums": 2, "spoken": 1},
        shard=(1, 2),
    )
    result = evaluate(prepare(config), doubles.CountingModel(byte_llama()), tmp_path / "run")
    assert result.is_complete
    assert list(result.tasks) == ["sums"]
    assert not result.groups
    assert any("both: no score" in line and "(spoken)" in line for line in result.notices)
    assert json.loads((tmp_path / "run" / "scores.json").read_text())["doc_ids"] == {"sums": "1"}


def test_another_model_does_not_get_the_folder(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(prepared.config, tasks=("spoken",), text=None, limits=1)
    evaluate(prepare(config), doubles.CountingModel(byte_llama()), tmp_path / "run")
    with pytest.raises(ResultsError, match="model_digest"):
        evaluate(prepare(config), doubles.CountingModel(byte_llama(1)), tmp_path / "run")
    with pytest.raises(ResultsError, match=r"config\.num_fewshot"):
        evaluate(
            prepare(dataclasses.replace(config, num_fewshot=3)),
            doubles.CountingModel(byte_llama()),
            tmp_path / "run",
        )


def test_the_manifest_says_what_was_asked(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(prepared.config, tasks=("sums",), text=None, limits=2, seed=7)
    evaluate(
        prepare(config),
        doubles.CountingModel(byte_llama()),
        tmp_path / "run",
        settings={"max_num_seqs": 64},
    )
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    task = manifest["plan"]["tasks"]["sums"]
    assert manifest["seed"] == 7
    assert task["version"] == 1.0
    assert task["num_fewshot"] == 2
    assert len(task["sha256s"]["test"]) == 64
    assert any("questions themselves" in line for line in task["deviations"])
    assert manifest["plan"]["identity"]["dtype"] == "float32"
    assert manifest["plan"]["settings"] == {"max_num_seqs": 64}
    assert manifest["environment"]["packages"]["torch"]


def test_long_prompts_are_cut_counted_and_said(
    doubles: ModuleType, small_tasks: Path, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    config = EvalConfig(tasks=("sums",), include=(small_tasks,), max_length=30)
    result = evaluate(prepare(config), doubles.CountingModel(byte_llama()), tmp_path / "run")
    assert result.tasks["sums"].num_truncated == 12
    assert any("12 of 12 prompts lost their beginning" in line for line in result.notices)


def test_an_answer_without_room_is_cut_and_said(
    doubles: ModuleType, small_tasks: Path, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    config = EvalConfig(tasks=("spoken",), include=(small_tasks,), max_length=32, max_gen_toks=256)
    model = doubles.CountingModel(byte_llama())
    result = evaluate(prepare(config), model, tmp_path / "run")
    assert result.tasks["spoken"].num_truncated == 0
    assert any("6 answers had less room" in line for line in result.notices)


def test_an_overflow_that_is_refused_is_refused_before_anything_runs(
    doubles: ModuleType, small_tasks: Path, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    config = EvalConfig(
        tasks=("spoken", "sums"), include=(small_tasks,), max_length=30, on_overflow="error"
    )
    model = doubles.CountingModel(byte_llama())
    with pytest.raises(WorkloadError, match="of sums"):
        evaluate(prepare(config), model, tmp_path / "run")
    assert not model.is_loaded


def test_progress_counts_every_item_and_carries_the_score(
    doubles: ModuleType, prepared: PreparedEval, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    heard: list[tuple[str, int, int, Any]] = []
    result = evaluate(
        prepared,
        doubles.CountingModel(byte_llama()),
        tmp_path / "run",
        on_progress=lambda *said: heard.append(said),
    )
    num_items = sum(map(len, result.items.values()))
    assert [done for _, done, _, _ in heard] == list(range(1, num_items + 1))
    assert {total for _, _, total, _ in heard} == {num_items}
    last = {stage: estimate for stage, _, _, estimate in heard}
    assert last["sums"].value == pytest.approx(result.tasks["sums"].primary.value)
    assert last["sums"].low == pytest.approx(result.tasks["sums"].primary.low)
    assert last["letters"].value == pytest.approx(result.tasks["letters"].primary.value)
    assert result.perplexity is not None
    assert last["perplexity"].value == pytest.approx(result.perplexity.token)


def test_items_behind_the_same_examples_are_asked_side_by_side() -> None:
    def question(task: str, doc_id: int, shots: tuple[int, ...], size: int) -> Question:
        draft = ItemRecord(
            task=task,
            doc_id=doc_id,
            key="",
            doc_hash="",
            prompt_hash="",
            target_hash="",
            fewshot_ids=shots,
            gold=0,
        )
        request = ScoreRequest(context=(1,) * size, continuations=((2,),))
        return Question(
            draft=draft,
            requests=(request,),
            digest="",
            worth=lambda record: record,  # type: ignore[arg-type,return-value]
        )

    asked = [
        question("a", 0, (0, 1), 5),
        question("b", 1, (), 7),
        question("a", 2, (2, 3), 3),
        question("a", 3, (0, 1), 9),
        question("b", 4, (), 2),
        question("a", 5, (2, 3), 6),
    ]
    assert [one.draft.doc_id for one in in_order(asked)] == [3, 0, 1, 5, 2, 4]


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_template_is_asked_recorded_and_part_of_the_folder(
    doubles: ModuleType,
    small_tasks: Path,
    byte_llama: Callable[..., Path],
    byte_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(byte_llama(), folder)
    byte_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    plain = EvalConfig(tasks=("sums",), include=(small_tasks,), limits=1, num_fewshot=1)
    config = dataclasses.replace(plain, apply_chat_template=True, system_instruction="Count.")
    model = doubles.CountingModel(folder)
    questions = prepare(config, load_tokenizer=lambda: model.tokenizer)
    evaluate(questions, model, tmp_path / "run")
    (request,) = model.asked
    text = model.tokenizer.decode(request.context)
    assert text.startswith("<system>Count.</system><user>")
    assert text.endswith("</user><assistant>")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["plan"]["chat"]["template"] == CHAT_TEMPLATE
    with pytest.raises(ResultsError, match="chat_template_sha256"):
        evaluate(prepare(plain), doubles.CountingModel(folder), tmp_path / "run")


@pytest.mark.parametrize(
    ("limits", "known"), [({"sums": 1, "sum": 2}, "sum"), ({"mmlu": 1}, "mmlu")]
)
def test_a_limit_for_what_is_not_asked_is_refused(
    small_tasks: Path, limits: dict[str, int], known: str
) -> None:
    config = EvalConfig(tasks=("sums",), include=(small_tasks,), limits=limits)
    with pytest.raises(BenchConfigError, match=f"not evaluated: {known}"):
        prepare(config)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tasks": ()}, "at least one task"),
        ({"num_fewshot": -1}, "num_fewshot"),
        ({"limits": 0}, "limit"),
        ({"limits": {"sums": 0}}, "limit of sums"),
        ({"shard": (2, 2)}, "shard"),
        ({"text": "a.txt"}, "not among the tasks"),
        ({"tasks": ("perplexity",)}, "needs a text"),
        ({"fewshot_as_multiturn": True}, "chat template"),
        ({"protocol": "sliding"}, "gptq"),
    ],
)
def test_settings_that_cannot_hold_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BenchConfigError, match=problem):
        EvalConfig(**({"tasks": ("sums",)} | changes))
