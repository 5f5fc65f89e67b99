"""Where the linear layers of a family stand towards the residual stream: all that a rotation needs.

A family can be rotated if every branch begins with an RMS norm and ends by adding to the stream.
No torch here: whether a model can be rotated is asked before anything heavy is imported.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Where a linear layer of a block stands.

    Attributes:
        norm: The norm in front of it, where it reads the residual stream.
        writes_stream: Its output is added to the residual stream.
        reads_values: Its input is the heads' mixed values.
        makes_values: Its output is values; `only_last` if those are the last rows of several.
    """

    norm: str | None = None
    writes_stream: bool = False
    reads_values: bool = False
    makes_values: bool = False
    only_last: bool = False


ATTENTION_NORM = "input_layernorm"
MLP_NORM = "post_attention_layernorm"

LLAMA = {
    "self_attn.q_proj": Role(norm=ATTENTION_NORM),
    "self_attn.k_proj": Role(norm=ATTENTION_NORM),
    "self_attn.v_proj": Role(norm=ATTENTION_NORM, makes_values=True),
    "self_attn.o_proj": Role(writes_stream=True, reads_values=True),
    "mlp.gate_proj": Role(norm=MLP_NORM),
    "mlp.up_proj": Role(norm=MLP_NORM),
    "mlp.down_proj": Role(writes_stream=True),
}
PHI3 = {
    "self_attn.qkv_proj": Role(norm=ATTENTION_NORM, makes_values=True, only_last=True),
    "self_attn.o_proj": LLAMA["self_attn.o_proj"],
    "mlp.gate_up_proj": Role(norm=MLP_NORM),
    "mlp.down_proj": LLAMA["mlp.down_proj"],
}
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "smollm3": LLAMA,
    "gemma": LLAMA,
    "phi3": PHI3,
}
OFFSET_NORM_FAMILIES = ("gemma",)
"""Families whose norms multiply by 1 + weight."""
NORM_BEHIND = "it has norms behind its branches, whose weights do not commute with a rotation"
LAYER_NORM = "its layer norms subtract a mean, which does not commute with a rotation"
REFUSED = {
    "gemma2": NORM_BEHIND,
    "gemma3": NORM_BEHIND,
    "gemma3_text": NORM_BEHIND,
    "olmo2": NORM_BEHIND,
    "opt": LAYER_NORM,
    "gpt2": LAYER_NORM,
    "gpt_neox": LAYER_NORM,
}


def refusal(hf_text_config: Any) -> str | None:
    """Why a model cannot be rotated; None if it can."""
    family = hf_text_config.model_type
    if family in FAMILIES:
        return None
    reason = REFUSED.get(family, "where its norms and linear layers stand is not known")
    return f"the family {family!r} cannot be rotated: {reason}"
