"""The operations between matrix multiplications as the fewest torch calls that compute them.

On CPU a decode step of a small model is 30 layers of operations that take a few microseconds
each, so the number of calls counts as much as the arithmetic. `EagerOps` computes what
reference.py specifies, in the tensors' own type where torch's kernels accumulate in float32 by
themselves, and is the default on every device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.kernels.reference import ACTIVATIONS, ActivatedLinear, TorchOps
from llmbench.engine.layers.attention.backend import AttentionBackend
from llmbench.engine.layers.attention.torch_backend import TorchAttention
from llmbench.engine.layers.linear import Linear
from llmbench.engine.layers.torch_quantized_linear import fast_quantized_linear
from llmbench.engine.models.architecture import Activation
from llmbench.quant.quantized_weight import QuantizedWeight

FEW_ROWS = 8
"""Up to here the number of calls weighs more than the arithmetic."""


class EagerOps(TorchOps):
    """TorchOps with fewer calls; results differ by rounding only."""

    name = "eager"

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of the layers' inputs, on which faster quantized layers depend."""
        self.dtype = dtype
        self._attention: AttentionBackend = TorchAttention()
        self._weights: dict[tuple[int, torch.dtype], Tensor | None] = {}

    def make_quantized_linear(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> Linear:
        """A quantized layer on torch's integer kernels, where they can express the weight."""
        linear = fast_quantized_linear(weight, bias, self.dtype)
        if linear is None or activation is None:
            return linear or super().make_quantized_linear(
                weight, bias, activation=activation, gated=gated
            )
        return ActivatedLinear(self, linear, activation, gated=gated)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of the rows of x [T, H]; weight [H] is float32.

        On CPU torch composes this norm of nine operations, and layer norm is one. Over a row
        followed by its negative the mean is 0 and the variance the mean square, so that layer
        norm of the two halves is this norm of the first: for few rows, where calls count, that
        takes half the time.
        """
        narrow = self._doubled(weight, x.dtype)
        width = x.shape[-1]
        if narrow is None:
            return super().rms_norm(x, weight, eps)
        if x.device.type == "cpu" and x.shape[0] <= FEW_ROWS:
            both = torch.cat((x, x.neg()), dim=-1)
            return F.layer_norm(both, narrow.shape, narrow, None, eps)[..., :width]
        return F.rms_norm(x, (width,), narrow[:width], eps)

    def rope_factors(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Factors [T, 1, 2 R] of a head and of the head with its halves swapped."""
        return (
            torch.cat((cos, cos), dim=-1)[:, None].to(dtype),
            torch.cat((-sin, sin), dim=-1)[:, None].to(dtype),
        )

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        slot_mapping: Tensor,
        kv_cache: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
        eps: float,
    ) -> None:
        """Norm and rotate queries and keys in place, then write keys and values at their slots."""
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        num_rotated = num_heads + num_kv_heads
        for start, stop, weight in (
            (0, num_heads, q_norm_weight),
            (num_heads, num_rotated, k_norm_weight),
        ):
            if weight is not None:
                part = heads[:, start:stop]
                rows = part if weight.numel() == head_dim else part.flatten(1)
                part.copy_(self.rms_norm(rows, weight, eps).view_as(part))
        if cos is not None and sin is not None:
            half = rotary_dim // 2
            rotated = heads[:, :num_rotated, :rotary_dim]
            swapped = rotated.roll(half, -1)
            rotated.mul_(cos).addcmul_(swapped, sin)
        kv_cache.index_copy_(0, slot_mapping, heads[:, num_heads:])

    def attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Causal attention of each sequence's new tokens over its cached ones -> [T, N * D]."""
        query = q.view(q.shape[0], -1, kv_cache.shape[2])
        out = self._attention.attend(
            query,
            kv_cache,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        return out.flatten(1)

    def act_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, x [T, 2 I] being gate and up side by side -> [T, I]."""
        half = x.shape[-1] // 2
        return ACTIVATIONS[activation](x[:, :half]).mul_(x[:, half:])

    def act(self, x: Tensor, activation: Activation) -> Tensor:
        """The activation of each element."""
        return ACTIVATIONS[activation](x)

    def _doubled(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The weight twice over in a type that does not round it, made once; else None."""
        key = (weight.data_ptr(), dtype)
        if key not in self._weights:
            narrow = weight.to(dtype)
            exact = torch.equal(narrow.float(), weight)
            self._weights[key] = torch.cat((narrow, narrow)) if exact else None
        return self._weights[key]
