"""Scores of an evaluation with their intervals, a row a task; and how divergence is spread.

Two overlapping intervals do not say that two models are alike: both were asked the same questions,
so what decides is the paired difference, which has far less noise (Miller 2024, section 4.2). It
has a panel of its own, where zero is the baseline. Chance is marked where a task has one, since a
score at chance says nothing, whichever model has it.

The divergence of a token is spread over many powers of ten, and its tail is what turns an answer,
so the share of tokens above each value is drawn with both axes logarithmic.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike

from llmbench.reports.axes import log_scale, plain_ticks, series_style
from llmbench.reports.figure import (
    BASELINE_COLOR,
    MAX_SERIES,
    QUIET_COLOR,
    Caption,
    new_figure,
    outside_legend,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import percent
from llmbench.reports.glyphs import drawable, short_label

SCORE, DIFFERENCE, PERPLEXITY = "score", "difference", "perplexity"
COLUMNS = ("panel", "row", "series", "value", "low", "high", "n", "chance")
BASE, CANDIDATE = "base", "candidate"
MAX_POINTS = 1000
"""Points of one curve: enough for any picture, and a CSV that opens."""
FAR_APART = 10
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
LARGE = 1e6

_LABELS = {
    SCORE: "score (%)",
    DIFFERENCE: "difference (percentage points)",
    PERPLEXITY: "perplexity",
}


def score_frame(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """Return rows as the frame that `score_figure` reads.

    `panel` is `score` or `difference` (shares of one) or `perplexity`; `series` is `base` or
    `candidate`; `row` is the task as it is labelled, line by line, `n` its items.
    """
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(("value", "low", "high", "n", "chance"), "float64"))


@styled
def score_figure(
    frame: pd.DataFrame, caption: Caption, *, names: Mapping[str, str] | None = None
) -> Figure:
    """Draw the frame, tasks in its order from the top; `names` are those of the two models."""
    names = names or {}
    panels_wanted = [panel for panel in _LABELS if (frame["panel"] == panel).any()]
    has_intervals = frame["low"].notna().any()
    note = "Whiskers are 95 % intervals. " if has_intervals else ""
    note += "A dotted mark is chance. " if frame["chance"].notna().any() else ""
    if DIFFERENCE in panels_wanted:
        note += "Differences are paired: the same questions to both. "
    rows = {
        panel: list(dict.fromkeys(frame[frame["panel"] == panel]["row"])) for panel in panels_wanted
    }
    tallest = max([2, *map(len, rows.values())])
    figure, panels = new_figure(
        replace(caption, note=f"{note}{caption.note}".strip()),
        columns=max(1, len(panels_wanted)),
        panel_size=(6.4 if len(panels_wanted) < 2 else 4.2, 1.0 + 0.42 * tallest),
    )
    if not panels_wanted:
        say_nothing_to_draw(panels[0], "nothing to draw: no task has a score")
        return figure
    for place, (panel, name) in enumerate(zip(panels, panels_wanted, strict=True)):
        found = frame[frame["panel"] == name]
        is_repeated = place > 0 and rows[name] == rows[panels_wanted[place - 1]]
        _draw_rows(panel, found, rows[name], name, with_labels=not is_repeated)
        panel.set_ylim(tallest - 0.5, -0.5)  # one height of a row in all panels
    if frame["series"].nunique() > 1:
        _legend(panels[len(panels_wanted) - 1], names)
    return figure


def kl_frame(samples: Mapping[str, ArrayLike]) -> pd.DataFrame:
    """Return the curves: columns series, n, kl, share; `samples` hold nats, one a token.

    `share` of the tokens diverge by more than `kl`. Tokens without divergence are counted in `n`
    and have no place on a logarithmic axis.
    """
    frames = [pd.DataFrame(columns=["series", "n", "kl", "share"])] if not samples else []
    for name, values in samples.items():
        ordered = np.sort(np.asarray(values, dtype=np.float64))
        ordered = ordered[np.isfinite(ordered)]
        shares = 1.0 - np.arange(ordered.size) / max(1, ordered.size)
        is_seen = ordered > 0
        ordered_seen, shares_seen = ordered[is_seen], shares[is_seen]
        kept = _spread(ordered_seen.size)
        frames.append(
            pd.DataFrame(
                {
                    "series": name,
                    "n": ordered.size,
                    "kl": ordered_seen[kept] if ordered_seen.size else np.full(1, np.nan),
                    "share": shares_seen[kept] if ordered_seen.size else np.full(1, np.nan),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


@styled
def kl_figure(frame: pd.DataFrame, caption: Caption) -> Figure:
    """Draw the curves of `kl_frame`: how many tokens diverge by more than each value."""
    names = list(dict.fromkeys(frame["series"]))
    assert len(names) <= MAX_SERIES, "too many lines to tell apart: make several figures"
    figure, (panel,) = new_figure(
        replace(caption, note=f"Further left and down is better. {caption.note}".strip()),
        panel_size=(7.2, 3.6),
    )
    known = frame.dropna(subset=["kl"])
    if known.empty:
        say_nothing_to_draw(panel, "nothing to draw: no token diverges")
        return figure
    for index, name in enumerate(names):
        curve = known[known["series"] == name]
        if curve.empty:
            continue
        label = f"{short_label(str(name))}\n(n = {int(curve['n'].iloc[0]):,})"
        panel.plot(
            curve["kl"], curve["share"], color=series_style(index).color, marker="", label=label
        )
    log_scale(panel, "x", known["kl"].tolist())
    log_scale(panel, "y", known["share"].tolist())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: percent(share, 1)))
    panel.set_xlabel("KL(base ‖ candidate), nats a token")
    panel.set_ylabel("share of tokens above")
    outside_legend(panel)
    return figure


def _draw_rows(
    panel: Axes,
    found: pd.DataFrame,
    rows: Sequence[str],
    name: str,
    *,
    with_labels: bool,
) -> None:
    scale = 1.0 if name == PERPLEXITY else 100.0
    panel.grid(visible=False, axis="y")
    panel.tick_params(axis="y", length=0)
    has_both = found["series"].nunique() > 1
    if name == DIFFERENCE:
        panel.axvline(0.0, color=BASELINE_COLOR, linewidth=1.0, zorder=1)
    for row in found.itertuples(index=False):
        is_base = row.series == BASE
        y = rows.index(str(row.row)) + (0.0 if not has_both else -0.14 if is_base else 0.14)
        color, marker = _style(str(row.series))
        value, low, high = (scale * float(getattr(row, key)) for key in ("value", "low", "high"))
        if not np.isnan(float(row.chance)):  # type: ignore[arg-type]
            at = scale * float(row.chance)  # type: ignore[arg-type]
            place = rows.index(str(row.row))
            panel.plot(
                [at, at], [place - 0.34, place + 0.34], color=QUIET_COLOR, ls=":", lw=1.2, marker=""
            )
        if not (np.isnan(low) or np.isnan(high)):
            panel.errorbar(
                value, y, xerr=[[value - low], [high - value]], color=color, lw=1.3, marker=""
            )
        # A score of zero is drawn whole.
        panel.plot(value, y, color=color, marker=marker, ls="", markersize=5.5, clip_on=False)
    labels = ["\n".join(map(drawable, row.split("\n"))) if with_labels else "" for row in rows]
    panel.set_yticks(range(len(rows)), labels=labels)
    panel.set_xlabel(_LABELS[name])
    if name == PERPLEXITY:
        _perplexity_scale(panel, found)
        return
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    plain_ticks(panel, "x")
    if name == SCORE:
        low, high = panel.get_xlim()
        panel.set_xlim(max(0.0, low), min(100.0 + 1.0, high))


def _perplexity_scale(panel: Axes, found: pd.DataFrame) -> None:
    """From zero, or logarithmic where the texts' perplexities are far apart."""
    values = [value for value in found[["value", "low", "high"]].to_numpy().ravel() if value > 0]
    if values and max(values) > FAR_APART * min(values):
        log_scale(panel, "x", values)
        if max(values) >= LARGE:
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        return
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    plain_ticks(panel, "x")
    panel.set_xlim(left=0.0)


def _legend(panel: Axes, names: Mapping[str, str]) -> None:
    for series in (BASE, CANDIDATE):
        color, marker = _style(series)
        label = short_label(names.get(series, series))
        panel.plot([], [], color=color, marker=marker, linestyle="", label=label)
    outside_legend(panel)


def _style(series: str) -> tuple[str, str]:
    if series == BASE:
        return BASELINE_COLOR, "s"
    style = series_style(0)
    return style.color, style.marker


def _spread(size: int) -> slice | list[int]:
    """Return places of at most MAX_POINTS values, dense in the tail."""
    if size <= MAX_POINTS:
        return slice(None)
    tail = np.unique(np.round(size - np.geomspace(1, size, MAX_POINTS)).astype(int))
    places: list[int] = tail.tolist()
    return places
