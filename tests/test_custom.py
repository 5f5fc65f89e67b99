"""The `custom` dataset: a user's JSONL in its three forms, and lines that are none of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.workload import Workload, WorkloadConfig, build_workload

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}

Build = Callable[..., Workload]


@pytest.fixture
def build(byte_tokenizer: Callable[..., Any], tmp_path: Path) -> Build:
    """Build a workload from lines (objects or raw text), in their order."""

    def run(*lines: Any, chat_template: str | None = TEMPLATE, **settings: Any) -> Workload:
        path = tmp_path / "rows.jsonl"
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
        config = WorkloadConfig(
            dataset_name="custom",
            dataset_path=str(path),
            disable_shuffle=True,
            **{"num_prompts": len(lines), "custom_output_len": 99} | settings,
        )
        return build_workload(config, byte_tokenizer(chat_template=chat_template), 4096)

    return run


@pytest.mark.parametrize(
    ("row", "text", "max_tokens"),
    [
        ({"prompt": "hi"}, "[user]hi[assistant]", 99),
        ({"prompt": "hi", "max_tokens": 3}, "[user]hi[assistant]", 3),
        ({"prompt": "hi", "output_len": 4}, "[user]hi[assistant]", 4),
        ({"messages": [USER]}, "[user]hi[assistant]", 99),
        ({"messages": [USER, ASSISTANT]}, "[user]hi[assistant]", 5),
        ({"messages": [USER, ASSISTANT], "max_tokens": 8}, "[user]hi[assistant]", 8),
        (
            {"messages": [USER, ASSISTANT, USER]},
            "[user]hi[assistant]hello[user]hi[assistant]",
            99,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            "[user]hi[assistant]",
            99,
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
            "[user]hi[assistant]",
            3,
        ),
    ],
)
def test_each_form_becomes_its_prompt_and_length(
    build: Build, row: dict[str, Any], text: str, max_tokens: int
) -> None:
    (request,) = build(row).requests
    assert (request.text, request.max_tokens) == (text, max_tokens)
    assert len(request.prompt_token_ids) == len(text)


def test_prompt_stands_as_it_is_without_a_template(build: Build) -> None:
    (request,) = build({"prompt": " hi\n"}, chat_template=None).requests
    assert request.text == " hi\n"


def test_bad_lines_are_counted_by_reason(build: Build) -> None:
    notes = build(
        {"prompt": "hi"},
        "{broken",
        "[1]",
        "",
        {"text": "hi"},
        {"prompt": "hi", "messages": [USER]},
        {"prompt": " "},
        {"prompt": None},
        {"prompt": "hi", "max_tokens": 0},
        {"prompt": "hi", "max_tokens": True},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [ASSISTANT]},
        num_prompts=1,
    ).notes
    assert notes["skipped"] == {
        "not JSON": 1,
        "not a JSON object": 1,
        "expected one of prompt, messages, conversations, found none": 1,
        "expected one of prompt, messages, conversations, found prompt and messages": 1,
        "blank text": 2,
        "text is missing or not a string": 1,
        "max_tokens is not a positive whole number": 2,
        "messages is not a list of turns": 1,
        "content holds more than text": 1,
    }
    assert (notes["num_rows"], notes["num_usable_rows"]) == (12, 1)


def test_a_line_separator_inside_a_text_ends_no_line(build: Build) -> None:
    (request,) = build('{"prompt": "a\u2028b"}', chat_template=None).requests
    assert request.text == "a\u2028b"


def test_a_byte_order_mark_is_no_part_of_the_first_line(build: Build) -> None:
    (request,) = build('\ufeff{"prompt": "hi"}', chat_template=None).requests
    assert request.text == "hi"


def test_a_json_list_is_pointed_to_sharegpt(build: Build) -> None:
    with pytest.raises(WorkloadError, match="one JSON object a line") as caught:
        build('[{"conversations": []}]')
    assert "--dataset-name sharegpt" in caught.value.__notes__[0]


def test_a_file_of_bad_lines_is_refused_with_the_forms(build: Build) -> None:
    with pytest.raises(WorkloadError, match=r"no usable row .*found none \(2\)") as caught:
        build({"a": 1}, {"b": 1})
    assert "prompt, messages, conversations" in caught.value.__notes__[0]
