"""Model families: from a Hugging Face config to a DecoderArchitecture and its weights' names.

Families differ in a dozen flags and in how their checkpoints call the same tensors; the native
decoder knows only the flags. What a config asks for and the flags cannot say is refused by the
name of the setting, never approximated: loader.py then falls back, in the open, to transformers'
own code. Defaults that a config leaves out come from transformers' config classes.

The translations are in llama_like.py, gemma.py and layer_norm_families.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmbench.engine.errors import UnsupportedModelError
from llmbench.engine.models import gemma, layer_norm_families, llama_like
from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.translation import DEFAULT_ROPE, refuse
from llmbench.engine.models.weight_names import WeightNames


@dataclass(frozen=True, slots=True)
class Family:
    """How one `model_type` is read."""

    architecture: Callable[[Any], DecoderArchitecture]
    weight_names: WeightNames


FAMILIES: dict[str, Family] = {
    "llama": Family(llama_like.llama, llama_like.NAMES),
    "mistral": Family(llama_like.mistral, llama_like.NAMES),
    "qwen2": Family(llama_like.qwen2, llama_like.NAMES),
    "qwen3": Family(llama_like.qwen3, llama_like.QK_NORM_NAMES),
    "smollm3": Family(llama_like.smollm3, llama_like.NAMES),
    "phi3": Family(llama_like.phi3, llama_like.PHI3_NAMES),
    "olmo2": Family(llama_like.olmo2, llama_like.OLMO2_NAMES),
    "gemma": Family(gemma.gemma, llama_like.NAMES),
    "gemma2": Family(gemma.gemma2, gemma.GEMMA2_NAMES),
    "gemma3_text": Family(gemma.gemma3, gemma.GEMMA3_NAMES),
    "gemma3": Family(gemma.gemma3, gemma.GEMMA3_NAMES),
    "opt": Family(layer_norm_families.opt, layer_norm_families.OPT_NAMES),
    "gpt2": Family(layer_norm_families.gpt2, layer_norm_families.GPT2_NAMES),
}


def text_config(hf_config: Any) -> Any:
    """The language model's part of a config; the config itself where it has no parts."""
    return hf_config.get_text_config(decoder=True)


def architecture_of(hf_config: Any) -> DecoderArchitecture:
    """Translate a transformers config for the native decoder.

    Raises:
        UnsupportedModelError: names the family or the setting that the decoder cannot run.
    """
    model_type = hf_config.model_type
    if model_type not in FAMILIES:
        error = UnsupportedModelError(f"the native decoder has no family {model_type!r}")
        error.add_note(f"it runs {', '.join(sorted(FAMILIES))}")
        raise error
    config = text_config(hf_config)
    for part in {id(part): part for part in (hf_config, config)}.values():
        if getattr(part, "is_encoder_decoder", False):
            raise refuse(part, "is_encoder_decoder")
    arch = FAMILIES[model_type].architecture(config)
    if DEFAULT_ROPE in arch.ropes and config.nested_rope_parameter_keys(config.rope_parameters):
        raise refuse(config, "rope_parameters")
    if arch.num_heads % arch.num_kv_heads:
        raise refuse(config, "num_key_value_heads")
    return arch
