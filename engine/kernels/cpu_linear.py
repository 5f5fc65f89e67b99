"""Linear layers on weights in our own packed layout (cpu_linear.h); bfloat16 on CPU.

One layout serves one row and a whole prompt, so the weight is held once. A call costs two
microseconds beside the arithmetic, where oneDNN's through torch costs ten to twenty, and a row's
result has the same bits in any batch.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from llmbench.engine.models.architecture import Activation

# The order of `enum Activation` in cpu_activation.h.
ACTIVATION_CODES: dict[Activation, int] = {
    name: code for code, name in enumerate(get_args(Activation))
}
# BLOCK * PAIR and INPUTS in cpu_linear.h: to whose multiples a packed weight is padded.
OUTPUTS, _INPUTS = 32, 32


class LinearCall(ctypes.Structure):
    """The struct of the same name in cpu_linear.h."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("gated", ctypes.c_int64),
    )


def can_pack(library: ctypes.CDLL, weight: Tensor) -> bool:
    """Whether the kernels multiply such a weight on this processor."""
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and bool(library.multiplies_bfloat16())
    )


class PackedLinear:
    """What layers over packed weights share: a call of a compiled kernel, bfloat16 in and out."""

    inputs: int
    outputs: int
    _product: Any
    _call: LinearCall
    _gated: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, N]."""
        return self._run(x, None, torch.empty((x.shape[0], self.outputs), dtype=torch.bfloat16))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, N] plus the layer's output, in place."""
        if (
            residual.shape != (x.shape[0], self.outputs)
            or residual.dtype is not torch.bfloat16
            or not residual.is_contiguous()
            or self._gated
        ):
            raise ValueError(f"linear layer cannot add to {residual.dtype} {residual.shape}")
        return self._run(x, residual, residual)

    def _run(self, x: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
        rows, inputs = x.shape
        if inputs != self.inputs or x.dtype is not torch.bfloat16:
            raise ValueError(f"linear layer cannot take {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        # A call of its own, since two threads may run one model.
        call = type(self._call).from_buffer_copy(self._call)
        call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), rows
        if residual is not None:
            call.residual = residual.data_ptr()
        self._product(ctypes.addressof(call), torch.get_num_threads())
        return out


class CpuLinear(PackedLinear):
    """A linear layer over a packed bfloat16 weight."""

    kernel = "cpu"

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        """Pack a weight [N, C].

        With an activation the layer's output is activated; where it is gated too, the first half
        of N are gates, and the output [T, N / 2] is activation(gate) times the second half.
        """
        rows, self.inputs = weight.shape
        self.outputs = rows // 2 if gated else rows
        padded_outputs = -(-self.outputs // (OUTPUTS // 2 if gated else OUTPUTS)) * OUTPUTS
        padded_inputs = -(-self.inputs // _INPUTS) * _INPUTS
        self.weight = torch.zeros(padded_outputs, padded_inputs, dtype=torch.bfloat16)
        self.weight_bytes = self.weight.nbytes
        pack: Any = library.pack_weight_bfloat16
        pack.argtypes = (ctypes.c_void_p,) * 2 + (ctypes.c_int64,) * 4
        row_major = weight.contiguous()
        pack(
            self.weight.data_ptr(),
            row_major.data_ptr(),
            rows,
            self.inputs,
            gated,
            torch.get_num_threads(),
        )
        self.bias = None
        if bias is not None:
            self.bias = packed_bias(bias, padded_outputs, gated=gated)
        self._product: Any = library.linear_bfloat16
        self._product.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._product.restype = None
        self._gated = gated
        self._call = LinearCall(
            weight=self.weight.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.inputs,
            outputs=rows,
            activation=-1 if activation is None else ACTIVATION_CODES[activation],
            gated=gated,
        )


def packed_bias(bias: Tensor, size: int, *, gated: bool) -> Tensor:
    """The bias in float32 and in the order of the packed weight's rows."""
    packed = torch.zeros(size)
    if gated:
        half = bias.numel() // 2
        columns = packed.view(-1, 2, OUTPUTS // 2)  # [pairs of blocks, gate or not, 16]
        for i in range(2):
            padded = torch.zeros(size // 2)
            padded[:half] = bias[i * half : (i + 1) * half]
            columns[:, i] = padded.view(-1, OUTPUTS // 2)
    else:
        packed[: bias.numel()] = bias
    return packed
