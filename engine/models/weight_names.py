"""From a checkpoint's tensors to the decoder's: names, fusion, orientation.

The decoder knows one set of names (decoder.expected_shapes). A family says what its checkpoints
call them; where the decoder has one matrix (query-key-value, gate-up) and the checkpoint several,
they are stacked on their output rows. Names and shapes of the whole model are checked against the
checkpoint's headers before the first tensor is read, in the checkpoint's own words. A quantized
layer counts as one weight [out, in] throughout (quantized.py).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmbench.engine.errors import CheckpointError
from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.decoder import expected_shapes
from llmbench.engine.models.linear_weights import LinearWeight, StoredWeight, stack
from llmbench.engine.models.quantized import CheckpointWeights

TOP_LEVEL = ("embed_tokens", "embed_positions", "final_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """What a family's checkpoints call the decoder's tensors, without `.weight` and `.bias`.

    Attributes:
        prefixes: What stands before every name but the head's; the first that fits is taken.
        layer: What stands before the names of a layer; `{}` is its number.
        attn_qkv: One stacked tensor, or query, key and value.
        mlp_in: One tensor, or gate and up.
        norms: Name in the decoder → name in the checkpoint, within a layer.
        lm_heads: Names that the head may have.
        has_transposed_linears: Matrices are stored [in, out].
        ignored: Patterns of whole names that follow from the config or serve other inputs.
    """

    prefixes: tuple[str, ...]
    layer: str
    embed_tokens: str
    embed_positions: str | None = None
    attn_qkv: tuple[str, ...]
    attn_out: tuple[str, ...]
    mlp_in: tuple[str, ...]
    mlp_out: tuple[str, ...]
    norms: dict[str, str]
    final_norm: str
    lm_heads: tuple[str, ...] = ("lm_head",)
    has_transposed_linears: bool = False
    ignored: tuple[str, ...] = field(default=())

    def prefix(self, checkpoint: CheckpointWeights) -> str:
        """The prefix under which the checkpoint has its embeddings; else the first."""
        found = (p for p in self.prefixes if f"{p}{self.embed_tokens}.weight" in checkpoint)
        return next(found, self.prefixes[0])

    def lm_head(self, checkpoint: CheckpointWeights) -> str:
        """Name of the head's tensor; the first possible one where the checkpoint has none."""
        names = [f"{name}.weight" for name in self.lm_heads]
        return next((name for name in names if name in checkpoint), names[0])

    def sources(self, name: str, checkpoint: CheckpointWeights) -> tuple[str, ...]:
        """The checkpoint's names of the tensors that make up the decoder's tensor `name`."""
        module, kind = name.rsplit(".", 1)
        if module == "lm_head":
            return (self.lm_head(checkpoint),)
        prefix = self.prefix(checkpoint)
        if module in TOP_LEVEL:
            return (f"{prefix}{getattr(self, module)}.{kind}",)
        _, layer, module = module.split(".", 2)
        modules = (self.norms[module],) if module in self.norms else getattr(self, module)
        return tuple(f"{prefix}{self.layer.format(layer)}{part}.{kind}" for part in modules)

    def is_transposed(self, name: str) -> bool:
        """Whether the decoder's tensor `name` is stored [in, out]."""
        is_linear = name.rsplit(".", 2)[-2] in ("attn_qkv", "attn_out", "mlp_in", "mlp_out")
        return self.has_transposed_linears and is_linear and name.endswith(".weight")


def check_weights(
    arch: DecoderArchitecture, names: WeightNames, checkpoint: CheckpointWeights
) -> None:
    """Hold all names and shapes of a checkpoint against the architecture; reads no tensor.

    Raises:
        CheckpointError: names a tensor that is missing, unexpected or of a wrong shape.
    """
    used: set[str] = set()
    missing: list[str] = []
    for name, shape in expected_shapes(arch).items():
        sources = names.sources(name, checkpoint)
        used.update(sources)
        absent = [source for source in sources if source not in checkpoint]
        missing += absent
        if absent:
            continue
        parts = _part_shapes(arch, name, shape, len(sources))
        for source, part in zip(sources, parts, strict=True):
            is_transposed = names.is_transposed(name) and not checkpoint.is_quantized(source)
            expected = part[::-1] if is_transposed else part
            if checkpoint.shape(source) != expected:
                raise CheckpointError(
                    f"{source} should have shape {list(expected)} by {checkpoint.folder}/"
                    f"config.json, but has {list(checkpoint.shape(source))}"
                )
    if missing:
        raise _mismatch(checkpoint, "lacks", missing, "needs", arch)
    if arch.tie_embeddings:
        used.add(names.lm_head(checkpoint))
    patterns = [re.compile(pattern) for pattern in names.ignored]
    unexpected = [
        name
        for name in checkpoint
        if name not in used
        and not any(pattern.fullmatch(name) for pattern in patterns)
        and not _is_idle_bias(name, checkpoint)
    ]
    if unexpected:
        raise _mismatch(checkpoint, "holds", unexpected, "has no place for", arch)


def read_weights(
    arch: DecoderArchitecture, names: WeightNames, checkpoint: CheckpointWeights
) -> Iterator[tuple[str, LinearWeight]]:
    """The decoder's weights by name, [out, in] and stacked, in the checkpoint's dtype."""
    for name in expected_shapes(arch):
        is_transposed = names.is_transposed(name)
        parts: list[StoredWeight] = []
        for source in names.sources(name, checkpoint):
            part = checkpoint.get(source)
            if is_transposed and isinstance(part, Tensor):
                part = part.t().contiguous()
            parts.append(part)
        yield name, stack(parts)


def has_own_head(names: WeightNames, checkpoint: CheckpointWeights) -> bool:
    """Whether a checkpoint with tied embeddings carries a head that differs from them."""
    head, embeddings = names.lm_head(checkpoint), names.sources("embed_tokens.weight", checkpoint)
    if head not in checkpoint:
        return False
    tensors = [checkpoint.get(name) for name in (head, embeddings[0])]
    plain = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    return len(plain) < len(tensors) or not torch.equal(*plain)


def _is_idle_bias(name: str, checkpoint: CheckpointWeights) -> bool:
    """Whether this is a bias of zeros that a quantizer gave to a layer without one."""
    module, _, kind = name.rpartition(".")
    if kind != "bias" or not checkpoint.is_quantized(f"{module}.weight"):
        return False
    bias = checkpoint.get(name)
    return isinstance(bias, Tensor) and not bool(bias.any())


def _part_shapes(
    arch: DecoderArchitecture, name: str, shape: tuple[int, ...], num_parts: int
) -> list[tuple[int, ...]]:
    """Shapes [out, in] of the tensors that are stacked to one of `shape`."""
    if num_parts == 1:
        return [shape]
    if name.rsplit(".", 2)[-2] == "attn_qkv":
        query, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        rows = [query, kv, kv]
    else:
        rows = [arch.intermediate_size] * 2
    return [(count, *shape[1:]) for count in rows]


def _mismatch(
    checkpoint: CheckpointWeights, verb: str, names: list[str], why: str, arch: DecoderArchitecture
) -> CheckpointError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    error = CheckpointError(
        f"{checkpoint.folder} {verb} {names[0]}{more}, which a {arch.family} model of "
        f"{arch.num_layers} layers {why}"
    )
    error.add_note("config.json and the weights are of different models, or the save is partial")
    return error
