"""Small agreements that all panels share: series styles, scales, tick labels."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from llmbench.reports.format import number


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """Colour and marker of a series: they change together, so neither carries meaning alone."""

    color: str
    marker: str


def series_style(index: int) -> SeriesStyle:
    """Return the style of the series at a place of the report; call it in the house style."""
    cycle = mpl.rcParams["axes.prop_cycle"].by_key()
    colors = [value if value.startswith("#") else f"#{value}" for value in cycle["color"]]
    markers = cycle["marker"]
    return SeriesStyle(colors[index % len(colors)], markers[index % len(markers)])


def plain_ticks(panel: Axes, which: Literal["x", "y", "both"]) -> None:
    """Label ticks with plain numbers, never with powers."""
    for axis in _axes_of(panel, which):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def log_scale(panel: Axes, which: Literal["x", "y"], values: Iterable[float | None]) -> None:
    """Make an axis logarithmic over the values, and label it at round numbers."""
    known = [value for value in values if value is not None and value > 0 and math.isfinite(value)]
    if not known:  # a logarithmic axis has no empty state
        (panel.set_xticks if which == "x" else panel.set_yticks)([])
        return
    low, high = min(known) / 1.3, max(known) * 1.3
    (panel.set_xscale if which == "x" else panel.set_yscale)("log")
    (panel.set_xlim if which == "x" else panel.set_ylim)(low, high)
    for axis in _axes_of(panel, which):
        axis.set_major_locator(_log_locator(low, high))
        axis.set_minor_locator(NullLocator())
    plain_ticks(panel, which)


def from_zero(panel: Axes, which: Literal["x", "y"], room: float = 1.04) -> None:
    """Start an axis of amounts at zero, so that lengths on it can be compared.

    `room` is the factor by which it reaches beyond the automatic limit.
    """
    get, put = (
        (panel.get_xlim, panel.set_xlim) if which == "x" else (panel.get_ylim, panel.set_ylim)
    )
    put(0, room * get()[1] or 1.0)
    plain_ticks(panel, which)


def _log_locator(low: float, high: float) -> LogLocator | MaxNLocator:
    """Return some four to nine ticks, whatever the span."""
    decades = math.log10(high / low)
    if decades < 0.5:
        return MaxNLocator(5, steps=[1, 2, 5, 10])
    if decades <= 1.2:
        subs = [1.0, 1.5, 2.0, 3.0, 5.0, 7.0]
    else:
        subs = [1.0, 2.0, 5.0] if decades <= 3 else [1.0]
    return LogLocator(base=10, subs=subs, numticks=20)


def _axes_of(panel: Axes, which: str) -> list[mpl.axis.Axis]:
    axes: list[mpl.axis.Axis] = []
    if which in ("x", "both"):
        axes.append(panel.xaxis)
    if which in ("y", "both"):
        axes.append(panel.yaxis)
    return axes


def _tick(value: float) -> str:
    """Return a tick's value without zeros at its end: ticks are round numbers."""
    text = number(value, 4)
    return text.rstrip("0").rstrip(".") if "." in text else text
