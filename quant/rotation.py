"""Turning a model's hidden space so that no channel stands out, without changing its output.

An RMS norm with weight 1 commutes with any rotation Q of the residual stream. So, after the norms'
weights have moved into the linears behind them, everything that writes into the stream can be
rotated by Q and everything that reads from it by Q transposed, and the model computes what it
computed (Ashkboos et al. 2024, SliceGPT, section 3; QuaRot, section 4.1). With Q a Hadamard matrix
the few channels that carry huge values share them with all others, and both weights and
activations become easy to round. The same is done inside each attention head between value and
output projection. What lies between the gated MLP's halves is not linear and stays as it is.

Embeddings and output head change differently (the head takes the final norm's weight), so tied
embeddings come apart. Norms behind a branch (OLMo 2, Gemma 2 and 3) scale channels one by one in
the middle of the stream and layer norms subtract a mean; neither commutes with a rotation.

Each tensor is transformed on its own, when it is read, in float64.

Shapes: `N` out features · `C` in features · `D` head dim.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmbench.quant.errors import ConfigError, QuantError
from llmbench.quant.hadamard import random_hadamard
from llmbench.quant.rotation_roles import (
    ATTENTION_NORM,
    FAMILIES,
    MLP_NORM,
    OFFSET_NORM_FAMILIES,
    Role,
    refusal,
)

_IN_BLOCK = re.compile(r"(?P<block>.*layers\.\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)")
_UNTOUCHED = re.compile(r".*\.(self_attn\.[qk]_norm\.weight|rotary_emb\.inv_freq)")
"""Norms over queries and keys lie behind their projections, inside a head."""


class Rotation:
    """A rotation of a whole model, applied to one tensor of its checkpoint at a time."""

    def __init__(
        self, hf_text_config: Any, seed: int, get: Callable[[str], Tensor], prefix: str = "model."
    ) -> None:
        """`get` reads a tensor of the checkpoint as it is on disk, by name; norms are asked for.

        Raises:
            ConfigError: the family cannot be rotated.
        """
        if (reason := refusal(hf_text_config)) is not None:
            error = ConfigError(reason)
            error.add_note("transform smooth or none works without a rotation")
            raise error
        config = hf_text_config
        head_dim = getattr(config, "head_dim", None)
        self.head_dim = int(head_dim or config.hidden_size // config.num_attention_heads)
        self.unties_embeddings = bool(config.tie_word_embeddings)
        """The head is a tensor of its own afterwards: transform the embeddings under its name."""
        self.config_changes = {"tie_word_embeddings": False} if self.unties_embeddings else {}
        self._value_rows = int(config.num_key_value_heads) * self.head_dim
        self._stream = random_hadamard(config.hidden_size, seed)
        self._values = random_hadamard(self.head_dim, seed + 1)
        self._roles = FAMILIES[config.model_type]
        self._offset = 1.0 if config.model_type in OFFSET_NORM_FAMILIES else 0.0
        self._get = get
        self._prefix = prefix

    @property
    def description(self) -> str:
        """What the rotation is, in words for the report."""
        kind = "Hadamard" if self._stream.is_hadamard else "random orthogonal"
        return (
            f"{kind} rotation of {self._stream.size} channels, Hadamard of {self.head_dim} a head"
        )

    def transform(self, name: str, tensor: Tensor) -> Tensor:
        """The rotated model's tensor of this name, in the type and shape of the given one.

        Raises:
            QuantError: nothing is known about a tensor of this name.
        """
        if name == f"{self._prefix}embed_tokens.weight":
            return self._stream.rotate(tensor)
        if name == "lm_head.weight":
            return self._stream.rotate(tensor, self._gain(f"{self._prefix}norm.weight"))
        if name == f"{self._prefix}norm.weight":
            return torch.full_like(tensor, 1 - self._offset)
        if _UNTOUCHED.fullmatch(name):
            return tensor
        match = _IN_BLOCK.fullmatch(name)
        if match is not None and match["module"] in (ATTENTION_NORM, MLP_NORM):
            return torch.full_like(tensor, 1 - self._offset)
        role = None if match is None else self._roles.get(match["module"])
        if match is None or role is None:
            raise QuantError(f"{name} has no known place in a model that is to be rotated")
        if match["kind"] == "bias":
            return self._outputs(tensor.double(), role).to(tensor.dtype)
        wide = tensor.double()
        if role.norm is not None:
            wide = self._stream.rotate(wide, self._gain(f"{match['block']}.{role.norm}.weight"))
        if role.reads_values:
            n, c = wide.shape
            heads = wide.reshape(n, c // self.head_dim, self.head_dim)
            wide = self._values.rotate(heads).reshape(n, c)
        return self._outputs(wide.t(), role).t().contiguous().to(tensor.dtype)

    def _gain(self, name: str) -> Tensor:
        """What a norm multiplies each channel by, [C] float64."""
        return self._get(name).double() + self._offset

    def _outputs(self, outputs: Tensor, role: Role) -> Tensor:
        """Rotate what a layer puts out, [..., N]: a bias, or a weight transposed."""
        if role.writes_stream:
            return self._stream.rotate(outputs)
        if not role.makes_values:
            return outputs
        rows = outputs.shape[-1]
        first = rows - self._value_rows if role.only_last else 0
        heads = outputs[..., first:].reshape(*outputs.shape[:-1], -1, self.head_dim)
        values = self._values.rotate(heads).flatten(-2)
        return torch.cat([outputs[..., :first], values], dim=-1)
