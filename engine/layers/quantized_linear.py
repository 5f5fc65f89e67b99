"""Quantized linear layers: the reference that every faster kernel is held against.

A layer holds its codes at their true width, packed as quant/packing.py lays them out, so a 4-bit
model takes a quarter of the memory of its 16-bit original also where no fast kernel exists. Each
call unpacks and dequantizes the weight and multiplies as quant/linear.py specifies, which is slow
and right for any number of bits, group size, zero point and order of groups.

Shapes: `T` tokens · `C` in features · `N` out features.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from llmbench.quant.linear import quantized_linear
from llmbench.quant.packing import pack, unpack
from llmbench.quant.quantized_weight import QuantizedWeight

CHUNK_CODES = 1 << 22
"""Codes that are unpacked at once: unpacking takes tens of bytes a code for a moment."""


class PackedWeight:
    """A `QuantizedWeight` with its codes and zeros packed."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.bits, self.shape = weight.bits, weight.codes.shape
        self._codes = pack(weight.codes, weight.bits)
        self._zeros = None if weight.zeros is None else pack(weight.zeros, weight.bits)
        # Everything else is in a weight of no rows, copied: a view would keep the codes in memory.
        empty = weight.rows(0, 0)
        self._empty = dataclasses.replace(
            empty,
            codes=empty.codes.clone(),
            zeros=None if empty.zeros is None else empty.zeros.clone(),
        )
        self._scales, self._channel_scales = weight.scales, weight.channel_scales

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        tensors = (
            self._codes,
            self._zeros,
            self._scales,
            self._channel_scales,
            self._empty.g_idx,
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Output rows `start` to `stop`, unpacked."""
        part = slice(start, stop)
        scales, zeros = self._scales[part], self._zeros
        return dataclasses.replace(
            self._empty,
            codes=unpack(self._codes[part], self.bits, self.shape[1]),
            scales=scales,
            zeros=None if zeros is None else unpack(zeros[part], self.bits, scales.shape[1]),
            channel_scales=None if self._channel_scales is None else self._channel_scales[part],
        )

    def unpacked(self) -> QuantizedWeight:
        """The whole weight."""
        return self.rows(0, self.shape[0])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, C], a part of the rows after another."""
        n, c = self.shape
        out = torch.empty(n, c, dtype=dtype, device=self._codes.device)
        step = max(1, CHUNK_CODES // c)
        for start in range(0, n, step):
            stop = min(start + step, n)
            out[start:stop] = self.rows(start, stop).dequantize(dtype)
        return out


class ReferenceQuantizedLinear:
    """Unpack, dequantize, multiply; with 8-bit activations, as quant/linear.py writes it."""

    kernel = "reference"

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self.weight = PackedWeight(weight)
        self.bias = bias
        self.weight_bytes = self.weight.nbytes
        self._has_plain_inputs = weight.activations == "none"

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, N]."""
        if self._has_plain_inputs:
            return F.linear(x, self.weight.dequantize(x.dtype), self.bias)
        return quantized_linear(x, self.weight.unpacked(), self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, N] plus the layer's output."""
        return residual + self(x)
