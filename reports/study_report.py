"""The report of a study: its table, its finding and its figure, from a results folder alone.

summary.md        finding, table, what was run
table.csv         the table in stored units
plots/*           SVG, PNG and the CSV of what is drawn
"""

from pathlib import Path
from typing import Any

import pandas as pd

from llmbench.bench import strict_json
from llmbench.bench.results import read_results
from llmbench.reports.errors import NothingToReportError
from llmbench.reports.figure import Caption, save_figure, write_csv, write_file
from llmbench.reports.study_figures import FIGURES
from llmbench.reports.study_table import study_table
from llmbench.reports.subject import hardware, model_name, versions
from llmbench.reports.tables import Table, markdown

CONCLUSION = "conclusion.json"
PLOTS = "plots"


def report_table(folder: Path) -> tuple[Table, str]:
    """Return the table of a study's folder, and its finding."""
    conclusion = _conclusion(folder)
    return study_table(conclusion["table"], conclusion["notes"]), conclusion["finding"]


def write_study_report(folder: Path) -> list[Path]:
    """Write the report into the folder and return the paths of its files."""
    results = read_results(folder)
    manifest, conclusion = results.manifest, _conclusion(folder)
    name = manifest["config"]["study"]
    model = model_name(manifest) if "engine" in manifest["config"] else ""
    about = " · ".join(filter(None, [model, hardware(manifest), versions(manifest)]))
    table, finding = report_table(folder)
    summary = [f"# study {name}", "", f"- {about}", "", markdown(table), "", _sentence(finding), ""]
    written = [
        write_file(folder / "summary.md", "\n".join(summary).encode()),
        write_csv(pd.DataFrame(conclusion["table"]), folder / "table.csv"),
    ]
    rows = [record["row"] for record in results.records]
    for picture in FIGURES.get(name, ()):
        caption = Caption(title=picture.title, subtitle=about)
        figure, frame = picture.draw(folder, rows, manifest["config"]["settings"], caption)
        written += save_figure(figure, frame, folder / PLOTS / picture.stem)
    return written


def _conclusion(folder: Path) -> dict[str, Any]:
    path = folder / CONCLUSION
    if not path.exists():
        error = NothingToReportError(f"expected {CONCLUSION} in {folder}, found none")
        error.add_note("the study did not run to its end; run it again into another folder")
        raise error
    conclusion: dict[str, Any] = strict_json.loads(path.read_bytes())
    return conclusion


def _sentence(finding: str) -> str:
    return f"{finding[:1].upper()}{finding[1:]}."
