"""Families of Llama's shape: RMS norm, rotary positions, gated MLP.

Llama (Touvron et al. 2023; SmolLM and SmolLM2 are Llamas), Mistral (Jiang et al. 2023: a sliding
window in every layer), Qwen2 (biases on query, key and value), Qwen3 (a norm over each query and
key head), SmolLM3 (every fourth layer without positions), Phi-3 (query, key and value stored as
one tensor, gate and up as another) and OLMo 2 (norms after attention and MLP, and over all query
and key heads together).
"""

from dataclasses import replace
from typing import Any

from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.translation import (
    activation,
    head_dim,
    layers_by_type,
    refuse,
    rotary_dim,
    same_layers,
)
from llmbench.engine.models.weight_names import WeightNames

NAMES = WeightNames(
    prefixes=("model.", ""),
    layer="layers.{}.",
    embed_tokens="embed_tokens",
    attn_qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attn_out=("self_attn.o_proj",),
    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
    mlp_out=("mlp.down_proj",),
    norms={
        "attn_pre_norm": "input_layernorm",
        "mlp_pre_norm": "post_attention_layernorm",
    },
    final_norm="norm",
    # Checkpoints of early 2023 carry the rotary table as a tensor; it follows from the config.
    ignored=(r".*\.rotary_emb\.inv_freq",),
)
QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
QK_NORM_NAMES = replace(NAMES, norms=NAMES.norms | QK_NORMS)
OLMO2_NAMES = replace(
    NAMES,
    norms={
        "attn_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
        **QK_NORMS,
    },
)
PHI3_NAMES = replace(
    NAMES, attn_qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",), ignored=()
)


def llama(
    config: Any, *, rotary_can_be_partial: bool = False, activation_setting: str = "hidden_act"
) -> DecoderArchitecture:
    """Llama, and what the others share with it."""
    bias = getattr(config, "attention_bias", False)
    return DecoderArchitecture(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        max_position_embeddings=config.max_position_embeddings,
        layers=same_layers(config),
        rotary_dim=rotary_dim(config, can_be_partial=rotary_can_be_partial),
        norm_eps=config.rms_norm_eps,
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        activation=activation(config, activation_setting),
        attention_scale=head_dim(config) ** -0.5,
        tie_embeddings=config.tie_word_embeddings,
    )


def mistral(config: Any) -> DecoderArchitecture:
    """Mistral: every layer has the window."""
    return replace(llama(config), layers=same_layers(config, config.sliding_window))


def qwen2(config: Any) -> DecoderArchitecture:
    """Qwen2: biases on query, key and value, whatever the config says."""
    return replace(llama(config), layers=layers_by_type(config), qkv_bias=True)


def qwen3(config: Any) -> DecoderArchitecture:
    """Qwen3: a norm over each query and key head."""
    return replace(llama(config), layers=layers_by_type(config), qk_norm="head")


def smollm3(config: Any) -> DecoderArchitecture:
    """SmolLM3: layers without positions, by `no_rope_layers` (1 means that rotary stays)."""
    layers = layers_by_type(config)
    if len(config.no_rope_layers) < len(layers):
        raise refuse(config, "no_rope_layers")
    layers = tuple(
        layer if config.no_rope_layers[i] else replace(layer, rope=None)
        for i, layer in enumerate(layers)
    )
    return replace(llama(config), layers=layers)


def phi3(config: Any) -> DecoderArchitecture:
    """Phi-3: a window in every layer, and rotary positions on a part of a head."""
    arch = llama(config, rotary_can_be_partial=True)
    return replace(arch, layers=same_layers(config, config.sliding_window))


def olmo2(config: Any) -> DecoderArchitecture:
    """OLMo 2: norms after the branches, and over all query and key heads together."""
    return replace(llama(config), norm_placement="post", qk_norm="full")
