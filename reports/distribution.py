"""The distribution of a latency, one curve a configuration: where the tail begins.

A mean or a p99 is one number; the curve shows whether one request in ten stalls or one in a
thousand. The share is drawn by its nines (0, 90 %, 99 %, 99.9 % at equal distances), so the tail
takes as much room as it has in the life of a user who waits for thousands of tokens. Marks stand
at p50, p95 and p99 where the sample carries them (see bench/stats.py).
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike, NDArray

from llmbench.bench.stats import PERCENTILES, required_sample_size
from llmbench.reports.axes import log_scale, series_style
from llmbench.reports.figure import (
    MAX_SERIES,
    Caption,
    new_figure,
    outside_legend,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import header, number, time_unit
from llmbench.reports.glyphs import short_label

MARKS = {"p50": 0.5, "p95": PERCENTILES["p95"], "p99": PERCENTILES["p99"]}
MAX_POINTS = 1000
"""Points of one curve: enough for any picture, and a CSV that opens."""

_TICKS = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999)


def distribution_frame(samples: Mapping[str, ArrayLike]) -> pd.DataFrame:
    """Return the curves: columns series, n, share, value_s; `samples` hold seconds.

    `share` of the sample is at most `value_s`. Quantiles are numpy's linear ones, and the rows of
    p50, p95 and p99 are among them where the sample reaches them. An empty sample has one row
    without values.
    """
    frames = [pd.DataFrame(columns=["series", "n", "share", "value_s"])] if not samples else []
    for name, values in samples.items():
        sample = np.asarray(values, dtype=np.float64)
        shares = _shares(sample.size)
        quantiles = np.quantile(sample, shares) if sample.size else np.full(1, np.nan)
        curve = {"series": name, "n": sample.size, "share": shares, "value_s": quantiles}
        frames.append(pd.DataFrame(curve))
    return pd.concat(frames, ignore_index=True)


@styled
def cumulative_distribution(
    frame: pd.DataFrame, caption: Caption, *, quantity: str = "ITL", what: str = "gaps"
) -> Figure:
    """Draw the curves of `distribution_frame`; n counts `what`."""
    names = list(dict.fromkeys(frame["series"]))
    num_panels = max(1, math.ceil(len(names) / MAX_SERIES))
    note = f"Further left is better. n counts {what}; marks at p50, p95, p99 where n carries them."
    figure, panels = new_figure(
        replace(caption, note=f"{note} {caption.note}".strip()),
        rows=num_panels,
        panel_size=(7.6, 3.6),
        sharex=True,
        sharey=True,
    )
    values: list[float] = frame["value_s"].dropna().tolist()
    if not values:
        say_nothing_to_draw(panels[0], "nothing to draw: the samples are empty")
        return figure
    unit = time_unit(values)
    top = float(frame["share"].max())
    log_scale(panels[0], "x", [unit.of(value) for value in values])
    for row, panel in enumerate(panels):
        _nines_scale(panel, top)
        panel.set_ylabel(f"share of {what}")
        for index in range(row * MAX_SERIES, min(len(names), (row + 1) * MAX_SERIES)):
            curve = frame[frame["series"] == names[index]]
            _draw_curve(panel, index, curve, unit.per_stored)
        outside_legend(panel, title=f"p50 / p95 / p99, {unit.symbol}", alignment="left")
    panels[-1].set_xlabel(header(quantity, unit))
    return figure


def _draw_curve(panel: Axes, index: int, curve: pd.DataFrame, per_stored: float) -> None:
    style = series_style(index)
    name, size = str(curve["series"].iloc[0]), int(curve["n"].iloc[0])
    if size == 0:
        panel.plot(
            [], [], color=style.color, marker=style.marker, label=f"{short_label(name)}\nempty"
        )
        return
    shares, values = curve["share"].to_numpy(), curve["value_s"].to_numpy() * per_stored
    panel.plot(values, shares, color=style.color, marker="", linewidth=1.6)
    marked = {
        mark: float(values[np.argmin(np.abs(shares - share))])
        for mark, share in MARKS.items()
        if mark == "p50" or size >= required_sample_size(share)
    }
    numbers = " / ".join(number(marked.get(mark)) for mark in MARKS)
    panel.plot(
        list(marked.values()),
        [MARKS[mark] for mark in marked],
        linestyle="",
        color=style.color,
        marker=style.marker,
        label=f"{short_label(name)}\n{numbers}  (n = {size:,})",
    )


def _shares(size: int) -> NDArray[np.float64]:
    """Return shares up to the last that the sample resolves, dense in nines."""
    if size == 0:
        return np.full(1, np.nan)
    last = -math.log10(1 / size) if size > 1 else 0.0
    nines = np.linspace(0.0, last, min(size, MAX_POINTS))
    shares = 1 - 10**-nines
    marks = [share for share in MARKS.values() if share <= shares[-1]]
    return np.unique(np.round(np.concatenate([shares, marks]), 9))


def _nines_scale(panel: Axes, top: float) -> None:
    ceiling = 1 - (1 - top) / 2
    panel.set_yscale("function", functions=(_to_nines, _from_nines))
    panel.set_ylim(0.0, max(ceiling, 0.95))
    panel.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick <= ceiling]))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.10g} %"))


def _to_nines(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    nines: NDArray[np.float64] = -np.log10(1 - np.minimum(shares, 1 - 1e-9))
    return nines


def _from_nines(nines: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 - 10.0**-nines
