"""Rotary frequencies of a model (Su et al. 2021), through transformers' rotary initializers.

This is the one place that knows transformers' rotary code (modeling_rope_utils, and the buffers
of its rotary modules); tests/test_families.py fails where it moves.

Two scalings depend on how long a sequence is: `longrope` has one table for short and one for long
sequences, `dynamic` stretches with the length. transformers chooses anew in each forward pass, by
the longest sequence in it. Here the choice is made once, from the model length: rotated keys are
kept in a cache, and a request's text must not depend on its neighbours. So with `longrope`, a
model length up to `original_max_position_embeddings` runs the short table and a longer one the
long table; with `dynamic`, the stretch is that of the model length.
"""

from typing import Any

import torch
from torch import Tensor

from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.translation import DEFAULT_ROPE, head_dim

LENGTH_DEPENDENT = ("longrope", "dynamic")


def inverse_frequencies(
    config: Any, arch: DecoderArchitecture, max_model_len: int
) -> dict[str, tuple[Tensor, float]]:
    """Rotary table name → (inverse frequencies [rotary_dim / 2] float32, factor on cos and sin).

    `config` is the language model's own config, where a model has several.
    """
    return {name: _table(config, name, max_model_len) for name in arch.ropes}


def fix_model_length(model: torch.nn.Module, max_model_len: int) -> None:
    """Stop a transformers model from choosing rotary tables by the length of each batch."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in LENGTH_DEPENDENT:
            frequencies, factor = _scaled(module.config, rope_type, max_model_len, None)
            module.inv_freq.copy_(frequencies)  # type: ignore[operator]
            module.attention_scaling = factor  # type: ignore[assignment]
            module.rope_type = DEFAULT_ROPE  # type: ignore[assignment]
        elif isinstance(rope_type, dict):
            for layer_type, kind in rope_type.items():
                if kind not in LENGTH_DEPENDENT:
                    continue
                frequencies, factor = _scaled(module.config, kind, max_model_len, layer_type)
                getattr(module, f"{layer_type}_inv_freq").copy_(frequencies)
                setattr(module, f"{layer_type}_attention_scaling", factor)
                rope_type[layer_type] = DEFAULT_ROPE


def _table(config: Any, name: str, max_model_len: int) -> tuple[Tensor, float]:
    layer_type = None if name == DEFAULT_ROPE else name
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[name]
    if parameters["rope_type"] != "default":
        return _scaled(config, parameters["rope_type"], max_model_len, layer_type)
    # transformers has this formula once a model and in no table of initializers.
    rotated = int(head_dim(config) * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return 1.0 / (parameters["rope_theta"] ** exponents), 1.0


def _scaled(
    config: Any, rope_type: str, max_model_len: int, layer_type: str | None
) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](
        config, torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
    )
    return frequencies, float(factor)
