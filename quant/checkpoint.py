"""A Hugging Face checkpoint on disk: config.json and safetensors files, single or sharded.

`Checkpoint.open` reads only headers, the index and the config, and holds each against the
others: a shard that the index names and the folder lacks, a tensor that the index claims and the
shard lacks, a file that is cut short, a path that leads out of the folder. Only what passed is
ever loaded, so a model can never run on half its weights. torch is imported when the first
tensor is read.

Reading uses plain file reads into fresh memory and not a memory map: a map would count every
weight twice in the resident size while the model is filled, and a file that shrinks under a map
kills the process in place of raising an error.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from llmbench.quant.errors import CheckpointError
from llmbench.quant.safetensors_header import SafetensorsHeader, TensorEntry, read_header

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 100_000_000
"""As for a safetensors header: an index of a million tensors stays below it."""
DIGEST_PAGE = 4096
"""Bytes of a tensor's beginning and end that enter the digest: a page of a disk cache."""


class Checkpoint:
    """A checked checkpoint folder; tensors are read one at a time, when asked for."""

    def __init__(
        self, folder: Path, headers: list[SafetensorsHeader], tensors: dict[str, TensorEntry]
    ) -> None:
        self.folder = folder
        self.config: dict[str, Any] = read_config(folder)
        self._headers = headers
        self._tensors = tensors

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Check a folder's files against one another; no tensor is read.

        Raises:
            CheckpointError: names the file or tensor that is missing or broken.
        """
        folder = Path(folder)
        check_folder(folder)
        index_path = folder / INDEX
        if not index_path.exists():
            headers = [read_header(_single_file(folder))]
            tensors = dict(headers[0].tensors)
        else:
            weight_map = _read_index(index_path)
            _check_not_ambiguous(folder, weight_map)
            headers = _read_shards(folder, weight_map)
            tensors = _match(index_path, weight_map, headers)
        if not tensors:
            raise CheckpointError(f"{folder} holds no tensors")
        return cls(folder, headers, tensors)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def files(self) -> list[Path]:
        """The weight files, in the order of the index."""
        return [header.path for header in self._headers]

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._entry(name).path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """Type of a tensor by torch's name of it, such as `bfloat16`."""
        return self._entry(name).dtype

    def numel(self, name: str) -> int:
        """Elements of a tensor."""
        return math.prod(self._entry(name).shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self._tensors.values())

    def get(self, name: str) -> "torch.Tensor":
        """Read one tensor from its file into fresh CPU memory."""
        import torch

        entry = self._entry(name)
        data = torch.empty(entry.num_bytes, dtype=torch.uint8)
        self._read(name, data.numpy().data)
        dtype: torch.dtype = getattr(torch, entry.dtype)
        return data.view(dtype).reshape(entry.shape)

    def integers(self, name: str) -> list[int]:
        """Values of a small int64 tensor, without torch."""
        entry = self._entry(name)
        if entry.dtype != "int64":
            raise CheckpointError(f"{name} is {entry.dtype}, expected int64")
        data = bytearray(entry.num_bytes)
        self._read(name, memoryview(data))
        return [
            int.from_bytes(data[start : start + 8], "little", signed=True)
            for start in range(0, len(data), 8)
        ]

    def _read(self, name: str, buffer: memoryview) -> None:
        entry = self._entry(name)
        try:
            with entry.path.open("rb", buffering=0) as file:
                file.seek(entry.start)
                _read_into(file, buffer)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {name} from {entry.path}: {error}") from error

    @cached_property
    def digest(self) -> str:
        """A sha256 that tells checkpoints apart without reading all of them.

        It covers config.json's content, every header, every file size and the first and last
        4 KiB of every tensor: another training run, dtype or quantization changes it, a copy or a
        renamed folder does not. Two checkpoints that differ only inside large tensors would
        share it, so it identifies a checkpoint and is no proof against tampering.
        """
        sha = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for header in sorted(self._headers, key=lambda header: header.path.name):
            sha.update(f"{header.path.name} {header.file_size} ".encode())
            sha.update(header.raw)
            try:
                with header.path.open("rb", buffering=0) as file:
                    for entry in header.tensors.values():
                        last = max(entry.start, entry.start + entry.num_bytes - DIGEST_PAGE)
                        for start in dict.fromkeys((entry.start, last)):
                            file.seek(start)
                            sha.update(file.read(min(DIGEST_PAGE, entry.num_bytes)))
            except OSError as error:
                raise CheckpointError(f"cannot read {header.path}: {error}") from error
        return sha.hexdigest()

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.folder} has no tensor {name}") from None


def check_folder(folder: Path) -> None:
    """Refuse a path that is no folder."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        error = CheckpointError(f"expected the folder of a checkpoint, {folder} {found}")
        if folder.exists():
            error.add_note(f"give the folder that holds {CONFIG} and {WEIGHTS}")
        raise error


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint folder's config.json.

    Raises:
        CheckpointError: it is absent or no JSON object.
    """
    check_folder(folder)
    path = folder / CONFIG
    if not path.exists():
        error = CheckpointError(f"{folder} has no {CONFIG}")
        error.add_note("a checkpoint as transformers' save_pretrained writes it is wanted")
        raise error
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, at most {MAX_JSON_BYTES} are read")
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _single_file(folder: Path) -> Path:
    """The one weight file of a folder without an index."""
    path = folder / WEIGHTS
    if path.exists():
        return path
    found = sorted(entry.name for entry in folder.iterdir())
    tensors = [name for name in found if name.endswith(".safetensors")]
    others = [name for name in found if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5"))]
    error = CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    if tensors:
        error.add_note(f"{tensors[0]} needs an index that says which tensor is in which file")
    elif others:
        error.add_note(
            f"{others[0]} is of a format that is not read: load it in transformers and save it "
            "with save_pretrained, which writes safetensors"
        )
    elif found:
        error.add_note(f"it holds {', '.join(found[:5])}{' …' if len(found) > 5 else ''}")
    raise error


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name → file name, each inside the folder."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files")
    for name, file in weight_map.items():
        # Lexical on purpose: the hub's cache links each shard to a blob outside the folder.
        parts = PurePosixPath(file.replace("\\", "/")).parts if isinstance(file, str) else ()
        inside = parts and ".." not in parts and parts[0] != "/" and ":" not in parts[0]
        if not inside or "\0" in file:
            raise CheckpointError(f"{path} sends tensor {name} to {file!r}, outside the folder")
    return weight_map


def _check_not_ambiguous(folder: Path, weight_map: dict[str, str]) -> None:
    """Refuse a single file beside an index of other files: one of the two is stale."""
    if (folder / WEIGHTS).exists() and WEIGHTS not in weight_map.values():
        other = next(iter(weight_map.values()))
        error = CheckpointError(
            f"{folder} has {WEIGHTS} and an index that names other files, such as {other}"
        )
        error.add_note(f"one of them is left over: delete {INDEX}, or {WEIGHTS}")
        raise error


def _read_shards(folder: Path, weight_map: dict[str, str]) -> list[SafetensorsHeader]:
    shards = list(dict.fromkeys(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).exists()]
    if missing:
        lost = sum(file in missing for file in weight_map.values())
        error = CheckpointError(
            f"{folder} lacks {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}, named in "
            f"{INDEX} ({len(missing)} of {len(shards)} files, {lost} of {len(weight_map)} tensors)"
        )
        error.add_note("fetch the missing files, or delete an index left from an earlier save")
        raise error
    return [read_header(folder / shard) for shard in shards]


def _match(
    index_path: Path, weight_map: dict[str, str], headers: list[SafetensorsHeader]
) -> dict[str, TensorEntry]:
    """Each tensor of the index, found where the index says it is."""
    shards = dict(zip(dict.fromkeys(weight_map.values()), headers, strict=True))
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            error = CheckpointError(f"{index_path} places tensor {name} in {file}, which lacks it")
            error.add_note("the index and the files are of different saves: fetch both again")
            raise error
    unclaimed = [
        name
        for file, header in shards.items()
        for name in header.tensors
        if weight_map.get(name) != file
    ]
    if unclaimed:
        logger.warning(
            "%s does not name %d tensors of its files, such as %s: they are not loaded",
            index_path,
            len(unclaimed),
            unclaimed[0],
        )
    return {name: shards[file].tensors[name] for name, file in weight_map.items()}


def _read_into(file: Any, buffer: memoryview) -> None:
    """Fill the buffer; a raw read may return less than asked for (2 GiB a call on Linux)."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise EOFError(f"the file ended {len(buffer) - done} bytes early")
        done += count
