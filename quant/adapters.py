"""Which parts of a model family's decoder block feed which: the pairs that can trade scales.

Dividing channel c of what a norm or a linear layer puts out by s, and multiplying column c of
every linear layer that reads it by s, changes nothing in full precision. What it changes is how
hard each number is to round: AWQ (Lin et al. 2023, section 3.2), SmoothQuant (Xiao et al. 2022,
section 4) and QQQ (Zhang et al. 2024, section 3.2) all choose such scales. The pairs are all that
these methods know about a family, and a family takes a dozen lines here.

A pair is valid only where the scale passes through everything between its two ends: attention
mixes tokens and not channels, and `gate * up` and ReLU commute with positive factors, while GELU
and SiLU do not. With grouped queries one value head feeds several heads of the output projection,
which then share its scales.

No torch here: whether a family can be done is asked before anything heavy is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["norm", "offset_norm", "linear"]


@dataclass(frozen=True, slots=True)
class ScalingPair:
    """A module whose output channels can be divided, and the linears that read them.

    Names are relative to the block.

    Attributes:
        kind: What `previous` is; an `offset_norm` multiplies by 1 + weight.
        rows: First and last-plus-one row of a fused linear that the pair is about.
        repeats: Heads of `next` that read one head of `previous`.
        head_dim: Channels of a head; needed only where `repeats` is above 1.
    """

    previous: str
    next: tuple[str, ...]
    kind: Kind
    rows: tuple[int, int] | None = None
    repeats: int = 1
    head_dim: int = 1


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Linears whose input takes no scales, and why; the report repeats it."""

    linears: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """The pairs of a family, of which the config chooses some."""

    family: str
    parts: Callable[[Any], tuple[ScalingPair | Unscaled, ...]]

    def pairs(self, hf_text_config: Any) -> tuple[ScalingPair, ...]:
        """Pairs of every block, in the order in which a block runs."""
        parts = self.parts(hf_text_config)
        return tuple(part for part in parts if isinstance(part, ScalingPair))

    def unscaled(self, hf_text_config: Any) -> tuple[Unscaled, ...]:
        """The linears that are in no pair."""
        return tuple(part for part in self.parts(hf_text_config) if isinstance(part, Unscaled))


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
POST_NORM = "the residual stream itself is read, and a scale cannot leave it"


def _head_dim(config: Any) -> int:
    """Some configs say it on their own: it need not be hidden size over heads."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def _value_to_output(config: Any, previous: str, output: str) -> ScalingPair:
    repeats = config.num_attention_heads // config.num_key_value_heads
    return ScalingPair(previous, (output,), "linear", repeats=repeats, head_dim=_head_dim(config))


def _llama(config: Any) -> tuple[ScalingPair | Unscaled, ...]:
    return (
        ScalingPair("input_layernorm", QKV, "norm"),
        _value_to_output(config, "self_attn.v_proj", "self_attn.o_proj"),
        ScalingPair("post_attention_layernorm", GATE_UP, "norm"),
        ScalingPair("mlp.up_proj", ("mlp.down_proj",), "linear"),
    )


def _gemma(config: Any) -> tuple[ScalingPair | Unscaled, ...]:
    _, values, _, down = _llama(config)
    return (
        ScalingPair("input_layernorm", QKV, "offset_norm"),
        values,
        ScalingPair("post_attention_layernorm", GATE_UP, "offset_norm"),
        down,
    )


def _gemma2(config: Any) -> tuple[ScalingPair | Unscaled, ...]:
    attention, values, _, down = _gemma(config)
    return attention, values, ScalingPair("pre_feedforward_layernorm", GATE_UP, "offset_norm"), down


def _gemma3(config: Any) -> tuple[ScalingPair | Unscaled, ...]:
    # vllm-project/llm-compressor 2571 measured that scaling this input made Gemma 3 worse.
    reason = "scaling the input of Gemma 3's query and key norms loses more than it gains"
    return Unscaled(QKV, reason), *_gemma2(config)[1:]


def _olmo2(config: Any) -> tuple[ScalingPair | Unscaled, ...]:
    _, values, _, down = _llama(config)
    return Unscaled(QKV, POST_NORM), values, Unscaled(GATE_UP, POST_NORM), down


def _phi3(config: Any) -> tuple[ScalingPair | Unscaled, ...]:
    head_dim = _head_dim(config)
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    first_value = (num_heads + num_kv_heads) * head_dim
    width = config.intermediate_size
    return (
        ScalingPair("input_layernorm", ("self_attn.qkv_proj",), "norm"),
        ScalingPair(
            "self_attn.qkv_proj",
            ("self_attn.o_proj",),
            "linear",
            rows=(first_value, first_value + num_kv_heads * head_dim),
            repeats=num_heads // num_kv_heads,
            head_dim=head_dim,
        ),
        ScalingPair("post_attention_layernorm", ("mlp.gate_up_proj",), "norm"),
        ScalingPair("mlp.gate_up_proj", ("mlp.down_proj",), "linear", rows=(width, 2 * width)),
    )


def _through_activation(
    name: str, previous: str, following: str
) -> tuple[ScalingPair | Unscaled, ...]:
    """An MLP without a gate: only ReLU lets a scale through."""
    if name == "relu":
        return (ScalingPair(previous, (following,), "linear"),)
    return (Unscaled((following,), f"{name} in front of it does not commute with a scale"),)


def _opt(config: Any) -> tuple[ScalingPair | Unscaled, ...]:
    values = ScalingPair("self_attn.v_proj", ("self_attn.out_proj",), "linear")
    fc2 = _through_activation(config.activation_function, "fc1", "fc2")
    if not config.do_layer_norm_before:  # the 350m one
        return Unscaled(QKV, POST_NORM), values, Unscaled(("fc1",), POST_NORM), *fc2
    if not config.layer_norm_elementwise_affine:
        reason = "the norm in front of it has no weight that could take a scale"
        return Unscaled(QKV, reason), values, Unscaled(("fc1",), reason), *fc2
    return (
        ScalingPair("self_attn_layer_norm", QKV, "norm"),
        values,
        ScalingPair("final_layer_norm", ("fc1",), "norm"),
        *fc2,
    )


def _gpt2(config: Any) -> tuple[ScalingPair | Unscaled, ...]:
    width = config.hidden_size
    values = ScalingPair("attn.c_attn", ("attn.c_proj",), "linear", rows=(2 * width, 3 * width))
    return (
        ScalingPair("ln_1", ("attn.c_attn",), "norm"),
        values,
        ScalingPair("ln_2", ("mlp.c_fc",), "norm"),
        *_through_activation(config.activation_function, "mlp.c_fc", "mlp.c_proj"),
    )


ADAPTERS: dict[str, Adapter] = {
    adapter.family: adapter
    for adapter in (
        Adapter("llama", _llama),
        Adapter("mistral", _llama),
        Adapter("qwen2", _llama),
        Adapter("qwen3", _llama),
        Adapter("smollm3", _llama),
        Adapter("gemma", _gemma),
        Adapter("gemma2", _gemma2),
        Adapter("gemma3_text", _gemma3),
        Adapter("olmo2", _olmo2),
        Adapter("phi3", _phi3),
        Adapter("opt", _opt),
        Adapter("gpt2", _gpt2),
    )
}
"""`model_type` of a text config → its adapter."""


def adapter_for(hf_text_config: Any) -> Adapter | None:
    """The adapter of a config's family, None if there is none (`refusal` then says why)."""
    if getattr(hf_text_config, "add_cross_attention", False):
        return None
    return ADAPTERS.get(hf_text_config.model_type)


def refusal(hf_text_config: Any, method: str) -> str | None:
    """Why a method that moves scales cannot do this model; None if it can."""
    family = hf_text_config.model_type
    if getattr(hf_text_config, "add_cross_attention", False):
        return f"{method} does not know cross attention (add_cross_attention in {family})"
    if adapter_for(hf_text_config) is not None:
        return None
    return (
        f"{method} must know which layers of a block feed each other, and no adapter says it for "
        f"the family {family!r} (known: {', '.join(sorted(ADAPTERS))}); rtn and gptq need none"
    )
