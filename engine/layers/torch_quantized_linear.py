"""Quantized linear layers on the integer kernels that torch has for CPUs.

Where no C++ compiler is at hand these stand between the reference, which dequantizes at every
call, and our own kernels. Each takes the weights that torch's kernel can express and leaves the
rest to the reference:

- `int4pack`: up to 4 bits without rounded activations, bfloat16 only. Few rows go through
  `_weight_int4pack_mm_for_cpu`, which reads a quarter of a bfloat16 weight's bytes; for many rows
  arithmetic counts, and the weight is dequantized for the call, a part after another. It is held
  once, packed, either way. torch holds scales and zeros in bfloat16, which changes a weight by
  as much as rounding the dequantized weight to bfloat16 would.
- `int_mm`: 8-bit activations. Integer products are exact, so results equal quant/linear.py's.
  A weight takes a byte, also one of 4 bits.

Shapes: `T` tokens · `C` in features · `N` out features · `G` groups of a row · `S` channels of a
group · `B` rows of a block of torch's packed layout.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from llmbench.engine.layers.linear import Linear
from llmbench.quant.config import PER_CHANNEL
from llmbench.quant.linear import quantize_activations
from llmbench.quant.quantized_weight import QuantizedWeight

INT4_GROUPS = (256, 128, 64, 32)
"""Group sizes of torch's kernel."""
INT4_MIDDLE = 8
"""The code that torch's kernel takes for 0."""
FEW_ROWS = 64
"""Up to here multiplying packed weights is faster than dequantizing them first (measured)."""
CHUNK_WEIGHTS = 1 << 22
"""Weights that are unpacked at once."""
PACKED_ROWS = 64
"""Multiple of the rows of every block that torch's packed layout has, on any processor."""


def fast_quantized_linear(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype | None
) -> Linear | None:
    """torch's fastest layer for a weight and inputs of `dtype`; None where it has none."""
    if weight.codes.device.type != "cpu":
        return None
    if weight.activations == "none":
        if dtype is not torch.bfloat16 or weight.bits > 4 or _block_rows() is None:
            return None
        order = _grouped_order(weight)
        size = _int4_group(weight)
        return None if order is False or size is None else Int4Linear(weight, bias, size, order)
    if not _multiplies_integers() or (weight.bits == 8 and not weight.sym):
        return None
    if weight.outlier_threshold is not None:
        return OutlierLinear(weight, bias) if weight.num_groups == 1 else None
    if weight.channel_scales is not None or weight.num_groups == 1:
        return Int8Linear(weight, bias)
    return GroupedInt8Linear(weight, bias)


class Int4Linear:
    """Packed 4-bit weights and bfloat16 inputs."""

    kernel = "int4pack"

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, group_size: int, order: Tensor | None
    ) -> None:
        """`order` sorts the input channels by group; None where they are in order."""
        n, c = weight.codes.shape
        rows = -(-n // PACKED_ROWS) * PACKED_ROWS
        self.out_features, self.group_size, self.bias = n, group_size, bias
        self._order = order
        self.packed = torch.empty(rows, c // 2, dtype=torch.uint8)
        step = max(1, CHUNK_WEIGHTS // (c * PACKED_ROWS)) * PACKED_ROWS
        for start in range(0, n, step):
            codes = weight.codes[start : start + step]
            codes = codes if order is None else codes[:, order]
            padded = torch.zeros(-(-len(codes) // PACKED_ROWS) * PACKED_ROWS, c, dtype=torch.int32)
            # The middle code of narrower weights becomes the kernel's own, which stands for 0.
            padded[: len(codes)] = codes + (INT4_MIDDLE - weight.middle)
            part = torch.ops.aten._convert_weight_to_int4pack_for_cpu(padded, 1)
            self.packed[start : start + len(padded)] = part
        # w = (code - zero) * scale = (code - middle) * scale + (middle - zero) * scale
        scales = weight.scales.float()
        zeros = weight.middle if weight.zeros is None else weight.zeros.float()
        both = torch.zeros(c // group_size, rows, 2, dtype=torch.bfloat16)  # [G, N, 2]
        repeats = c // group_size // weight.num_groups
        for i, values in enumerate((scales, (weight.middle - zeros) * scales)):
            both[:, :n, i] = values.t().repeat_interleave(repeats, 0)
        self.scales_and_zeros = both
        self.weight_bytes = self.packed.nbytes + both.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, N]."""
        if self._order is not None:
            x = x[:, self._order]
        if x.shape[0] <= FEW_ROWS:
            out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self.packed, self.group_size, self.scales_and_zeros
            )
        else:
            out = self._multiply_dequantized(x)
        out = out[:, : self.out_features]
        return out.contiguous() if self.bias is None else out + self.bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, N] plus the layer's output."""
        return residual + self(x)

    def _multiply_dequantized(self, x: Tensor) -> Tensor:
        """[T, C] to [T, padded N]."""
        rows, half = self.packed.shape
        c, block = half * 2, _block_rows()
        assert block is not None
        out = torch.empty(x.shape[0], rows, dtype=x.dtype)
        step = max(1, CHUNK_WEIGHTS // (c * block)) * block
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            out[:, start:stop] = x @ self._transposed(start, stop, block)
        return out

    def _transposed(self, start: int, stop: int, block: int) -> Tensor:
        """[C, n], the dequantized weights of some rows."""
        c = self.packed.shape[1] * 2
        groups = c // self.group_size
        pairs = self.packed[start:stop].view(-1, groups, self.group_size, block // 2)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-2)  # [N / B, G, S, 2, B / 2]
        centered = codes.to(torch.bfloat16).sub_(INT4_MIDDLE)
        part = self.scales_and_zeros[:, start:stop].view(groups, -1, 1, 2, block // 2, 2)
        scales, zeros = part.transpose(0, 1).contiguous().unbind(-1)  # [N / B, G, 1, 2, B / 2]
        dense = torch.addcmul(zeros, centered, scales)  # one rounding
        return dense.reshape(-1, c, block).transpose(0, 1).reshape(c, stop - start)


class Int8Linear:
    """8-bit weights with a scale a row, and inputs rounded to 8 bits."""

    kernel = "int_mm"

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self.weight = weight.int8_weight()  # [N, C]
        self.bias = None if bias is None else bias.float()
        self.has_two_levels = weight.channel_scales is not None
        scales = weight.scales[:, 0] if weight.channel_scales is None else weight.channel_scales
        self.scales = scales.float()
        self.weight_bytes = self.weight.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, N]."""
        return self._finish(self._product(x.float()), x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, N] plus the layer's output."""
        return residual + self(x)

    def _product(self, x: Tensor) -> Tensor:
        """[T, N] float32, multiplied in the order of quant/linear.py."""
        codes, token_scales = quantize_activations(x)
        sums = torch._int_mm(codes, self.weight.t()).float()
        if self.has_two_levels:
            return sums.mul_(token_scales).mul_(self.scales)
        return sums.mul_(self.scales).mul_(token_scales)

    def _finish(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        return (out if self.bias is None else out.add_(self.bias)).to(dtype)


class OutlierLinear(Int8Linear):
    """LLM.int8: outliers go around the integer product."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        assert weight.outlier_threshold is not None
        self.threshold = weight.outlier_threshold

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, N]."""
        wide = x.float()
        is_outlier = wide.abs() >= self.threshold  # [T, C]
        channels = is_outlier.any(dim=0).nonzero()[:, 0]
        if not len(channels):
            return self._finish(self._product(wide), x.dtype)
        out = self._product(wide.masked_fill(is_outlier, 0.0))
        outliers = wide.masked_fill(~is_outlier, 0.0)[:, channels]
        columns = self.weight[:, channels].float() * self.scales[:, None]
        return self._finish(out.addmm_(outliers, columns.t()), x.dtype)


class GroupedInt8Linear:
    """Weights with a scale a group, and inputs rounded to 8 bits: an integer product a group."""

    kernel = "int_mm"

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        groups, centered = weight.group_of_channel(), weight.centered().to(torch.int8)
        self.order = None if weight.g_idx is None else groups.argsort(stable=True)
        columns = centered if self.order is None else centered[:, self.order]
        sizes = torch.bincount(groups, minlength=weight.num_groups).tolist()
        # [S, N] each; a kernel wants its matrix in one piece.
        self.parts = [part.t().contiguous() for part in torch.split(columns, sizes, dim=1)]
        self.sizes = sizes
        self.scales = weight.scales.float().t().contiguous()  # [G, N]
        self.bias = None if bias is None else bias.float()
        self.weight_bytes = centered.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, N]."""
        codes, token_scales = quantize_activations(x)
        if self.order is not None:
            codes = codes[:, self.order]
        out = torch.zeros(x.shape[0], self.scales.shape[1])
        pieces = torch.split(codes, self.sizes, dim=1)
        for piece, part, scales in zip(pieces, self.parts, self.scales, strict=True):
            if part.shape[0]:
                out.addcmul_(torch._int_mm(piece.contiguous(), part).float(), scales)
        out.mul_(token_scales)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, N] plus the layer's output."""
        return residual + self(x)


def _grouped_order(weight: QuantizedWeight) -> Any:
    """Order of channels in which groups are whole and one after another; False if there is none."""
    if weight.g_idx is None:
        return None
    sizes = torch.bincount(weight.g_idx.long(), minlength=weight.num_groups)
    return weight.g_idx.argsort(stable=True) if bool((sizes == weight.group_size).all()) else False


def _int4_group(weight: QuantizedWeight) -> int | None:
    """The largest group size of torch's kernel that the weight's own groups are made of."""
    own = weight.in_features if weight.group_size == PER_CHANNEL else weight.group_size
    fits = (size for size in INT4_GROUPS if own % size == 0 and weight.in_features % own == 0)
    return next(fits, None)


@lru_cache(maxsize=1)
def _block_rows() -> int | None:
    """Rows B of a block in torch's packed layout [N / B, C, B / 2], which depends on the processor.

    A byte holds row i in its low half and row i + B / 2 in its high one. None: some other layout.
    """
    c = 32
    codes = torch.arange(PACKED_ROWS * 2 * c).mul(7).remainder(16).reshape(-1, c)
    codes[:, 0] = torch.arange(len(codes)).div(3).remainder(16)  # no two rows alike
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    for block in (64, 32):
        low, high = codes.view(-1, 2, block // 2, c).to(torch.uint8).unbind(1)
        if torch.equal((low | (high << 4)).transpose(1, 2).reshape(packed.shape), packed):
            return block
    return None


@lru_cache(maxsize=1)
def _multiplies_integers() -> bool:
    """Whether `_int_mm` is exact here: processors without VNNI may saturate sums of pairs."""
    codes = torch.full((3, 64), 127, dtype=torch.int8)
    weight = torch.full((32, 64), -128, dtype=torch.int8)
    expected = codes.long() @ weight.long().t()
    return torch.equal(torch._int_mm(codes, weight.t()).long(), expected)
