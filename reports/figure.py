"""The frame of every figure: style, title block, panels, and the files that it becomes.

Figures are made as `Figure()` objects, which draw with the Agg backend, so there is no state of
`pyplot`, no display and nothing to close. Title (subject or finding), subtitle (model, hardware,
workload, versions) and note (n, kind of interval, what could not be drawn) stand around the panels
in bands whose height follows from the wrapped text; the constrained layout gets what is left.
"""

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine

from llmbench.reports.errors import UnwritableReportError
from llmbench.reports.glyphs import drawable

STYLE = Path(__file__).with_name("llmbench.mplstyle")
MAX_SERIES = 6
"""More lines than this in one panel cannot be told apart: small multiples then."""
BASELINE_COLOR = "#777777"
QUIET_COLOR = "#555555"
FAULT_COLOR = "#B00020"

_TITLE_PT, _SMALL_PT = 11.0, 8.0
_LINE_HEIGHT = 1.35
_MARGIN_IN = 0.12

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """The words around a figure."""

    title: str
    subtitle: str = ""
    note: str = ""


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the house style within the block."""
    with mpl.style.context([STYLE]):
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Make a function draw in the house style: artists take theirs when they are made."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with house_style():
            return draw(*args, **kwargs)

    return wrapped


def new_figure(
    caption: Caption,
    *,
    rows: int = 1,
    columns: int = 1,
    panel_size: tuple[float, float] = (6.4, 3.4),
    sharex: bool | str = False,
    sharey: bool | str = False,
) -> tuple[Figure, list[Axes]]:
    """Make a figure with its caption and a grid of panels, row by row; `panel_size` in inches."""
    width = max(6.4, columns * panel_size[0])
    title = _wrap(caption.title, width, _TITLE_PT, "bold")
    subtitle = _wrap(caption.subtitle, width, _SMALL_PT)
    note = _wrap(caption.note, width, _SMALL_PT)
    head = _MARGIN_IN + _height(title, _TITLE_PT) + _height(subtitle, _SMALL_PT)
    foot = _MARGIN_IN / 2 + _height(note, _SMALL_PT)
    height = head + rows * panel_size[1] + foot

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    engine = ConstrainedLayoutEngine(
        rect=(0.0, foot / height, 1.0, 1.0 - (head + foot) / height),
        w_pad=0.08,
        h_pad=0.06,
        hspace=0.03,
    )
    figure.set_layout_engine(engine)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)  # type: ignore[arg-type]

    left, y = _MARGIN_IN / width, 1.0 - _MARGIN_IN / height
    figure.text(left, y, "\n".join(title), size=_TITLE_PT, weight="bold", va="top")
    y -= _height(title, _TITLE_PT) / height
    small: dict[str, Any] = {"size": _SMALL_PT, "color": QUIET_COLOR}
    figure.text(left, y, "\n".join(subtitle), va="top", **small)
    figure.text(left, _MARGIN_IN / 2 / height, "\n".join(note), va="bottom", **small)
    return figure, [panel for row in axes for panel in row]


def hide_unused(panels: Sequence[Axes], num_used: int) -> None:
    """Take away the panels of a grid that have nothing to show."""
    for panel in panels[num_used:]:
        panel.set_axis_off()


def say_nothing_to_draw(panel: Axes, why: str) -> None:
    """Let an empty panel say why it is empty."""
    panel.set_axis_off()
    panel.text(0.5, 0.5, drawable(why), transform=panel.transAxes, ha="center", va="center")


def outside_legend(panel: Axes, **options: Any) -> None:
    """Put a panel's legend to its right, where it covers nothing."""
    panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, **options)


def save_figure(figure: Figure, data: pd.DataFrame, stem: Path) -> list[Path]:
    """Write `<stem>.svg`, `<stem>.png` and the figure's data as `<stem>.csv`; same in, same out."""
    with house_style():
        figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout stands; it costs more than the drawing
    written = []
    for suffix, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        buffer = io.BytesIO()
        with house_style():
            figure.savefig(buffer, format=suffix, metadata=metadata)
        written.append(write_file(stem.with_name(f"{stem.name}.{suffix}"), buffer.getvalue()))
    return [*written, write_csv(data, stem.with_name(f"{stem.name}.csv"))]


def write_csv(data: pd.DataFrame, path: Path) -> Path:
    """Write a table of stored values; what is unknown is an empty field."""
    return write_file(path, data.to_csv(index=False, lineterminator="\n").encode())


def write_file(path: Path, content: bytes) -> Path:
    """Write a file, whole or not at all, in a folder that is made where missing."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as cause:
        error = UnwritableReportError(f"cannot write {path}: {cause.strerror or cause}")
        error.add_note("check the folder's permissions and the space left on its disk")
        raise error from cause
    return path


def _height(lines: list[str], size_pt: float) -> float:
    """Return inches; no line, no height."""
    return len(lines) * size_pt * _LINE_HEIGHT / 72 + (0.04 if lines else 0.0)


def _wrap(text: str, width_in: float, size_pt: float, weight: str = "normal") -> list[str]:
    """Break text into lines that fit; a single longer word is broken too."""
    room = width_in - 2 * _MARGIN_IN
    lines: list[str] = []
    for word in drawable(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _width(longer, size_pt, weight) <= room:
            lines[-1] = longer
            continue
        while _width(word, size_pt, weight) > room:
            fitting = max(1, int(len(word) * room / _width(word, size_pt, weight)) - 1)
            lines.append(word[:fitting])
            word = word[fitting:]
        lines.append(word)
    return [line for line in lines if line]


@functools.cache
def _renderer() -> Any:
    canvas: Any = FigureCanvasAgg(Figure(dpi=72))
    return canvas.get_renderer()


def _width(text: str, size_pt: float, weight: str) -> float:
    """Return the width of a line in inches."""
    font = FontProperties(family="DejaVu Sans", size=size_pt, weight=weight)
    width, _, _ = _renderer().get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72
