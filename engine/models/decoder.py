"""One decoder-only transformer, driven by the flags of a DecoderArchitecture.

The model is matrix multiplications (layers/linear.py) and what stands between them (an `ops`
object, kernels/), so a new weight format or a new kernel changes neither this file nor the
families. Query, key and value are one multiplication, gate and up another; the residual sum is
folded into the multiplication that ends a branch where the norm placement allows it.

Legend: T tokens in this step · H hidden size · L rows whose logits are asked for · V vocabulary.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.errors import CheckpointError
from llmbench.engine.kernels.eager import EagerOps
from llmbench.engine.kernels.reference import TorchOps
from llmbench.engine.layers.linear import Linear
from llmbench.engine.layers.output_head import OutputHead
from llmbench.engine.models.architecture import Activation, DecoderArchitecture, LayerArchitecture
from llmbench.engine.models.linear_weights import LinearWeight, make_linear, move, shape_of

Rope = tuple[Tensor, float]
"""Inverse frequencies [R] and the factor on cos and sin (YaRN's attention scaling)."""


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""


class _RMSNorm:
    def __init__(self, ops: TorchOps, weight: Tensor, eps: float) -> None:
        self.ops, self.weight, self.eps = ops, weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class _LayerNorm:
    def __init__(self, ops: TorchOps, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.ops, self.weight, self.bias, self.eps = ops, weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class DecoderLayer:
    """Attention and MLP with their norms and residual sums."""

    def __init__(
        self,
        arch: DecoderArchitecture,
        layer: LayerArchitecture,
        weights: dict[str, LinearWeight],
        ops: TorchOps,
    ) -> None:
        self.arch, self.layer, self.ops = arch, layer, ops
        self.query_width = arch.num_heads * arch.head_dim
        vectors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}

        def linear(name: str, activation: Activation | None = None, gated: bool = False) -> Linear:
            weight, bias = weights[f"{name}.weight"], vectors.get(f"{name}.bias")
            return make_linear(ops, weight, bias, activation, gated=gated)

        self.attn_qkv, self.attn_out = linear("attn_qkv"), linear("attn_out")
        self.mlp_in = linear("mlp_in", arch.activation, arch.gated_mlp)
        self.mlp_out = linear("mlp_out")
        norms = {
            name: _make_norm(arch, ops, vectors, name)
            for name in ("attn_pre_norm", "attn_post_norm", "mlp_pre_norm", "mlp_post_norm")
        }
        self.attn_pre_norm, self.attn_post_norm = norms["attn_pre_norm"], norms["attn_post_norm"]
        self.mlp_pre_norm, self.mlp_post_norm = norms["mlp_pre_norm"], norms["mlp_post_norm"]
        self.q_norm_weight = _norm_weight(arch, vectors, "q_norm.weight")
        self.k_norm_weight = _norm_weight(arch, vectors, "k_norm.weight")

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrix multiplications, in the order of their use."""
        return self.attn_qkv, self.attn_out, self.mlp_in, self.mlp_out

    def forward(
        self,
        hidden: Tensor,  # [T, H]
        rope_factors: tuple[Tensor, Tensor] | None,
        kv_cache: Tensor,  # from `make_kv_cache`
        batch: ForwardBatch,
    ) -> Tensor:
        """The layer's output [T, H]; `hidden` may be overwritten."""
        arch, ops = self.arch, self.ops
        normed = hidden if self.attn_pre_norm is None else self.attn_pre_norm(hidden)
        qkv = self.attn_qkv(normed)
        cos, sin = (None, None) if rope_factors is None else rope_factors
        ops.rope_and_store(
            qkv,
            cos,
            sin,
            batch.slot_mapping,
            kv_cache,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            rotary_dim=arch.rotary_dim,
            q_norm_weight=self.q_norm_weight,
            k_norm_weight=self.k_norm_weight,
            eps=arch.norm_eps,
        )
        attended = ops.attention(
            qkv[:, : self.query_width],
            kv_cache,
            batch,
            scale=arch.attention_scale,
            sliding_window=self.layer.sliding_window,
            softcap=arch.attention_softcap,
        )
        hidden = _add_branch(hidden, self.attn_out, attended, self.attn_post_norm)
        normed = hidden if self.mlp_pre_norm is None else self.mlp_pre_norm(hidden)
        return _add_branch(hidden, self.mlp_out, self.mlp_in(normed), self.mlp_post_norm)


class Decoder:
    """A decoder-only transformer over the paged KV cache."""

    def __init__(
        self,
        arch: DecoderArchitecture,
        ropes: dict[str, Rope],
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: TorchOps | None = None,
    ) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.ropes = {name: (freqs.to(device), scale) for name, (freqs, scale) in ropes.items()}
        self.ops = ops if ops is not None else EagerOps(dtype)
        self.layers: list[DecoderLayer] = []
        self.embed_tokens = torch.empty(0)
        self.embed_positions: Tensor | None = None
        self.final_norm: Norm | None = None
        self.head: OutputHead | None = None
        # Gemma rounds the scale to the model's type before it multiplies.
        self.embedding_scale = torch.tensor(arch.embedding_scale, dtype=dtype).item()

    @property
    def num_layers(self) -> int:
        """Layers, each with a KV cache of its own."""
        return self.arch.num_layers

    @property
    def kernel(self) -> str:
        """What runs: the layers' matrix multiplications, each kernel once, and what is between."""
        kernels = dict.fromkeys(linear.kernel for layer in self.layers for linear in layer.linears)
        return f"{','.join(kernels)}+{self.ops.name}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are held, a tied head's packed copy included."""
        tensors = [self.embed_tokens]
        if self.embed_positions is not None:
            tensors.append(self.embed_positions)
        linears = [linear for layer in self.layers for linear in layer.linears]
        if self.head is not None:
            linears.append(self.head.linear)
        return sum(t.nbytes for t in tensors) + sum(linear.weight_bytes for linear in linears)

    def load_weights(self, weights: Iterable[tuple[str, LinearWeight]]) -> None:
        """Take the weights under their canonical names, in any order, casting each as it comes.

        Raises CheckpointError that names a tensor which is missing, unexpected or of a wrong
        shape. A layer is assembled as soon as its last tensor is there, so that no more than the
        unfinished layers are held twice.
        """
        expected = expected_shapes(self.arch)
        missing = dict.fromkeys(expected)
        top: dict[str, LinearWeight] = {}
        parts: list[dict[str, LinearWeight]] = [{} for _ in self.arch.layers]
        wanted = [0] * self.arch.num_layers
        for name in expected:
            if name.startswith("layers."):
                wanted[int(name.split(".")[1])] += 1
        layers: dict[int, DecoderLayer] = {}
        for name, weight in weights:
            if name not in expected:
                raise CheckpointError(f"unexpected tensor {name} for a {self.arch.family} model")
            if shape_of(weight) != expected[name]:
                raise CheckpointError(
                    f"{name} should have shape {list(expected[name])}, "
                    f"but has {list(shape_of(weight))} in the checkpoint"
                )
            missing.pop(name, None)
            moved = move(weight, self.device, self.dtype)
            if not name.startswith("layers."):
                top[name] = moved
                continue
            _, index_text, short = name.split(".", 2)
            index = int(index_text)
            parts[index][short] = moved
            if len(parts[index]) == wanted[index]:
                layers[index] = DecoderLayer(
                    self.arch, self.arch.layers[index], parts[index], self.ops
                )
                parts[index] = {}
        if missing:
            names = list(missing)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"the checkpoint has no tensor for {names[0]}{more}")
        self.layers = [layers[i] for i in range(self.arch.num_layers)]
        tensors = {name: value for name, value in top.items() if isinstance(value, Tensor)}
        self.embed_tokens = tensors["embed_tokens.weight"]
        self.embed_positions = tensors.get("embed_positions.weight")
        self.final_norm = _make_norm(self.arch, self.ops, tensors, "final_norm")
        head = top["embed_tokens.weight" if self.arch.tie_embeddings else "lm_head.weight"]
        self.head = OutputHead(make_linear(self.ops, head, None), self.arch.final_softcap)

    def make_kv_cache(self, num_slots: int) -> list[Tensor]:
        """Zeroed K/V tensors for so many token slots, one a layer, in the layout of the `ops`."""
        return [
            self.ops.make_kv_cache(
                num_slots,
                self.arch.num_kv_heads,
                self.arch.head_dim,
                dtype=self.dtype,
                device=self.device,
            )
            for _ in self.layers
        ]

    def forward(self, batch: ForwardBatch, kv_caches: list[Tensor]) -> Tensor:
        """Hidden states [T, H] before the final norm; writes K/V of the batch's tokens."""
        hidden = F.embedding(batch.input_ids, self.embed_tokens)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        if self.embed_positions is not None:
            rows = batch.positions + self.arch.position_offset
            hidden = hidden + F.embedding(rows, self.embed_positions)
        factors = {name: self._rope_factors(batch.positions, name) for name in self.ropes}
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            rope = layer.layer.rope
            hidden = layer.forward(hidden, None if rope is None else factors[rope], kv_cache, batch)
        return hidden

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """Rows [L, H] of `forward`'s result behind the last norm."""
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [L, V] of rows [L, H] of `forward`'s result; applies the final norm."""
        assert self.head is not None, "load_weights comes first"
        return self.head.logits(self.final_hidden(hidden))

    def _rope_factors(self, positions: Tensor, name: str) -> tuple[Tensor, Tensor]:
        frequencies, scale = self.ropes[name]
        angles = positions[:, None].float() * frequencies  # [T, R]
        return self.ops.rope_factors(angles.cos() * scale, angles.sin() * scale, self.dtype)


def expected_shapes(arch: DecoderArchitecture) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor name of a decoder with its shape."""
    hidden, inner = arch.hidden_size, arch.intermediate_size
    query, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (arch.vocab_size, hidden)}
    if arch.learned_positions:
        rows = arch.max_position_embeddings + arch.position_offset
        shapes["embed_positions.weight"] = (rows, hidden)
    mlp_in = (2 if arch.gated_mlp else 1) * inner
    linears = {
        "attn_qkv": (query + 2 * kv, hidden, arch.qkv_bias),
        "attn_out": (hidden, query, arch.attention_output_bias),
        "mlp_in": (mlp_in, hidden, arch.mlp_bias),
        "mlp_out": (hidden, inner, arch.mlp_bias),
    }
    norms = []
    if arch.norm_placement in ("pre", "sandwich"):
        norms += ["attn_pre_norm", "mlp_pre_norm"]
    if arch.norm_placement in ("post", "sandwich"):
        norms += ["attn_post_norm", "mlp_post_norm"]
    for i in range(arch.num_layers):
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"layers.{i}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"layers.{i}.{name}.bias"] = (rows,)
        for name in norms:
            shapes |= _norm_shapes(arch, f"layers.{i}.{name}")
        if arch.qk_norm != "none":
            per_head = arch.qk_norm == "head"
            shapes[f"layers.{i}.q_norm.weight"] = (arch.head_dim if per_head else query,)
            shapes[f"layers.{i}.k_norm.weight"] = (arch.head_dim if per_head else kv,)
    if arch.final_norm:
        shapes |= _norm_shapes(arch, "final_norm")
    if not arch.tie_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    return shapes


def _norm_shapes(arch: DecoderArchitecture, name: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (arch.hidden_size,)}
    if arch.norm == "layer":
        shapes[f"{name}.bias"] = (arch.hidden_size,)
    return shapes


def _add_branch(hidden: Tensor, linear: Linear, x: Tensor, post_norm: Norm | None) -> Tensor:
    """hidden + linear(x), or hidden + norm(linear(x))."""
    if post_norm is None:
        return linear.add_to(hidden, x)
    return hidden + post_norm(linear(x))


def _norm_weight(arch: DecoderArchitecture, weights: dict[str, Tensor], name: str) -> Tensor | None:
    """A norm weight in float32 with the family's offset added, so that no kernel knows of it."""
    weight = weights.get(name)
    return None if weight is None else weight.float() + arch.norm_weight_offset


def _make_norm(
    arch: DecoderArchitecture, ops: TorchOps, weights: dict[str, Tensor], name: str
) -> Norm | None:
    weight = _norm_weight(arch, weights, f"{name}.weight")
    if weight is None:
        return None
    if arch.norm == "rms":
        return _RMSNorm(ops, weight, arch.norm_eps)
    bias = weights.get(f"{name}.bias")
    return _LayerNorm(ops, weight, None if bias is None else bias.float(), arch.norm_eps)
