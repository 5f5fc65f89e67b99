"""OPT (Zhang et al. 2022) and GPT-2 (Radford et al. 2019): layer norm and learned positions.

Both have biases everywhere and an MLP without a gate. GPT-2 stores its matrices transposed
(`Conv1D`) and query, key and value as one; OPT's position table starts with two unused rows.
"""

from typing import Any

from llmbench.engine.models.architecture import DecoderArchitecture, LayerArchitecture
from llmbench.engine.models.translation import activation, refuse
from llmbench.engine.models.weight_names import WeightNames

OPT_POSITION_OFFSET = 2
"""Unused first rows of OPT's position table (fairseq counted from the padding id)."""

OPT_NAMES = WeightNames(
    prefixes=("model.decoder.", "decoder."),
    layer="layers.{}.",
    embed_tokens="embed_tokens",
    embed_positions="embed_positions",
    attn_qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attn_out=("self_attn.out_proj",),
    mlp_in=("fc1",),
    mlp_out=("fc2",),
    norms={"attn_pre_norm": "self_attn_layer_norm", "mlp_pre_norm": "final_layer_norm"},
    final_norm="final_layer_norm",
)
GPT2_NAMES = WeightNames(
    prefixes=("transformer.", ""),
    layer="h.{}.",
    embed_tokens="wte",
    embed_positions="wpe",
    attn_qkv=("attn.c_attn",),
    attn_out=("attn.c_proj",),
    mlp_in=("mlp.c_fc",),
    mlp_out=("mlp.c_proj",),
    norms={"attn_pre_norm": "ln_1", "mlp_pre_norm": "ln_2"},
    final_norm="ln_f",
    has_transposed_linears=True,
    # Causal masks that old checkpoints carry as tensors.
    ignored=(r".*\.attn\.(bias|masked_bias)",),
)


def opt(config: Any) -> DecoderArchitecture:
    """OPT with norms before the branches: every size but 350m."""
    if not config.do_layer_norm_before:
        raise refuse(config, "do_layer_norm_before")
    if config.word_embed_proj_dim != config.hidden_size:
        raise refuse(config, "word_embed_proj_dim")
    if not config.layer_norm_elementwise_affine:
        raise refuse(config, "layer_norm_elementwise_affine")
    return _layer_norm_decoder(
        config,
        intermediate_size=config.ffn_dim,
        position_offset=OPT_POSITION_OFFSET,
        final_norm=not config._remove_final_layer_norm,
        has_biases=config.enable_bias,
    )


def gpt2(config: Any) -> DecoderArchitecture:
    """GPT-2."""
    for setting in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if getattr(config, setting):
            raise refuse(config, setting)
    return _layer_norm_decoder(
        config,
        intermediate_size=config.n_inner or 4 * config.hidden_size,
        norm_eps=config.layer_norm_epsilon,
        is_scaled=config.scale_attn_weights,
    )


def _layer_norm_decoder(
    config: Any,
    *,
    intermediate_size: int,
    position_offset: int = 0,
    norm_eps: float = 1e-5,  # torch.nn.LayerNorm's, which OPT leaves as it is
    final_norm: bool = True,
    has_biases: bool = True,
    is_scaled: bool = True,
) -> DecoderArchitecture:
    if config.hidden_size % config.num_attention_heads:
        raise refuse(config, "num_attention_heads")
    head_dim = config.hidden_size // config.num_attention_heads
    return DecoderArchitecture(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        layers=(LayerArchitecture(rope=None),) * config.num_hidden_layers,
        ropes=(),
        learned_positions=True,
        position_offset=position_offset,
        norm="layer",
        norm_eps=norm_eps,
        final_norm=final_norm,
        qkv_bias=has_biases,
        attention_output_bias=has_biases,
        mlp_bias=has_biases,
        gated_mlp=False,
        activation=activation(config, "activation_function"),
        attention_scale=head_dim**-0.5 if is_scaled else 1.0,
        tie_embeddings=config.tie_word_embeddings,
    )
