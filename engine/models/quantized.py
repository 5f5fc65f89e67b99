"""A checkpoint as a model sees it: every layer one `.weight`, quantized or not.

On disk a quantized layer is several tensors whose names and layout depend on the file format
(quant/formats/). Here it is one weight [out, in] under the name that its full-precision original
has, so that names, shapes and fusion are checked alike for all checkpoints, from headers alone.

Imports no torch, so that a plan can be made without loading it.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import PER_CHANNEL, Scheme
from llmbench.quant.linear_layers import HEADS
from llmbench.quant.safetensors_header import DTYPES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
    from llmbench.quant.quantized_weight import QuantizedWeight

SCALE_BYTES = 2
"""Of a scale in memory; some files store four bytes, which is a percent more in all."""
FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16")
WIDTHS = {name: width for name, width in DTYPES.values()}


class CheckpointWeights:
    """The weights of a checkpoint, by the names that a full-precision model has."""

    def __init__(self, checkpoint: Checkpoint, quantized: "QuantizedCheckpoint | None") -> None:
        self.checkpoint, self.quantized = checkpoint, quantized
        self._layers = {} if quantized is None else {f"{n}.weight": n for n in quantized.layers}
        self._consumed = set() if quantized is None else quantized.consumed

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> "CheckpointWeights":
        """Find the quantized layers of a checkpoint by its config and headers.

        Raises:
            QuantError: a quantization that is not known, or whose tensors are not all there.
        """
        from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint

        return cls(checkpoint, QuantizedCheckpoint.of(checkpoint))

    @property
    def folder(self) -> "Path":
        """The checkpoint's folder."""
        return self.checkpoint.folder

    def __iter__(self) -> Iterator[str]:
        yield from self._layers
        yield from (name for name in self.checkpoint if name not in self._consumed)

    def __contains__(self, name: object) -> bool:
        if name in self._layers:
            return True
        return name in self.checkpoint and name not in self._consumed

    @property
    def quantized_layers(self) -> list[str]:
        """Module names of the quantized layers."""
        return list(self._layers.values())

    @property
    def has_quantized_head(self) -> bool:
        """Whether the output head is one of them."""
        return any(name.rpartition(".")[2] in HEADS for name in self._layers.values())

    def is_consumed(self, name: str) -> bool:
        """Whether a tensor of the file is part of a quantized layer."""
        return name in self._consumed

    def is_quantized(self, name: str) -> bool:
        """Whether `name` is the weight of a quantized layer."""
        return name in self._layers

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight; [out, in] of a quantized one, whatever its file's orientation."""
        if name in self._layers and self.quantized is not None:
            return self.quantized.shape(self._layers[name])
        return self.checkpoint.shape(name)

    def get(self, name: str) -> "Tensor | QuantizedWeight":
        """Read one weight."""
        if name in self._layers and self.quantized is not None:
            return self.quantized.weight(self._layers[name])
        return self.checkpoint.get(name)

    @property
    def num_plain_parameters(self) -> int:
        """Elements of all tensors that are not part of a quantized layer."""
        return sum(self.checkpoint.numel(n) for n in self.checkpoint if n not in self._consumed)

    @property
    def num_quantized_parameters(self) -> int:
        """Weights in quantized layers."""
        return sum(math.prod(self.shape(name)) for name in self._layers)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the quantized layers with codes at their true width."""
        if self.quantized is None:
            return 0
        return sum(
            packed_bytes(scheme, *self.quantized.shape(name))
            for name, scheme in self.quantized.layers.items()
        )

    def num_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all weights once loaded: floats are cast, codes keep their width."""
        plain = (name for name in self.checkpoint if name not in self._consumed)
        return self.quantized_bytes + sum(
            self.checkpoint.numel(name) * self._width(name, dtype_bytes) for name in plain
        )

    @property
    def float_dtype(self) -> str | None:
        """Type of the largest tensor of floats that is not part of a quantized layer."""
        floats = [
            name
            for name in self.checkpoint
            if name not in self._consumed and self.checkpoint.dtype(name) in FLOAT_TYPES
        ]
        if not floats:
            return None
        return self.checkpoint.dtype(max(floats, key=self.checkpoint.numel))

    @property
    def facts(self) -> dict[str, Any] | None:
        """What a record says of the quantization; None for a full-precision checkpoint."""
        if self.quantized is None:
            return None
        counts = Counter(self.quantized.layers.values())
        usual = counts.most_common(1)[0][0]
        return {
            "format": self.quantized.format,
            "scheme": usual.name,
            "bits": usual.bits,
            "group_size": usual.group_size,
            "sym": usual.sym,
            "num_layers": sum(counts.values()),
            "schemes": {describe(scheme): count for scheme, count in counts.most_common()},
        }

    def _width(self, name: str, dtype_bytes: int) -> int:
        own = self.checkpoint.dtype(name)
        return dtype_bytes if own in FLOAT_TYPES else WIDTHS[own]


def describe(scheme: Scheme) -> str:
    """A scheme in a few words, such as `W4A16 g64 sym`."""
    groups = "per channel" if scheme.group_size == PER_CHANNEL else f"g{scheme.group_size}"
    return f"{scheme.name} {groups} {'sym' if scheme.sym else 'asym'}"


def packed_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
    """Bytes of a quantized layer's codes, scales and zeros, packed."""
    groups = 1 if scheme.group_size == PER_CHANNEL else -(-in_features // scheme.group_size)
    num_scales = out_features * groups
    codes = -(-out_features * in_features * scheme.bits // 8)
    zeros = 0 if scheme.sym else -(-num_scales * scheme.bits // 8)
    return codes + zeros + SCALE_BYTES * num_scales
