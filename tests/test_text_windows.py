"""Windows of a text: what is read, what is scored, and what is said about it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.bench.accuracy.text_source import Text, read_text
from llmbench.bench.accuracy.text_windows import TextWindows, cut_windows, encode_text
from llmbench.bench.errors import BenchConfigError, BenchError

BOS = 0


@pytest.fixture(scope="module")
def tokenizers(byte_tokenizer: Callable[..., Any]) -> dict[bool, Any]:
    """With a BOS of its own and without."""
    return {adds_bos: byte_tokenizer(adds_bos=adds_bos) for adds_bos in (False, True)}


def cut(tokenizer: Any, text: str, kind: Any = "gptq", **choices: Any) -> TextWindows:
    choices = {"max_length": 4096, **choices}
    return cut_windows(Text(name="text", text=text), tokenizer, kind, **choices)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_gptq_windows_share_nothing_and_drop_the_tail(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    found = cut(tokenizer, "abcdefghijk", window=4)
    ids = ids_of(tokenizer, "abcdefghijk")
    assert [list(window) for window in found.windows] == [ids[:4], ids[4:8]]
    assert [len(part.context) for part in found.parts] == [1, 1]
    assert (found.num_text_tokens, found.num_dropped_tokens) == (11, 3)


def test_gptq_bos_stands_once_at_the_start_of_the_text(byte_tokenizer: Callable[..., Any]) -> None:
    found = cut(byte_tokenizer(adds_bos=True), "abcdefg", window=4)
    assert [window.count(BOS) for window in found.windows] == [1, 0]
    assert found.windows[0][0] == BOS
    assert found.num_text_tokens == 7
    assert "a BOS at its start" in found.protocol


def test_llamacpp_scores_the_second_half_behind_a_bos(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    found = cut(tokenizer, "abcdefghijklmnopq", "llamacpp", window=8)
    ids = [BOS, *ids_of(tokenizer, "abcdefghijklmnopq")]
    assert [list(window) for window in found.windows] == [
        ids[:8],
        [BOS, *ids[9:16]],
    ]
    # llama.cpp scores logits at positions 4 ... 6, hence tokens 5 ... 7.
    assert [len(part.context) for part in found.parts] == [5, 5]
    assert [len(part.continuation) for part in found.parts] == [3, 3]


def test_llamacpp_keeps_the_first_token_without_a_bos(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    found = cut(tokenizer, "abcdefgh", "llamacpp", window=8)
    assert list(found.windows[0]) == ids_of(tokenizer, "abcdefgh")
    assert "no BOS" in found.protocol


@given(
    length=st.integers(0, 200),
    size=st.integers(2, 20),
    step=st.integers(1, 20),
    adds_bos=st.booleans(),
)
def test_strided_windows_score_every_token_once(
    tokenizers: dict[bool, Any], length: int, size: int, step: int, adds_bos: bool
) -> None:
    text = "".join(chr(ord("a") + index % 26) for index in range(length))
    tokenizer = tokenizers[adds_bos]
    found = cut(tokenizer, text, "strided", window=size, stride=min(step, size))
    ids = ids_of(tokenizer, text)
    scored = [token for part in found.parts for token in part.continuation]
    assert scored == (ids if adds_bos else ids[1:])
    for part in found.parts:
        assert part.context
        assert len(part.context) + len(part.continuation) <= size + (step >= size)


def test_strided_windows_read_what_transformers_documents(
    byte_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = byte_tokenizer()
    found = cut(tokenizer, "abcdefghij", "strided", window=6, stride=3)
    ids = ids_of(tokenizer, "abcdefghij")
    assert [list(window) for window in found.windows] == [ids[0:6], ids[3:9], ids[6:10]]
    assert [list(part.continuation) for part in found.parts] == [ids[1:6], ids[6:9], ids[9:]]


@pytest.mark.parametrize("kind", ["gptq", "llamacpp", "strided"])
def test_bos_is_single_where_the_text_brings_one(
    byte_tokenizer: Callable[..., Any], kind: Any
) -> None:
    found = cut(byte_tokenizer(adds_bos=True), "<s>abcdefg", kind, window=8)
    assert [window.count(BOS) for window in found.windows] == [1]


@pytest.mark.parametrize(
    ("adds_bos", "wanted", "count"),
    [(False, None, 0), (True, None, 1), (False, True, 1), (True, False, 0), (True, True, 1)],
)
def test_bos_is_the_tokenizers_affair_unless_it_is_set(
    byte_tokenizer: Callable[..., Any], adds_bos: bool, wanted: bool | None, count: int
) -> None:
    ids, has_bos = encode_text("abc", byte_tokenizer(adds_bos=adds_bos), wanted)
    assert (ids.count(BOS), has_bos) == (count, bool(count))


def test_text_below_one_window_is_a_shorter_one(byte_tokenizer: Callable[..., Any]) -> None:
    for kind in ("gptq", "llamacpp", "strided"):
        found = cut(byte_tokenizer(), "abcdef", kind, window=100)
        assert [len(window) for window in found.windows] == [6]


def test_limit_keeps_the_first_windows_and_says_so(byte_tokenizer: Callable[..., Any]) -> None:
    found = cut(byte_tokenizer(), "a" * 40, window=4, limit=3)
    assert len(found.parts) == 3
    assert "3 of 10 windows of 4" in found.protocol


def test_default_window_is_what_the_model_reads_at_most(byte_tokenizer: Callable[..., Any]) -> None:
    assert cut(byte_tokenizer(), "a" * 90, max_length=16).window == 16
    assert cut(byte_tokenizer(), "a" * 9000).window == 2048
    assert cut(byte_tokenizer(), "a" * 9000, "llamacpp").window == 512


@pytest.mark.parametrize(
    ("kind", "choices", "message"),
    [
        ("gptq", {"window": 99}, "expected a window of 2 to 64 tokens"),
        ("gptq", {"stride": 4}, "a stride is for the protocol strided"),
        ("strided", {"window": 8, "stride": 9}, "would leave tokens out"),
        ("llamacpp", {"window": 1}, "expected a window of 2 to 64 tokens, which the model reads"),
    ],
)
def test_impossible_windows_are_refused(
    byte_tokenizer: Callable[..., Any], kind: Any, choices: dict[str, int], message: str
) -> None:
    with pytest.raises(BenchConfigError, match=message):
        cut(byte_tokenizer(), "a" * 100, kind, max_length=64, **choices)


def test_protocol_names_every_choice(byte_tokenizer: Callable[..., Any]) -> None:
    source = Text(name="WikiText-2 test", text="a" * 10, joiner="\n\n")
    found = cut_windows(
        source, byte_tokenizer(), "strided", max_length=64, window=4, stride=2, add_bos=True
    )
    for said in ("WikiText-2 test", r"'\n\n'", "10 tokens", "of 258", "a BOS", "strided", "of 4"):
        assert said in found.protocol
    assert "stride of 2" in found.protocol


def test_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("a\r\nb \u2028c\n".encode())
    text = read_text(str(path))
    assert text.text == "a\r\nb \u2028c\n"
    assert (text.joiner, text.num_words, text.num_bytes) == (None, 3, 10)


@pytest.mark.parametrize("field", ["text", "page"])
def test_rows_of_json_lines_are_joined(tmp_path: Path, field: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({field: row}) + "\n" for row in ("a", "", "b")))
    assert read_text(str(path)).text == "a\n\n\n\nb"
    assert read_text(str(path), joiner=" ").text == "a  b"


def test_row_without_a_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(BenchError, match="line 2"):
        read_text(str(path))


def test_unknown_source_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="expected a text file"):
        read_text(str(tmp_path / "missing.txt"))


def test_wikitext2_rows_are_those_of_the_hub(data_dir: Path) -> None:
    text = read_text("wikitext2", data_dir=data_dir)
    assert text.num_bytes == 1_296_370
    assert text.text.startswith("\n\n = Robert Boulter = \n\n\n\n\n Robert Boulter is")
