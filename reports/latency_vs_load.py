"""Latency against load: how long users wait as more of them come.

One panel for each of TTFT, TPOT and E2EL: the median as a solid line with its interval, the tail as
a dashed one, both on a logarithmic axis, since queueing turns milliseconds into seconds. TTFT and
E2EL count from the scheduled arrival: under a cap on concurrency a request may wait in the client,
and its user waits with it. A vertical line marks the first load that the target did not keep up
with (achieved below 95 % of offered): latencies from there on depend on how long the run lasted.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmbench.reports.axes import log_scale, series_style
from llmbench.reports.cells import (
    CellView,
    best_tail,
    missing_note,
    withheld_note,
)
from llmbench.reports.figure import (
    FAULT_COLOR,
    QUIET_COLOR,
    Caption,
    hide_unused,
    new_figure,
    outside_legend,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import Unit, header, time_unit
from llmbench.reports.load_axis import LoadAxis, LoadSeries, load_axis, load_series

MAX_SERIES_HERE = 3
"""Each series has two lines, so half of what a panel bears."""

NAMES = {"ttft_from_schedule_s": "TTFT", "tpot_s": "TPOT", "e2el_from_schedule_s": "E2EL"}
LATENCIES = tuple(NAMES)
E2EL = "e2el_from_schedule_s"


def latency_vs_load_frame(cells: Sequence[CellView]) -> pd.DataFrame:
    """Return the values of the figure, a row for each cell and latency."""
    tail = best_tail(cells, LATENCIES)
    rows = []
    for cell in cells:
        for metric in LATENCIES:
            low, high = cell.interval(metric, "median") or (None, None)
            tail_low, tail_high = cell.interval(metric, tail) or (None, None)
            rows.append(
                {
                    "cell_id": cell.cell_id,
                    "request_rate": cell.request_rate,
                    "max_concurrency": cell.max_concurrency,
                    "metric": metric,
                    "n": cell.sample_size(metric),
                    "median": cell.statistic(metric, "median"),
                    "median_low": low,
                    "median_high": high,
                    tail: cell.statistic(metric, tail),
                    f"{tail}_low": tail_low,
                    f"{tail}_high": tail_high,
                    "is_readable": cell.is_readable,
                    "is_saturated": cell.is_saturated,
                }
            )
    return pd.DataFrame(rows)


@styled
def latency_vs_load(cells: Sequence[CellView], caption: Caption) -> Figure:
    """Draw median and tail of TTFT, TPOT and E2EL against the load."""
    axis = load_axis(cells)
    series = load_series(cells, axis)
    tail = best_tail(cells, LATENCIES)
    num_rows = math.ceil(len(series) / MAX_SERIES_HERE)
    figure, panels = new_figure(
        replace(caption, note=f"{_note(cells, tail)} {caption.note}".strip()),
        rows=num_rows,
        columns=len(LATENCIES),
        panel_size=(3.4, 3.1),
        sharey="col",
    )
    if not any(cell.statistic(E2EL, "median") is not None for cell in cells):
        say_nothing_to_draw(panels[1], "nothing to draw: no cell has a completed request")
        hide_unused([panels[0], *panels[2:]], 0)
        return figure
    for row in range(num_rows):
        shown = series[row * MAX_SERIES_HERE : (row + 1) * MAX_SERIES_HERE]
        row_panels = panels[row * len(LATENCIES) : (row + 1) * len(LATENCIES)]
        for panel, metric in zip(row_panels, LATENCIES, strict=True):
            _draw_panel(panel, metric, tail, shown, cells, axis)
        _add_legend(row_panels[-1], shown, cells, tail)
    return figure


def _draw_panel(
    panel: Axes,
    metric: str,
    tail: str,
    shown: Sequence[LoadSeries],
    cells: Sequence[CellView],
    axis: LoadAxis,
) -> None:
    values = [cell.statistic(metric, name) for cell in cells for name in ("median", tail)]
    values += [end for cell in cells for end in cell.interval(metric, "median") or ()]
    unit = time_unit(values)
    axis.apply(panel)
    log_scale(panel, "y", [unit.of(value) for value in values if value is not None])
    panel.set_title(NAMES[metric])
    panel.set_ylabel(header("latency", unit))
    for series in shown:
        _draw_series(panel, metric, tail, series, axis, unit)
    _draw_saturation(panel, shown, axis)


def _draw_series(
    panel: Axes, metric: str, tail: str, series: LoadSeries, axis: LoadAxis, unit: Unit
) -> None:
    closed = [cell for cell in series.cells if _is_closed_loop(cell, axis)]
    along = [cell for cell in series.cells if cell not in closed]
    for cells in (along, *([cell] for cell in closed)):
        _draw_line(
            panel, metric, tail, [cell for cell in cells if cell.is_readable], series, axis, unit
        )
    for cell in series.cells:
        median = cell.statistic(metric, "median")
        if cell.is_readable:
            continue
        x = axis.position(axis.of(cell))
        if median is None:
            panel.annotate(
                "no result",
                (x, 0.03),
                xycoords=("data", "axes fraction"),
                rotation=90,
                ha="center",
                size=8,
                color=FAULT_COLOR,
            )
        else:
            panel.plot([x], [unit.of(median)], linestyle="", marker="x", color=FAULT_COLOR)


def _draw_line(
    panel: Axes,
    metric: str,
    tail: str,
    cells: Sequence[CellView],
    series: LoadSeries,
    axis: LoadAxis,
    unit: Unit,
) -> None:
    style = series_style(series.index)
    for name, dashes, marker in (("median", "-", style.marker), (tail, "--", "")):
        points = [
            (axis.position(axis.of(cell)), unit.of(value), cell.interval(metric, name))
            for cell in cells
            if (value := cell.statistic(metric, name)) is not None
        ]
        if name == tail and len(points) == 1:
            marker = "_"  # a dashed line needs two points
        xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
        panel.plot(xs, ys, linestyle=dashes, color=style.color, marker=marker)
        if name == "median":
            banded = [(x, unit.of(ends[0]), unit.of(ends[1])) for x, _, ends in points if ends]
            if len(banded) > 1:
                xs, lows, highs = (list(column) for column in zip(*banded, strict=True))
                panel.fill_between(xs, lows, highs, color=style.color, alpha=0.15, lw=0)
            for x, low, high in banded[: len(banded) == 1]:
                panel.plot([x, x], [low, high], color=style.color, marker="", linewidth=1)


def _is_closed_loop(cell: CellView, axis: LoadAxis) -> bool:
    """Whether a cell among request rates has none: `inf` under a cap is a closed loop."""
    is_rate = axis.kind == "request_rate"
    return is_rate and math.isinf(cell.request_rate) and cell.max_concurrency is not None


def _draw_saturation(panel: Axes, shown: Sequence[LoadSeries], axis: LoadAxis) -> None:
    """Mark the first saturated load of each series, once where they agree."""
    first: dict[float, str] = {}
    for series in shown:
        for cell in series.cells:
            if cell.is_saturated:
                color = series_style(series.index).color
                is_shared = len(shown) == 1 or axis.of(cell) in first
                first[axis.of(cell)] = QUIET_COLOR if is_shared else color
                break
    for load, color in first.items():
        panel.axvline(axis.position(load), color=color, linewidth=1, linestyle=":", zorder=1)


def _add_legend(
    panel: Axes, shown: Sequence[LoadSeries], cells: Sequence[CellView], tail: str
) -> None:
    if len(shown) > 1 or shown[0].index > 0:
        for series in shown:
            style = series_style(series.index)
            panel.plot([], [], color=style.color, marker=style.marker, label=series.name)
    color = QUIET_COLOR if len(shown) > 1 else series_style(shown[0].index).color
    panel.plot([], [], color=color, marker="", label="p50")
    if any(cell.statistic(metric, tail) is not None for cell in cells for metric in LATENCIES):
        panel.plot([], [], color=color, marker="", linestyle="--", label=tail)
    if any(cell.is_saturated for series in shown for cell in series.cells):
        panel.plot(
            [], [], color=QUIET_COLOR, marker="", linestyle=":", lw=1, label="saturated from here"
        )
    if any(not cell.is_readable for series in shown for cell in series.cells):
        panel.plot(
            [], [], color=FAULT_COLOR, marker="x", linestyle="", label="incomplete or not valid"
        )
    outside_legend(panel)


def _note(cells: Sequence[CellView], tail: str) -> str:
    sizes = sorted({n for cell in cells if (n := cell.sample_size(E2EL))})
    parts = ["Lower is better. TTFT and E2EL count from the scheduled arrival."]
    if sizes:
        span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        parts.append(f"n = {span} requests a point; band: 95 % bootstrap interval of p50.")
        if tail != "p99" or not any(cell.statistic(E2EL, tail) for cell in cells):
            parts.append(f"{withheld_note('p99', sizes[-1], 'request')}.")
    if any(_is_closed_loop(cell, load_axis(cells)) for cell in cells):
        parts.append("inf under a cap is a closed loop: no request is due before a slot is free.")
    missing = [cell for cell in cells if cell.statistic(E2EL, "median") is None]
    if missing:
        parts.append(missing_note(missing))
    return " ".join(parts)
