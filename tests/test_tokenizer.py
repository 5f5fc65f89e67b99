"""Loading a tokenizer: the same ids as transformers' own way, or one clear error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.tokenizer import load_tokenizer

TEXT = "<s>Grüße, 한국어 🙂\n\n  x = 1"


def test_saved_tokenizer_comes_back_with_ids_and_template(
    byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    saved = byte_tokenizer(adds_bos=True, chat_template="{{ bos_token }}x")
    saved.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded(TEXT)["input_ids"] == saved(TEXT)["input_ids"]
    assert loaded.chat_template == saved.chat_template
    assert loaded.all_special_ids == saved.all_special_ids


def test_ids_are_those_of_auto_tokenizer(
    byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))(TEXT)["input_ids"] == auto(TEXT)["input_ids"]


@pytest.mark.parametrize("content", ["{broken", "{}", ""])
def test_broken_tokenizer_is_refused_with_its_folder(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(WorkloadError, match="cannot load a tokenizer from") as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "--tokenizer" in caught.value.__notes__[0]


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot load a tokenizer from"):
        load_tokenizer(str(tmp_path))
