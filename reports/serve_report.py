"""The report of a sweep: its table, its conclusion and its plots, from a results folder alone.

    summary.md                            table, conclusion, what was run
    cells.csv                             every figure of every cell
    plots/throughput-interactivity.*      SVG, PNG and the CSV of what is drawn
    plots/latency-vs-load.*
    plots/drift.*  drift-2.* …            six cells a figure

Nothing is measured again: the same folder gives the same files, on a machine without torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llmbench.bench.client.events import EventLog
from llmbench.bench.metrics import RequestTimeline, request_timelines
from llmbench.bench.results import Results, read_results
from llmbench.reports.cells import CellView, cells_frame, views
from llmbench.reports.conclusion import conclude
from llmbench.reports.drift import MAX_PANELS, drift, drift_frame
from llmbench.reports.errors import NothingToReportError, ReportError
from llmbench.reports.figure import Caption, save_figure, write_csv, write_file
from llmbench.reports.latency_vs_load import latency_vs_load, latency_vs_load_frame
from llmbench.reports.serve_table import serve_table
from llmbench.reports.subject import hardware, model_name, subtitle, versions, workload
from llmbench.reports.tables import Table, markdown
from llmbench.reports.throughput_interactivity import (
    objective_tok_s,
    throughput_interactivity,
    throughput_interactivity_frame,
)

__all__ = ["conclude", "serve_table", "write_serve_report"]

PLOTS = "plots"


def write_serve_report(results_folder: Path) -> list[Path]:
    """Write the report into the folder and return the paths of its files."""
    results = read_results(results_folder)
    cells = views(results.records)
    if not cells:
        error = NothingToReportError(f"expected records of cells in {results_folder}, found none")
        error.add_note("the run ended before its first cell; the same command continues it")
        raise error
    plots = results.path / PLOTS
    about = subtitle(results.manifest)
    written = [
        write_file(results.path / "summary.md", _summary(results).encode()),
        write_csv(cells_frame(cells), results.path / "cells.csv"),
    ]
    written += save_figure(
        throughput_interactivity(
            cells,
            Caption(title="Output throughput against the speed of each user", subtitle=about),
            min_user_tok_s=objective_tok_s(results.manifest),
        ),
        throughput_interactivity_frame(cells),
        plots / "throughput-interactivity",
    )
    written += save_figure(
        latency_vs_load(cells, Caption(title="Latency against load", subtitle=about)),
        latency_vs_load_frame(cells),
        plots / "latency-vs-load",
    )
    return [*written, *_write_drift(results, cells, about)]


def report_table(results_folder: Path) -> tuple[Table, str]:
    """Return the final table of a folder, and its conclusion."""
    records = read_results(results_folder).records
    return serve_table(records), conclude(records)


def _summary(results: Results) -> str:
    manifest = results.manifest
    facts = {
        "model": model_name(manifest),
        "hardware": hardware(manifest),
        "workload": workload(manifest),
        "versions": versions(manifest),
    }
    lines = [f"# {model_name(manifest)}: serve-bench", ""]
    lines += [f"- {name}: {text}" for name, text in facts.items()]
    lines += ["", markdown(serve_table(results.records)), "", conclude(results.records), ""]
    return "\n".join(lines)


def _write_drift(results: Results, cells: Sequence[CellView], about: str) -> list[Path]:
    timelines, missing = _timelines(results.path, cells)
    note = f"No event log: {', '.join(missing)}." if missing else ""
    names = list(timelines)
    groups = [names[start : start + MAX_PANELS] for start in range(0, len(names), MAX_PANELS)]
    written: list[Path] = []
    for number, group in enumerate(groups or [[]], start=1):
        title = "Latency of each request, in order of sending"
        if len(groups) > 1:
            title += f" ({number} of {len(groups)})"
        frame = drift_frame({name: timelines[name] for name in group})
        stem = "drift" if number == 1 else f"drift-{number}"
        figure = drift(frame, Caption(title=title, subtitle=about, note=note))
        written += save_figure(figure, frame, results.path / PLOTS / stem)
    return written


def _timelines(
    folder: Path, cells: Iterable[CellView]
) -> tuple[Mapping[str, Sequence[RequestTimeline]], list[str]]:
    """Return the requests of each cell by its load, and the loads whose log is not there."""
    found: dict[str, Sequence[RequestTimeline]] = {}
    missing: list[str] = []
    for cell in cells:
        path = folder / f"events-{cell.cell_id}.parquet"
        if not path.exists():
            missing.append(cell.load)
            continue
        name = cell.load if cell.load not in found else f"{cell.load} ({cell.cell_id})"
        try:
            found[name] = request_timelines(EventLog.read_parquet(path))
        except (OSError, ValueError, KeyError) as cause:
            raise ReportError(f"cannot read the event log {path}: {cause}") from cause
    return found, missing
