"""compressed-tensors' config groups: which layers have which numbers.

Layers differ through several `config_groups`, each with its targets: an exact module name wins
over a regular expression (`re:`), and that over a class name such as `Linear`. A group says much
that integers a token or a group do not need (floats, blocks, static activations, transforms);
what is not read is refused by its name, since a reader that passes over it computes something
else.

Sources: compressed-tensors, src/compressed_tensors/quantization/quant_config.py, quant_scheme.py,
quant_args.py and utils/match.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmbench.quant.config import PER_CHANNEL, Activations, Scheme
from llmbench.quant.errors import FormatError
from llmbench.quant.formats import format as shared

PACKED, INT = "pack-quantized", "int-quantized"
CONTAINERS = (PACKED, INT, "naive-quantized", "mixed-precision")
LINEAR_CLASSES = ("Linear", "LinearBase", "Conv1D")
STRATEGIES = ("tensor", "channel", "group")
TOKEN_INT8 = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """The layers that a group is for, and their scheme.

    Attributes:
        is_per_tensor: One scale for the whole weight, which each row then has.
    """

    name: str
    targets: tuple[str, ...]
    scheme: Scheme
    is_per_tensor: bool


def refuse_unsupported(settings: Mapping[str, Any]) -> None:
    """Refuse by name what the config asks for and this reader does not do."""
    container = settings.get("format")
    if container not in CONTAINERS:
        raise FormatError(
            f"compressed-tensors files of the format {container!r} are not read, only {PACKED} "
            f"and {INT} of integers"
        )
    status = settings.get("quantization_status", "compressed")
    if status != "compressed":
        raise FormatError(f"quantization_status is {status!r}, expected 'compressed'")
    for key in ("kv_cache_scheme", "transform_config"):
        if settings.get(key):
            raise FormatError(f"compressed-tensors files with a {key} are not read")
    sparsity = settings.get("sparsity_config") or {}
    sparsity = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if sparsity != "dense":
        raise FormatError(f"compressed-tensors files of sparse weights ({sparsity}) are not read")


def config_groups(settings: Mapping[str, Any]) -> list[ConfigGroup]:
    """All groups of a `quantization_config`, in its order."""
    found = settings.get("config_groups")
    if not isinstance(found, Mapping) or not found:
        raise FormatError("quantization_config lacks config_groups")
    return [_group(name, group) for name, group in found.items()]


def _group(name: str, group: Any) -> ConfigGroup:
    where = f"config_groups.{name}"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise FormatError(f"{where} of quantization_config has no settings of weights")
    if group.get("format") not in (None, *CONTAINERS):
        raise FormatError(f"{where} has the format {group['format']!r}, which is not read")
    if group.get("output_activations"):
        raise FormatError(f"{where} quantizes outputs, which is not supported")
    if str(weights.get("type", "int")).lower() != "int":
        raise FormatError(f"{where} has weights of type {weights['type']!r}, only int is read")
    size = weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == PER_CHANNEL else "group"
    if strategy not in STRATEGIES:
        raise FormatError(
            f"{where} has the strategy {strategy!r}, only {', '.join(STRATEGIES)} are read"
        )
    targets = group.get("targets")
    if not isinstance(targets, Sequence) or isinstance(targets, str):
        raise FormatError(f"{where} has the targets {targets!r}, expected a list")
    return ConfigGroup(
        name=name,
        targets=tuple(map(str, targets)),
        scheme=shared.scheme_from(
            bits=shared.integer(weights, "num_bits"),
            group_size=shared.integer(weights, "group_size") if strategy == "group" else -1,
            sym=shared.flag(weights, "symmetric", True),
            activations=_activations(where, group.get("input_activations")),
        ),
        is_per_tensor=strategy == "tensor",
    )


def _activations(where: str, settings: Any) -> Activations:
    """`int8` for dynamic int8 a token, `none` without activation quantization."""
    if not settings:
        return "none"
    if not isinstance(settings, Mapping):
        raise FormatError(f"{where} has input_activations {settings!r}, expected an object")
    found = {key: settings.get(key, TOKEN_INT8[key]) for key in TOKEN_INT8}
    if found != TOKEN_INT8:
        kind = ", ".join(f"{key} {value}" for key, value in found.items())
        error = FormatError(f"{where} has input activations of {kind}, which are not supported")
        error.add_note("int8, symmetric, dynamic, one scale a token is supported")
        raise error
    return "int8"


def group_of(module: str, groups: Sequence[ConfigGroup]) -> ConfigGroup:
    """The group of a layer: by exact name, then regular expression, then class."""

    def by_pattern(target: str) -> bool:
        return target.startswith("re:") and shared.is_match(target.removeprefix("re:"), module)

    for matches in (module.__eq__, by_pattern, LINEAR_CLASSES.__contains__):
        for group in groups:
            if any(matches(target) for target in group.targets):
                return group
    names = ", ".join(group.name for group in groups)
    raise FormatError(f"{module} is quantized, but no target of {names} matches it")
