"""Labels beside points, without one lying on another.

Each label tries the places around its point and takes the first that is free of other labels, of
points and of the frame's outside. Where none is free it is left out: a label that cannot be read
is worth less than none, and the figure's data stand beside it.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from llmbench.reports.figure import QUIET_COLOR

_GAP_PT = 6.5
_PLACES = (
    (1.0, 0.0, "left", "center"),
    (0.0, 1.0, "center", "bottom"),
    (0.0, -1.0, "center", "top"),
    (-1.0, 0.0, "right", "center"),
    (0.7, 0.7, "left", "bottom"),
    (0.7, -0.7, "left", "top"),
    (-0.7, 0.7, "right", "bottom"),
    (-0.7, -0.7, "right", "top"),
)


def label_points(
    panel: Axes,
    labels: Sequence[tuple[float, float, str]],
    obstacles: Sequence[tuple[float, float]],
) -> None:
    """Write each (x, y, text) beside its point; `obstacles` are all points that are drawn.

    Call it last: limits, scales and legend of the panel must stand.
    """
    figure: Any = panel.get_figure(root=True)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    frame = panel.get_window_extent(renderer)
    radius = 2.5 * figure.dpi / 72
    placed: list[tuple[str, Bbox]] = []
    taken = [
        Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius)
        for x, y in panel.transData.transform(list(obstacles))
    ]
    for x, y, text in labels:
        # Points that coincide share one label.
        near = Bbox.from_bounds(
            *(panel.transData.transform((x, y)) - 8 * radius), *[16 * radius] * 2
        )
        if any(text == other and near.overlaps(box) for other, box in placed):
            continue
        for right, up, horizontal, vertical in _PLACES:
            note = panel.annotate(
                text,
                (x, y),
                xytext=(right * _GAP_PT, up * _GAP_PT),
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                size=8,
                color=QUIET_COLOR,
            )
            note.set_in_layout(False)
            box = note.get_window_extent(renderer)
            is_inside = frame.containsx(box.x0) and box.x1 <= frame.x1 and frame.y0 <= box.y0
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                placed.append((text, box))
                break
            note.remove()
