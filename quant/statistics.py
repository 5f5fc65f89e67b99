"""What a method needs to know of the inputs of a linear layer, gathered token by token.

The Hessian of the squared output error is H = sum over tokens of x x^T (Frantar et al. 2022,
section 3.1, up to the factor 2): GPTQ and AWQ ask it everything about the activations, so no
activation has to be kept. Sums run in float32 and every token counts alike, however the tokens
were cut into texts and batches.

bfloat16 inputs are multiplied as bfloat16 and summed in float32: a product of two bfloat16
numbers is exact in float32, so this differs from a float32 product by nothing but the order of
the sum, at several times the speed. H is symmetric and only its upper half is computed.

Shapes: `T` tokens of a call · `C` input channels · `R` sampled tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

STRIPE = 384
"""Columns of H that are computed at once: wide enough for a matrix product at full speed."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Its multiples modulo 1 are spread evenly without a period (Weyl 1916)."""


class InputStatistics:
    """Sums over the inputs of linear layers that share one input.

    `hessian`, `abs_mean`, `low` and `high` describe all tokens so far; `sample` holds some of
    them, spread evenly over `total_tokens`, the number that is going to come.
    """

    def __init__(
        self,
        num_channels: int,
        *,
        hessian: bool = True,
        sample_rows: int = 0,
        total_tokens: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_tokens = 0
        self._upper = torch.zeros(num_channels, num_channels, device=device) if hessian else None
        self._abs_sum = torch.zeros(num_channels, device=device)
        self.low = torch.full((num_channels,), torch.inf, device=device)
        self.high = torch.full((num_channels,), -torch.inf, device=device)
        rows = min(sample_rows, total_tokens)
        # One token of each of `rows` equal stretches, at another place in each: at even distances
        # the sample would be in step with texts of equal length, and full of their first tokens.
        places = (int((i + i * GOLDEN_RATIO % 1) * total_tokens / rows) for i in range(rows))
        self._wanted = list(dict.fromkeys(places))
        self._sample: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        """Add the tokens of x [..., C]."""
        x = x.reshape(-1, x.shape[-1])
        if len(x) == 0:
            return
        wide = x.float()
        if self._upper is not None:
            with _exact_products(x):
                for start in range(0, wide.shape[1], STRIPE):
                    stop = min(start + STRIPE, wide.shape[1])
                    stripe = self._upper[start:stop, start:]
                    torch.addmm(stripe, wide[:, start:stop].t(), wide[:, start:], out=stripe)
        self._abs_sum += wide.abs().sum(dim=0)
        low, high = torch.aminmax(wide, dim=0)
        self.low = torch.minimum(self.low, low)
        self.high = torch.maximum(self.high, high)
        end = self.num_tokens + len(wide)
        here = [row - self.num_tokens for row in self._wanted if self.num_tokens <= row < end]
        if here:
            self._sample.append(wide[here])
        self.num_tokens = end

    @property
    def hessian(self) -> Tensor:
        """[C, C] float32, the sum over tokens of x x^T."""
        if self._upper is None:
            raise AssertionError("these statistics were asked for without a Hessian")
        upper = self._upper.triu()
        return upper + upper.triu(1).t()

    @property
    def abs_mean(self) -> Tensor:
        """[C] float32, the mean magnitude of each channel."""
        return self._abs_sum / max(self.num_tokens, 1)

    @property
    def sample(self) -> Tensor:
        """[R, C] float32, tokens from all over the calibration set."""
        if not self._sample:
            return self._abs_sum.new_zeros(0, len(self._abs_sum))
        return torch.cat(self._sample)


@contextmanager
def _exact_products(x: Tensor) -> Iterator[None]:
    """Let float32 products of bfloat16 values run on bfloat16 units, where that is exact."""
    if x.dtype is not torch.bfloat16 or x.device.type != "cpu":
        yield
        return
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
