"""Prompts as a model is asked them: what is right, what is left out for length, what is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.encoding import Encoder
from llmbench.bench.accuracy.eval_config import OnOverflow
from llmbench.bench.accuracy.prompts import build_prompts
from llmbench.bench.accuracy.questions import Question, task_questions
from llmbench.bench.accuracy.task_catalog import load_tasks
from llmbench.bench.accuracy.task_data import load_task_data

CHOICES = """\
task: own
output_type: multiple_choice
test_split: test
fewshot_split: dev
fewshot_config: {sampler: first_n}
local_files: {test: t.jsonl, dev: t.jsonl}
doc_to_text: "{{q}}"
doc_to_choice: "{{c}}"
doc_to_target: "{{a}}"
description: "Add.\\n"
"""
WRITTEN = CHOICES.replace("multiple_choice", "generate_until").replace(
    'doc_to_choice: "{{c}}"\n', ""
)
ROWS = [{"q": f"{n}+1?", "c": ["x", "y"], "a": 1} for n in range(4)]

Ask = Callable[..., tuple[list[Question], Encoder]]


@pytest.fixture
def ask(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> Ask:
    """Return the questions of a task of one's own, and what encoded them."""

    def build(
        keys: str,
        rows: list[dict[str, Any]],
        *,
        num_fewshot: int = 0,
        max_length: int = 64,
        on_overflow: OnOverflow = "truncate",
        tokenizer: Any = None,
    ) -> tuple[list[Question], Encoder]:
        (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        (tmp_path / "own.yaml").write_text(keys, encoding="utf-8")
        (task,) = load_tasks(["own"], include=[tmp_path / "own.yaml"]).tasks
        prompts = build_prompts(task, load_task_data(task, None), num_fewshot=num_fewshot)
        encoder = Encoder(
            tokenizer or byte_tokenizer(adds_bos=True), max_length, on_overflow=on_overflow
        )
        return list(task_questions(task, prompts, encoder, 4)), encoder

    return build


def context_of(question: Question, tokenizer: Any) -> str:
    ids = question.generate.prompt if question.generate else question.requests[0].context
    return str(tokenizer.decode(list(ids)))


@pytest.mark.parametrize(
    ("response", "worth"), [("New York", 1.0), ("Big Apple", 1.0), ("Boston", 0.0)]
)
def test_any_of_several_written_answers_is_right(ask: Ask, response: str, worth: float) -> None:
    rows = [{"q": "Where?", "a": ["Big Apple", "New York"]}]
    for doc_to_target in ("a", '"{{a}}"'):  # the list itself, and the list that is read back
        (question,), _ = ask(WRITTEN.replace('"{{a}}"', doc_to_target), rows)
        record = question.responded("key", response)
        assert record.metrics == {"exact_match,none": worth}
        assert record.gold == ("Big Apple", "New York")


def test_first_of_several_written_answers_stands_in_a_shot(
    ask: Ask, byte_tokenizer: Callable[..., Any]
) -> None:
    rows = [{"q": f"{n}?", "a": ["one", "uno"]} for n in range(2)]
    questions, _ = ask(WRITTEN, rows, num_fewshot=1)
    assert context_of(questions[1], byte_tokenizer()).endswith("0? one\n\n1?")


def test_no_written_answer_is_refused(ask: Ask) -> None:
    from llmbench.bench.errors import WorkloadError

    with pytest.raises(WorkloadError, match="no answer is right"):
        ask(WRITTEN, [{"q": "?", "a": []}])


@pytest.mark.parametrize("keys", [CHOICES, WRITTEN])
def test_whole_shots_are_left_out_and_said(
    ask: Ask, byte_tokenizer: Callable[..., Any], keys: str
) -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    (whole, *_), _ = ask(keys, ROWS, num_fewshot=3, max_length=200)
    size = whole.num_read_tokens
    for num_fewer, expected in ((0, 3), (8, 2), (16, 1), (24, 0)):
        max_length = size - num_fewer + (4 if keys == WRITTEN else -2)
        questions, encoder = ask(
            keys, ROWS, num_fewshot=3, max_length=max_length, on_overflow="drop-shots"
        )
        for question in questions:
            text = context_of(question, tokenizer)
            assert text.startswith("<s>Add.\n")
            assert text.count("\n\n") == expected == len(question.draft.fewshot_ids)
            assert question.draft.num_truncated_tokens == 0
        notices = [line for line in encoder.notices if "first shots" in line]
        if expected == 3:
            assert notices == []
        else:
            assert notices == [
                f"own: 4 of 4 prompts lost their first shots, to fit in {max_length} tokens: "
                f"4 without {3 - expected}"
            ]


def test_without_being_asked_for_no_shot_is_left_out(ask: Ask) -> None:
    questions, encoder = ask(CHOICES, ROWS, num_fewshot=3, max_length=20)
    assert all(question.draft.num_truncated_tokens for question in questions)
    assert all(len(question.draft.fewshot_ids) == 3 for question in questions)
    assert encoder.notices == ()


def test_continuations_that_were_tokenized_alone_are_said(ask: Ask) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(["<s>", "A", "n", " ", "An", "?"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("A", "n")]))
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>"
    )
    keys = CHOICES.replace('description: "Add.\\n"\n', "") + 'target_delimiter: ""\n'
    rows = [{"q": "?A", "c": ["n", " "], "a": 0}, {"q": "?", "c": ["A", "n"], "a": 0}]
    _, encoder = ask(keys, rows, tokenizer=tokenizer)
    assert [line for line in encoder.notices if "alone" in line] == [
        "own: 1 continuations were tokenized alone, since a token spans their beginning and their "
        "context's end"
    ]
