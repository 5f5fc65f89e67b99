"""Throughput against interactivity: what a load buys the operator, and what it costs each user.

Each point is one load. To the right a single user reads faster, further up the machine earns more;
adding load moves along the curve from right to left and up. A point with another one both to its
right and above it is dominated: no one should run there, so it is hollow.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmbench.reports.axes import from_zero, series_style
from llmbench.reports.cells import CellView, missing_note
from llmbench.reports.figure import (
    FAULT_COLOR,
    MAX_SERIES,
    QUIET_COLOR,
    Caption,
    hide_unused,
    new_figure,
    outside_legend,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import TOKENS_PER_SECOND, TOKENS_PER_SECOND_USER, header
from llmbench.reports.load_axis import LoadAxis, LoadSeries, load_axis, load_series
from llmbench.reports.point_labels import label_points

X, Y = "per_user_tok_s", "output_throughput_tok_s"


def throughput_interactivity_frame(cells: Sequence[CellView]) -> pd.DataFrame:
    """Return the points of the figure, a row a cell."""
    dominated = dominated_cells(cells)
    rows = []
    for cell in cells:
        low, high = cell.interval(X, "median") or (None, None)
        rows.append(
            {
                "cell_id": cell.cell_id,
                "request_rate": cell.request_rate,
                "max_concurrency": cell.max_concurrency,
                "per_user_tok_s_median": cell.statistic(X, "median"),
                "per_user_tok_s_median_low": low,
                "per_user_tok_s_median_high": high,
                Y: cell.number(Y),
                "num_completed": cell.number("num_completed"),
                "is_readable": cell.is_readable,
                "is_dominated": cell.cell_id in dominated,
            }
        )
    return pd.DataFrame(rows)


def dominated_cells(cells: Sequence[CellView]) -> set[str]:
    """Return the ids of readable cells that another one beats on both axes, or on one at a tie."""
    points = {
        cell.cell_id: (x, y)
        for cell in cells
        if cell.is_readable and (x := _x(cell))
        if (y := _y(cell))
    }
    return {
        name
        for name, (x, y) in points.items()
        if any(
            other_x >= x and other_y >= y and (other_x, other_y) != (x, y)
            for other_x, other_y in points.values()
        )
    }


@styled
def throughput_interactivity(
    cells: Sequence[CellView], caption: Caption, *, min_user_tok_s: float | None = None
) -> Figure:
    """Draw output tok/s against output tok/s of a user; `min_user_tok_s` is an objective."""
    axis = load_axis(cells)
    series = load_series(cells, axis)
    num_panels = math.ceil(len(series) / MAX_SERIES)
    figure, panels = new_figure(
        replace(caption, note=f"{_note(cells, axis)} {caption.note}".strip()),
        rows=num_panels,
        sharex=True,
        sharey=True,
        panel_size=(6.4, 3.4),
    )
    if not any(_is_drawn(cell) for cell in cells):
        say_nothing_to_draw(panels[0], "nothing to draw: no cell has a completed request")
        hide_unused(panels, 1)
        return figure
    dominated = dominated_cells(cells)
    for number, panel in enumerate(panels):
        shown = series[number * MAX_SERIES : (number + 1) * MAX_SERIES]
        for one in shown:
            _draw_series(panel, one, dominated)
        if min_user_tok_s is not None:
            panel.axvline(
                min_user_tok_s,
                color=QUIET_COLOR,
                linewidth=1,
                linestyle=":",
                label="TPOT objective",
            )
        panel.set_ylabel(header("output throughput", TOKENS_PER_SECOND))
        from_zero(panel, "x", room=1.12)
        from_zero(panel, "y")
        _add_legend(panel, shown, cells, dominated)
    panels[-1].set_xlabel(header("output speed of a user, median", TOKENS_PER_SECOND_USER))
    for number, panel in enumerate(panels):
        _label_ends(panel, series[number * MAX_SERIES : (number + 1) * MAX_SERIES], axis)
    return figure


def _draw_series(panel: Axes, series: LoadSeries, dominated: set[str]) -> None:
    style = series_style(series.index)
    line = [cell for cell in series.cells if cell.is_readable and _is_drawn(cell)]
    panel.plot(*_points(line), color=style.color, marker="", alpha=0.6)
    for cell in series.cells:
        if not _is_drawn(cell):
            continue
        x, y = _x(cell), _y(cell)
        if not cell.is_readable:
            panel.plot([x], [y], marker="x", color=FAULT_COLOR, linestyle="", markeredgewidth=1.8)
            continue
        if interval := cell.interval(X, "median"):
            panel.plot(interval, [y, y], color=style.color, marker="", linewidth=1)
        face = "white" if cell.cell_id in dominated else style.color
        panel.plot(
            [x], [y], linestyle="", color=style.color, marker=style.marker, markerfacecolor=face
        )


def _add_legend(
    panel: Axes, shown: Sequence[LoadSeries], cells: Sequence[CellView], dominated: set[str]
) -> None:
    for series in shown:
        style = series_style(series.index)
        panel.plot([], [], color=style.color, marker=style.marker, label=series.name)
    keys: dict[str, Any] = {"linestyle": "", "color": QUIET_COLOR}
    if dominated:
        panel.plot([], [], marker="o", markerfacecolor="white", label="dominated", **keys)
    if any(_is_drawn(cell) and not cell.is_readable for cell in cells):
        panel.plot(
            [], [], marker="x", linestyle="", color=FAULT_COLOR, label="incomplete or not valid"
        )
    if len(panel.get_legend_handles_labels()[0]) > 1:
        outside_legend(panel)


def _label_ends(panel: Axes, series: Sequence[LoadSeries], axis: LoadAxis) -> None:
    """Name the first and the last load of each line."""
    labels: list[tuple[float, float, str]] = []
    obstacles: list[tuple[float, float]] = []
    for one in series:
        drawn = [cell for cell in one.cells if _is_drawn(cell)]
        points = [(_x(cell), _y(cell)) for cell in drawn]
        obstacles += points
        for start, end in itertools.pairwise(points):
            obstacles += _along(start, end)
        for cell, (_, y) in zip(drawn, points, strict=True):
            low, high = cell.interval(X, "median") or (_x(cell), _x(cell))
            obstacles += _along((low, y), (high, y))
        for cell in drawn[:1] + drawn[1:][-1:]:
            labels.append((_x(cell), _y(cell), _load_text(cell, axis)))
    label_points(panel, labels, obstacles)


def _along(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """Return points on a line, close enough to keep a label off it."""
    shares = [step / 16 for step in range(17)]
    return [
        ((1 - share) * start[0] + share * end[0], (1 - share) * start[1] + share * end[1])
        for share in shares
    ]


def _load_text(cell: CellView, axis: LoadAxis) -> str:
    text = axis.text(axis.of(cell))
    if axis.kind == "max_concurrency":
        return f"c={text}"
    return f"{text} req/s" if math.isfinite(cell.request_rate) else text


def _note(cells: Sequence[CellView], axis: LoadAxis) -> str:
    sizes = sorted({cell.sample_size(X) for cell in cells if _is_drawn(cell)})
    parts = ["Up and to the right is better."]
    what = "request rates" if axis.kind == "request_rate" else "concurrencies"
    if sizes:
        span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        parts.append(
            f"Points are {what}, n = {span} requests each; "
            "bars: 95 % bootstrap interval of the median."
        )
    missing = [cell for cell in cells if not _is_drawn(cell)]
    if missing:
        parts.append(missing_note(missing))
    return " ".join(parts)


def objective_tok_s(manifest: Mapping[str, Any]) -> float | None:
    """Return the speed of a user that the run's goodput asks for, through its TPOT."""
    goodput = (manifest.get("config") or {}).get("goodput") or {}
    tpot_s = goodput.get("tpot_s")
    return 1 / tpot_s if tpot_s else None


def _is_drawn(cell: CellView) -> bool:
    return cell.statistic(X, "median") is not None and cell.number(Y) is not None


def _x(cell: CellView) -> float:
    return cell.statistic(X, "median") or 0.0


def _y(cell: CellView) -> float:
    return cell.number(Y) or 0.0


def _points(cells: Sequence[CellView]) -> tuple[list[float], list[float]]:
    return [_x(cell) for cell in cells], [_y(cell) for cell in cells]
