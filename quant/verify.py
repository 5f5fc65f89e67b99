"""Proof that a saved checkpoint holds what was quantized.

The files are reopened with the safetensors library and decoded by plain numpy, written from the
formats' definitions and sharing no line with the writers (packing.py, formats/): every quantized
layer is turned back into float32 and its digest compared with the one taken from memory when the
layer was quantized; every other tensor is compared byte for byte in the same way. Peers' faults
that this finds: a zero point off by one against the format's tag (vllm#26343), a shard that the
index does not know, a tensor that was saved before its last change.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmbench.quant.checkpoint import CONFIG, Checkpoint
from llmbench.quant.errors import VerificationError
from llmbench.quant.output_folder import MANIFEST

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
Read = Callable[[str], Array]

ROWS = 1024
"""Output rows that are decoded at once, which bounds the memory of the bits in between."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was compared, all of it equal."""

    num_layers: int
    num_tensors: int


def verify_checkpoint(folder: Path) -> Verification:
    """Hold a folder's tensors against its manifest.

    Raises:
        VerificationError: names the first tensor that differs, or a contradiction in the files.
        CheckpointError: the files are incomplete.
    """
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    reader = IndependentReader(folder)
    checkpoint = Checkpoint.open(folder)
    if missing := sorted(set(manifest["tensors"]) ^ set(checkpoint.names)):
        raise VerificationError(f"{folder}: {missing[0]} is not in both manifest and files")
    for name, digest in manifest["tensors"].items():
        if _digest(reader.read(name)) != digest:
            raise VerificationError(f"{folder}: {name} is not as it was when it was saved")
    for layer, digest in manifest["dequantized"].items():
        if _digest(reader.weight(layer)) != digest:
            raise VerificationError(
                f"{folder}: {layer} reads back as other numbers than were quantized "
                f"({manifest['format']}, {manifest['schemes'][layer]['bits']} bits)"
            )
    return Verification(
        num_layers=len(manifest["dequantized"]), num_tensors=len(manifest["tensors"])
    )


class IndependentReader:
    """A saved checkpoint through other code than wrote it.

    Attributes:
        format: Of the files, as in a `QuantConfig`.
        layers: Module names of the quantized layers.
        schemes: The manifest's scheme of each.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        self.layers: list[str] = list(manifest["dequantized"])
        self.schemes: dict[str, Any] = manifest["schemes"]
        self._config: dict[str, Any] = config["quantization_config"]
        self.format: str = manifest["format"]
        self._decode = _DECODERS[self.format]
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    @property
    def names(self) -> list[str]:
        """Names of all stored tensors."""
        return list(self._files)

    def tensor(self, name: str) -> "torch.Tensor":
        """A stored tensor as the safetensors library gives it."""
        from safetensors import safe_open

        with safe_open(str(self._files[name]), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def read(self, name: str) -> Array:
        """A stored tensor; bfloat16, which numpy lacks, as a record of its bits."""
        import torch

        tensor = self.tensor(name)
        if tensor.dtype is torch.bfloat16:
            return _bfloat16(tensor.view(torch.uint16).numpy())
        array: Array = tensor.numpy()
        return array

    def weight(self, layer: str) -> Array:
        """[N, C] float32, what a quantized layer's codes stand for.

        Raises:
            VerificationError: a tensor of the layer is absent, or contradicts the config.
        """
        try:
            return self._decode(
                lambda part: self.read(f"{layer}.{part}"), self.schemes[layer], self._config
            )
        except KeyError as error:
            raise VerificationError(f"{self.folder}: {layer} has no tensor {error}") from None


def _bfloat16(bits: Array) -> Array:
    return bits.view([("bfloat16", np.uint16)]).reshape(bits.shape)


def _float32(values: Array) -> Array:
    if values.dtype.names is not None:  # the upper half of a float32
        wide = values["bfloat16"].astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    return values.astype(np.float32)


def _digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _codes(lines: Array, bits: int, count: int) -> Array:
    """[L, W] int32 words to [L, count] codes: code i is bits i*b to i*b+b-1 of the line."""
    flat = np.ascontiguousarray(lines).astype("<i4", copy=False).view(np.uint8)  # [L, 4 W]
    if bits == 8:
        codes = flat
    elif bits == 4:
        codes = np.stack([flat & 15, flat >> 4], axis=2).reshape(len(flat), -1)
    else:
        planes = np.unpackbits(flat, axis=1, bitorder="little")[:, : count * bits]
        weights = (1 << np.arange(bits)).astype(np.uint8)
        codes = (planes.reshape(len(flat), count, bits) * weights).sum(axis=2, dtype=np.uint8)
    return codes[:, :count].astype(np.int32)


def _in_pieces(lines: Array, bits: int, count: int) -> Array:
    pieces = [_codes(lines[i : i + ROWS], bits, count) for i in range(0, len(lines), ROWS)]
    return np.concatenate(pieces)


def _affine(codes: Array, zeros: Array, scales: Array, groups: Array) -> Array:
    """[N, C] codes, [N, G] zeros and scales, [C] groups to float32 weights."""
    centered = (codes - zeros[:, groups]).astype(np.float32)
    weight: Array = centered * scales[:, groups]
    return weight


def _groups(in_features: int, num_groups: int) -> Array:
    return np.arange(in_features) // (in_features // num_groups)


def _gptq(read: Read, scheme: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    bits, size = scheme["bits"], 1 << scheme["bits"]
    scales = _float32(read("scales")).T
    n = len(scales)
    qweight, qzeros = read("qweight"), read("qzeros")
    is_v1 = config.get("checkpoint_format", "gptq") == "gptq"
    zeros = _in_pieces(qzeros, bits, n).T
    if is_v1:
        zeros = (zeros + 1) % size
    if scheme["sym"] and not (zeros == size // 2).all():
        raise VerificationError(
            f"symmetric zeros are {sorted(set(zeros.flat))}, expected {size // 2}: they do not "
            f"match the tag {config.get('checkpoint_format')}"
        )
    in_features = qweight.shape[0] * 32 // bits
    codes = _in_pieces(qweight.T, bits, in_features)
    return _affine(codes, zeros, scales, read("g_idx").astype(np.int64))


def _awq(read: Read, scheme: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    scales = _float32(read("scales")).T

    def unpacked(words: Array) -> Array:
        codes = _in_pieces(words, 4, words.shape[1] * 8).reshape(len(words), -1, 8)
        ordered = np.empty_like(codes)
        ordered[:, :, AWQ_ORDER] = codes
        return ordered.reshape(len(words), -1).T

    codes, zeros = unpacked(read("qweight")), unpacked(read("qzeros"))
    return _affine(codes, zeros, scales, _groups(codes.shape[1], scales.shape[1]))


def _compressed_tensors(read: Read, scheme: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    bits, middle = scheme["bits"], 1 << (scheme["bits"] - 1)
    scales = _float32(read("weight_scale"))
    try:
        packed = read("weight_packed")
    except KeyError:
        codes = read("weight").astype(np.int32)
        return _affine(
            codes, np.zeros(scales.shape, int), scales, _groups(codes.shape[1], scales.shape[1])
        )
    n, c = (int(extent) for extent in read("weight_shape"))
    codes = _in_pieces(packed, bits, c)
    zeros = np.full(scales.shape, middle)
    if not scheme["sym"]:
        zeros = _in_pieces(read("weight_zero_point").T, bits, n).T
    return _affine(codes, zeros, scales, _groups(c, scales.shape[1]))


def _bitsandbytes(read: Read, scheme: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    scales = read("SCB").astype(np.float32) / np.float32(127)
    weight: Array = read("weight").astype(np.float32) * scales[:, None]
    return weight


def _qqq(read: Read, scheme: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    words, channel = read("B"), read("s_channel")
    c, n = words.shape[0] * 16, words.shape[1] // 2
    is_grouped = scheme["group_size"] != -1
    shuffle = (0, 2, 4, 6, 1, 3, 5, 7) if is_grouped else (4, 0, 5, 1, 6, 2, 7, 3)
    # Where the kernel's threads find the rows and columns of four neighbouring 16 x 16 tiles.
    order = [
        256 * tile + 16 * (4 * (thread % 4) + row) + thread // 4 + half
        for thread in range(32)
        for tile in range(4)
        for half in (0, 8)
        for row in range(4)
    ]
    order = [order[8 * run + place] for run in range(128) for place in shuffle]
    stored = _in_pieces(words, 4, 16 * n).reshape(-1, 1024)
    chunks = np.empty_like(stored)
    chunks[:, order] = stored
    codes = chunks.reshape(c // 16, n // 16, 16, 16).swapaxes(1, 2).reshape(c, n).T
    pairs = [2 * i + place for i in range(4) for place in (0, 1, 8, 9, 16, 17, 24, 25)]
    s_channel = np.empty(n, np.float32)
    s_channel.reshape(-1, 32)[:, pairs] = channel.reshape(-1, 32)
    if not is_grouped:
        signed = np.where(codes > 7, codes - 16, codes)
        return signed.astype(np.float32) * (s_channel * np.float32(16))[:, None]
    columns = [i + 8 * j for i in range(8) for j in range(8)]
    stored_groups = read("s_group")
    s_group = np.empty_like(stored_groups)
    s_group.reshape(-1, 64)[:, columns] = stored_groups.reshape(-1, 64)
    groups = _groups(c, len(s_group))
    wide = np.rint((codes - 8).astype(np.float32) * s_group.astype(np.float32).T[:, groups])
    wide = wide.clip(-128, 127)  # as the kernel does
    weight: Array = wide.astype(np.float32) * s_channel[:, None]
    return weight


_DECODERS: dict[str, Callable[[Read, Mapping[str, Any], Mapping[str, Any]], Array]] = {
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
    "qqq": _qqq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}
