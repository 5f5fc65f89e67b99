"""A linear layer over oneDNN's packed weights, with a kernel of our own for a few rows.

oneDNN does not document how it packs, so nothing is assumed: the kernel tries the block sizes
that oneDNN is known to use, and a layer takes it only where its result for random inputs is
oneDNN's. Where none fits (another processor, another oneDNN), the layer is plain oneDNN, and its
`kernel` says so.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from llmbench.engine.layers.linear import OneDNNLinear

FEW_ROWS = 8
"""Rows up to which the kernel runs; cpu_linear.h has code for no more."""
BLOCK_SIZES = (32, 64, 48, 16)

FewRowsKernel = Callable[..., int]


class LinearShape(ctypes.Structure):
    """Argument of the kernel, as in cpu_linear.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("block", ctypes.c_int64),
    )


class PackedLinear(OneDNNLinear):
    """oneDNN's linear, and for up to 8 rows ours over the same weights (bfloat16, CPU)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, few_rows: FewRowsKernel) -> None:
        super().__init__(weight, bias)
        self._few_rows = few_rows
        self._outputs, self._inputs = weight.shape
        self._address: int = torch.ops.mkldnn.data_ptr(self.weight)
        self._bias_address = None if self.bias is None else self.bias.data_ptr()
        self._shapes = self._prove()
        if self._shapes:
            self.kernel = "onednn+packed"

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, N]."""
        if x.shape[0] > FEW_ROWS or not self._shapes:
            return super().__call__(x)
        return self._run(self._shapes[x.shape[0]], x, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, N] plus the layer's output, in one kernel."""
        if x.shape[0] > FEW_ROWS or not self._shapes:
            return super().add_to(residual, x)
        return self._run(self._shapes[x.shape[0]], x, residual)

    def _run(self, shape: LinearShape, x: Tensor, residual: Tensor | None) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        if residual is not None and not residual.is_contiguous():
            residual = residual.contiguous()
        out = torch.empty((x.shape[0], self._outputs), dtype=torch.bfloat16)
        self._few_rows(
            ctypes.addressof(shape),
            out.data_ptr(),
            x.data_ptr(),
            self._address,
            self._bias_address,
            None if residual is None else residual.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def _prove(self) -> list[LinearShape]:
        """Kernel arguments by number of rows, if some block size gives oneDNN's own results."""
        num_packed: int = torch.ops.mkldnn._nbytes(self.weight)
        if num_packed != 2 * self._outputs * self._inputs or self._inputs % 2:
            return []  # padded
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, self._inputs, generator=generator).bfloat16()
        want = super().__call__(x).float()
        for block in BLOCK_SIZES:
            if self._outputs % block:
                continue
            shapes = [
                LinearShape(rows, self._outputs, self._inputs, block)
                for rows in range(FEW_ROWS + 1)
            ]
            got = self._run(shapes[1], x, None).float()
            # bfloat16 rounds to 1 in 256; a wrong layout is off by the size of the values.
            if torch.allclose(got, want, rtol=2**-6, atol=2**-6 * float(want.abs().max())):
                return shapes
        return []
