"""Figures: what is drawn, what is said, and that no input breaks them. Never pixels."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmbench.bench.metrics import request_timelines
from llmbench.reports.bars import bar_figure, bar_frame
from llmbench.reports.cells import CellView, views
from llmbench.reports.distribution import cumulative_distribution, distribution_frame
from llmbench.reports.drift import MAX_PANELS, drift, drift_frame, moving_median
from llmbench.reports.errors import ReportError, UnwritableReportError
from llmbench.reports.figure import FAULT_COLOR, Caption, save_figure
from llmbench.reports.latency_vs_load import latency_vs_load, latency_vs_load_frame
from llmbench.reports.lines import line_figure, line_frame
from llmbench.reports.load_axis import LoadAxis, load_axis, load_series
from llmbench.reports.memory import memory_figure, memory_frame, waste_share
from llmbench.reports.throughput_interactivity import (
    dominated_cells,
    throughput_interactivity,
    throughput_interactivity_frame,
)

CAPTION = Caption(title="A title", subtitle="model · machine", note="A note.")


def draw(figure: Figure) -> Figure:
    """Lay the figure out: a glyph that is missing or a bad layout warns, which is an error."""
    figure.draw_without_rendering()
    return figure


def texts(figure: Figure) -> str:
    """All words of a figure, in one string."""
    found = [text.get_text() for text in figure.texts]
    for panel in figure.axes:
        found += [panel.get_title(loc="left"), panel.get_xlabel(), panel.get_ylabel()]
        found += [text.get_text() for text in panel.texts]
        legend = panel.get_legend()
        found += [text.get_text() for text in legend.get_texts()] if legend else []
    return "\n".join(found)


def lines_of(panel: Axes, *, style: str) -> list[Any]:
    """Lines of a style that have data; legend entries have none."""
    return [
        line
        for line in panel.lines
        if line.get_linestyle() == style and len(np.asarray(line.get_xdata())) > 1
    ]


@pytest.fixture(scope="module")
def rates(simulated_sweep: ModuleType) -> list[CellView]:
    return views([simulated_sweep.simulated_record(rate) for rate in (1, 2, 4, math.inf)])


@pytest.fixture(scope="module")
def grid(simulated_sweep: ModuleType) -> list[CellView]:
    return views(
        [
            simulated_sweep.simulated_record(rate, cap, num_requests=40)
            for rate in (2, 16, math.inf)
            for cap in (2, 4)
        ]
    )


@pytest.fixture(scope="module")
def broken(simulated_sweep: ModuleType) -> list[CellView]:
    return views(
        [simulated_sweep.failed_record(), simulated_sweep.simulated_record(4, failing=range(64))]
    )


def test_the_load_axis_is_the_half_of_the_load_that_varies(simulated_sweep: ModuleType) -> None:
    def axis_of(*loads: tuple[float, int | None]) -> LoadAxis:
        return load_axis(views([simulated_sweep.failed_record(*load) for load in loads]))

    inf = math.inf
    assert axis_of((1, None), (2, None)) == LoadAxis("request_rate", (1, 2))
    assert axis_of((inf, 1), (inf, 4)) == LoadAxis("max_concurrency", (1, 4))
    assert axis_of((2, 1), (2, None)) == LoadAxis("max_concurrency", (1, inf))
    assert axis_of((2, 1), (inf, 1)) == LoadAxis("request_rate", (2, inf))
    assert axis_of((2, None)) == LoadAxis("request_rate", (2,))
    assert axis_of((inf, None)) == LoadAxis("max_concurrency", (inf,))


@pytest.mark.parametrize("values", [(1, 2, 4, 8, math.inf), (1, 2, 3, math.inf), (4, math.inf)])
def test_infinity_stands_beyond_the_last_load_and_is_named(values: tuple[float, ...]) -> None:
    axis = LoadAxis("request_rate", values)
    positions = [axis.position(value) for value in values]
    assert positions == sorted(positions)
    assert all(map(math.isfinite, positions))
    assert axis.text(math.inf) == "inf"


def test_each_cap_is_a_series_along_the_rates(grid: list[CellView]) -> None:
    series = load_series(grid, load_axis(grid))
    assert [(one.name, len(one.cells)) for one in series] == [
        ("concurrency ≤ 2", 3),
        ("concurrency ≤ 4", 3),
    ]


def test_throughput_starts_at_zero_and_names_its_axes_and_ends(rates: list[CellView]) -> None:
    figure = draw(throughput_interactivity(rates, CAPTION))
    panel = figure.axes[0]
    assert panel.get_xlabel() == "output speed of a user, median (tok/s/user)"
    assert panel.get_ylabel() == "output throughput (tok/s)"
    assert panel.get_xlim()[0] == panel.get_ylim()[0] == 0
    assert [text.get_text() for text in panel.texts] == ["1 req/s", "inf"]
    assert "n = 64 requests each" in texts(figure)
    assert "95 % bootstrap interval" in texts(figure)


def test_concurrencies_are_labelled_as_such(simulated_sweep: ModuleType) -> None:
    cells = views([simulated_sweep.simulated_record(math.inf, cap) for cap in (1, 8)])
    figure = draw(throughput_interactivity(cells, CAPTION))
    assert [text.get_text() for text in figure.axes[0].texts] == ["c=1", "c=8"]


def test_a_point_beaten_on_both_axes_is_dominated(simulated_sweep: ModuleType) -> None:
    records = [simulated_sweep.simulated_record(rate) for rate in (1, 2, 4)]
    points = [(10.0, 100.0), (20.0, 200.0), (20.0, 150.0)]
    for record, (x, y) in zip(records, points, strict=True):
        record["metrics"]["per_user_tok_s"]["median"] = x
        record["metrics"]["output_throughput_tok_s"] = y
    cells = views(records)
    assert dominated_cells(cells) == {"rate=1-cap=none", "rate=4-cap=none"}
    figure = draw(throughput_interactivity(cells, CAPTION))
    hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert len([line for line in hollow if len(np.asarray(line.get_xdata()))]) == 2
    assert "dominated" in texts(figure)


def test_equal_points_do_not_dominate_each_other(simulated_sweep: ModuleType) -> None:
    records = [simulated_sweep.simulated_record(1, cap) for cap in (32, 64)]
    assert dominated_cells(views(records)) == set()


def test_more_than_six_series_become_small_multiples(simulated_sweep: ModuleType) -> None:
    cells = views(
        [
            simulated_sweep.simulated_record(rate, cap, num_requests=8)
            for rate in (4, math.inf)
            for cap in range(1, 8)
        ]
    )
    assert len(draw(throughput_interactivity(cells, CAPTION)).axes) == 2
    assert len(draw(latency_vs_load(cells, CAPTION)).axes) == 9


def test_the_objective_is_drawn(rates: list[CellView]) -> None:
    figure = draw(throughput_interactivity(rates, CAPTION, min_user_tok_s=20))
    assert "TPOT objective" in texts(figure)


def test_latency_has_a_panel_for_each_time_on_a_log_axis(rates: list[CellView]) -> None:
    figure = draw(latency_vs_load(rates, CAPTION))
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["TTFT", "TPOT", "E2EL"]
    for panel in figure.axes:
        assert panel.get_yscale() == "log"
        assert panel.get_ylabel().startswith("latency (")
        assert panel.get_xlabel() == "request rate (req/s)"
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["1", "2", "4", "inf"]
        assert len(lines_of(panel, style="-")) == 1
        assert len(lines_of(panel, style="--")) == 1
    assert "p90" in texts(figure)
    assert "p99 needs 368 requests" in texts(figure)


def test_the_first_saturated_load_is_marked(
    simulated_sweep: ModuleType, rates: list[CellView]
) -> None:
    cells = views([simulated_sweep.simulated_record(rate, 2) for rate in (2, 16, 32)])
    figure = draw(latency_vs_load(cells, CAPTION))
    marks = lines_of(figure.axes[0], style=":")
    assert [list(line.get_xdata()) for line in marks] == [[16, 16]]
    assert "saturated from here" in texts(figure)
    assert "saturated" not in texts(draw(latency_vs_load(rates, CAPTION)))


def test_a_closed_loop_is_not_joined_to_the_rates(grid: list[CellView]) -> None:
    figure = draw(latency_vs_load(grid, CAPTION))
    for line in lines_of(figure.axes[0], style="-"):
        xs = set(np.asarray(line.get_xdata()).tolist())
        assert len(xs) == 1 or max(xs) <= 16
    assert "inf under a cap is a closed loop" in texts(figure)


def test_cells_without_figures_are_named_and_marked(simulated_sweep: ModuleType) -> None:
    cells = views(
        [
            simulated_sweep.simulated_record(1),
            simulated_sweep.simulated_record(4, failing=range(64)),
            simulated_sweep.simulated_record(8, failing=range(5)),
            simulated_sweep.failed_record(),
        ]
    )
    latency = draw(latency_vs_load(cells, CAPTION))
    assert [text.get_text() for text in latency.axes[0].texts] == ["no result", "no result"]
    for figure in (latency, draw(throughput_interactivity(cells, CAPTION))):
        assert "incomplete or not valid" in texts(figure)
        words = texts(figure).replace("\n", " ")
        assert "Not drawn: 4 req/s (FAILED-REQUESTS: 64 of 64 requests failed" in words
        crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
        assert {line.get_color() for line in crosses} == {FAULT_COLOR}


def test_a_sweep_without_any_result_still_has_its_figures(broken: list[CellView]) -> None:
    for figure in (throughput_interactivity(broken, CAPTION), latency_vs_load(broken, CAPTION)):
        assert "nothing to draw" in texts(draw(figure))


def test_a_single_small_cell_has_its_figures(simulated_sweep: ModuleType) -> None:
    cells = views([simulated_sweep.simulated_record(4, num_requests=1)])
    draw(throughput_interactivity(cells, CAPTION))
    figure = draw(latency_vs_load(cells, CAPTION))
    assert "p99 needs 368 requests; the sample has 1 request" in texts(figure).replace("\n", " ")


def test_drift_shows_each_request_in_order_of_sending(simulated_sweep: ModuleType) -> None:
    frame = drift_frame({"4 req/s": request_timelines(simulated_sweep.simulate(4, None))})
    assert frame["order"].tolist() == list(range(1, 65))
    assert frame["sent_s"].is_monotonic_increasing
    figure = draw(drift(frame, CAPTION))
    assert figure.axes[0].get_xlabel() == "request, in order of sending"
    assert "TTFT" in texts(figure)
    assert "TPOT" in texts(figure)


def test_drift_draws_failures(simulated_sweep: ModuleType) -> None:
    log = simulated_sweep.simulate(4, None, failing=range(3))
    frame = drift_frame({"4 req/s": request_timelines(log)})
    assert frame["ttft_s"].isna().sum() == 3
    assert "not completed" in texts(draw(drift(frame, CAPTION)))


@pytest.mark.parametrize("num_cells", [0, 1, 2, 4, MAX_PANELS])
def test_drift_has_a_panel_a_cell(simulated_sweep: ModuleType, num_cells: int) -> None:
    timelines = request_timelines(simulated_sweep.simulate(4, None, 8))
    frame = drift_frame({f"cell {index}": timelines for index in range(num_cells)})
    figure = draw(drift(frame, CAPTION))
    assert sum(panel.axison for panel in figure.axes) == num_cells


def test_the_moving_median_passes_over_what_is_missing() -> None:
    values = pd.Series([1.0, 1.0, 1.0, None, 100.0, 1.0, 1.0, 1.0])
    assert moving_median(values).tolist() == [1.0] * 8


def test_distribution_marks_only_what_the_sample_carries() -> None:
    rng = np.random.default_rng(0)
    samples: dict[str, Any] = {
        "many": rng.exponential(0.02, 5000),
        "few": rng.exponential(0.02, 40),
        "none": [],
    }
    frame = distribution_frame(samples)
    figure = draw(cumulative_distribution(frame, CAPTION))
    panel = figure.axes[0]
    legend = panel.get_legend()
    assert legend is not None
    many, few, none = (text.get_text() for text in legend.get_texts())
    assert "– / –  (n = 40)" in few  # noqa: RUF001
    assert "–" not in many  # noqa: RUF001
    assert none == "none\nempty"
    assert panel.get_xscale() == "log"
    assert panel.get_xlabel() == "ITL (ms)"


def test_distribution_keeps_numpy_quantiles_and_few_rows() -> None:
    sample = np.random.default_rng(0).lognormal(size=50_000)
    frame = distribution_frame({"one": sample})
    assert len(frame) <= 1003
    for share in (0.5, 0.95, 0.99):
        row = frame[frame["share"] == share]
        assert row["value_s"].tolist() == pytest.approx([np.quantile(sample, share)])
    assert frame["value_s"].is_monotonic_increasing


@pytest.mark.parametrize("samples", [{}, {"a": []}, {"a": [0.1]}, {"a": [0.1, 0.1, 0.1]}])
def test_distribution_of_little_or_nothing_is_drawn(samples: dict[str, list[float]]) -> None:
    draw(cumulative_distribution(distribution_frame(samples), CAPTION))


def line_rows(xs: Sequence[float], **columns: object) -> list[dict[str, object]]:
    return [{"panel": "time (s)", "series": "cache", "x": x, "y": x, **columns} for x in xs]


def test_lines_share_one_axis_below_each_other() -> None:
    rows = line_rows((16, 32, 64, 128))
    rows += line_rows((16, 32, 64, 128), panel="output tok/s", low=10, high=90)
    rows += line_rows((16, 32), series="no cache")
    rows += [{"panel": "time (s)", "series": "no cache", "x": 128, "note": "out of memory"}]
    figure = draw(
        line_figure(
            line_frame(rows), CAPTION, x_label="output length (tokens)", baseline="no cache"
        )
    )
    assert [panel.get_ylabel() for panel in figure.axes] == ["time (s)", "output tok/s"]
    assert figure.axes[-1].get_xlabel() == "output length (tokens)"
    assert figure.axes[-1].get_xscale() == "log"
    assert "no cache at 128: out of memory" in texts(figure)
    assert "95 % intervals" in texts(figure)


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("xs", [(), (5,), (0, 10, 1000)])
def test_lines_of_any_length_are_drawn(xs: Sequence[float], log_y: bool) -> None:
    draw(line_figure(line_frame(line_rows(xs)), CAPTION, x_label="x", log_y=log_y))


def test_bars_start_at_zero_and_carry_value_interval_or_reason() -> None:
    rows: list[dict[str, object]] = [
        {"panel": "tok/s", "label": "paged", "value": 412.4, "low": 400, "high": 420},
        {"panel": "tok/s", "label": "reserved", "value": 90.0},
        {"panel": "tok/s", "label": "uncached", "value": None, "note": "out of memory"},
        {"panel": "sequences", "label": "paged", "value": 40},
    ]
    figure = draw(bar_figure(bar_frame(rows), CAPTION, baseline="reserved"))
    throughput, batch = figure.axes
    assert throughput.get_xlim()[0] == 0
    assert [text.get_text().strip() for text in throughput.texts] == [
        "412",
        "90.0",
        "out of memory",
    ]
    assert [text.get_text().strip() for text in batch.texts] == ["40"]
    assert [label.get_text() for label in throughput.get_yticklabels()] == [
        "paged",
        "reserved",
        "uncached",
    ]


@pytest.mark.parametrize("value", [None, 0.0])
def test_bars_without_length_are_drawn(value: float | None) -> None:
    rows: list[dict[str, object]] = [{"panel": "tok/s", "label": "a", "value": value}]
    draw(bar_figure(bar_frame(rows), CAPTION))
    draw(bar_figure(bar_frame([]), CAPTION))


def steps_file(path: Path, reserved: Sequence[int], used: Sequence[int]) -> Path:
    steps = pd.DataFrame(
        {
            "start_s": [100.0 + index for index in range(len(used))],
            "num_running": 2,
            "kv_num_blocks": 10,
            "kv_free_blocks": 0,
            "kv_reserved_slots": reserved,
            "kv_used_slots": used,
        }
    )
    steps.to_parquet(path)
    return path


def test_memory_splits_the_pool_into_used_wasted_and_free(tmp_path: Path) -> None:
    path = steps_file(tmp_path / "steps.parquet", reserved=[64, 96], used=[16, 48])
    frame = memory_frame({"paged": path}, block_size=16)
    assert frame[["time_s", "used", "wasted", "free"]].to_numpy().tolist() == [
        [0.0, 16, 48, 96],
        [1.0, 48, 48, 64],
    ]
    assert waste_share(frame) == pytest.approx(0.75)
    figure = draw(memory_figure(frame, CAPTION))
    assert "paged: 75.0 % of what is held is wasted, at most 2 running" in texts(figure)
    assert figure.axes[0].get_ylabel() == "KV pool (tokens)"
    in_bytes = draw(memory_figure(frame, CAPTION, bytes_per_slot=23040))
    assert in_bytes.axes[0].get_ylabel() == "KV pool (MiB)"


def test_memory_of_runs_without_steps_is_drawn(tmp_path: Path) -> None:
    path = steps_file(tmp_path / "steps.parquet", reserved=[], used=[])
    draw(memory_figure(memory_frame({"paged": path}, block_size=16), CAPTION))


def test_unreadable_step_records_are_named(tmp_path: Path) -> None:
    (tmp_path / "steps.parquet").write_bytes(b"not parquet")
    with pytest.raises(ReportError, match=r"steps\.parquet"):
        memory_frame({"paged": tmp_path / "steps.parquet"}, block_size=16)


@pytest.mark.parametrize(
    "name",
    ["모델-가나다", "模型", "a$b$c_{x}", "x" * 400, "word " * 100, "", "tab\tand\nline", "👍"],
)
def test_any_name_can_be_drawn(rates: list[CellView], name: str) -> None:
    caption = Caption(title=name, subtitle=name, note=name)
    draw(throughput_interactivity(rates[:2], caption))
    draw(cumulative_distribution(distribution_frame({name: [0.1, 0.2]}), caption, quantity="ITL"))
    rows: list[dict[str, object]] = [{"panel": "t", "label": name, "value": 1.0}]
    draw(bar_figure(bar_frame(rows), CAPTION))


def test_saved_figures_are_the_same_twice(rates: list[CellView], tmp_path: Path) -> None:
    frame = throughput_interactivity_frame(rates)
    contents = []
    for folder in ("one", "two"):
        figure = throughput_interactivity(rates, CAPTION)
        paths = save_figure(figure, frame, tmp_path / folder / "v1.5-figure")
        contents.append([path.read_bytes() for path in paths])
        assert [path.name for path in paths] == [
            "v1.5-figure.svg",
            "v1.5-figure.png",
            "v1.5-figure.csv",
        ]
    assert contents[0] == contents[1]
    assert b"A title" in contents[0][0]


def test_the_csv_beside_a_figure_has_stored_units(rates: list[CellView]) -> None:
    frame = latency_vs_load_frame(rates)
    first = frame[frame["metric"] == "ttft_from_schedule_s"].iloc[0]
    assert first["median"] == rates[0].statistic("ttft_from_schedule_s", "median")
    assert len(frame) == 3 * len(rates)


def test_an_unwritable_place_is_named(tmp_path: Path, rates: list[CellView]) -> None:
    (tmp_path / "file").write_text("")
    figure = throughput_interactivity(rates, CAPTION)
    with pytest.raises(UnwritableReportError, match=r"cannot write .*figure\.svg") as caught:
        save_figure(figure, pd.DataFrame(), tmp_path / "file" / "figure")
    assert caught.value.__notes__
