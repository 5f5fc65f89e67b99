"""Odd ShareGPT rows (case C30): each is used by a stated rule or skipped with a count."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.workload import Workload, WorkloadConfig, build_workload


def turn(role: Any, value: Any) -> dict[str, Any]:
    return {"from": role, "value": value}


ODD_ROWS: list[dict[str, Any]] = [
    {"id": "ok1", "conversations": [turn("human", "Say hi"), turn("gpt", "Hi there")]},
    {"id": "empty", "conversations": []},
    {"id": "single", "conversations": [turn("human", "hello?")]},
    {
        "id": "gptfirst",
        "conversations": [turn("gpt", "I start"), turn("human", "ok"), turn("gpt", "fine")],
    },
    {
        "id": "sysfirst",
        "conversations": [
            turn("system", "Be brief"),
            turn("human", "What is 2+2?"),
            turn("gpt", "4 it is"),
        ],
    },
    {"id": "blank", "conversations": [turn("human", ""), turn("gpt", "")]},
    {"id": "nokey"},
    {
        "id": "multi",
        "conversations": [
            turn("human", "한국어로 인사해 줘 🙂"),
            turn("gpt", "안녕하세요! 👋🏽"),
            turn("human", "한 번 더"),
            turn("gpt", "또 안녕하세요"),
        ],
    },
    {"id": "nullval", "conversations": [turn("human", None), turn("gpt", "x")]},
    {"id": "altroles", "conversations": [turn("user", "ping"), turn("assistant", "pong pong")]},
]
USABLE = {
    "Say hi": "Hi there",
    "ok": "fine",
    "Be brief\n\nWhat is 2+2?": "4 it is",
    "한국어로 인사해 줘 🙂": "안녕하세요! 👋🏽",
    "ping": "pong pong",
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('this model takes no system message') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)

Build = Callable[..., Workload]


@pytest.fixture
def build(byte_tokenizer: Callable[..., Any], tmp_path: Path) -> Build:
    """Build a workload from rows with a tokenizer of one id a byte."""

    def run(
        rows: Any,
        *,
        max_model_len: int = 4096,
        chat_template: str | None = None,
        adds_bos: bool = False,
        **settings: Any,
    ) -> Workload:
        path = tmp_path / "rows.json"
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows), encoding="utf-8")
        config = WorkloadConfig(dataset_name="sharegpt", dataset_path=str(path), **settings)
        tokenizer = byte_tokenizer(chat_template=chat_template, adds_bos=adds_bos)
        return build_workload(config, tokenizer, max_model_len)

    return run


@pytest.mark.parametrize("num_prompts", [2, 5, 50])
def test_number_of_requests_is_the_number_asked_for(build: Build, num_prompts: int) -> None:
    workload = build(ODD_ROWS, num_prompts=num_prompts)
    assert [request.index for request in workload.requests] == list(range(num_prompts))


@pytest.mark.parametrize("num_prompts", [2, 5, 50])
def test_only_human_turns_are_asked_with_the_length_of_their_replies(
    build: Build, num_prompts: int
) -> None:
    workload = build(ODD_ROWS, num_prompts=num_prompts)
    asked = {str(request.text): request.max_tokens for request in workload.requests}
    assert asked.items() <= {text: len(USABLE[text].encode()) for text in USABLE}.items()
    assert len(asked) == min(num_prompts, 5)


def test_unusable_rows_are_counted_by_reason(build: Build) -> None:
    notes = build(ODD_ROWS, num_prompts=2).notes
    assert notes["skipped"] == {
        "empty conversation": 1,
        "no reply to the first human turn": 1,
        "blank text": 1,
        "no list of conversations": 1,
        "text is missing or not a string": 1,
    }
    assert (notes["num_rows"], notes["num_usable_rows"]) == (10, 5)


def test_repeats_are_counted(build: Build) -> None:
    notes = build(ODD_ROWS, num_prompts=48).notes
    assert (notes["num_distinct_prompts"], notes["max_repeats"]) == (5, 10)


def test_repeats_can_be_refused(build: Build) -> None:
    with pytest.raises(WorkloadError, match=r"only 5 usable rows in .*50 asked for") as caught:
        build(ODD_ROWS, num_prompts=50, no_oversample=True)
    assert "--num-prompts 5" in caught.value.__notes__[0]


def test_the_case_file_is_the_one_above(cases_dir: Path) -> None:
    assert json.loads((cases_dir / "C30_sharegpt.json").read_text("utf-8")) == ODD_ROWS


def test_template_writes_the_only_bos(build: Build) -> None:
    rows = [ODD_ROWS[0]]
    (request,) = build(rows, num_prompts=1, chat_template=TEMPLATE, adds_bos=True).requests
    assert request.text == "<s>[user]Say hi\n[assistant]"
    assert request.prompt_token_ids.count(0) == 1


def test_skipped_template_leaves_the_tokenizers_own_bos(build: Build) -> None:
    (request,) = build(
        [ODD_ROWS[0]],
        num_prompts=1,
        chat_template=TEMPLATE,
        adds_bos=True,
        skip_chat_template=True,
    ).requests
    assert request.text == "Say hi"
    assert request.prompt_token_ids[0] == 0
    assert len(request.prompt_token_ids) == 1 + len("Say hi")


def test_system_text_reaches_the_template_as_a_system_turn(build: Build) -> None:
    (request,) = build([ODD_ROWS[4]], num_prompts=1, chat_template=TEMPLATE).requests
    assert request.text == "<s>[system]Be brief\n[user]What is 2+2?\n[assistant]"


def test_refusal_of_the_template_is_counted_in_its_words(build: Build) -> None:
    workload = build(ODD_ROWS, num_prompts=4, chat_template=NO_SYSTEM)
    assert len(workload.requests) == 4
    notes = build(ODD_ROWS, num_prompts=5, chat_template=NO_SYSTEM).notes
    assert notes["skipped"]["chat template refused: this model takes no system message"] == 1
    assert notes["num_usable_rows"] == 4


def test_template_that_fails_is_counted_and_not_raised(build: Build) -> None:
    rows = [ODD_ROWS[0], ODD_ROWS[4]]
    fails_on_two = "{{ messages[0]['content'] + messages[1:2] and messages[0]['content'] }}"
    with pytest.raises(WorkloadError, match=r"no usable row .*chat template failed.*\(2\)"):
        build(rows, num_prompts=1, chat_template=fails_on_two)


def test_pairs_longer_than_the_model_are_skipped_and_counted(build: Build) -> None:
    notes = build(ODD_ROWS, num_prompts=4, max_model_len=len("pingpong pong")).notes
    assert notes["skipped"]["prompt + output longer than the model's 13 tokens"] == 3
    assert notes["num_distinct_prompts"] == 2


def test_output_length_can_be_set(build: Build) -> None:
    workload = build(ODD_ROWS, num_prompts=5, sharegpt_output_len=7)
    assert {request.max_tokens for request in workload.requests} == {7}


def test_order_of_the_file_can_be_kept(build: Build) -> None:
    workload = build(ODD_ROWS, num_prompts=7, disable_shuffle=True)
    assert [request.text for request in workload.requests] == [*USABLE, "Say hi", "ok"]


def test_seed_decides_the_order(build: Build) -> None:
    rows = [{"conversations": [turn("human", str(i)), turn("gpt", "y")]} for i in range(40)]
    first, again, other = (build(rows, num_prompts=9, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.digest != other.digest


def test_half_a_surrogate_pair_is_skipped(build: Build) -> None:
    rows = json.dumps([{"conversations": [turn("human", "\ud83d"), turn("gpt", "x")]}])
    with pytest.raises(WorkloadError, match="not valid Unicode"):
        build(rows, num_prompts=1)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "row is not an object"),
        ({"conversations": "text"}, "no list of conversations"),
        ({"conversations": ["text"]}, "turn is not an object"),
        ({"conversations": [turn("gpt", "a"), turn("gpt", "b")]}, "no human turn"),
        ({"conversations": [turn("human", "a"), turn("human", "b")]}, "no reply"),
        ({"conversations": [turn("human", "a"), turn("gpt", " \n")]}, "blank text"),
        ({"conversations": [turn("human", "a"), turn("tool", "b")]}, "role tool"),
        ({"conversations": [turn(["x"], "a")]}, r"role \['x'\]"),
        ({"conversations": [turn("human", 5), turn("gpt", "b")]}, "not a string"),
    ],
)
def test_file_of_only_bad_rows_is_refused_with_the_reason(
    build: Build, row: Any, reason: str
) -> None:
    with pytest.raises(WorkloadError, match=rf"no usable row in .*{reason}.* \(1\)"):
        build([row], num_prompts=1)


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("", "is empty", None),
        (" \n", "is empty", None),
        ("[]", "no rows", None),
        ('{"a": 1}', "found an object with a", "the form is"),
        ('"x"', "expected a JSON list", "the form is"),
        ('[{"conversations": [', "line 1, column", None),
        ('{"prompt": "a"}\n{"prompt": "b"}', "extra data at line 2", "--dataset-name custom"),
        ("[" * 100_000, "nesting too deep", None),
    ],
)
def test_file_of_another_form_is_refused(
    build: Build, text: str, words: str, hint: str | None
) -> None:
    with pytest.raises(WorkloadError, match=words) as caught:
        build(text, num_prompts=1)
    assert (hint or "") in "".join(getattr(caught.value, "__notes__", [""]))


def test_missing_file_is_named(byte_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    config = WorkloadConfig(dataset_name="sharegpt", dataset_path=str(tmp_path / "no.json"))
    with pytest.raises(WorkloadError, match=r"no dataset file .*no\.json"):
        build_workload(config, byte_tokenizer(), 100)


def test_file_that_is_not_utf8_is_refused(
    byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "latin1.json"
    path.write_bytes('["é"]'.encode("latin-1"))
    config = WorkloadConfig(dataset_name="sharegpt", dataset_path=str(path))
    with pytest.raises(WorkloadError, match="found byte 0xe9 at offset 2"):
        build_workload(config, byte_tokenizer(), 100)


def test_korean_conversations_are_all_usable(
    byte_tokenizer: Callable[..., Any], data_dir: Path
) -> None:
    path = data_dir / "korean_chat_songys" / "sharegpt_ko_multi8.json"
    config = WorkloadConfig(dataset_name="sharegpt", dataset_path=str(path), num_prompts=1477)
    notes = build_workload(config, byte_tokenizer(), 4096).notes
    assert (notes["num_rows"], notes["num_usable_rows"], notes["skipped"]) == (1477, 1477, {})
