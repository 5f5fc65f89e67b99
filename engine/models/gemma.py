"""Gemma 1 to 3 (Gemma Team 2024, 2024, 2025): Llama's shape with other norms and scales.

Norm weights are stored minus one and embeddings are multiplied by sqrt(hidden size). Gemma 2 and
3 norm what enters and what leaves each branch and alternate layers with and without a window;
Gemma 2 caps attention scores and logits softly; Gemma 3 norms query and key heads and rotates
windowed and full layers at different base frequencies.

Of a Gemma 3 that also sees images, the language model is run; the vision tower is left out.
"""

from dataclasses import replace
from typing import Any

from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.llama_like import NAMES, QK_NORMS, llama
from llmbench.engine.models.translation import layers_by_type, refuse

GEMMA2_NAMES = replace(
    NAMES,
    norms={
        "attn_pre_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_pre_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)
GEMMA3_NAMES = replace(
    GEMMA2_NAMES,
    prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    norms=GEMMA2_NAMES.norms | QK_NORMS,
    lm_heads=("lm_head", "language_model.lm_head"),
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
)


def gemma(config: Any) -> DecoderArchitecture:
    """Gemma 1."""
    return _common(config, "hidden_act")


def gemma2(config: Any) -> DecoderArchitecture:
    """Gemma 2."""
    return replace(
        _common(config, "hidden_activation"),
        layers=layers_by_type(config),
        norm_placement="sandwich",
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        final_softcap=config.final_logit_softcapping,
    )


def gemma3(config: Any) -> DecoderArchitecture:
    """Gemma 3's language model."""
    # The published ones set no cap, and transformers applies none whatever the config says.
    if config.attn_logit_softcapping is not None:
        raise refuse(config, "attn_logit_softcapping")
    layers = layers_by_type(config, rope_by_type=True)
    return replace(
        _common(config, "hidden_activation"),
        layers=layers,
        ropes=tuple(dict.fromkeys(layer.rope for layer in layers if layer.rope)),
        norm_placement="sandwich",
        qk_norm="head",
        attention_scale=config.query_pre_attn_scalar**-0.5,
        final_softcap=config.final_logit_softcapping,
    )


def _common(config: Any, activation_setting: str) -> DecoderArchitecture:
    if config.use_bidirectional_attention:
        raise refuse(config, "use_bidirectional_attention")
    return replace(
        llama(config, activation_setting=activation_setting),
        norm_weight_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
    )
