"""Any set of operations over a KV cache of 8 bits.

Everything but the cache is the inner operations': their multiplications, norms, activations and
rotary embedding. Rotated keys and values are then rounded and written in plain torch, and
attention is torch's over dequantized blocks, also where the inner operations have kernels of
their own for a 16-bit cache. The name in the record says so.
"""

import torch
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.device import zeros
from llmbench.engine.kernels.reference import TorchOps
from llmbench.engine.layers.attention.int8_cache import quantize_rows
from llmbench.engine.layers.attention.torch_backend import TorchAttention
from llmbench.engine.layers.linear import Linear
from llmbench.engine.memory import int8_row_bytes
from llmbench.engine.models.architecture import Activation
from llmbench.quant.quantized_weight import QuantizedWeight

LABEL = "int8-kv-torch"
"""What a record calls the attention."""


class Int8CacheOps(TorchOps):
    """Inner operations with the cache in 8 bits."""

    def __init__(self, inner: TorchOps) -> None:
        self.inner = inner
        self.name = f"{inner.name}+{LABEL}"
        self._attention = TorchAttention()
        self._head_dim = 0
        self._scratch = torch.empty(0)
        self._num_scratch_slots = 0

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """As the inner operations."""
        return self.inner.make_linear(weight, bias)

    def make_activated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, *, gated: bool
    ) -> Linear:
        """As the inner operations."""
        return self.inner.make_activated_linear(weight, bias, activation, gated=gated)

    def make_quantized_linear(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> Linear:
        """As the inner operations."""
        return self.inner.make_quantized_linear(weight, bias, activation=activation, gated=gated)

    def make_kv_cache(
        self,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """A zeroed cache [S, 2 M, W] of rows as int8_cache.py describes them."""
        self._head_dim = head_dim
        return zeros((num_slots, 2 * num_kv_heads, int8_row_bytes(head_dim)), torch.int8, device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As the inner operations."""
        return self.inner.rms_norm(x, weight, eps)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """As the inner operations."""
        return self.inner.layer_norm(x, weight, bias, eps)

    def rope_factors(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As the inner operations."""
        return self.inner.rope_factors(cos, sin, dtype)

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
        """Norm and rotate as the inner operations do, then round keys and values into the cache."""
        num_tokens = qkv.shape[0]
        # The inner operations write into a cache of theirs, which nobody reads.
        self.inner.rope_and_store(
            qkv,
            cos,
            sin,
            torch.arange(num_tokens, device=qkv.device),
            self._scratch_cache(num_tokens, num_kv_heads, head_dim, qkv),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            q_norm_weight=q_norm_weight,
            k_norm_weight=k_norm_weight,
            eps=eps,
        )
        heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)[:, num_heads:]
        written = slot_mapping >= 0
        if not bool(written.all()):
            heads, slot_mapping = heads[written], slot_mapping[written]
        kv_cache.index_copy_(0, slot_mapping, quantize_rows(heads))

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
        """torch's attention over dequantized blocks -> [T, N * D]."""
        out = self._attention.attend(
            q.view(q.shape[0], -1, self._head_dim),
            kv_cache,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        return out.flatten(1)

    def act_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """As the inner operations."""
        return self.inner.act_and_mul(x, activation)

    def act(self, x: Tensor, activation: Activation) -> Tensor:
        """As the inner operations."""
        return self.inner.act(x, activation)

    def _scratch_cache(
        self, num_tokens: int, num_kv_heads: int, head_dim: int, x: Tensor
    ) -> Tensor:
        """A cache of the inner operations with room for a step's tokens."""
        if num_tokens > self._num_scratch_slots:
            self._num_scratch_slots = num_tokens
            self._scratch = self.inner.make_kv_cache(
                num_tokens, num_kv_heads, head_dim, dtype=x.dtype, device=x.device
            )
        return self._scratch
