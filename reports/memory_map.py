"""A map of the KV pool: what each of its blocks holds, over time.

A row of the map is a block of the pool, at its address; a column is a moment. Reservations show as
bands that are filled from below and end half empty; free stretches too short for the next one show
as holes between them. Blocks that are taken one by one leave neither.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llmbench.reports.axes import plain_ticks, series_style
from llmbench.reports.errors import ReportError
from llmbench.reports.figure import (
    QUIET_COLOR,
    Caption,
    new_figure,
    outside_legend,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import shorten
from llmbench.reports.glyphs import drawable
from llmbench.reports.memory import FREE_COLOR

COLUMNS = ("series", "time_s", "end_s", "first_block", "num_blocks", "state")
STATES = ("free", "with tokens", "reserved, empty")
"""By their number in the file."""

NUM_MOMENTS = 300
"""Columns of the longest run's map: about two pixels of a screen each."""


def memory_map_frame(paths: Mapping[str, Path]) -> pd.DataFrame:
    """Return the maps as runs of neighbouring blocks in one state, for equally spaced moments.

    `paths` has each run's `memory-*.npz` by the run's name: `time_s` [steps] and `state`
    [steps, blocks].
    """
    pictures = {name: _read(path) for name, path in paths.items()}
    longest_s = max((float(times[-1]) for times, _ in pictures.values()), default=0.0)
    width_s = longest_s / NUM_MOMENTS
    frames = [pd.DataFrame(columns=list(COLUMNS))] if not pictures else []
    for name, (times, states) in pictures.items():
        count = max(1, round(float(times[-1]) / width_s)) if width_s > 0 else 1
        starts = np.arange(count) * width_s
        # What a step left behind lasts until the next one ends.
        steps = np.searchsorted(times, starts, side="right") - 1
        for start, state in zip(starts, states[np.maximum(steps, 0)], strict=True):
            first = np.flatnonzero(np.diff(state, prepend=255))  # 255 is no state
            frames.append(
                pd.DataFrame(
                    {
                        "series": name,
                        "time_s": start,
                        "end_s": start + width_s,
                        "first_block": first,
                        "num_blocks": np.diff(first, append=len(state)),
                        "state": [STATES[number] for number in state[first]],
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


@styled
def memory_map_figure(frame: pd.DataFrame, caption: Caption) -> Figure:
    """Draw one map a run below each other, over the same time."""
    names = list(dict.fromkeys(frame["series"]))
    figure, panels = new_figure(
        replace(caption, note=f"Each row is a block of the pool. {caption.note}".strip()),
        rows=max(1, len(names)),
        panel_size=(7.2, 2.2 if len(names) > 1 else 3.4),
        sharex=True,
        sharey=True,
    )
    if frame.empty:
        say_nothing_to_draw(panels[0], "nothing to draw: no step was recorded")
        return figure
    colors = [FREE_COLOR, series_style(0).color, series_style(1).color]
    num_blocks = int((frame["first_block"] + frame["num_blocks"]).max())
    for panel, name in zip(panels, names, strict=True):
        _draw_map(panel, frame[frame["series"] == name], num_blocks, colors)
        panel.set_title(drawable(shorten(name, 40)), fontsize=9)
        panel.set_ylabel("block")
    panels[-1].set_xlim(0, float(frame["end_s"].max()))
    panels[-1].set_xlabel("time (s)")
    plain_ticks(panels[-1], "both")
    legend = [
        Patch(facecolor=color, edgecolor=QUIET_COLOR, linewidth=0.5, label=state)
        for state, color in zip(STATES, colors, strict=True)
    ]
    outside_legend(panels[0], handles=legend)
    return figure


def _draw_map(panel: Axes, rows: pd.DataFrame, num_blocks: int, colors: list[str]) -> None:
    columns = rows.groupby("time_s", sort=True)
    image = np.zeros((num_blocks, len(columns)), dtype=np.uint8)
    for place, (_, column) in enumerate(columns):
        states = column["state"].map(STATES.index).to_numpy(dtype=np.uint8)
        image[:, place] = np.repeat(states, column["num_blocks"].to_numpy())
    panel.grid(visible=False)
    panel.imshow(
        image,
        cmap=ListedColormap(colors),
        vmin=0,
        vmax=len(colors) - 1,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, float(rows["end_s"].max()), 0.0, float(num_blocks)),
    )


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path) as picture:
            return picture["time_s"], picture["state"]
    except (OSError, ValueError, KeyError) as cause:
        raise ReportError(f"cannot read the memory picture {path}: {cause}") from cause
