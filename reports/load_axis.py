"""The horizontal axis of a load: request rates or concurrencies, infinity included.

Loads are tried in powers as a rule, so the axis is logarithmic where they span much, with the
tried values as its labels. `inf` (all at once) and `none` (no cap) are loads like any other and
the highest of them: they stand one step beyond the last finite value.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from llmbench.reports.cells import CellView, cap_value
from llmbench.reports.format import REQUESTS_PER_SECOND, header

Kind = Literal["request_rate", "max_concurrency"]

MIN_LOG_SPAN = 6.0  # the lower half of a linear axis would crowd more than two doublings
MAX_TICKS = 8


@dataclass(frozen=True, slots=True)
class LoadAxis:
    """Positions of loads on an axis; `values` ascend, and the last may be infinite."""

    kind: Kind
    values: tuple[float, ...]

    @property
    def label(self) -> str:
        """Label of the axis."""
        if self.kind == "request_rate":
            return header("request rate", REQUESTS_PER_SECOND)
        return "concurrency (requests in flight)"

    @property
    def is_log(self) -> bool:
        """Whether the finite values span too much for a linear axis."""
        finite = self._finite
        return len(finite) > 1 and finite[-1] / finite[0] >= MIN_LOG_SPAN

    def of(self, cell: CellView) -> float:
        """Return the load of a cell on this axis."""
        return cell.request_rate if self.kind == "request_rate" else cap_value(cell)

    def position(self, value: float) -> float:
        """Return where a load stands; infinity gets a place."""
        if math.isfinite(value):
            return value
        finite = self._finite
        if not finite:
            return 1.0
        if self.is_log or len(finite) == 1:
            return 2 * finite[-1]
        return finite[-1] + (finite[-1] - finite[0]) / (len(finite) - 1)

    def text(self, value: float) -> str:
        """Return a load as its flag spells it."""
        if math.isfinite(value):
            return f"{value:g}"
        return "inf" if self.kind == "request_rate" else "none"

    def apply(self, panel: Axes) -> None:
        """Set scale, limits, ticks and label of a panel's horizontal axis."""
        positions = [self.position(value) for value in self.values]
        low, high = positions[0], positions[-1]
        if self.is_log:
            panel.set_xscale("log", base=2)
            panel.set_xlim(low / 1.25, high * 1.25)
        else:
            margin = 0.08 * (high - low) or 0.5 * high
            panel.set_xlim(low - margin, high + margin)
        shown = _thinned(len(positions))
        panel.xaxis.set_major_locator(FixedLocator([positions[index] for index in shown]))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xticks(
            [positions[index] for index in shown],
            labels=[self.text(self.values[index]) for index in shown],
        )
        panel.set_xlabel(self.label)

    @property
    def _finite(self) -> tuple[float, ...]:
        return tuple(value for value in self.values if math.isfinite(value))


def load_axis(cells: Iterable[CellView]) -> LoadAxis:
    """Choose the axis: request rates where several were tried, else concurrencies."""
    cells = list(cells)
    rates = sorted({cell.request_rate for cell in cells})
    caps = sorted({cap_value(cell) for cell in cells})
    if len(rates) > 1 or (len(caps) == 1 and math.isfinite(rates[0])):
        return LoadAxis("request_rate", tuple(rates))
    return LoadAxis("max_concurrency", tuple(caps))


@dataclass(frozen=True, slots=True)
class LoadSeries:
    """Cells along a load axis that share the other half of their load."""

    name: str
    index: int
    """Place among all series of the report: it decides colour and marker."""
    cells: tuple[CellView, ...]


def load_series(cells: Iterable[CellView], axis: LoadAxis) -> list[LoadSeries]:
    """Group cells into lines along the axis."""
    groups: dict[float, list[CellView]] = {}
    for cell in cells:
        other = cap_value(cell) if axis.kind == "request_rate" else cell.request_rate
        groups.setdefault(other, []).append(cell)
    series = []
    for index, other in enumerate(sorted(groups)):
        name = _series_name(axis.kind, other)
        ordered = sorted(groups[other], key=axis.of)
        series.append(LoadSeries(name, index, tuple(ordered)))
    return series


def _series_name(kind: Kind, other: float) -> str:
    if kind == "request_rate":
        return f"concurrency ≤ {other:g}" if math.isfinite(other) else "no concurrency cap"
    return f"{other:g} req/s" if math.isfinite(other) else "closed loop"


def _thinned(count: int) -> list[int]:
    """Return indices of at most MAX_TICKS of `count` ticks, the last always among them."""
    step = math.ceil(count / MAX_TICKS)
    return sorted(range(count - 1, -1, -step))
