"""Drift: the latency of each request, in the order in which requests were sent.

A median hides whether the first requests were slow (cold caches, first compilations), the last
ones (a queue that grows, a processor that gets hot) or single ones (a neighbour on the machine). A
run without drift is a flat band.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from llmbench.bench.metrics import RequestTimeline
from llmbench.reports.axes import log_scale, series_style
from llmbench.reports.figure import (
    FAULT_COLOR,
    Caption,
    hide_unused,
    new_figure,
    outside_legend,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import header, time_unit
from llmbench.reports.glyphs import short_label

MAX_PANELS = 6
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT"}

_WINDOW_SHARE = 0.1  # of the run: short enough to follow a trend, long enough to be calm
_MIN_WINDOW = 5


def drift_frame(timelines: Mapping[str, Sequence[RequestTimeline]]) -> pd.DataFrame:
    """Return one row a request that was sent; `timelines` by the name of their cell."""
    rows: list[dict[str, Any]] = []
    for cell, requests in timelines.items():
        sent = sorted(
            (request for request in requests if request.sent_s is not None),
            key=lambda request: (request.sent_s, request.request_index),
        )
        start = sent[0].sent_s if sent else 0.0
        for order, request in enumerate(sent, start=1):
            rows.append(
                {
                    "cell": cell,
                    "order": order,
                    "request_index": request.request_index,
                    "sent_s": (request.sent_s or 0.0) - (start or 0.0),
                    "ttft_s": request.ttft_s if request.is_completed else None,
                    "tpot_s": request.tpot_s if request.is_completed else None,
                    "e2el_s": request.e2el_s if request.is_completed else None,
                    "num_output_tokens": request.num_output_tokens,
                    "outcome": request.outcome,
                }
            )
    columns = ["cell", "order", "request_index", "sent_s", "ttft_s", "tpot_s", "e2el_s"]
    columns += ["num_output_tokens", "outcome"]
    numeric = dict.fromkeys(("sent_s", "ttft_s", "tpot_s", "e2el_s"), "float64")
    return pd.DataFrame(rows, columns=columns).astype(numeric)


def moving_median(values: pd.Series) -> pd.Series:
    """Return the centred moving median over a tenth of the run; missing values are skipped."""
    window = max(_MIN_WINDOW, round(_WINDOW_SHARE * len(values))) | 1  # odd, so that it is centred
    return values.rolling(window, center=True, min_periods=min(3, window)).median()


@styled
def drift(frame: pd.DataFrame, caption: Caption) -> Figure:
    """Draw TTFT and TPOT in order of sending, a panel a cell; at most MAX_PANELS cells."""
    cells = list(dict.fromkeys(frame["cell"]))
    assert len(cells) <= MAX_PANELS, "split the cells over several figures"
    columns = 2 if len(cells) == 4 else max(1, min(3, len(cells)))
    rows = max(1, math.ceil(len(cells) / columns))
    note = (
        "Points: single requests; line: moving median over a tenth of the run, "
        f"at least {_MIN_WINDOW} requests."
    )
    figure, panels = new_figure(
        replace(caption, note=f"{note} {caption.note}".strip()),
        rows=rows,
        columns=columns,
        panel_size=(6.4, 3.4) if columns == 1 else (3.4, 2.5),
    )
    hide_unused(panels, len(cells))
    if not cells:
        say_nothing_to_draw(panels[0], "nothing to draw: no request was sent")
        return figure
    values: list[float] = frame[list(LATENCIES)].to_numpy().ravel().tolist()
    unit = time_unit(values)
    for number, (panel, cell) in enumerate(zip(panels, cells, strict=False)):
        requests = frame[frame["cell"] == cell]
        own: list[float] = requests[list(LATENCIES)].to_numpy().ravel().tolist()
        log_scale(panel, "y", [unit.of(value) for value in own])
        _draw_cell(panel, requests, unit.per_stored)
        panel.set_title(short_label(cell))
        if number % columns == 0:
            panel.set_ylabel(header("latency", unit))
        if number + columns >= len(cells):
            panel.set_xlabel("request, in order of sending")
    _add_legend(panels[min(columns, len(cells)) - 1], frame)
    return figure


def _draw_cell(panel: Axes, requests: pd.DataFrame, per_stored: float) -> None:
    size = 3.0 if len(requests) <= 200 else 1.5
    for index, name in enumerate(LATENCIES):
        style = series_style(index)
        values = requests[name] * per_stored
        panel.plot(
            requests["order"],
            values,
            linestyle="",
            color=style.color,
            marker=style.marker,
            markersize=size,
            markeredgewidth=0,
            alpha=0.45,
        )
        panel.plot(requests["order"], moving_median(values), color=style.color, marker="")
    broken = requests[requests["outcome"] != "completed"]
    panel.plot(
        broken["order"],
        [0.03] * len(broken),
        transform=panel.get_xaxis_transform(),
        linestyle="",
        marker="x",
        color=FAULT_COLOR,
        markersize=4,
    )
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.set_xlim(0.5 - 0.02 * len(requests), 1.02 * len(requests) + 0.5)


def _add_legend(panel: Axes, frame: pd.DataFrame) -> None:
    for index, name in enumerate(LATENCIES.values()):
        style = series_style(index)
        panel.plot([], [], color=style.color, marker=style.marker, label=name)
    if (frame["outcome"] != "completed").any():
        panel.plot([], [], color=FAULT_COLOR, marker="x", linestyle="", label="not completed")
    outside_legend(panel)
