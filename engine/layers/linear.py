"""Linear layers: y = x W^T + b, with the residual sum folded in where the kernel can.

On CPU the weight is reordered once into oneDNN's own blocked layout, which is the largest single
gain that plain torch offers for few rows: 1.5 to 2.4 times on bfloat16. Everywhere else, and for
float32, it is torch's linear. Quantized weights become further classes with the same two calls.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """A linear layer of any weight format."""

    kernel: str
    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, N]."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` [T, N] plus the layer's output; `residual` itself may be overwritten."""


class PlainLinear:
    """torch's linear over a row-major weight [N, C]."""

    kernel = "torch"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, N]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` [T, N] plus the layer's output."""
        if self.bias is None:
            return torch.addmm(residual, x, self.weight.t())
        return residual + F.linear(x, self.weight, self.bias)


class OneDNNLinear:
    """oneDNN's linear over a weight in its own blocked layout (CPU)."""

    kernel = "onednn"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight_bytes = weight.nbytes
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, N]."""
        out: torch.Tensor = self._linear(x, self.weight, self.bias, "none", [], "")
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` [T, N] plus the layer's output, in one kernel."""
        out: torch.Tensor = self._linear_add(x, residual, self.weight, self.bias, "add")
        return out


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs this weight, and computes with it faster for that."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest layer that torch offers for an unquantized weight [N, C]."""
    return OneDNNLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)
