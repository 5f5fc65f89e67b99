"""Lines: one quantity against another that was varied, a line a configuration.

For comparisons along a ladder: seconds against output length, TTFT against cached prefix. Several
quantities of the same runs stand below each other over one horizontal axis.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from llmbench.reports.axes import from_zero, log_scale, plain_ticks, series_style
from llmbench.reports.figure import (
    BASELINE_COLOR,
    FAULT_COLOR,
    MAX_SERIES,
    Caption,
    new_figure,
    outside_legend,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import number
from llmbench.reports.glyphs import drawable, short_label
from llmbench.reports.load_axis import MIN_LOG_SPAN

COLUMNS = ("panel", "series", "x", "y", "low", "high", "note")


def line_frame(rows: Iterable[dict[str, object]]) -> pd.DataFrame:
    """Return rows as the frame that `line_figure` reads.

    `panel` is the label of a vertical axis with its unit, `low` and `high` an interval of `y`. A
    row whose `y` is None was tried and gave nothing; `note` says why (`out of memory`).
    """
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(("x", "y", "low", "high"), "float64"))


@styled
def line_figure(
    frame: pd.DataFrame,
    caption: Caption,
    *,
    x_label: str,
    log_y: bool = False,
    baseline: str | None = None,
    ideal: str | None = None,
    interval: str = "95 % intervals",
) -> Figure:
    """Draw the frame; `baseline` names the grey series, `ideal` one that is a limit, drawn thin.

    `interval` says what `low` and `high` are.
    """
    names = list(dict.fromkeys(frame["series"]))
    assert len(names) <= MAX_SERIES + 2, "too many lines to tell apart: make several figures"
    labels = list(dict.fromkeys(frame["panel"]))
    figure, panels = new_figure(
        replace(caption, note=f"{_note(frame, interval)} {caption.note}".strip()),
        rows=max(1, len(labels)),
        panel_size=(6.4, 3.4 if len(labels) < 2 else 2.6),
        sharex=True,
    )
    if frame["y"].isna().all():
        for panel in panels:
            say_nothing_to_draw(panel, "nothing to draw: no run gave a result")
        return figure
    for panel, label in zip(panels, labels, strict=True):
        panel.set_ylabel(drawable(label))
        rows = frame[frame["panel"] == label]
        if log_y:
            log_scale(panel, "y", rows[["y", "low", "high"]].to_numpy().ravel().tolist())
        for index, name in enumerate(names):
            _draw_line(panel, rows[rows["series"] == name], index, name, baseline, ideal)
        _draw_failures(panel, rows)
        if not log_y:
            from_zero(panel, "y")
    _set_x(panels[-1], sorted(set(frame["x"])))
    panels[-1].set_xlabel(drawable(x_label))
    if len(names) > 1:
        outside_legend(panels[0])
    return figure


def _draw_line(
    panel: Axes, rows: pd.DataFrame, index: int, name: str, baseline: str | None, ideal: str | None
) -> None:
    style = series_style(index)
    color = BASELINE_COLOR if name in (baseline, ideal) else style.color
    rows = rows.sort_values("x")
    good = rows[rows["y"].notna()]
    is_ideal = name == ideal
    panel.plot(
        good["x"],
        good["y"],
        color=color,
        marker="" if is_ideal else style.marker,
        linestyle="--" if is_ideal else "-",
        linewidth=1.0 if is_ideal else 1.8,
        label=short_label(name),
    )
    for x, low, high in good[["x", "low", "high"]].dropna().itertuples(index=False):
        panel.plot([x, x], [low, high], color=color, marker="", linewidth=1.2)


def _draw_failures(panel: Axes, rows: pd.DataFrame) -> None:
    """Cross the places of what was tried in vain; the note says what and why."""
    failed = rows[rows["y"].isna()]
    panel.plot(
        failed["x"],
        [0.03] * len(failed),
        transform=panel.get_xaxis_transform(),
        linestyle="",
        marker="x",
        color=FAULT_COLOR,
    )


def _note(frame: pd.DataFrame, interval: str) -> str:
    parts = []
    if not frame[["low", "high"]].isna().all(axis=None):
        parts.append(f"Bars: {interval}.")
    failures: dict[str, None] = {}  # in order, each once: panels repeat them
    for series, x, note in frame[frame["y"].isna()][["series", "x", "note"]].to_numpy():
        reason = note if isinstance(note, str) and note else "no result"
        failures[f"{short_label(series)} at {number(int(x) if x == int(x) else x)}: {reason}"] = (
            None
        )
    if failures:
        parts.append(f"Crosses: {'; '.join(failures)}.")
    return " ".join(parts)


def _set_x(panel: Axes, values: list[float]) -> None:
    """Scale the horizontal axis; tried values are its ticks where they fit."""
    positive = [value for value in values if value > 0]
    is_log = len(positive) > 2 and positive[-1] / positive[0] >= MIN_LOG_SPAN
    if is_log and len(positive) == len(values):
        panel.set_xscale("log", base=2)
        panel.set_xlim(values[0] / 1.2, values[-1] * 1.2)
        step = math.ceil(len(values) / 10)
        panel.xaxis.set_major_locator(FixedLocator(values[::-1][::step]))
        panel.xaxis.set_minor_locator(NullLocator())
        plain_ticks(panel, "x")
        return
    from_zero(panel, "x")
    if values and values[0] == 0:
        panel.set_xlim(left=-0.02 * values[-1])  # room for a marker at zero
