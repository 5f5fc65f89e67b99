"""Bars: a few configurations side by side, a panel a quantity.

Horizontal, so that names can be read; from zero, so that lengths can be compared; with the value
at each bar's end, and the reason where a bar is missing. The baseline is grey.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from llmbench.reports.axes import plain_ticks, series_style
from llmbench.reports.figure import (
    BASELINE_COLOR,
    FAULT_COLOR,
    QUIET_COLOR,
    Caption,
    hide_unused,
    new_figure,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import number
from llmbench.reports.glyphs import drawable, short_label

COLUMNS = ("panel", "label", "value", "low", "high", "note")
MAX_COLUMNS = 3
MAX_TICKS = 5
"""Intervals between ticks that leave room for `10,000` in the narrowest panel."""


def bar_frame(rows: Iterable[dict[str, object]]) -> pd.DataFrame:
    """Return rows as the frame that `bar_figure` reads.

    `panel` names a quantity with its unit, `label` a configuration, `low` and `high` an interval.
    A row whose `value` is None was tried and gave nothing; `note` says why (`out of memory`).
    """
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(("value", "low", "high"), "float64"))


@styled
def bar_figure(frame: pd.DataFrame, caption: Caption, *, baseline: str | None = None) -> Figure:
    """Draw the frame, bars in its order from the top; `baseline` names the grey bar."""
    panel_names = list(dict.fromkeys(frame["panel"]))
    labels = list(dict.fromkeys(frame["label"]))
    columns = max(1, min(MAX_COLUMNS, len(panel_names)))
    note = "" if frame["low"].isna().all() else "Bars carry 95 % intervals."
    figure, panels = new_figure(
        replace(caption, note=f"{note} {caption.note}".strip()),
        rows=max(1, math.ceil(len(panel_names) / columns)),
        columns=columns,
        panel_size=(6.4 if columns == 1 else 3.8, 0.8 + 0.36 * max(2, len(labels))),
    )
    hide_unused(panels, len(panel_names))
    if frame.empty:
        say_nothing_to_draw(panels[0], "nothing to draw: no run gave a result")
        return figure
    for place, (panel, name) in enumerate(zip(panels, panel_names, strict=False)):
        _draw_panel(panel, frame[frame["panel"] == name], labels, baseline)
        panel.set_xlabel(drawable(name))
        names = [short_label(label) for label in labels]
        is_first = place % columns == 0
        panel.set_yticks(range(len(labels)), labels=names if is_first else [""] * len(labels))
        panel.set_ylim(len(labels) - 0.5, -0.5)
    return figure


def _draw_panel(panel: Axes, rows: pd.DataFrame, labels: list[str], baseline: str | None) -> None:
    panel.grid(visible=False, axis="y")
    panel.tick_params(axis="y", length=0)
    ends = rows[["value", "high"]].max(axis=1)
    largest = float(ends.max()) if ends.notna().any() else 1.0
    panel.set_xlim(0, 1.28 * largest or 1.0)  # room for the values
    panel.xaxis.set_major_locator(MaxNLocator(MAX_TICKS))
    plain_ticks(panel, "x")
    are_counts = bool((rows["value"].dropna() % 1 == 0).all())
    for row in rows.itertuples(index=False):
        y = labels.index(str(row.label))
        value, low, high = (float(getattr(row, name)) for name in ("value", "low", "high"))
        if math.isnan(value):
            reason = row.note if isinstance(row.note, str) and row.note else "no result"
            panel.text(0.0, y, f" {drawable(reason)}", va="center", color=FAULT_COLOR, size=8)
            continue
        color = BASELINE_COLOR if row.label == baseline else series_style(y).color
        panel.barh(y, value, height=0.62, color=color)
        end = value
        if not (math.isnan(low) or math.isnan(high)):
            panel.errorbar(
                value, y, xerr=[[value - low], [high - value]], color="black", lw=1, marker=""
            )
            end = max(value, high)
        text = f" {number(int(value) if are_counts else value)}"
        if isinstance(row.note, str) and row.note:
            text += f" ({drawable(row.note)})"
        panel.text(end, y, text, va="center", size=8, color=QUIET_COLOR)
