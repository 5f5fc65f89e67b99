"""What is written tensor by tensor is what the safetensors library reads."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmbench.quant.checkpoint import INDEX, WEIGHTS, Checkpoint
from llmbench.quant.safetensors_writer import spec_of, write_checkpoint, write_file

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
)
TENSORS = {
    f"t{i}.{str(dtype)[6:]}": torch.arange(12).reshape(shape).to(dtype)
    for i, (dtype, shape) in enumerate(
        zip(DTYPES, [(3, 4), (12,), (2, 6), (4, 3), (12, 1), (1, 12), (2, 2, 3)], strict=True)
    )
}


def specs(tensors: dict[str, torch.Tensor]) -> list:  # type: ignore[type-arg]
    return [spec_of(name, tensor) for name, tensor in tensors.items()]


def test_file_reads_back_by_the_library(tmp_path: Path) -> None:
    tensors = TENSORS | {"scalar": torch.tensor(3.5), "transposed": torch.ones(2, 3).t()}
    write_file(tmp_path / "a.safetensors", specs(tensors), tensors.__getitem__)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert not list(tmp_path.glob("*.partial"))


def test_bytes_of_tensors_are_the_librarys(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", specs(TENSORS), TENSORS.__getitem__)
    save_file(TENSORS, tmp_path / "b.safetensors")
    a, b = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in TENSORS)


@settings(max_examples=25, deadline=None)
@given(limit=st.integers(1, 400))
def test_shards_hold_every_tensor_once_with_a_true_index(
    tmp_path_factory: pytest.TempPathFactory, limit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    write_checkpoint(folder, specs(TENSORS), TENSORS.__getitem__, max_shard_bytes=limit)
    checkpoint = Checkpoint.open(folder)
    assert sorted(checkpoint.names) == sorted(TENSORS)
    assert all(torch.equal(checkpoint.get(name), TENSORS[name]) for name in TENSORS)
    assert (folder / INDEX).exists() != (folder / WEIGHTS).exists()


def test_tensor_that_changed_since_the_header_is_not_written(tmp_path: Path) -> None:
    wanted = specs({"a": torch.zeros(3)})
    with pytest.raises(AssertionError, match="a changed"):
        write_file(tmp_path / "a.safetensors", wanted, lambda name: torch.zeros(4))
    assert not (tmp_path / "a.safetensors").exists()
