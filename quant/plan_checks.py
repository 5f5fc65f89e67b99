"""The refusals of a quantization plan: what would fail later, named before it costs anything.

Each function raises a ConfigError that names the layer, the two numbers that disagree, and, in a
note, settings that would work. Sources of the rules: group sizes as every consumer wants them
(the size divides the input width; compressed-tensors 447 reports the failure at save time), fused
layers as vLLM's loader asserts them (GPTQModel 1485), tied heads as sglang 2935 reports them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import PER_CHANNEL, Format, Method, QuantConfig, Scheme
from llmbench.quant.errors import ConfigError
from llmbench.quant.formats.registry import FORMATS, Target, objection
from llmbench.quant.linear_layers import LinearLayer, fused_with

USUAL_GROUP_SIZES = (128, 64, 32, 16, PER_CHANNEL)
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""How configs of mixtures of experts call the number of experts of a layer."""
FLOATING = ("float32", "bfloat16", "float16")
METHOD_BITS: dict[Method, tuple[int, ...]] = {
    "rtn": (2, 3, 4, 8),
    "gptq": (2, 3, 4, 8),
    "awq": (2, 3, 4, 8),
    "qqq": (4,),
    "smoothquant": (8,),
    "int8": (8,),
}
SYMMETRIC_METHODS: tuple[Method, ...] = ("qqq", "smoothquant", "int8")
"""Their products run on integers, where a zero point would need a sum of every token's input."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json."""
    part = config.get("text_config")
    return dict(part) if isinstance(part, dict) else dict(config)


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose layers are codes already."""
    config = checkpoint.config
    keys = ("quantization_config", "compression_config")
    found = next(
        (part[key] for part in (config, text_config(config)) for key in keys if part.get(key)), None
    )
    packed = next(
        (name for name in checkpoint.names if re.search(r"\.(qweight|weight_packed|B|SCB)$", name)),
        None,
    )
    if not found and packed is None:
        return
    method = found.get("quant_method") if isinstance(found, dict) else None
    how = f"by {method}" if method else f"it holds {packed}" if packed else "by its config.json"
    error = ConfigError(f"{checkpoint.folder} is quantized already ({how})")
    error.add_note("start from the full-precision checkpoint that it was made from")
    error.add_note("to move its codes into another file format, use `llmbench convert`")
    raise error


def refuse_experts(text: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Refuse mixtures of experts: an expert that gets no tokens has nothing to be fitted to."""
    key = next((key for key in EXPERT_COUNTS if isinstance(text.get(key), int) and text[key]), None)
    tensor = next((name for name in checkpoint.names if ".experts." in name), None)
    if key is None and tensor is None:
        return
    evidence = f"{key} is {text[key]}" if key else f"it holds {tensor}"
    family = text.get("model_type", "this model")
    error = ConfigError(
        f"mixtures of experts are not quantized here, and {family} is one ({evidence})"
    )
    error.add_note(
        "gptqmodel and llmcompressor do them, where installed: `--backend gptqmodel`, "
        "`--backend llmcompressor`"
    )
    raise error


def refuse_several_stacks(linears: Sequence[LinearLayer]) -> None:
    """Refuse models of several stacks of blocks: an encoder beside the decoder, or a vision part.

    Calibration text runs through one stack of blocks alone.
    """
    stacks = dict.fromkeys(layer.block.rpartition(".")[0] for layer in linears if layer.block)
    if len(stacks) > 1:
        error = ConfigError(
            f"expected one stack of decoder blocks, found {len(stacks)}: {', '.join(stacks)}"
        )
        error.add_note("models with a vision part or an encoder are not quantized here")
        raise error


def refuse_other_types(checkpoint: Checkpoint, linears: Sequence[LinearLayer]) -> None:
    """Refuse weights that are not floating-point numbers of 16 or 32 bits."""
    for layer in linears:
        dtype = checkpoint.dtype(f"{layer.name}.weight")
        if dtype not in FLOATING:
            raise ConfigError(
                f"{layer.name}.weight holds {dtype}, expected one of {', '.join(FLOATING)}"
            )


def refuse_tied_head(
    checkpoint: Checkpoint, config: QuantConfig, linears: Sequence[LinearLayer]
) -> None:
    """Refuse to quantize a head that is the embedding table under another name."""
    if not config.quantize_lm_head:
        return
    text = text_config(checkpoint.config)
    is_tied = text.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings", False))
    if is_tied or linears[-1].block:
        error = ConfigError(
            "quantize_lm_head needs a head of its own, and this model's is tied to its embeddings"
        )
        error.add_note("leave the head in full precision: it is stored once either way")
        raise error


def refuse_idle_overrides(config: QuantConfig, linears: Sequence[LinearLayer]) -> None:
    """Refuse an override that decides nothing: most often its pattern has a typing error."""
    taken: dict[str, str] = {}
    for override in config.overrides:
        matched = [layer.name for layer in linears if override.matches(layer.name)]
        kind = "skip" if override.skip else "override"
        if not matched:
            # A tied head is no layer of its own, and skipping it is what happens anyway.
            if override.skip and override.matches("lm_head"):
                continue
            error = ConfigError(f"{kind} {override.pattern!r} matches no linear layer")
            names = dict.fromkeys(layer.name.rpartition(".")[2] for layer in linears)
            error.add_note(f"layers are called, for example, {linears[0].name}")
            error.add_note(f"last parts of names: {', '.join(names)}")
            raise error
        first = next((name for name in matched if name not in taken), None)
        if first is None:
            raise ConfigError(
                f"{kind} {override.pattern!r} has no effect: {taken[matched[0]]!r} comes before it "
                f"and matches {matched[0]} too"
            )
        is_head_only = all(not layer.block for layer in linears if layer.name in matched)
        if is_head_only and not override.skip and not config.quantize_lm_head:
            error = ConfigError(
                f"{kind} {override.pattern!r} has no effect: the head stays in full precision"
            )
            error.add_note("quantize_lm_head quantizes it too")
            raise error
        for name in matched:
            taken.setdefault(name, override.pattern)


def refuse_schemes(targets: Sequence[Target], config: QuantConfig) -> None:
    """Refuse what the method cannot do, and group sizes that do not divide a layer's input."""
    method = config.method
    for layer, scheme in targets:
        if scheme.bits not in METHOD_BITS[method]:
            known = " or ".join(str(bits) for bits in METHOD_BITS[method])
            error = ConfigError(f"{method} works with {known} bits, not {scheme.bits}")
            error.add_note(f"asked for {layer.name}; rtn and gptq do 2, 3, 4 and 8 bits")
            raise error
        if not scheme.sym and method in SYMMETRIC_METHODS:
            raise ConfigError(
                f"{method} has no zero points, and asymmetric weights are asked for ({layer.name})"
            )
    misfits = [
        (layer, scheme)
        for layer, scheme in targets
        if scheme.group_size != PER_CHANNEL and layer.in_features % scheme.group_size
    ]
    if not misfits:
        return
    layer, scheme = misfits[0]
    others = f" and {len(misfits) - 1} more layers" if len(misfits) > 1 else ""
    error = ConfigError(
        f"group_size {scheme.group_size} does not divide in_features {layer.in_features} "
        f"({layer.name}{others})"
    )
    fits = [size for size in USUAL_GROUP_SIZES if _divides_all(size, targets)]
    error.add_note(
        "group sizes that fit every layer: "
        + ", ".join("-1 (one group a row)" if size == PER_CHANNEL else str(size) for size in fits)
    )
    widths = {item.in_features for item, _ in misfits}
    if len(misfits) < len(targets) and len(widths) == 1:
        kinds = "|".join(dict.fromkeys(_in_block(item) for item, _ in misfits))
        own = [size for size in fits if size == PER_CHANNEL or size < scheme.group_size]
        error.add_note(
            f"or another size for these alone: override '({kinds})$:group_size={own[0]}', or "
            f"leave them in full precision: skip '({kinds})$'"
        )
    raise error


def refuse_fused_differences(schemes: Mapping[str, Scheme | None]) -> None:
    """Refuse different schemes in layers that engines run as one."""
    for name, scheme in schemes.items():
        for other in fused_with(name):
            if other not in schemes or schemes[other] == scheme:
                continue
            members = [member for member in fused_with(name) if member in schemes]
            last = "|".join(member.rpartition(".")[2] for member in members)
            error = ConfigError(
                f"{name} is {_spelled(scheme)} and {other} is {_spelled(schemes[other])}, but "
                "engines run these as one layer"
            )
            error.add_note(f"let the pattern match all of them: '({last})$'")
            raise error


def refuse_format(file_format: Format, targets: Sequence[Target], config: QuantConfig) -> None:
    """Refuse a format that cannot hold every layer; name those that can."""
    reason = objection(file_format, targets, desc_act=config.desc_act)
    if reason is None:
        return
    error = ConfigError(reason)
    others = [name for name in FORMATS if not objection(name, targets, desc_act=config.desc_act)]
    if others:
        error.add_note(f"formats that hold every layer: {', '.join(others)}")
    else:
        error.add_note(
            "no format holds these layers: change their bits or group size, or skip them"
        )
    raise error


def _in_block(layer: LinearLayer) -> str:
    """An expression for a layer's name without its block, such as `mlp\\.down_proj`."""
    return re.escape(layer.name.removeprefix(f"{layer.block}.") if layer.block else layer.name)


def _divides_all(size: int, targets: Sequence[Target]) -> bool:
    return size == PER_CHANNEL or all(layer.in_features % size == 0 for layer, _ in targets)


def _spelled(scheme: Scheme | None) -> str:
    if scheme is None:
        return "in full precision"
    zeros = "symmetric" if scheme.sym else "asymmetric"
    return f"{scheme.name} with groups of {scheme.group_size}, {zeros}"
