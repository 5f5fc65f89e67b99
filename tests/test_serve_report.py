"""The report of a results folder: its files, whatever the folder holds."""

import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from llmbench.bench.slo import Goodput
from llmbench.reports.errors import NothingToReportError, ReportError
from llmbench.reports.serve_report import write_serve_report
from llmbench.reports.subject import hardware, model_name, subtitle

NAMES = ("throughput-interactivity", "latency-vs-load", "drift")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, simulated_sweep: ModuleType) -> Path:
    path: Path = tmp_path_factory.mktemp("results")
    records = [
        simulated_sweep.simulated_record(rate, cap, num_requests=24, events_folder=path)
        for rate in (2, math.inf)
        for cap in (4, None)
    ]
    simulated_sweep.write_folder(path, [*records, simulated_sweep.failed_record(64)])
    return path


@pytest.fixture(scope="module")
def written(folder: Path) -> list[Path]:
    return write_serve_report(folder)


def test_a_report_has_table_cells_and_three_plots_in_three_forms(
    folder: Path, written: list[Path]
) -> None:
    expected = {folder / "summary.md", folder / "cells.csv"}
    expected |= {
        folder / "plots" / f"{name}.{suffix}" for name in NAMES for suffix in ("svg", "png", "csv")
    }
    assert set(written) == expected
    assert len(written) == len(expected)
    assert all(path.stat().st_size > 0 for path in written)


@pytest.mark.usefixtures("written")
def test_the_summary_says_what_was_run_and_found(folder: Path) -> None:
    summary = (folder / "summary.md").read_text()
    assert summary.startswith("# SmolLM2-135M-Instruct: serve-bench\n")
    assert "- hardware: Example CPU @ 2.10GHz, 2 cores, 8.00 GiB" in summary
    assert "| rate (req/s) | conc. |" in summary
    assert "Output is highest " in summary


@pytest.mark.usefixtures("written")
def test_cells_and_requests_are_kept_in_stored_units(folder: Path) -> None:
    cells = pd.read_csv(folder / "cells.csv")
    assert cells["request_rate"].tolist() == [2, 2, 64, math.inf, math.inf]
    assert cells["status"].tolist().count("failed") == 1
    requests = pd.read_csv(folder / "plots" / "drift.csv")
    assert set(requests["cell"]) == {
        "2 req/s, concurrency 4",
        "2 req/s",
        "concurrency 4",
        "all at once",
    }
    assert len(requests) == 4 * 24


def test_the_same_folder_gives_the_same_files(folder: Path, written: list[Path]) -> None:
    first = {path: path.read_bytes() for path in written}
    assert {path: path.read_bytes() for path in write_serve_report(folder)} == first


def test_more_than_six_cells_spread_over_drift_figures(
    tmp_path: Path, simulated_sweep: ModuleType
) -> None:
    records = [
        simulated_sweep.simulated_record(math.inf, cap, num_requests=6, events_folder=tmp_path)
        for cap in range(1, 8)
    ]
    written = write_serve_report(simulated_sweep.write_folder(tmp_path, records))
    assert {path.name for path in written if path.suffix == ".svg"} == {
        "throughput-interactivity.svg",
        "latency-vs-load.svg",
        "drift.svg",
        "drift-2.svg",
    }


def test_a_sweep_in_which_all_failed_has_a_report(
    tmp_path: Path, simulated_sweep: ModuleType
) -> None:
    folder = simulated_sweep.write_folder(tmp_path, [simulated_sweep.failed_record()])
    assert len(write_serve_report(folder)) == 11
    assert "No cell is fit to be read (1 failed)" in (tmp_path / "summary.md").read_text()


def test_objectives_of_the_run_reach_the_plot(tmp_path: Path, simulated_sweep: ModuleType) -> None:
    goodput = Goodput(tpot_s=0.05)
    record = simulated_sweep.simulated_record(4, num_requests=6, goodput=goodput)
    manifest = simulated_sweep.simulated_manifest("모델", goodput)
    write_serve_report(simulated_sweep.write_folder(tmp_path, [record], manifest))
    svg = (tmp_path / "plots" / "throughput-interactivity.svg").read_text()
    assert "TPOT objective" in svg
    assert "model · Example CPU" in svg


def test_a_folder_without_records_is_refused(tmp_path: Path, simulated_sweep: ModuleType) -> None:
    folder = simulated_sweep.write_folder(tmp_path, [])
    with pytest.raises(NothingToReportError, match="expected records") as caught:
        write_serve_report(folder)
    assert caught.value.__notes__


def test_a_damaged_event_log_is_named(tmp_path: Path, simulated_sweep: ModuleType) -> None:
    record = simulated_sweep.simulated_record(4, num_requests=6, events_folder=tmp_path)
    folder = simulated_sweep.write_folder(tmp_path, [record])
    (tmp_path / "events-rate=4-cap=none.parquet").write_bytes(b"torn")
    with pytest.raises(ReportError, match=r"events-rate=4-cap=none\.parquet"):
        write_serve_report(folder)


def test_what_a_manifest_does_not_say_is_said_to_be_unknown() -> None:
    assert subtitle({}) == "unknown model · unknown processor · unknown workload"


def test_gpus_are_counted_and_paths_are_left_out() -> None:
    manifest = {
        "config": {"engine": {"model": "/home/me/models/llama-8b/"}},
        "hardware": {"cpu_model": "CPU", "gpus": ["NVIDIA H200", "NVIDIA H200"]},
    }
    assert hardware(manifest) == "2 × NVIDIA H200"  # noqa: RUF001
    assert model_name(manifest) == "llama-8b"


def test_a_report_is_written_without_torch(folder: Path) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers')))"
        "; from pathlib import Path; from llmbench.reports.serve_report import write_serve_report"
        "; write_serve_report(Path(sys.argv[1]))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(folder)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
