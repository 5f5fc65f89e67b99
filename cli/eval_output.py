"""What `llmbench eval` prints: the list of tasks, the plan of a dry run, and the result."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.cli.output import Output
from llmbench.reports.format import NULL, counted, size

if TYPE_CHECKING:
    from llmbench.bench.accuracy.eval_costs import TaskCost
    from llmbench.bench.accuracy.eval_plan import PreparedEval
    from llmbench.bench.accuracy.model import EvaluatedModel
    from llmbench.bench.accuracy.task_catalog import TaskListing

NO_VERDICT = 4


def print_tasks(include: tuple[Path, ...], streams: Output) -> None:
    """Print groups and tasks; those that one file makes many of are one line."""
    from llmbench.bench.accuracy.eval_config import PERPLEXITY
    from llmbench.bench.accuracy.task_catalog import list_tasks
    from llmbench.bench.strict_json import strict
    from llmbench.reports.tables import Table, render, text_column

    listings = list_tasks(include)
    streams.document([strict(listing) for listing in listings])
    rows = list(_listed(listings))
    rows.append((PERPLEXITY, "text", NULL, "perplexity of any text: --text, --protocol"))
    names = ("name", "kind", "shots", "what it asks")
    columns = [
        text_column(name, column)
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    ]
    streams.result(render(Table(columns=tuple(columns)), sys.stdout))


def _listed(listings: "tuple[TaskListing, ...]") -> Iterator[tuple[str, str, str, str]]:
    families: dict[str, int] = {}
    for listing in listings:
        if listing.family is not None:
            families[listing.family] = families.get(listing.family, 0) + 1
    told: set[str] = set()
    for listing in listings:
        shots = "as its tasks" if listing.num_fewshot is None else str(listing.num_fewshot)
        family = listing.family
        if family is None:
            yield listing.name, listing.kind, shots, listing.summary
        elif family not in told:
            told.add(family)
            yield family, listing.kind, shots, f"{counted(families[family], 'task')}, a name each"


def print_dry_run(
    prepared: "PreparedEval",
    model: "EvaluatedModel",
    base: "EvaluatedModel | None",
    folder: Path,
    *,
    cache_limit: int | None,
    with_divergence: bool,
    streams: Output,
) -> None:
    """Print what a run would ask, read and store."""
    from llmbench.bench.accuracy.eval_costs import count_costs
    from llmbench.bench.strict_json import strict
    from llmbench.cli.progress import Progress
    from llmbench.reports.tables import Table, number_column, render, text_column

    with Progress(streams) as progress:
        costs = count_costs(
            prepared,
            model,
            baseline=base,
            on_progress=lambda done, total: progress.update("counting tokens", done, total),
        )
    truncated = sum(cost.num_truncated for cost in costs.values())
    notes = (
        [f"{counted(truncated, 'prompt')} cut: longer than the model reads"] if truncated else []
    )
    rows = _cost_rows(prepared, costs)
    table = Table(
        columns=(
            text_column("task", [row.name for row in rows]),
            text_column("shots", [row.shots for row in rows]),
            number_column("items", [row.cost.num_items for row in rows]),
            number_column("of", [row.num_docs for row in rows]),
            number_column("requests", [row.cost.num_requests for row in rows]),
            number_column("tokens read", [row.cost.num_read_tokens for row in rows]),
            number_column("written, at most", [row.cost.num_generated_tokens for row in rows]),
            number_column("longest", [row.cost.longest for row in rows]),
        ),
        notes=("tokens that prompts share are counted in each and computed once", *notes),
    )
    streams.result(f"{render(table, sys.stdout)}\n")
    for group in prepared.groups:
        streams.result(f"group     {group.name}: mean over {group.weighting}")
    for notice in told_notices(prepared):
        streams.result(f"note      {notice}")
    stored = _stored_bytes(base, costs) if with_divergence else None
    if stored is not None:
        limit = "" if cache_limit is None else f", the limit is {size(cache_limit)}"
        streams.result(f"disk      {size(stored)} for the baseline's hidden states{limit}")
    streams.result(f"output    {folder}")
    streams.document(
        {
            "tasks": {name: strict(cost) for name, cost in costs.items()},
            "questions": prepared.facts(),
            "notices": list(prepared.notices),
            "store_bytes": stored,
            "model": model.name,
            "baseline": None if base is None else base.name,
            "output": str(folder),
        }
    )


def told_notices(prepared: "PreparedEval") -> list[str]:
    """What does not apply to a task and how its data deviate, with the tasks that it is about."""
    tasks: dict[str, list[str]] = {}
    for each in prepared.tasks:
        for line in filter(None, (each.notice, *each.deviations)):
            tasks.setdefault(line, []).append(each.task.family or each.task.name)
    return [
        f"{', '.join(dict.fromkeys(names))}: {line}" if names else line
        for line, names in tasks.items()
    ]


@dataclass(frozen=True, slots=True)
class _CostRow:
    """A task, or all tasks that one file makes."""

    name: str
    shots: str
    num_docs: int | None
    cost: "TaskCost"


def _cost_rows(prepared: "PreparedEval", costs: "Mapping[str, TaskCost]") -> list[_CostRow]:
    rows: dict[str, _CostRow] = {}
    tasks = {each.task.name: each for each in prepared.tasks}
    for name, cost in costs.items():
        each = tasks.get(name)
        if each is None:
            rows[name] = _CostRow(name, NULL, None, cost)
            continue
        shown = each.task.family or name
        before = rows.get(shown)
        if before is None:
            rows[shown] = _CostRow(shown, str(each.num_shots), each.num_docs, cost)
            continue
        rows[shown] = _CostRow(
            shown,
            before.shots if before.shots == str(each.num_shots) else NULL,
            (before.num_docs or 0) + each.num_docs,
            before.cost + cost,
        )
    return list(rows.values())


def _stored_bytes(base: "EvaluatedModel | None", costs: "Mapping[str, TaskCost]") -> int | None:
    from llmbench.bench.accuracy.engine_model import EngineModel
    from llmbench.bench.accuracy.eval_costs import store_bytes

    if not isinstance(base, EngineModel):
        return None
    return store_bytes(costs, hidden_size=base.facts.hidden_size, dtype=base.facts.dtype)


def print_result(folder: Path, streams: Output) -> None:
    """Print tables, caveats and verdict of what the folder holds, and write its report."""
    from llmbench.reports.eval_report import (
        read_eval,
        report_sentences,
        report_tables,
        write_eval_report,
    )
    from llmbench.reports.tables import render

    records = read_eval(folder)
    for table in report_tables(records):
        streams.result(f"{render(table, sys.stdout)}\n")
    for sentence in report_sentences(records):
        streams.result(sentence)
    written = write_eval_report(records)
    streams.document(
        {
            **records.scores,
            "output": str(folder),
            "baseline_scores": records.base,
            "files": [str(path) for path in written],
        }
    )
    streams.note("")
    for path in written:
        if path.suffix in (".png", ".html"):
            streams.note(f"{'plot' if path.suffix == '.png' else 'samples':8} {path}")
    streams.note(f"results  {folder}")


def exit_code(folder: Path) -> int:
    """Whether the scores can be relied on: 0, or 4 where something in them says no."""
    from llmbench.reports.eval_report import read_eval
    from llmbench.reports.eval_table import decisive_flags

    records = read_eval(folder)
    both = [scores for scores in (records.scores, records.base) if scores is not None]
    return NO_VERDICT if any(map(decisive_flags, both)) else 0


def print_harness_result(result: Mapping[str, Any], folder: Path, streams: Output) -> None:
    """Print the harness's own scores, and keep its result."""
    from llmbench.bench.results import write_json
    from llmbench.bench.strict_json import strict
    from llmbench.reports.tables import Table, render, text_column

    rows = []
    for task, scores in result["results"].items():
        for name, value in scores.items():
            if not isinstance(value, float | int) or "_stderr" in name or name == "sample_len":
                continue
            metric, _, suffix = name.partition(",")
            error = scores.get(f"{metric}_stderr,{suffix}")
            spread = f"± {error:.4f}" if isinstance(error, float) else NULL
            shots = result.get("n-shot", {}).get(task, NULL)
            rows.append((task, str(shots), name, f"{value:.4f}", spread))
    names = ("task", "shots", "metric", "score", "± stderr")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    table = Table(
        columns=tuple(
            text_column(name, column) for name, column in zip(names, columns, strict=True)
        ),
        notes=("scored by lm-evaluation-harness itself, on the built-in engine",),
    )
    streams.result(render(table, sys.stdout))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "lm_eval_results.json", result)
    streams.document(strict(dict(result)))
    streams.note(f"results  {folder / 'lm_eval_results.json'}")
