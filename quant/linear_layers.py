"""The linear layers of a checkpoint, found in its headers: what can be quantized.

A linear layer is a two-dimensional `.weight` inside a numbered block (`model.layers.7.…`,
`transformer.h.7.…`); embeddings and norms are outside blocks or one-dimensional. The output head
is listed where the checkpoint stores it as a tensor of its own.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.errors import ConfigError

HEADS = ("lm_head", "embed_out", "output")
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Layers over the same input that engines run as one, so they must be quantized alike."""
TRANSPOSED_FAMILIES = ("gpt2",)
"""model_types whose linear layers are Conv1D: stored [in, out]."""

_BLOCK_WEIGHT = re.compile(
    r"(?P<block>(?:.+\.)?(?:layers|h|blocks|block)\.\d+)\.(?P<rest>.+)\.weight"
)
_EMBEDDING = re.compile(r"(^|[._])(emb|embed|embedding|embeddings|wte|wpe)([._]|$)|norm|layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """A linear layer by its headers.

    Attributes:
        name: Of the module, such as `model.layers.0.self_attn.q_proj`.
        block: The numbered block that it is in; empty for the head.
        is_transposed: The tensor is stored [in, out].
    """

    name: str
    out_features: int
    in_features: int
    block: str
    is_transposed: bool = False

    @property
    def num_weights(self) -> int:
        """Elements of the weight."""
        return self.out_features * self.in_features


def find_linears(checkpoint: Checkpoint) -> list[LinearLayer]:
    """All linear layers, block after block in numerical order, the head last."""
    is_transposed = checkpoint.config.get("model_type") in TRANSPOSED_FAMILIES
    found: list[LinearLayer] = []
    for name in checkpoint.names:
        shape = checkpoint.shape(name)
        match = _BLOCK_WEIGHT.fullmatch(name)
        if match is None or len(shape) != 2 or _EMBEDDING.search(match["rest"]):
            continue
        out_features, in_features = reversed(shape) if is_transposed else shape
        found.append(
            LinearLayer(
                name=name.removesuffix(".weight"),
                out_features=out_features,
                in_features=in_features,
                block=match["block"],
                is_transposed=is_transposed,
            )
        )
    found.sort(key=lambda layer: block_number(layer.block))
    head = next((name for name in HEADS if f"{name}.weight" in checkpoint), None)
    if head is not None:
        rows, columns = checkpoint.shape(f"{head}.weight")
        found.append(LinearLayer(name=head, out_features=rows, in_features=columns, block=""))
    return found


def block_number(block: str) -> int:
    """Position of a block by its name."""
    return int(block.rpartition(".")[2])


def fused_with(name: str) -> tuple[str, ...]:
    """Module names of the layers that engines fuse with this one, itself included."""
    parent, _, last = name.rpartition(".")
    for family in FUSED:
        if last in family:
            return tuple(f"{parent}.{other}" for other in family)
    return (name,)


def check_has_linears(layers: Iterable[LinearLayer], folder: object) -> None:
    """Refuse a checkpoint without numbered blocks of linear layers."""
    if not any(layer.block for layer in layers):
        error = ConfigError(f"{folder} has no numbered blocks of linear layers to quantize")
        error.add_note("expected tensor names such as model.layers.0.self_attn.q_proj.weight")
        raise error
