"""Writing safetensors files tensor by tensor, in the memory of one tensor.

The library's own writer wants all tensors of a file at once; here the header is made from names,
types and shapes alone, and each tensor is fetched when its bytes are due. Several files get the
index that says which tensor is in which; a single one must not have any.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.quant.checkpoint import INDEX, WEIGHTS
from llmbench.quant.safetensors_header import DTYPES

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5_000_000_000
"""As huggingface_hub cuts checkpoints (its serialization's MAX_SHARD_SIZE)."""
ALIGNMENT = 8
"""The header is filled up to a multiple of this, so that readers can map tensors in place."""
_CODES = {torch_name: (code, size) for code, (torch_name, size) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor before its bytes: `dtype` is torch's name, such as `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        size = _CODES[self.dtype][1]
        for extent in self.shape:
            size *= extent
        return size


def spec_of(name: str, tensor: "torch.Tensor") -> TensorSpec:
    """The spec of a tensor in memory."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def write_checkpoint(
    folder: Path,
    specs: Sequence[TensorSpec],
    get: Callable[[str], "torch.Tensor"],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder's weights: one file, or shards with their index."""
    shards = _shards(specs, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / WEIGHTS, specs, get)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard, get)
        weight_map |= {spec.name: name for spec in shard}
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec in specs)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(
    path: Path, specs: Sequence[TensorSpec], get: Callable[[str], "torch.Tensor"]
) -> None:
    """Write one file; it appears under its name only when it is whole and on disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        end = position + spec.num_bytes
        header[spec.name] = {
            "dtype": _CODES[spec.dtype][0],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec in specs:
            tensor = get(spec.name)
            if spec_of(spec.name, tensor) != spec:
                raise AssertionError(f"{spec.name} changed its type or shape while it was saved")
            file.write(tensor_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def tensor_bytes(tensor: "torch.Tensor") -> memoryview:
    """A tensor's bytes, row-major and little-endian."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards
