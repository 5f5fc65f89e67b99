"""Linear layers on quantized weights in our own packed layout (cpu_codes.h); bfloat16 on CPU.

Every format and bit width becomes one of two packed forms, codes of 4 or of 8 bits with scales
and zeros beside them, and both serve bfloat16 and 8-bit activations, one row and a whole prompt.
What is computed is quant/linear.py's product: codes are multiplied as integers and scaled a group
at a time, so no weight is rounded a second time. A row's result has the same bits in any batch.

What the kernels do not take stays with the reference (`unsupported_weight`).

Shapes: `N` out features · `C` in features · `G` groups of a row · `S` channels of a group.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmbench.engine.kernels.cpu_linear import (
    ACTIVATION_CODES,
    OUTPUTS,
    LinearCall,
    PackedLinear,
    packed_bias,
)
from llmbench.engine.models.architecture import Activation
from llmbench.quant.config import PER_CHANNEL
from llmbench.quant.quantized_weight import INT8_MAX, QuantizedWeight

# A vector of the widest kind holds 16 inputs, and groups are whole vectors.
_GROUP_STEP = 16
# To whose multiple a row is padded that is one group: a line of the widest tile.
_ROW_STEP = 64
# 255 * 127 * C, the largest sum of 8-bit products, must stay below 2^31.
_MOST_INPUTS = 65536
# The order of `enum ScaleType` in cpu_codes.h.
_SCALE_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class _QuantizedCall(LinearCall):
    _fields_ = (
        ("columns", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("scale_type", ctypes.c_int64),
        ("has_zeros", ctypes.c_int64),
        ("int8_activations", ctypes.c_int64),
        ("channel_scales", ctypes.c_void_p),
    )


def unsupported_weight(weight: QuantizedWeight) -> str | None:
    """Why the compiled kernels leave a weight to the reference; None if they take it."""
    if weight.outlier_threshold is not None:
        return "input channels with outliers are multiplied in full precision"
    if weight.codes.device.type != "cpu":
        return f"the weight is on {weight.codes.device}"
    if weight.in_features > _MOST_INPUTS:
        return f"{weight.in_features} inputs are more than {_MOST_INPUTS}"
    # Two levels of scales can become one.
    return None if weight.channel_scales is not None else _unsupported_groups(weight)


def _unsupported_groups(weight: QuantizedWeight) -> str | None:
    if weight.group_size == PER_CHANNEL:
        return None
    if weight.group_size % _GROUP_STEP:
        return f"group_size {weight.group_size} is no multiple of {_GROUP_STEP}"
    most = int(torch.bincount(weight.group_of_channel()).max())
    if most > weight.group_size:
        return f"g_idx puts {most} inputs into a group of {weight.group_size}"
    return None


class CpuQuantizedLinear(PackedLinear):
    """A linear layer over packed codes."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        """Pack a weight [N, C] that has no `unsupported_weight`; the rest as in `CpuLinear`."""
        codes = _Codes.of(weight, can_keep_levels=bool(library.multiplies_two_levels()))
        rows, self.inputs = weight.out_features, weight.in_features
        self.outputs = rows // 2 if gated else rows
        self._gated = gated
        self.kernel = f"cpu-w{codes.bits}a{8 if weight.activations == 'int8' else 16}"
        order = _packed_rows(rows, gated=gated)
        scales, zeros = _in_records(codes.scales, order), None
        if codes.zeros is not None:
            zeros = _in_records(codes.zeros.to(torch.int16), order)
        code_bytes = codes.group_size * OUTPUTS * codes.bits // 8
        header = scales.shape[-1] + (0 if zeros is None else zeros.shape[-1])
        # [pairs of blocks, G, bytes of a record]
        self.weight = torch.zeros(*scales.shape[:2], header + code_bytes, dtype=torch.uint8)
        self.weight[..., : scales.shape[-1]] = scales
        if zeros is not None:
            self.weight[..., scales.shape[-1] : header] = zeros
        self.columns, self.channel_scales = codes.columns, None
        if codes.channel_scales is not None:
            packed = codes.channel_scales[order.clamp(min=0)]
            self.channel_scales = packed.masked_fill(order < 0, 0).contiguous()
        parts = (self.weight, self.columns, self.channel_scales)
        self.weight_bytes = sum(part.nbytes for part in parts if part is not None)
        self.bias = None if bias is None else packed_bias(bias, order.numel(), gated=gated)
        self._call = _QuantizedCall(
            weight=self.weight.data_ptr(),
            bias=_address(self.bias),
            inputs=self.inputs,
            outputs=rows,
            activation=-1 if activation is None else ACTIVATION_CODES[activation],
            gated=gated,
            columns=_address(self.columns),
            bits=codes.bits,
            group_size=codes.group_size,
            groups=scales.shape[1],
            scale_type=_SCALE_TYPES[codes.scales.dtype],
            has_zeros=zeros is not None,
            int8_activations=weight.activations == "int8",
            channel_scales=_address(self.channel_scales),
        )
        pack: Any = library.pack_codes
        pack.argtypes = (ctypes.c_void_p,) * 3 + (ctypes.c_int64,) * 2
        row_major = codes.codes.contiguous()
        pack(
            ctypes.addressof(self._call),
            self.weight.data_ptr(),
            row_major.data_ptr(),
            codes.lift,
            torch.get_num_threads(),
        )
        self._product: Any = library.quantized_linear
        self._product.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._product.restype = None


@dataclass(frozen=True, slots=True, eq=False)
class _Codes:
    """A weight in one of the two packed widths, 4 and 8 bits.

    Attributes:
        lift: Added to each code, so that the middle of fewer bits is the middle of 4.
        columns: [G * S] int32, the input that each packed one is, -1: none; None: in order.
    """

    bits: int
    codes: Tensor
    lift: int
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    columns: Tensor | None
    channel_scales: Tensor | None

    @classmethod
    def of(cls, weight: QuantizedWeight, *, can_keep_levels: bool) -> "_Codes":
        """Without `can_keep_levels` two levels of scales become 8-bit codes with one."""
        row = -(-weight.in_features // _ROW_STEP) * _ROW_STEP
        if weight.channel_scales is not None and not (can_keep_levels and _keeps_levels(weight)):
            codes = (weight.int8_weight().to(torch.int16) + INT8_MAX + 1).to(torch.uint8)
            scales = _narrowed(weight.channel_scales[:, None])
            return cls(8, codes, 0, scales, None, row, None, None)
        bits = 4 if weight.bits <= 4 else 8
        return cls(
            bits,
            weight.codes,
            (1 << (bits - 1)) - weight.middle if weight.sym else 0,
            _narrowed(weight.scales),
            weight.zeros,
            row if weight.group_size == PER_CHANNEL else weight.group_size,
            _columns(weight),
            weight.channel_scales,
        )


def _keeps_levels(weight: QuantizedWeight) -> bool:
    """Whether the kernels make a weight's 8-bit integers from its 4-bit codes as they go."""
    if weight.group_size == PER_CHANNEL or _unsupported_groups(weight) is not None:
        return False
    packed = weight.num_groups * weight.group_size
    return weight.bits == 4 and weight.sym and packed % _ROW_STEP == 0


def _narrowed(scales: Tensor) -> Tensor:
    """The scales in 16 bits where that changes none of them."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales.float()):
            return narrow
    return scales


def _columns(weight: QuantizedWeight) -> Tensor | None:
    """[G * S], the inputs in the order of their groups; None where they lie so."""
    if weight.g_idx is None or weight.group_size == PER_CHANNEL:
        return None
    group = weight.group_of_channel()
    order = torch.argsort(group, stable=True)
    if torch.equal(group, torch.arange(group.numel()) // weight.group_size):
        return None
    members = torch.bincount(group, minlength=weight.num_groups)
    place = torch.arange(group.numel()) - (members.cumsum(0) - members)[group[order]]
    columns = torch.full((weight.num_groups, weight.group_size), -1, dtype=torch.int32)
    columns[group[order], place] = order.to(torch.int32)
    return columns.flatten()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _packed_rows(rows: int, *, gated: bool) -> Tensor:
    """The row of the weight at each place of the packed outputs; -1 where there is none."""
    half = OUTPUTS // 2
    width = rows // 2 if gated else rows
    place = torch.arange(-(-width // (half if gated else OUTPUTS)) * OUTPUTS)
    if not gated:
        return torch.where(place < rows, place, -1)
    index = place // OUTPUTS * half + place % half
    return torch.where(index < width, index + place // half % 2 * width, -1)


def _in_records(values: Tensor, order: Tensor) -> Tensor:
    """[N, G] values of 2 or 4 bytes as bytes [pairs of blocks, G, 32 of them]."""
    packed = values[order.clamp(min=0)].masked_fill((order < 0)[:, None], 0)
    packed = packed.view(-1, OUTPUTS, values.shape[1]).transpose(1, 2).contiguous()
    return packed.view(torch.uint8)
