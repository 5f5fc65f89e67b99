"""Memory of the KV pool over time: used, reserved in vain, and free.

What a sequence holds but has not filled is waste: a reservation for tokens that may never come, or
the rest of a last block. The picture shows why paging serves more sequences from the same pool.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmbench.reports.axes import from_zero, series_style
from llmbench.reports.errors import ReportError
from llmbench.reports.figure import (
    QUIET_COLOR,
    Caption,
    new_figure,
    outside_legend,
    say_nothing_to_draw,
    styled,
)
from llmbench.reports.format import TOKENS, byte_unit, header, percent
from llmbench.reports.glyphs import short_label

COLUMNS = ("series", "time_s", "used", "wasted", "free", "num_running")
STEP_COLUMNS = (
    "start_s",
    "num_running",
    "kv_num_blocks",
    "kv_free_blocks",
    "kv_reserved_slots",
    "kv_used_slots",
)
FREE_COLOR = "#EEEEEE"


def memory_frame(steps_paths: Mapping[str, Path], *, block_size: int) -> pd.DataFrame:
    """Return the pool's state at each step, in token slots.

    `steps_paths` has each run's `steps-*.parquet` by the run's name.
    """
    frames = [_run_frame(name, path, block_size) for name, path in steps_paths.items()]
    kept = [frame for frame in frames if len(frame)]
    return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame(columns=list(COLUMNS))


def waste_share(frame: pd.DataFrame) -> float | None:
    """Return the share of held slots without a token, as a mean over time."""
    if len(frame) < 2:
        return None
    times = frame["time_s"].to_numpy()
    held = (frame["used"] + frame["wasted"]).to_numpy()[:-1]
    spans = np.diff(times)
    total = float((held * spans).sum())
    return float((frame["wasted"].to_numpy()[:-1] * spans).sum()) / total if total > 0 else None


@styled
def memory_figure(
    frame: pd.DataFrame, caption: Caption, *, bytes_per_slot: float | None = None
) -> Figure:
    """Draw one panel a run below each other; in token slots, or in bytes where given."""
    names = list(dict.fromkeys(frame["series"]))
    note = "Wasted: held by a sequence without a token in it. Percentages are means over time."
    figure, panels = new_figure(
        replace(caption, note=f"{note} {caption.note}".strip()),
        rows=max(1, len(names)),
        panel_size=(7.2, 2.2 if len(names) > 1 else 3.4),
        sharex=True,
        sharey=True,
    )
    if frame.empty:
        say_nothing_to_draw(panels[0], "nothing to draw: no step was recorded")
        return figure
    slots = frame[["used", "wasted", "free"]].sum(axis=1)
    unit = TOKENS
    scale = 1.0
    if bytes_per_slot is not None:
        unit = byte_unit((slots * bytes_per_slot).tolist())
        scale = bytes_per_slot * unit.per_stored
    for panel, name in zip(panels, names, strict=True):
        rows = frame[frame["series"] == name]
        _draw_run(panel, rows, scale)
        waste = waste_share(rows)
        wasted = "" if waste is None else f": {percent(waste)} of what is held is wasted"
        most = int(rows["num_running"].max())
        panel.set_title(f"{short_label(name)}{wasted}, at most {most} running", fontsize=9)
        panel.set_ylabel(header("KV pool", unit))
        panel.margins(x=0)
        from_zero(panel, "y", room=1.0)
    panels[0].set_ylim(0, 1.02 * scale * float(slots.max()))
    panels[-1].set_xlabel("time (s)")
    outside_legend(panels[0], reverse=True)
    return figure


def _draw_run(panel: Axes, rows: pd.DataFrame, scale: float) -> None:
    layers = (
        ("used", series_style(0).color, ""),
        ("wasted", series_style(1).color, "////"),
        ("free", FREE_COLOR, ""),
    )
    floor = np.zeros(len(rows))
    for name, color, hatch in layers:
        top = floor + rows[name].to_numpy() * scale
        panel.fill_between(
            rows["time_s"].to_numpy(),
            floor,
            top,
            step="post",
            facecolor=color,
            alpha=0.85,
            hatch=hatch,
            edgecolor="white" if hatch else "none",
            linewidth=0,
            label=name,
        )
        floor = top
    panel.step(
        rows["time_s"],
        (rows["used"] + rows["wasted"]) * scale,
        where="post",
        color=QUIET_COLOR,
        marker="",
        linewidth=0.8,
    )


def _run_frame(name: str, path: Path, block_size: int) -> pd.DataFrame:
    try:
        steps = pd.read_parquet(path, columns=list(STEP_COLUMNS))
    except (OSError, ValueError, KeyError) as cause:
        raise ReportError(f"cannot read step records from {path}: {cause}") from cause
    start = steps["start_s"].min() if len(steps) else 0.0
    used, reserved = steps["kv_used_slots"], steps["kv_reserved_slots"]
    return pd.DataFrame(
        {
            "series": name,
            "time_s": steps["start_s"] - start,
            "used": used,
            "wasted": reserved - used,
            "free": steps["kv_num_blocks"] * block_size - reserved,
            "num_running": steps["num_running"],
        },
        columns=list(COLUMNS),
    )
