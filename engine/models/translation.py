"""What the families' translations of a Hugging Face config share.

A config is typed `Any`: each family has a class of its own in transformers, and the attributes
read here exist in all of those that are translated.
"""

from typing import Any

from llmbench.engine.errors import UnsupportedModelError
from llmbench.engine.models.architecture import Activation, LayerArchitecture

DEFAULT_ROPE = "default"
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Rotary scalings whose frequencies are fixed once the model length is known."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""transformers' name (ACT2FN) → ours; the three tanh forms differ in rounding only."""


def refuse(config: Any, setting: str) -> UnsupportedModelError:
    """An error that names a setting which the native decoder cannot run."""
    value = getattr(config, setting)
    text = repr(value)
    return UnsupportedModelError(
        f"the native decoder cannot run {config.model_type} with {setting}="
        f"{text if len(text) <= 60 else text[:57] + '...'}"
    )


def activation(config: Any, setting: str) -> Activation:
    """Our name of the activation that `setting` of a config asks for."""
    name = getattr(config, setting)
    if name not in ACTIVATIONS:
        raise refuse(config, setting)
    return ACTIVATIONS[name]


def head_dim(config: Any) -> int:
    """Width of a head: what the config says, else its hidden size over its heads."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def rotary_dim(config: Any, *, can_be_partial: bool = False) -> int:
    """Leading dimensions of a head that are rotated; also checks the kind of rotary scaling."""
    nested = config.nested_rope_parameter_keys(config.rope_parameters)
    tables = [config.rope_parameters[key] for key in nested] or [config.rope_parameters]
    for table in tables:
        if table["rope_type"] not in ROPE_TYPES:
            raise refuse(config, "rope_parameters")
    fraction = tables[0].get("partial_rotary_factor", 1.0)
    if fraction != 1.0 and not can_be_partial:
        raise refuse(config, "rope_parameters")
    return int(head_dim(config) * fraction)


def layers_by_type(config: Any, *, rope_by_type: bool = False) -> tuple[LayerArchitecture, ...]:
    """One layer an entry of `layer_types`: with the sliding window or without.

    With `rope_by_type`, the rotary table is called as the layer type.
    """
    layers = []
    for layer_type in config.layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise refuse(config, "layer_types")
        window = config.sliding_window if layer_type == "sliding_attention" else None
        rope = layer_type if rope_by_type else DEFAULT_ROPE
        layers.append(LayerArchitecture(rope=rope, sliding_window=window))
    return tuple(layers)


def same_layers(config: Any, sliding_window: int | None = None) -> tuple[LayerArchitecture, ...]:
    """`num_hidden_layers` layers that are all alike."""
    layer = LayerArchitecture(sliding_window=sliding_window)
    return tuple(layer for _ in range(config.num_hidden_layers))
