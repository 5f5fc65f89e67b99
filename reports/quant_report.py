"""Tables of a quantization: what will be done to which layers, who can load the result, how well
each layer came out, and where the time went.

A model of thirty blocks has the same seven layers thirty times, so the plan is told by kinds of
layer; errors are told layer by layer, the worst first, since one bad layer can cost a model its
wits while the mean looks fine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmbench.quant.config import PER_CHANNEL
from llmbench.quant.consumers import Consumer
from llmbench.quant.plan import PlannedLayer, QuantPlan
from llmbench.reports.format import (
    NULL,
    PERCENT,
    SECONDS,
    byte_unit,
    counted,
    percent,
    quantity,
    size,
)
from llmbench.reports.tables import Table, number_column, text_column

if TYPE_CHECKING:
    from llmbench.quant.layer_report import LayerReport

WORST = 8
"""Layers, and notes of a kind, that the final table shows; the result file holds all."""
FUSED = 3
"""Most layers that share one note about their input alone: query, key and value."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one shape, name and fate: `count` blocks have one each."""

    name: str
    count: int
    first: PlannedLayer

    @property
    def scheme(self) -> str:
        """What they become."""
        scheme = self.first.scheme
        if scheme is None:
            return "full precision"
        return f"{scheme.name} {'sym' if scheme.sym else 'asym'}"

    @property
    def group(self) -> str:
        """Inputs that share a scale."""
        scheme = self.first.scheme
        if scheme is None:
            return NULL
        return "row" if scheme.group_size == PER_CHANNEL else str(scheme.group_size)


def layer_kinds(plan: QuantPlan) -> list[LayerKind]:
    """The plan's layers without the number of their block, in the order of a block."""
    kinds: dict[tuple[object, ...], list[PlannedLayer]] = {}
    for item in plan.layers:
        name = item.name.removeprefix(f"{item.layer.block}.") if item.layer.block else item.name
        key = (name, item.layer.out_features, item.layer.in_features, item.scheme, item.reason)
        kinds.setdefault(key, []).append(item)
    return [LayerKind(str(key[0]), len(items), items[0]) for key, items in kinds.items()]


def plan_table(plan: QuantPlan) -> Table:
    """What becomes of every kind of layer."""
    kinds = layer_kinds(plan)
    unit = byte_unit([item.bytes_before for item in plan.layers])
    return Table(
        columns=(
            text_column("layer", [kind.name for kind in kinds]),
            number_column("number", [kind.count for kind in kinds]),
            number_column("out", [kind.first.layer.out_features for kind in kinds]),
            number_column("in", [kind.first.layer.in_features for kind in kinds]),
            text_column("becomes", [kind.scheme for kind in kinds]),
            text_column("group", [kind.group for kind in kinds]),
            number_column("before", [kind.first.bytes_before for kind in kinds], unit),
            number_column("after", [kind.first.bytes_after for kind in kinds], unit),
        ),
        notes=tuple(
            dict.fromkeys(
                f"{kind.name}: {kind.first.reason}" for kind in kinds if kind.first.reason
            )
        ),
    )


def consumer_table(consumers: Sequence[Consumer]) -> Table:
    """Who can load the file, what computes it there, and what to know."""
    return Table(
        columns=(
            text_column("loads in", [item.name for item in consumers]),
            text_column("loads", [item.loads for item in consumers]),
            text_column("kernel", [item.kernel or NULL for item in consumers]),
            text_column("against unquantized", [item.speed or NULL for item in consumers]),
        ),
        notes=tuple(f"{item.name}: {item.note}" for item in consumers if item.note),
    )


def layer_table(layers: "Mapping[str, LayerReport]", *, limit: int = WORST) -> Table:
    """The layers with the largest errors, and every fallback by name."""
    ordered = sorted(layers.items(), key=lambda item: item[1].relative_mse, reverse=True)
    shown = ordered[:limit]
    columns = [
        text_column("layer", [name for name, _ in shown]),
        number_column("error", [report.relative_mse for _, report in shown], PERCENT),
    ]
    if any(report.damp is not None for _, report in shown):
        columns.append(number_column("damping", [report.damp for _, report in shown], PERCENT))
    if _saw_tokens(layers):
        columns.append(number_column("tokens", [report.num_tokens for _, report in shown]))
    of = "output over the calibration tokens" if _saw_tokens(layers) else "weights"
    notes = [f"error: squared, of a layer's {of} against their own square; {_spread(layers)}"]
    if len(ordered) > limit:
        notes.append(f"the worst {limit} of {counted(len(ordered), 'layer')}")
    notes += _told({name: (report.fallback,) for name, report in layers.items() if report.fallback})
    notes += _told({name: report.notes for name, report in layers.items()}, least=FUSED + 1)
    return Table(columns=tuple(columns), notes=tuple(notes))


def phase_line(seconds_by_phase: Mapping[str, float]) -> str:
    """Where the time went, the longest phase first: `75.1 s: solve 40.2 s, capture 34.9 s`."""
    ordered = sorted(seconds_by_phase.items(), key=lambda item: item[1], reverse=True)
    total = quantity(sum(seconds_by_phase.values()), SECONDS)
    return f"{total}: {', '.join(f'{name} {quantity(value, SECONDS)}' for name, value in ordered)}"


def mean_error(layers: "Mapping[str, LayerReport]") -> float | None:
    """Mean of the layers' errors; None without layers."""
    if not layers:
        return None
    return sum(report.relative_mse for report in layers.values()) / len(layers)


def size_line(bytes_before: int, bytes_after: int) -> str:
    """Both sizes and their ratio: `257 MiB → 113 MiB (44 %)`."""
    share = percent(bytes_after / bytes_before, 2) if bytes_before else NULL
    return f"{size(bytes_before)} → {size(bytes_after)} ({share})"


def _told(texts_by_layer: Mapping[str, Sequence[str]], *, least: int = 1) -> list[str]:
    """Each text once, with the layers that it is about, if they are at least so many."""
    names: dict[str, list[str]] = {}
    for name, texts in texts_by_layer.items():
        for text in texts:
            names.setdefault(text, []).append(name)
    told = [
        f"{text} ({found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''})"
        for text, found in names.items()
        if len(found) >= least
    ]
    return (
        told if len(told) <= WORST else [*told[:WORST], f"and {len(told) - WORST} more such notes"]
    )


def _saw_tokens(layers: "Mapping[str, LayerReport]") -> bool:
    return any(report.num_tokens for report in layers.values())


def _spread(layers: "Mapping[str, LayerReport]") -> str:
    errors = sorted(report.relative_mse for report in layers.values())
    if not errors:
        return "no layers"
    middle = errors[len(errors) // 2]
    return f"mean {percent(mean_error(layers))}, median {percent(middle)}"
