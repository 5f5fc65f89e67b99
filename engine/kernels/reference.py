"""The operations between a decoder's matrix multiplications, in plain torch: the specification.

A decoder is matrix multiplications and, between them, a few memory-bound operations: norms,
rotary embedding, the write into the KV cache, attention, activations. `TorchOps` says what each
of them computes, in as few lines as possible; `CpuOps` (cpu_ops.py) offers the same methods as
fused C++ kernels, and the tests hold the two against each other.

Arithmetic is in float32 whatever the tensors' type, and each result is rounded once.

Legend: T tokens in this step · H hidden size · N query heads · M key/value heads · D head dim ·
R rotated half (rotary_dim / 2) · I intermediate size · S slots of the KV cache · B sequences.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.device import zeros
from llmbench.engine.layers.linear import Linear, make_linear
from llmbench.engine.layers.quantized_linear import ReferenceQuantizedLinear
from llmbench.engine.models.architecture import Activation
from llmbench.quant.quantized_weight import QuantizedWeight

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class TorchOps:
    """The operations in plain torch, on any device."""

    name = "torch"
    """Which kernels these are, for the step record."""

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear layer over a weight [N, C]."""
        return make_linear(weight, bias)

    def make_activated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, *, gated: bool
    ) -> Linear:
        """activation(x W^T + b), the MLP's first half.

        With `gated`, the weight [2 I, C] holds gates and then what they multiply, and the output
        [T, I] is activation(gate) * up.
        """
        return ActivatedLinear(self, self.make_linear(weight, bias), activation, gated=gated)

    def make_quantized_linear(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> Linear:
        """A linear layer over quantized codes [N, C], activated as `make_activated_linear` does.

        `bias` is in the type of the layer's input. What is computed is quant/linear.py's
        `quantized_linear`; the layer holds the codes at their true width.
        """
        linear = ReferenceQuantizedLinear(weight, bias)
        if activation is None:
            return linear
        return ActivatedLinear(self, linear, activation, gated=gated)

    def make_kv_cache(
        self,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """A zeroed KV cache of one layer, here [S, 2 M, D]: a token's key heads, then its values.

        Only `rope_and_store` and `attention` of the same class know a cache's layout.
        """
        shape = (num_slots, 2 * num_kv_heads, head_dim)
        return zeros(shape, dtype, device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm (Zhang and Sennrich 2019, eq. 4) of the rows of x [T, H].

        `weight` [H] is float32, with Gemma's offset of 1 already added.
        """
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Layer norm (Ba et al. 2016) of the rows of x [T, H]; weight and bias are float32 [H]."""
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)

    def rope_factors(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `rope_and_store` takes as cos and sin, from float32 [T, R]; made once a step."""
        return cos, sin

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
        """Norm and rotate queries and keys in place, then write keys and values at their slots.

        qkv [T, (N + 2 M) * D] holds query, key and value heads. `cos` and `sin` are float32
        [T, R], the rotary table's rows at the tokens' positions; None rotates nothing. The
        rotation pairs dimension i with i + R, as Hugging Face checkpoints do ("neox" style),
        and leaves dimensions from rotary_dim on as they are. A norm weight (float32) of D
        entries norms each head by itself, one of N * D or M * D all heads of a token together.
        kv_cache comes from `make_kv_cache`. A token whose slot is negative is not written.
        """
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        q, k, _ = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        for part, weight in ((q, q_norm_weight), (k, k_norm_weight)):
            wide = part.float()
            if weight is not None:
                together = weight.numel() != head_dim
                rows = wide.flatten(1) if together else wide
                wide = self.rms_norm(rows, weight, eps).view_as(wide)
            if cos is not None and sin is not None:
                wide = rotate(wide, cos, sin, rotary_dim)
            if weight is not None or cos is not None:
                part.copy_(wide)
        written = slot_mapping >= 0
        kv_cache[slot_mapping[written]] = heads[written, num_heads:]

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
        """Causal attention of each sequence's new tokens over its cached ones -> [T, N * D].

        q [T, N * D] may be a view into qkv. The cache already holds the new tokens. A token sees
        those before it and itself, at most `sliding_window` of them; `softcap` replaces a score s
        by softcap * tanh(s / softcap) before the mask (Gemma 2). Query heads share key/value
        heads in consecutive groups (Ainslie et al. 2023).
        """
        _, doubled, head_dim = kv_cache.shape
        num_kv_heads = doubled // 2
        num_heads = q.shape[1] // head_dim
        out = torch.empty(q.shape[0], num_heads * head_dim, dtype=q.dtype, device=q.device)
        offsets = torch.arange(batch.block_size, device=q.device)
        start = 0
        for i, (query_len, context_len) in enumerate(
            zip(batch.query_lens, batch.context_lens, strict=True)
        ):
            blocks = batch.block_table[i, : -(-context_len // batch.block_size)].long()
            slots = (blocks[:, None] * batch.block_size + offsets).flatten()[:context_len]
            # [context, 2 M, D] -> [M, context, D]
            k, v = torch.split(kv_cache[slots].float().transpose(0, 1), num_kv_heads)
            rows = q[start : start + query_len].float()
            grouped = rows.view(query_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
            scores = grouped @ k[:, None].transpose(-1, -2) * scale  # [M, N / M, query, context]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            key = torch.arange(context_len, device=q.device)
            last = key[context_len - query_len :, None]  # position of each query: its last key
            hidden = key > last
            if sliding_window is not None:
                hidden |= key <= last - sliding_window
            scores = scores.masked_fill(hidden, float("-inf"))
            heads = scores.softmax(-1) @ v[:, None]  # [M, N / M, query, D]
            out[start : start + query_len] = heads.permute(2, 0, 1, 3).flatten(1).to(q.dtype)
            start += query_len
        return out

    def act_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, x [T, 2 I] being gate and up side by side -> [T, I]."""
        gate, up = x.float().chunk(2, dim=-1)
        return (ACTIVATIONS[activation](gate) * up).to(x.dtype)

    def act(self, x: Tensor, activation: Activation) -> Tensor:
        """The activation of each element."""
        return ACTIVATIONS[activation](x.float()).to(x.dtype)


class ActivatedLinear:
    """A linear layer and, as an operation of its own, the activation of its output."""

    def __init__(
        self, ops: TorchOps, linear: Linear, activation: Activation, *, gated: bool
    ) -> None:
        self.linear, self.activation = linear, activation
        self._activate = ops.act_and_mul if gated else ops.act
        self.kernel, self.weight_bytes = linear.kernel, linear.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] to [T, I]."""
        return self._activate(self.linear(x), self.activation)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, I] plus the activated output."""
        return residual + self(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """Rotary embedding (Su et al. 2021, eq. 34) of x [T, heads, D] float32; cos, sin [T, R]."""
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:])
    return torch.cat(rotated, dim=-1)
