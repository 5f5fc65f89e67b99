"""The fingerprint of a checkpoint sees what changes a model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmbench.bench.errors import ResultsError
from llmbench.bench.model_digest import model_digest

SIZE = 3 * 2**20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "model.safetensors").write_bytes(bytes(SIZE))
    return tmp_path


def _write(name: str, offset: int, data: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _write("config.json", 5, b"x"),
        _write("model.safetensors", 10, b"x"),  # a header's place
        _write("model.safetensors", SIZE - 1, b"x"),
        _write("model.safetensors", SIZE, b"x"),  # longer
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "config.json").rename(folder / "other.json"),
        lambda folder: (folder / "config.json").unlink(),
    ],
)
def test_changed_checkpoint_has_another_digest(
    checkpoint: Path, change: Callable[[Path], object]
) -> None:
    before = model_digest(checkpoint)
    change(checkpoint)
    assert model_digest(checkpoint) != before


def test_files_that_are_no_part_of_the_model_do_not_count(checkpoint: Path) -> None:
    before = model_digest(checkpoint)
    (checkpoint / "README.md").write_text("about")
    assert model_digest(checkpoint) == before


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="found none of its files"):
        model_digest(tmp_path)
    with pytest.raises(ResultsError, match="cannot read checkpoint"):
        model_digest(tmp_path / "missing")
