"""Faults that users of other harnesses reported, where they show only in a whole evaluation.

Each test names its thread. The parts by themselves have tests of their own: BOS and overflow in
test_encoding.py, stops and numbers in test_answers.py, ties in test_scoring.py and so on.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_plan import prepare
from llmbench.bench.accuracy.evaluation import run_eval
from llmbench.cli.eval_output import exit_code
from llmbench.engine.config import EngineConfig
from llmbench.engine.scoring import ContinuationScore, ScoreRequest

BOS = 0
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class WatchedModel(EngineModel):
    """Remembers what it was asked, and may answer with a number of its own."""

    def __init__(self, folder: Path, answer: float | None = None) -> None:
        settings: dict[str, Any] = {"dtype": "float32", "compile": False, "num_kv_blocks": 128}
        super().__init__(EngineConfig(model=str(folder), **settings))
        self.answer = answer
        self.asked: list[ScoreRequest] = []

    def score(
        self, requests: Sequence[ScoreRequest], *, with_hidden: bool = False
    ) -> Iterator[tuple[int, tuple[ContinuationScore, ...]]]:
        self.asked += requests
        if self.answer is None:
            yield from super().score(requests, with_hidden=with_hidden)
            return
        for index, request in enumerate(requests):
            yield (
                index,
                tuple(
                    ContinuationScore(
                        logprobs=(self.answer / len(ids),) * len(ids), is_greedy=False, hidden=None
                    )
                    for ids in request.continuations
                ),
            )


@pytest.mark.parametrize("adds_bos", [False, True])
def test_template_that_writes_bos_leaves_one(
    adds_bos: bool,
    small_tasks: Path,
    byte_llama: Callable[..., Path],
    byte_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """lang-uk/ukrainian-llm-leaderboard#5, princeton-pli/retaining-by-doing#5."""
    folder = tmp_path / "model"
    shutil.copytree(byte_llama(), folder)
    byte_tokenizer(adds_bos=adds_bos, chat_template=TEMPLATE).save_pretrained(folder)
    model = WatchedModel(folder)
    config = EvalConfig(
        tasks=("sums",), include=(small_tasks,), limits=2, num_fewshot=1, apply_chat_template=True
    )
    run_eval(prepare(config, load_tokenizer=lambda: model.tokenizer), model, tmp_path / "run")
    assert model.asked
    for request in model.asked:
        assert request.context[0] == BOS
        assert request.context.count(BOS) == 1
        assert all(BOS not in ids for ids in request.continuations)


@pytest.mark.parametrize(
    ("adds_bos", "add_bos", "expected"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False)],
)
def test_whether_texts_get_a_bos_is_recorded(
    adds_bos: bool,
    add_bos: bool | None,
    expected: bool,
    small_tasks: Path,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """EleutherAI/lm-evaluation-harness#1465, #2049, #3295, #2676."""
    model = WatchedModel(byte_llama(adds_bos=adds_bos))
    config = EvalConfig(tasks=("sums",), include=(small_tasks,), limits=1, add_bos=add_bos)
    run_eval(prepare(config), model, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["plan"]["adds_bos"] is expected
    assert (model.asked[0].context[0] == BOS) is expected


def test_head_runs_on_the_rows_of_scored_tokens_alone(
    byte_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EleutherAI/lm-evaluation-harness#1678, #2458, #2698, #2800: logits of whole prompts."""
    model = WatchedModel(byte_llama())
    inner = model.load().loaded.model
    compute_logits, rows = inner.compute_logits, []

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return compute_logits(hidden)

    monkeypatch.setattr(inner, "compute_logits", watched)
    contexts = [tuple(10 + (i * n) % 200 for i in range(300)) for n in (1, 3)]
    items = [
        ScoreRequest(context=contexts[0], continuations=((5, 6, 7), (8, 9))),
        ScoreRequest(context=contexts[1], continuations=((20,), (21,), (22,))),
    ]
    assert len(list(model.score(items))) == 2
    assert sum(rows) == 3 + 2 + 1


def test_model_that_finds_all_choices_alike_gets_no_verdict(
    small_tasks: Path, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """EleutherAI/lm-evaluation-harness#2007: ties fall to the first choice, often the right one."""
    prepared = prepare(EvalConfig(tasks=("sums",), include=(small_tasks,)))
    result = run_eval(prepared, WatchedModel(byte_llama(), answer=-12.0), tmp_path)
    assert result.tasks["sums"].num_tied == 12
    assert any("12 of 12 items are ties" in flag for flag in result.flags)
    assert exit_code(tmp_path) == 4


def test_model_without_numbers_is_right_nowhere_and_gets_no_verdict(
    small_tasks: Path, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """EleutherAI/lm-evaluation-harness#2007: NaN scored 1.0 where the first choice is right."""
    prepared = prepare(EvalConfig(tasks=("sums", "letters"), include=(small_tasks,)))
    result = run_eval(prepared, WatchedModel(byte_llama(), answer=math.nan), tmp_path)
    for task, count in (("sums", 12), ("letters", 3)):
        score = result.tasks[task]
        assert score.num_invalid == count
        assert all(metric.value is None for metric in score.metrics.values())
    assert exit_code(tmp_path) == 4
