"""What a quantization run will do, decided from headers and config before anything is computed.

The plan lists every linear layer with the scheme that it gets or the reason why it stays in full
precision, chooses the file format, and estimates bytes, memory and time. Whatever would make the
run fail after hours is refused here: a group size that does not divide a layer's input, a shape
that the format cannot hold, layers that engines fuse and that would differ, a pattern that
matches nothing. No torch: a plan takes a second, so `--dry-run` can show it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmbench.quant import plan_checks as checks
from llmbench.quant.adapters import refusal as adapter_refusal
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Format, QuantConfig, Scheme, Transform
from llmbench.quant.errors import ConfigError
from llmbench.quant.formats.registry import default_format
from llmbench.quant.linear_layers import LinearLayer, check_has_linears, find_linears
from llmbench.quant.rotation_roles import refusal as rotation_refusal
from llmbench.quant.run_costs import (
    RunCosts,
    check_disk,
    free_disk_bytes,
    hidden_bytes,
    machine_rate,
    memory_parts,
    operations,
    stored_bytes,
)
from llmbench.quant.safetensors_header import DTYPES

SCALING_METHODS = ("awq", "qqq", "smoothquant")
"""Methods that move scales between layers and so must know the family."""
TRANSFORMS: dict[Transform, str] = {
    "smooth": "channels that stand out are shrunk, and the layers behind them grown",
    "rotate": "the hidden space is rotated, so that no channel stands out",
    "none": "left as they are",
}
ITEM_BYTES = {name: width for name, width in DTYPES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """One linear layer and what becomes of it.

    Attributes:
        scheme: None leaves the layer in full precision, for `reason`.
        bytes_before, bytes_after: Of the weight and of what replaces it.
    """

    layer: LinearLayer
    scheme: Scheme | None
    reason: str
    bytes_before: int
    bytes_after: int

    @property
    def name(self) -> str:
        """Of the module."""
        return self.layer.name


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantPlan:
    """A run that has passed every check that headers allow.

    Attributes:
        format: Of the file; `format_reason` says why this one where the user named none.
        layers: Every linear layer of the checkpoint, in its order.
        notes: What the user should know before the run starts.
    """

    model_type: str
    config: QuantConfig
    format: Format
    format_reason: str
    layers: tuple[PlannedLayer, ...]
    costs: RunCosts
    notes: tuple[str, ...] = ()

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme of each layer that is quantized, by module name."""
        return {item.name: item.scheme for item in self.layers if item.scheme is not None}

    @property
    def targets(self) -> tuple[tuple[LinearLayer, Scheme], ...]:
        """The layers that are quantized, with their schemes."""
        return tuple((item.layer, item.scheme) for item in self.layers if item.scheme is not None)

    @property
    def quantized(self) -> tuple[PlannedLayer, ...]:
        """The layers that are quantized."""
        return tuple(item for item in self.layers if item.scheme is not None)

    @property
    def kept(self) -> dict[str, str]:
        """Why each of the other layers stays in full precision, by module name."""
        return {item.name: item.reason for item in self.layers if item.scheme is None}

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "model_type": self.model_type,
            "config": self.config.to_json(),
            "format": self.format,
            "format_reason": self.format_reason,
            "layers": [
                {
                    "name": item.name,
                    "out_features": item.layer.out_features,
                    "in_features": item.layer.in_features,
                    "scheme": None if item.scheme is None else asdict(item.scheme),
                    "reason": item.reason,
                    "bytes_before": item.bytes_before,
                    "bytes_after": item.bytes_after,
                }
                for item in self.layers
            ],
            "costs": self.costs.to_json(),
            "notes": list(self.notes),
        }


def plan_run(
    checkpoint: Checkpoint, config: QuantConfig, *, output: Path | None = None
) -> QuantPlan:
    """Decide what becomes of every layer, or refuse the run.

    Raises:
        ConfigError: names what cannot be, where, and what could.
    """
    text = checks.text_config(checkpoint.config)
    checks.refuse_quantized(checkpoint)
    checks.refuse_experts(text, checkpoint)
    linears = find_linears(checkpoint)
    check_has_linears(linears, checkpoint.folder)
    checks.refuse_several_stacks(linears)
    checks.refuse_other_types(checkpoint, linears)
    family = SimpleNamespace(**{"model_type": None, **text})
    if config.method in SCALING_METHODS:
        _check_family(family, config)
    checks.refuse_tied_head(checkpoint, config, linears)
    checks.refuse_idle_overrides(config, linears)
    chosen = [(layer, *_scheme_of(layer, config)) for layer in linears]
    targets = [(layer, scheme) for layer, scheme, _ in chosen if scheme is not None]
    if not targets:
        raise ConfigError("every layer is skipped: nothing is left to quantize")
    checks.refuse_schemes(targets, config)
    checks.refuse_fused_differences({layer.name: scheme for layer, scheme, _ in chosen})
    if config.format is None:
        file_format, format_reason = default_format(
            config.method, targets, desc_act=config.desc_act
        )
    else:
        file_format, format_reason = config.format, "as asked"
    checks.refuse_format(file_format, targets, config)
    model_bytes = ITEM_BYTES[checkpoint.dtype(f"{linears[0].name}.weight")]
    layers = tuple(
        _planned(checkpoint, layer, scheme, reason, file_format, model_bytes)
        for layer, scheme, reason in chosen
    )
    untied = _untied_bytes(checkpoint, config, family)
    costs = _costs(checkpoint, config, layers, model_bytes, untied, output)
    if output is not None:
        check_disk(output, costs)
    return QuantPlan(
        model_type=str(family.model_type),
        config=config,
        format=file_format,
        format_reason=format_reason,
        layers=layers,
        costs=costs,
        notes=tuple(_notes(config, family, untied)),
    )


def check_shapes(checkpoint: Checkpoint, config: QuantConfig) -> None:
    """Refuse what no tool could quantize: layers that the group size does not divide, codes.

    Raises:
        ConfigError: names the layer.
    """
    checks.refuse_quantized(checkpoint)
    linears = [layer for layer in find_linears(checkpoint) if layer.block]
    check_has_linears(linears, checkpoint.folder)
    checks.refuse_other_types(checkpoint, linears)
    checks.refuse_schemes([(layer, config.scheme) for layer in linears], config)


def chosen_transform(config: QuantConfig, hf_text_config: Any) -> Transform:
    """What QQQ does to outliers first: as asked, or a rotation where the family allows it."""
    if config.method != "qqq":
        return "none"
    if config.transform is not None:
        return config.transform
    return "smooth" if rotation_refusal(hf_text_config) else "rotate"


def _check_family(family: Any, config: QuantConfig) -> None:
    reason = adapter_refusal(family, config.method)
    if reason is not None:
        raise ConfigError(reason)
    if config.transform == "rotate" and (reason := rotation_refusal(family)) is not None:
        error = ConfigError(reason)
        error.add_note("transform smooth or none works without a rotation")
        raise error


def _untied_bytes(checkpoint: Checkpoint, config: QuantConfig, family: Any) -> int:
    """Bytes of the head that a rotation makes of tied embeddings."""
    embeddings = "model.embed_tokens.weight"
    if chosen_transform(config, family) != "rotate" or "lm_head.weight" in checkpoint:
        return 0
    return _weight_bytes(checkpoint, embeddings) if embeddings in checkpoint else 0


def _notes(config: QuantConfig, family: Any, untied: int) -> Iterator[str]:
    if config.method == "qqq":
        yield f"outliers: {TRANSFORMS[chosen_transform(config, family)]}"
    if untied:
        yield "embeddings and head come apart: a rotation changes them differently"


def _scheme_of(layer: LinearLayer, config: QuantConfig) -> tuple[Scheme | None, str]:
    """The scheme of a layer, or None and why it has none."""
    if not layer.block and not config.quantize_lm_head:
        return None, "output head"
    scheme = config.scheme_of(layer.name)
    if scheme is not None:
        return scheme, ""
    pattern = next(item.pattern for item in config.overrides if item.matches(layer.name))
    return None, f"skipped by {pattern!r}"


def _planned(
    checkpoint: Checkpoint,
    layer: LinearLayer,
    scheme: Scheme | None,
    reason: str,
    file_format: Format,
    model_bytes: int,
) -> PlannedLayer:
    before = _weight_bytes(checkpoint, f"{layer.name}.weight")
    after = before if scheme is None else stored_bytes(file_format, scheme, layer, model_bytes)
    return PlannedLayer(
        layer=layer, scheme=scheme, reason=reason, bytes_before=before, bytes_after=after
    )


def _costs(
    checkpoint: Checkpoint,
    config: QuantConfig,
    layers: Sequence[PlannedLayer],
    model_bytes: int,
    untied: int,
    output: Path | None,
) -> RunCosts:
    total = checkpoint.num_bytes
    after = total + untied - sum(item.bytes_before - item.bytes_after for item in layers)
    inside = [item.layer for item in layers if item.layer.block]
    quantized = [item.layer for item in layers if item.scheme is not None]
    outside_bytes = total + untied - sum(item.bytes_before for item in layers if item.layer.block)
    return RunCosts(
        bytes_before=total,
        bytes_after=after,
        disk_bytes=2 * (after + hidden_bytes(config, inside, model_bytes)),
        memory_parts=memory_parts(config, inside, outside_bytes, model_bytes),
        operations=operations(config, quantized),
        rate=machine_rate(),
        free_disk_bytes=None if output is None else free_disk_bytes(output),
    )


def _weight_bytes(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.numel(name) * ITEM_BYTES[checkpoint.dtype(name)]
