"""What distinguishes one decoder-only transformer from another, as plain flags.

The native decoder is one piece of code driven by these; families.py translates each family's
Hugging Face config into them. Everything here is a fact of a paper or a config key, none of it
touches a tensor, so this module imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from llmbench.engine.config import KVCacheDType
from llmbench.engine.memory import kv_row_bytes

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
NormKind = Literal["rms", "layer"]
NormPlacement = Literal["pre", "post", "sandwich"]
QKNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArchitecture:
    """One decoder layer's own settings."""

    rope: str | None = "default"
    """Name of the rotary table (`DecoderArchitecture.ropes`); None leaves positions out (NoPE)."""
    sliding_window: int | None = None
    """A token sees this many tokens, itself included; None sees all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderArchitecture:
    """A decoder-only transformer.

    Attributes:
        norm_placement: `pre` normalizes what enters attention and MLP (Llama), `post` what leaves
            them before the residual sum (OLMo 2), `sandwich` both (Gemma 2 and 3).
        norm_weight_offset: Added to norm weights; 1 for Gemma, which stores w - 1.
        qk_norm: Normalize queries and keys over each head (Qwen3, Gemma 3) or over all heads
            together (OLMo 2).
        gated_mlp: down(act(gate(x)) * up(x)); else down(act(up(x))).
        ropes: Names of rotary tables; families.py supplies their inverse frequencies.
        rotary_dim: Leading dimensions of a head that are rotated.
        position_offset: Rows skipped in a learned position table (2 for OPT).
        embedding_scale: Multiplies token embeddings (Gemma: sqrt(hidden)), in the model's dtype.
        attention_scale: Multiplies query-key products.
        attention_softcap: cap * tanh(score / cap) before the mask (Gemma 2); None is off.
        final_softcap: The same for logits.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerArchitecture, ...]
    ropes: tuple[str, ...] = ("default",)
    rotary_dim: int = 0
    learned_positions: bool = False
    position_offset: int = 0
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_placement: NormPlacement = "pre"
    norm_weight_offset: float = 0.0
    final_norm: bool = True
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    tie_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def kv_bytes_per_token(self, dtype_bytes: int, kv_cache_dtype: KVCacheDType = "auto") -> int:
        """Bytes of K and V of one token over all layers."""
        row = kv_row_bytes(self.head_dim, dtype_bytes, kv_cache_dtype)
        return 2 * self.num_layers * self.num_kv_heads * row

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied ones once; norms and biases included."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (query + 2 * kv) + query * hidden
        mlp = (3 if self.gated_mlp else 2) * hidden * inner
        norms = (4 if self.norm_placement == "sandwich" else 2) * hidden
        norms *= 2 if self.norm == "layer" else 1
        if self.qk_norm == "head":
            norms += 2 * self.head_dim
        elif self.qk_norm == "full":
            norms += query + kv
        biases = (query + 2 * kv if self.qkv_bias else 0) + (
            hidden if self.attention_output_bias else 0
        )
        if self.mlp_bias:
            biases += hidden + (2 if self.gated_mlp else 1) * inner
        total = self.num_layers * (attention + mlp + norms + biases)
        total += self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        if self.learned_positions:
            total += (self.max_position_embeddings + self.position_offset) * hidden
        if self.final_norm:
            total += hidden * (2 if self.norm == "layer" else 1)
        return total
