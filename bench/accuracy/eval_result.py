"""What an evaluation found: scores of tasks and groups, a text's perplexity, and a comparison.

Everything here follows from item records and needs no model. A group whose questions count alike,
such as the 57 subjects of MMLU, is compared with the baseline as one: 57 tests would hide what they
find together.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmbench.bench import strict_json
from llmbench.bench.accuracy.aggregate import GroupScore, TaskScore, score_groups, score_task
from llmbench.bench.accuracy.divergence_summary import DivergenceSummary, summarize_divergence
from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.items import ItemDivergence, ItemRecord, id_ranges
from llmbench.bench.accuracy.paired import compare_items
from llmbench.bench.accuracy.paired_score import PairedScore, adjust
from llmbench.bench.accuracy.perplexity import Perplexity, WindowLoss, perplexity_of
from llmbench.bench.accuracy.scoring import PICK_METRICS
from llmbench.bench.accuracy.task import TaskGroup
from llmbench.bench.accuracy.text_windows import TextWindows
from llmbench.bench.accuracy.verdict import caveats, verdict

SCHEMA_VERSION = 1
MAX_NAMED = 3
"""Tasks that a sentence names."""

Items = Mapping[str, Sequence[ItemRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A candidate against its baseline on the same items.

    Attributes:
        paired: Of each task, or of a group whose questions count alike; p-values adjusted.
        divergence: Of all scored tokens together; None where it was not measured.
        task_divergence: By task.
        group_divergence: By group, of all tokens below it.
        notes: What a reader of the verdict has to know.
    """

    baseline: str
    paired: tuple[PairedScore, ...]
    divergence: DivergenceSummary | None
    task_divergence: Mapping[str, DivergenceSummary]
    group_divergence: Mapping[str, DivergenceSummary]
    verdict: str
    notes: tuple[str, ...]

    def to_record(self) -> dict[str, Any]:
        """Return strict JSON types."""
        return {
            "baseline": self.baseline,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "paired": [score.to_record() for score in self.paired],
            "divergence": None if self.divergence is None else self.divergence.to_record(),
            "task_divergence": _records(self.task_divergence),
            "group_divergence": _records(self.group_divergence),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """All scores of one model.

    Attributes:
        is_complete: Whether every item was answered; groups are only scored then, and where they
            have items of every member.
        notices: What a reader of the scores has to know, a sentence each.
        items: By task, in order of documents.
    """

    model: str
    is_complete: bool
    tasks: Mapping[str, TaskScore]
    groups: Mapping[str, GroupScore]
    perplexity: Perplexity | None
    notices: tuple[str, ...] = ()
    comparison: Comparison | None = None
    items: Items = field(repr=False)

    @property
    def flags(self) -> tuple[str, ...]:
        """Reasons not to believe the scores; a run with any is invalid."""
        found = [f"{task.task}: {flag}" for task in self.tasks.values() for flag in task.flags]
        if self.perplexity is not None and self.perplexity.reason is not None:
            found.append(f"{PERPLEXITY}: {self.perplexity.reason}")
        return tuple(found)

    def to_record(self) -> dict[str, Any]:
        """Return strict JSON types: what scores.json holds."""
        plain: dict[str, Any] = strict_json.strict(
            {
                "schema_version": SCHEMA_VERSION,
                "model": self.model,
                "status": "complete" if self.is_complete else "partial",
                "tasks": {name: score.to_record() for name, score in self.tasks.items()},
                "groups": {name: score.to_record() for name, score in self.groups.items()},
                "perplexity": None if self.perplexity is None else self.perplexity.to_record(),
                "comparison": None if self.comparison is None else self.comparison.to_record(),
                "doc_ids": {
                    task: id_ranges(item.doc_id for item in items)
                    for task, items in self.items.items()
                    if items
                },
                "flags": self.flags,
                "notices": self.notices,
            }
        )
        return plain


def score_items(
    prepared: PreparedEval,
    items: Items,
    windows: TextWindows | None,
    *,
    model: str,
    is_complete: bool = True,
    notices: Sequence[str] = (),
) -> EvalResult:
    """Score answered items; tasks without any are left out, and so are groups of a partial run.

    A group that lacks a task, since none of its documents are in this limit or shard, has no mean
    that could be compared with any other: it is left out, and the notices say so.
    """
    tasks = {
        each.task.name: score_task(each.task, items[each.task.name])
        for each in prepared.tasks
        if items.get(each.task.name)
    }
    whole_groups, told = [], list(notices)
    for group in prepared.groups if is_complete else ():
        if absent := [name for name in _below(group, prepared.groups) if name not in tasks]:
            told.append(_absence(group.name, absent))
        else:
            whole_groups.append(group)
    perplexity = None
    answered = items.get(PERPLEXITY, ())
    if windows is not None and (answered or not windows.parts):  # a text too short says why
        perplexity = perplexity_of([_loss(item) for item in answered], windows)
    return EvalResult(
        model=model,
        is_complete=is_complete,
        tasks=tasks,
        groups=score_groups(whole_groups, tasks),
        perplexity=perplexity,
        notices=tuple(told),
        items=items,
    )


def compare(
    prepared: PreparedEval,
    result: EvalResult,
    base: Items,
    baseline: str,
    *,
    with_divergence: bool = True,
) -> EvalResult:
    """Add the comparison with a baseline; items that only one model answered are left out.

    Divergences that items hold count `with_divergence`, and where they are from this very baseline.
    """
    ours, theirs = _shared(result.items, base)
    paired = [
        compare_items(
            [item for task in tasks for item in theirs[task]],
            [item for task in tasks for item in ours[task]],
            metric,
            name=name,
        )
        for name, tasks, metric in _units(prepared, ours)
    ]
    adjusted = adjust(paired)
    measured = _measured(ours, theirs) if with_divergence else {}
    whole = None
    if measured:
        whole = summarize_divergence([one for found in measured.values() for one in found])
    of_groups = {
        group.name: [
            one for task in _below(group, prepared.groups) for one in measured.get(task, ())
        ]
        for group in prepared.groups
    }
    return dataclasses.replace(
        result,
        comparison=Comparison(
            baseline=baseline,
            paired=adjusted,
            divergence=whole,
            task_divergence={task: summarize_divergence(found) for task, found in measured.items()},
            group_divergence={
                group: summarize_divergence(found) for group, found in of_groups.items() if found
            },
            verdict=verdict(adjusted, whole, base=baseline),
            notes=caveats(adjusted, whole),
        ),
    )


def _loss(item: ItemRecord) -> WindowLoss:
    return WindowLoss(nll=-sum(item.loglikelihoods or ()), num_tokens=sum(item.num_tokens))


def _records(summaries: Mapping[str, DivergenceSummary]) -> dict[str, Any]:
    return {name: summary.to_record() for name, summary in summaries.items()}


def _absence(group: str, absent: Sequence[str]) -> str:
    shown = ", ".join(absent[:MAX_NAMED]) + (", …" if len(absent) > MAX_NAMED else "")
    return (
        f"{group}: no score, since no document of {len(absent)} of its tasks is in this limit or "
        f"shard ({shown})"
    )


def _measured(ours: Items, theirs: Items) -> dict[str, list[ItemDivergence]]:
    """Return the divergences by task that were measured against these very answers."""
    found = {
        task: [
            item.divergence
            for item, of_base in zip(items, theirs[task], strict=True)
            if item.divergence is not None and item.divergence.base_key == of_base.key
        ]
        for task, items in ours.items()
    }
    return {task: divergences for task, divergences in found.items() if divergences}


def _shared(items: Items, base: Items) -> tuple[dict[str, list[ItemRecord]], ...]:
    """Return both models' items of the documents that both answered.

    Windows of a text are cut by a model's own tokenizer: where the two cut otherwise, the text's
    windows are no pairs and are left out.
    """
    ours: dict[str, list[ItemRecord]] = {}
    theirs: dict[str, list[ItemRecord]] = {}
    for task, answered in items.items():
        of_base = {item.doc_id: item for item in base.get(task, ())}
        both = [item for item in answered if item.doc_id in of_base]
        if task == PERPLEXITY:
            both = [item for item in both if item.prompt_hash == of_base[item.doc_id].prompt_hash]
        if both:
            ours[task] = both
            theirs[task] = [of_base[item.doc_id] for item in both]
    return ours, theirs


def _units(prepared: PreparedEval, items: Items) -> list[tuple[str, tuple[str, ...], str]]:
    """Return (name, tasks, metric) of each comparison."""
    metrics = {}
    for each in prepared.tasks:
        name, metric = each.task.name, each.task.primary_metric
        if metric == "f1":  # of all items together: it has no pairs
            metric = next((one for one in each.task.metrics if one in PICK_METRICS), "")
        if name in items and metric:
            metrics[name] = metric
    units: list[tuple[str, tuple[str, ...], str]] = []
    left = dict.fromkeys(metrics)
    for group in reversed(prepared.groups):  # those that hold others come last
        members = tuple(name for name in _below(group, prepared.groups) if name in left)
        own = group.metric if group.metric != "f1" else None
        used = {own or metrics[name] for name in members}
        if group.weighting == "items" and len(members) > 1 and len(used) == 1:
            units.append((group.name, members, used.pop()))
            for name in members:
                del left[name]
    units += [(name, (name,), metrics[name]) for name in left]
    order = list(metrics)
    units.sort(key=lambda unit: order.index(unit[1][0]))
    if PERPLEXITY in items:
        units.append((PERPLEXITY, (PERPLEXITY,), PERPLEXITY))
    return units


def _below(group: TaskGroup, groups: Sequence[TaskGroup]) -> list[str]:
    """Return the names of all tasks below a group."""
    by_name = {each.name: each for each in groups}
    found: list[str] = []
    for name in group.members:
        found += _below(by_name[name], groups) if name in by_name else [name]
    return list(dict.fromkeys(found))
