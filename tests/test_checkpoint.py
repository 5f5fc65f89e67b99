"""A broken checkpoint is named and refused before a tensor is read; a sound one reads back."""

import json
import logging
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmbench.quant.checkpoint import INDEX, Checkpoint
from llmbench.quant.errors import CheckpointError

TENSOR = {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}


def write_raw(
    path: Path, header: Any, data: bytes = bytes(32), *, length: int | None = None
) -> None:
    """Write a safetensors file whose header says what the test wants it to say."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def write_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    save_file({"a": torch.zeros(4, 2), "b": torch.ones(3)}, folder / "model-1.safetensors")
    save_file({"c": torch.full((2,), 2.0)}, folder / "model-2.safetensors")
    write_index(
        folder, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    )
    return folder


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_reads_back_bit_for_bit(folder: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (5, 3)).to(dtype)
    save_file({"first": torch.zeros(1), "x": tensor}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    read = checkpoint.get("x")
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    assert checkpoint.shape("x") == (5, 3)
    assert str(dtype) == f"torch.{checkpoint.dtype('x')}"


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_scalar_and_empty_tensors_keep_their_shape(folder: Path, shape: tuple[int, ...]) -> None:
    save_file({"x": torch.ones(shape)}, folder / "model.safetensors")
    assert Checkpoint.open(folder).get("x").shape == shape


def test_sharded_checkpoint_reads_each_tensor_from_its_file(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.names == ["a", "b", "c"]
    assert checkpoint.get("b").tolist() == [1.0, 1.0, 1.0]
    assert checkpoint.get("c").tolist() == [2.0, 2.0]
    assert checkpoint.num_bytes == 4 * (8 + 3 + 2)
    assert checkpoint.config == {"model_type": "llama"}


def test_shard_that_links_out_of_the_folder_is_read(sharded: Path) -> None:
    """The hub's cache stores each file as a link to a blob beside the snapshot."""
    blobs = sharded.parent / f"{sharded.name}-blobs"
    blobs.mkdir()
    os.rename(sharded / "model-2.safetensors", blobs / "abc")
    (sharded / "model-2.safetensors").symlink_to(blobs / "abc")
    assert Checkpoint.open(sharded).get("c").tolist() == [2.0, 2.0]


# Each break takes a sound single-file folder or replaces it; the words must be in the message.
def absent_shard(folder: Path) -> None:
    write_raw(folder / "model-00001-of-00002.safetensors", {"a": TENSOR})
    write_index(
        folder,
        {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    )


def lying_index(folder: Path) -> None:
    write_raw(folder / "model-1.safetensors", {"a": TENSOR})
    write_index(folder, {"a": "model-1.safetensors", "model.norm.weight": "model-1.safetensors"})


def truncated_shard(folder: Path) -> None:
    write_raw(folder / "model-1.safetensors", {"a": TENSOR}, bytes(31))
    write_index(folder, {"a": "model-1.safetensors"})


def dangling_shard(folder: Path) -> None:
    (folder / "model-1.safetensors").symlink_to(folder / "blob-never-fetched")
    write_index(folder, {"a": "model-1.safetensors"})


def index_to(file: object) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, {"a": file})


def index_text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


def stale_index(folder: Path) -> None:
    write_raw(folder / "model.safetensors", {"a": TENSOR})
    absent_shard(folder)


def weights(header: Any, data: bytes = bytes(32), **options: int) -> Callable[[Path], None]:
    return lambda folder: write_raw(folder / "model.safetensors", header, data, **options)


def file_named(name: str, content: bytes = b"") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def tensor(**changes: object) -> dict[str, object]:
    return {"a": {**TENSOR, **changes}}


BREAKS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "shard absent": (absent_shard, ["model-00002-of-00002.safetensors", "1 of 2 files"]),
    "shard is a dangling link": (dangling_shard, ["model-1.safetensors"]),
    "index claims a tensor the shard lacks": (
        lying_index,
        ["model.norm.weight", "model-1.safetensors"],
    ),
    "shard cut short": (truncated_shard, ["model-1.safetensors", "tensor a", "cut short"]),
    "index leads upwards": (index_to("../../etc/passwd"), ["../../etc/passwd", "outside"]),
    "index leads upwards, backslashes": (index_to("..\\x.safetensors"), ["outside"]),
    "index leads up from a subfolder": (index_to("sub/../../x.safetensors"), ["outside"]),
    "index is absolute": (index_to("/etc/passwd"), ["/etc/passwd", "outside"]),
    "index is absolute with a drive": (index_to("C:/x.safetensors"), ["outside"]),
    "index names no file": (index_to(""), ["outside"]),
    "index names the folder itself": (index_to("."), ["outside"]),
    "index maps to a number": (index_to(3), ["outside"]),
    "index maps to a zero byte": (index_to("a\0b"), ["outside"]),
    "index is not JSON": (index_text("{"), [INDEX, "not JSON"]),
    "index is a list": (index_text("[]"), [INDEX, "list"]),
    "index without map": (index_text("{}"), ["weight_map"]),
    "index with an empty map": (index_text('{"weight_map": {}}'), ["weight_map"]),
    "index nested without end": (index_text("[" * 100_000), [INDEX, "not JSON"]),
    "index beside a single file": (stale_index, ["model.safetensors", "other files"]),
    "no weights": (lambda folder: None, ["neither", "model.safetensors"]),
    "tensor cut short": (weights({"a": TENSOR}, bytes(27)), ["tensor a", "cut short"]),
    "file of no bytes": (file_named("model.safetensors"), ["8 bytes"]),
    "file of five bytes": (file_named("model.safetensors", b"12345"), ["8 bytes"]),
    "header longer than the file": (
        weights(b"{}", b"", length=1_000_000_000_000),
        ["1000000000000 bytes"],
    ),
    "header length of all ones": (weights(b"{}", b"", length=2**64 - 1), ["claims"]),
    "header not JSON": (weights(b"{]"), ["not JSON"]),
    "header not UTF-8": (weights(b'{"\xff": 1}'), ["not JSON"]),
    "header a list": (weights([]), ["list"]),
    "header empty": (weights({}, b""), ["no tensors"]),
    "tensor twice": (
        weights(b'{"a": {"dtype": "F32"}, "a": {"dtype": "F32"}}'),
        ["'a' twice"],
    ),
    "bytes after the last tensor": (weights({"a": TENSOR}, bytes(40)), ["8 bytes follow"]),
    "range smaller than the shape": (weights(tensor(shape=[4, 3])), ["tensor a", "48 bytes"]),
    "range backwards": (weights(tensor(data_offsets=[32, 0])), ["tensor a"]),
    "offset negative": (weights(tensor(data_offsets=[-32, 0])), ["tensor a", "-32"]),
    "shape negative": (weights(tensor(shape=[-4, -2])), ["tensor a", "[-4, -2]"]),
    "shape of text": (weights(tensor(shape="42")), ["tensor a"]),
    "shape of truths": (weights(tensor(shape=[True, 8])), ["tensor a"]),
    "shape of fractions": (weights(tensor(shape=[4.0, 2.0])), ["tensor a"]),
    "dtype unknown": (weights(tensor(dtype="F31")), ["tensor a", "F31"]),
    "offsets of three": (weights(tensor(data_offsets=[0, 16, 32])), ["tensor a"]),
    "tensor without offsets": (weights({"a": {"dtype": "F32", "shape": []}}), ["tensor a"]),
    "tensor a number": (weights({"a": 3}), ["tensor a"]),
    "tensors overlap": (
        weights({"a": TENSOR, "b": {**TENSOR, "data_offsets": [16, 48]}}, bytes(48)),
        ["tensor b", "overlaps"],
    ),
    "tensors share bytes": (weights({"a": TENSOR, "b": TENSOR}), ["overlaps"]),
    "hole before a tensor": (
        weights(tensor(data_offsets=[8, 40]), bytes(40)),
        ["tensor a", "hole"],
    ),
    "Git LFS pointer": (
        file_named("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid"),
        ["Git LFS"],
    ),
    "weights are a folder": (
        lambda folder: (folder / "model.safetensors").mkdir(),
        ["not a regular file"],
    ),
    "weights are a pipe": (
        lambda folder: os.mkfifo(folder / "model.safetensors"),
        ["not a regular file"],
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_weights_are_refused_by_name(folder: Path, name: str) -> None:
    damage, words = BREAKS[name]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("pytorch_model.bin", "save_pretrained"),
        ("model.gguf", "save_pretrained"),
        ("part.safetensors", "index"),
        ("readme.txt", "readme.txt"),
    ],
)
def test_folder_without_safetensors_says_what_it_holds(folder: Path, file: str, hint: str) -> None:
    (folder / "config.json").rename(folder / file)
    with pytest.raises(CheckpointError, match="neither") as caught:
        Checkpoint.open(folder)
    assert file in caught.value.__notes__[0]
    assert hint in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "has no config.json"), ("{", "not JSON"), ("[1]", "list"), ("\xff", "not JSON")],
)
def test_broken_config_is_refused(sharded: Path, text: str | None, words: str) -> None:
    config = sharded / "config.json"
    config.unlink()
    if text is not None:
        config.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(sharded)


def test_missing_weights_are_named_before_a_missing_config(tmp_path: Path) -> None:
    absent_shard(tmp_path)
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(("kind", "words"), [("file", "is a file"), ("absent", "does not exist")])
def test_path_that_is_no_folder_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "file":
        write_raw(path, {"a": TENSOR})
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(path)


def test_file_that_shrinks_after_the_check_names_the_tensor(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    path = sharded / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"cannot read c .*4 bytes early"):
        checkpoint.get("c")


def test_unknown_tensor_is_refused(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor nope"):
        Checkpoint.open(sharded).get("nope")


def test_tensor_outside_the_index_is_left_out_with_a_warning(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_index(sharded, {"a": "model-1.safetensors"})
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint.open(sharded)
    assert checkpoint.names == ["a"]
    assert "1 tensors" in caplog.text
    assert "such as b" in caplog.text


def test_digest_is_of_content_and_not_of_place(sharded: Path, tmp_path: Path) -> None:
    digest = Checkpoint.open(sharded).digest
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in sharded.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    assert Checkpoint.open(copy).digest == digest


@pytest.mark.parametrize("position", [0, -1])
def test_digest_sees_a_changed_weight(folder: Path, position: int) -> None:
    values = torch.zeros(5000)
    save_file({"x": values}, folder / "model.safetensors")
    before = Checkpoint.open(folder).digest
    values[position] = 1.0
    save_file({"x": values}, folder / "model.safetensors")
    assert Checkpoint.open(folder).digest != before


def test_digest_sees_a_changed_config(sharded: Path) -> None:
    before = Checkpoint.open(sharded).digest
    (sharded / "config.json").write_text('{"model_type": "mistral"}')
    assert Checkpoint.open(sharded).digest != before


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("C43_shards", "model-00002-of-00002.safetensors"),
        ("C43_truncated", "model.embed_tokens.weight"),
        ("C43_lying_index", "model.norm.weight"),
        ("C43_header_too_long", "1000000000000"),
        ("C43_traversal_index", "passwd"),
    ],
)
def test_reported_broken_checkpoints_are_refused(cases_dir: Path, case: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(cases_dir / case)
