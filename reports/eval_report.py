"""The report of an evaluation, from its results folder alone.

summary.md        verdict, tables, what was run
table.csv         every score in stored units, with the baseline's and the difference
plots/scores.*    scores with intervals, the baseline beside them, and the paired differences
plots/kl.*        how the divergence of tokens is spread
samples.*         answers side by side, where there are any
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from llmbench.bench import strict_json
from llmbench.bench.accuracy.items import ItemRecord, items_path, read_id_ranges, read_items
from llmbench.bench.results import read_results
from llmbench.reports.errors import NothingToReportError
from llmbench.reports.eval_comparison import divergence_tables, paired_table
from llmbench.reports.eval_table import PERPLEXITY, decisive_flags, families, score_table
from llmbench.reports.figure import MAX_SERIES, Caption, save_figure, write_csv, write_file
from llmbench.reports.format import shorten
from llmbench.reports.samples_page import SAMPLES, write_samples
from llmbench.reports.score_figure import (
    BASE,
    CANDIDATE,
    DIFFERENCE,
    SCORE,
    kl_figure,
    kl_frame,
    score_figure,
    score_frame,
)
from llmbench.reports.score_figure import PERPLEXITY as PERPLEXITY_PANEL
from llmbench.reports.subject import hardware, versions
from llmbench.reports.tables import Table, markdown

SCORES, PLOTS, BASELINE = "scores.json", "plots", "baseline"
_CHANCE_METRICS = ("acc", "acc_norm", "acc_norm_bytes", "acc_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecords:
    """An evaluation's folder as read; `base` are the baseline's own scores."""

    folder: Path
    manifest: dict[str, Any]
    scores: dict[str, Any]
    base: dict[str, Any] | None

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of the questions, by task."""
        plan = self.manifest.get("plan") or {}
        found: Mapping[str, Any] = plan.get("tasks") or {}
        return found

    @property
    def comparison(self) -> dict[str, Any] | None:
        """With the baseline."""
        found: dict[str, Any] | None = self.scores["comparison"]
        return found

    def items(self, task: str) -> list[ItemRecord]:
        """Of a task, those that the scores are of: the folder may hold more, of other runs."""
        counted = read_id_ranges(self.scores["doc_ids"].get(task, ""))
        found = read_items(items_path(self.folder, task)) if counted else []
        return [item for item in found if item.doc_id in counted]

    @property
    def names(self) -> dict[str, str]:
        """Of the two models, as short as a legend wants them."""
        names = {CANDIDATE: _short(self.scores["model"])}
        if self.comparison is not None:
            names[BASE] = _short(self.comparison["baseline"])
        return names


def read_eval(folder: Path) -> EvalRecords:
    """Read a folder; NothingToReportError where no score is in it yet."""
    path = folder / SCORES
    if not path.exists():
        error = NothingToReportError(f"expected {SCORES} in {folder}, found none")
        error.add_note(
            "`llmbench eval … --output` writes it; a broken-off run goes on the same way"
        )
        raise error
    base_path = folder / BASELINE / SCORES
    return EvalRecords(
        folder=folder,
        manifest=read_results(folder).manifest,
        scores=strict_json.loads(path.read_bytes()),
        base=strict_json.loads(base_path.read_bytes()) if base_path.exists() else None,
    )


def report_tables(records: EvalRecords) -> list[Table]:
    """Return the tables in the order in which they are read."""
    tables = [score_table(records.scores, records.facts)]
    comparison = records.comparison
    if comparison is None:
        return tables
    names = records.names
    tables.append(paired_table(comparison["paired"], base=names[BASE], candidate=names[CANDIDATE]))
    if comparison["divergence"] is not None:
        by_task = _shown_divergences(records)
        tables += divergence_tables({**by_task, "": comparison["divergence"]})
    return tables


def report_sentences(records: EvalRecords) -> list[str]:
    """Return what stands below the tables: notices, the verdict and its caveats."""
    lines = []
    if records.scores["status"] != "complete":
        lines.append("The run is not complete: these are the items answered so far.")
    about_tasks = tuple(f"{task}: " for task in (*records.scores["tasks"], PERPLEXITY))
    in_table = {line for fact in records.facts.values() for line in fact.get("deviations", ())}
    lines += [
        _sentence(notice)
        for notice in records.scores["notices"]
        if not notice.startswith(about_tasks) and notice not in in_table
    ]
    lines += [f"Not to be relied on: {flag}." for flag in decisive_flags(records.scores)]
    if records.comparison is not None:
        lines += [_sentence(note) for note in records.comparison["notes"]]
        lines.append(records.comparison["verdict"])
    return lines


def write_eval_report(records: EvalRecords) -> list[Path]:
    """Write the report into the folder and return the paths of its files."""
    folder, manifest = records.folder, records.manifest
    about = " · ".join(filter(None, [hardware(manifest), versions(manifest)]))
    names = records.names
    title = names[CANDIDATE]
    if BASE in names:
        title += f" against {names[BASE]}"
    lines = [f"# {title}", "", f"- {about}", ""]
    for table in report_tables(records):
        lines += [markdown(table), ""]
    for sentence in report_sentences(records):
        lines += [sentence, ""]
    written = [
        write_file(folder / "summary.md", "\n".join(lines).encode()),
        write_csv(score_data(records), folder / "table.csv"),
    ]
    frame = score_frame(_figure_rows(records))
    figure = score_figure(frame, Caption(title=title, subtitle=about), names=names)
    written += save_figure(figure, frame, folder / PLOTS / "scores")
    if records.comparison is not None and records.comparison["divergence"] is not None:
        frame = kl_frame(_kl_samples(records))
        caption = Caption(title=f"Divergence of {title}", subtitle=about)
        written += save_figure(kl_figure(frame, caption), frame, folder / PLOTS / "kl")
    if (folder / SAMPLES).exists():
        written += write_samples(folder)
    return written


def score_data(records: EvalRecords) -> pd.DataFrame:
    """Return every score as a row, in stored units, with the differences of those compared."""
    scores, base = records.scores, records.base or {}
    paired = {score["task"]: score for score in (records.comparison or {}).get("paired", ())}
    rows = []
    for name, task in scores["tasks"].items():
        theirs = base.get("tasks", {}).get(name, {}).get("metrics", {})
        for metric, score in task["metrics"].items():
            row = {"task": name, "kind": "task", "metric": metric, "shots": task["num_shots"]}
            is_compared = name in paired and paired[name]["metric"] == metric
            row |= score | _difference(theirs.get(metric), paired[name] if is_compared else None)
            rows.append(row)
    for name, group in scores["groups"].items():
        theirs = base.get("groups", {}).get(name, {})
        for mean, weighting in (("by_items", "items"), ("by_tasks", "tasks")):
            row = {
                "task": name,
                "kind": "group",
                "metric": f"{group['metric'] or 'primary'} {mean}",
            }
            is_compared = name in paired and weighting == group["weighting"]
            row |= group[mean]
            rows.append(row | _difference(theirs.get(mean), paired[name] if is_compared else None))
    if (text := scores[PERPLEXITY]) is not None:
        theirs = base.get(PERPLEXITY)
        row = {"task": PERPLEXITY, "kind": "text", "metric": "per token"} | _text_score(text)
        row |= {"higher_is_better": False, "note": text["protocol"]}
        as_base = None if theirs is None else _text_score(theirs)
        rows.append(row | _difference(as_base, paired.get(PERPLEXITY)))
    frame = pd.DataFrame(rows)
    return frame.dropna(axis="columns", how="all").convert_dtypes()


def _difference(base: Mapping[str, Any] | None, paired: Mapping[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"base_value": None if base is None else base["value"]}
    if paired is None:
        return row
    names = ("difference", "p_value", "adjusted_p", "flip_rate", "agreement", "detectable")
    row |= {name: paired[name] for name in names}
    row |= {"difference_low": paired["low"], "difference_high": paired["high"]}
    return row | (paired["flips"] or {})


def _figure_rows(records: EvalRecords) -> Iterator[dict[str, Any]]:
    """The rows of the figure: the number that stands for each task, and each family's mean."""
    scores, base = records.scores, records.base or {}
    hidden = families(scores)
    differences = {score["task"]: score for score in (records.comparison or {}).get("paired", ())}
    for name, task in scores["tasks"].items():
        if name in hidden:
            continue
        metric = task["primary_metric"]
        theirs = base.get("tasks", {}).get(name, {}).get("metrics", {}).get(metric)
        chance = _chance(records, [name]) if metric in _CHANCE_METRICS else None
        label = f"{name}\n{metric}, {task['num_shots']}-shot"
        yield from _rows(label, task["metrics"][metric], theirs, differences.get(name), chance)
    for name in dict.fromkeys(hidden.values()):
        group = scores["groups"][name]
        key = "by_items" if group["weighting"] == "items" else "by_tasks"
        theirs = base.get("groups", {}).get(name, {}).get(key)
        chance = _chance(records, group["tasks"])
        label = f"{name}\n{group['metric'] or 'primary'}, {len(group['tasks'])} tasks"
        yield from _rows(label, group[key], theirs, differences.get(name), chance)
    if (text := scores[PERPLEXITY]) is not None:
        as_score = _text_score(text)
        theirs = _text_score(base[PERPLEXITY]) if base.get(PERPLEXITY) else None
        yield from _rows(f"{PERPLEXITY}\nper token", as_score, theirs, None, None)


def _rows(
    label: str,
    score: Mapping[str, Any],
    base: Mapping[str, Any] | None,
    paired: Mapping[str, Any] | None,
    chance: float | None,
) -> Iterator[dict[str, Any]]:
    panel = SCORE if score["unit"] == "share" else PERPLEXITY_PANEL
    if score["unit"] == "bits/byte":
        return
    label = f"{label}, n = {score['n']:,}"
    for series, one in ((BASE, base), (CANDIDATE, score)):
        if one is not None and one["value"] is not None:
            kept = {name: one[name] for name in ("value", "low", "high", "n")}
            yield {"panel": panel, "row": label, "series": series, "chance": chance, **kept}
    if paired is not None and paired["unit"] == "share" and paired["difference"] is not None:
        yield {
            "panel": DIFFERENCE,
            "row": label,
            "series": CANDIDATE,
            "value": paired["difference"],
            **{name: paired[name] for name in ("low", "high", "n")},
        }


def _text_score(text: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: text[name] for name in ("low", "high")}
    return {**kept, "value": text["token"], "n": text["num_windows"], "unit": "perplexity"}


def _chance(records: EvalRecords, tasks: list[str]) -> float | None:
    """Return the share of right answers that guessing gives: the mean of 1 / choices."""
    shares = [
        1 / len(item.choices)
        for task in tasks
        for item in records.items(task)
        if item.choices and isinstance(item.gold, int)
    ]
    return sum(shares) / len(shares) if shares else None


def _shown_divergences(records: EvalRecords) -> dict[str, Any]:
    """Return the divergence of each task that has a row of its own, and of each family."""
    assert records.comparison is not None  # asked for only where there is one
    hidden = families(records.scores)
    by_task: dict[str, Any] = records.comparison["task_divergence"]
    by_group: dict[str, Any] = records.comparison["group_divergence"]
    shown = {task: record for task, record in by_task.items() if task not in hidden}
    shown |= {name: by_group[name] for name in hidden.values() if name in by_group}
    return shown if len(shown) > 1 else {}


def _kl_samples(records: EvalRecords) -> dict[str, list[float]]:
    """Return the tokens' divergences by task or family; all together where that is too many."""
    assert records.comparison is not None  # asked for only where there is one
    hidden = families(records.scores)
    found: dict[str, list[float]] = {}
    for task in records.comparison["task_divergence"]:
        values = found.setdefault(hidden.get(task, task), [])
        for item in records.items(task):
            values += item.divergence.kl if item.divergence is not None else ()
    if len(found) > MAX_SERIES:
        return {"all tasks": [value for values in found.values() for value in values]}
    return found


def _short(model: str) -> str:
    return shorten(Path(model).name or model)


def _sentence(text: str) -> str:
    text = f"{text[:1].upper()}{text[1:]}"
    return text if text.endswith(".") else f"{text}."
