"""Calibration accounts for every sample and token that it reads."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.quant.calibration import calibration_from_ids, load_calibration
from llmbench.quant.errors import CalibrationError

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def load(source: Path | str, tokenizer: Any, *, samples: int = 8, length: int = 10) -> Any:
    return load_calibration(str(source), tokenizer, num_samples=samples, max_seq_length=length)


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_text_is_cut_into_consecutive_pieces_from_its_beginning(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz", encoding="utf-8")
    tokenizer = byte_tokenizer()
    found = load(path, tokenizer, samples=2)
    assert tokenizer.decode([token for piece in found.samples for token in piece]) == (
        "abcdefghijklmnopqrst"
    )
    assert [len(piece) for piece in found.samples] == [10, 10]
    assert found.coverage.num_unused_tokens == 6


def test_short_text_keeps_its_last_piece_and_says_that_it_is_short(
    tmp_path: Path, byte_tokenizer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x" * 23, encoding="utf-8")
    found = load(path, byte_tokenizer())
    assert [len(piece) for piece in found.samples] == [10, 10, 3]
    assert found.coverage.num_tokens == 23
    assert "23 tokens: 3 samples of 10, 8 were asked for" in caplog.text


def test_rows_that_are_too_long_are_cut_and_counted(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"text": "x" * 14}, {"text": ""}, {"text": "yz"})
    coverage = load(path, byte_tokenizer()).coverage
    assert coverage.to_json() == {
        "num_samples": 2,
        "num_tokens": 12,
        "num_truncated_samples": 1,
        "num_truncated_tokens": 4,
        "num_dropped_samples": 1,
        "num_unused_tokens": 0,
    }


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"conversations": [{"from": "human", "value": "hi"}]},
    ],
)
def test_chats_go_through_the_template(
    tmp_path: Path, byte_tokenizer: Callable[..., Any], row: dict[str, Any]
) -> None:
    tokenizer = byte_tokenizer(adds_bos=True, chat_template=TEMPLATE)
    (sample,) = load(write_rows(tmp_path / "rows.jsonl", row), tokenizer, length=99).samples
    assert tokenizer.decode(sample) == "[user]hi", "no BOS: the template writes its own"


def test_rows_are_drawn_by_the_seed(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *[{"text": str(i)} for i in range(9)])
    tokenizer = byte_tokenizer()

    def draw(seed: int) -> tuple[tuple[int, ...], ...]:
        return load_calibration(
            str(path), tokenizer, num_samples=3, max_seq_length=9, seed=seed
        ).samples

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_digest_ignores_the_order_of_samples_and_nothing_else() -> None:
    digests = [
        calibration_from_ids(samples, max_seq_length=9).digest
        for samples in ([[1, 2], [3]], [[3], [1, 2]], [[1], [2, 3]], [[1, 2, 3]])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "line 1 is not JSON"),
        ('{"prompt": "x"}', "row 1 has neither text nor messages"),
        ('{"messages": []}', "is a chat, and the tokenizer has no chat template"),
        ('{"text": ""}', "holds no sample with tokens (1 empty ones)"),
        ("", "holds no rows"),
    ],
)
def test_unusable_rows_are_named(
    tmp_path: Path, byte_tokenizer: Callable[..., Any], content: str, words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CalibrationError) as caught:
        load(path, byte_tokenizer())
    assert words in str(caught.value)


def test_line_separators_inside_a_row_end_no_row(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a\u2028b\u0085c, long enough"}\n', encoding="utf-8")
    assert len(load(path, byte_tokenizer(), samples=1).samples) == 1


def test_missing_file_is_named(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(CalibrationError, match="does not exist"):
        load(tmp_path / "absent.txt", byte_tokenizer())


def test_plain_text_for_a_chat_model_is_remarked(
    tmp_path: Path, byte_tokenizer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some text", encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="llmbench"):
        load(path, byte_tokenizer(chat_template=TEMPLATE))
    assert "chat template" in caplog.text
