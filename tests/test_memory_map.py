"""The map of the KV pool covers each block at each moment, and shows what was there."""

from pathlib import Path

import numpy as np
import pytest

from llmbench.reports.errors import ReportError
from llmbench.reports.figure import Caption
from llmbench.reports.memory_map import NUM_MOMENTS, STATES, memory_map_figure, memory_map_frame

FREE, FILLED, EMPTY = range(3)


def picture(folder: Path, name: str, times: list[float], states: list[list[int]]) -> Path:
    path = folder / f"memory-{name}.npz"
    np.savez_compressed(path, time_s=times, state=np.array(states, dtype=np.uint8))
    return path


def test_runs_of_blocks_tile_the_pool_at_every_moment(tmp_path: Path) -> None:
    states = np.random.default_rng(0).integers(0, 3, size=(50, 40))
    path = picture(tmp_path, "a", np.linspace(0.0, 7.0, 50).tolist(), states.tolist())
    frame = memory_map_frame({"a": path})
    assert frame["time_s"].nunique() == NUM_MOMENTS
    for _, moment in frame.groupby("time_s"):
        assert moment["num_blocks"].sum() == 40
        ends = moment["first_block"] + moment["num_blocks"]
        assert moment["first_block"].tolist() == [0, *ends.tolist()[:-1]]


def test_each_moment_shows_the_step_before_it(tmp_path: Path) -> None:
    path = picture(tmp_path, "a", [0.0, 1.0, 3.0], [[FILLED], [EMPTY], [FREE]])
    frame = memory_map_frame({"a": path})
    early = frame[frame["time_s"] < 1.0]["state"]
    late = frame[frame["time_s"] > 1.01]["state"]
    assert set(early) == {STATES[FILLED]}
    assert set(late) == {STATES[EMPTY]}


def test_shorter_runs_end_where_they_ended(tmp_path: Path) -> None:
    paths = {
        "long": picture(tmp_path, "long", [0.0, 10.0], [[FILLED], [FREE]]),
        "short": picture(tmp_path, "short", [0.0, 1.0], [[FILLED], [FREE]]),
        "instant": picture(tmp_path, "instant", [0.0], [[FILLED]]),
    }
    frame = memory_map_frame(paths)
    ends = frame.groupby("series")["end_s"].max()
    assert ends["long"] == pytest.approx(10.0)
    assert ends["short"] == pytest.approx(1.0)
    assert ends["instant"] == pytest.approx(10.0 / NUM_MOMENTS)


def test_figure_has_a_panel_a_run_and_names_its_axes(tmp_path: Path) -> None:
    paths = {
        name: picture(tmp_path, name, [0.0, 1.0], [[FILLED, EMPTY, FREE], [FREE, FREE, FREE]])
        for name in ("reserved", "paged")
    }
    figure = memory_map_figure(memory_map_frame(paths), Caption(title="map"))
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["reserved", "paged"]
    assert [panel.get_ylabel() for panel in figure.axes] == ["block", "block"]
    assert figure.axes[-1].get_xlabel() == "time (s)"
    first_moment = np.asarray(figure.axes[0].images[0].get_array())[:, 0]
    assert first_moment.tolist() == [FILLED, EMPTY, FREE]


def test_no_run_draws_an_empty_panel() -> None:
    figure = memory_map_figure(memory_map_frame({}), Caption(title="map"))
    assert "nothing to draw" in figure.axes[0].texts[0].get_text()


def test_unreadable_picture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "memory-a.npz"
    path.write_bytes(b"no picture")
    with pytest.raises(ReportError, match=r"memory-a\.npz"):
        memory_map_frame({"a": path})
