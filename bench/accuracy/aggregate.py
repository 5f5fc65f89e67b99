"""Items to task scores, task scores to group scores, each with its own error.

How a number is made, and what stands beside it, is in `metric_scores`. Items that could not be
scored are left out and counted; ties are counted; a score with any of the first, or more than a
tenth of the second among enough items, is flagged: a model that answers everything alike gets full
marks wherever the right choice is the first.

A group has two means, and they differ by points (MMLU: 0.83 or 0.50 of the same answers): over
*items*, where every question counts alike, and over *tasks*, where every member does. Both are
kept, each with the standard error of that very mean: pooled over the tasks as in the harness for
the first, sqrt(sum of squares) / k for the second.

Metrics are named as in the items: "acc", or "exact_match,<filter>" for generated answers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from llmbench.bench import strict_json
from llmbench.bench.accuracy.metric_scores import (
    MetricScore,
    f1,
    mean,
    noted,
    over_items,
    over_tasks,
    weighted,
)
from llmbench.bench.accuracy.scoring import ROLLING_METRICS
from llmbench.bench.errors import BenchError

if TYPE_CHECKING:
    from llmbench.bench.accuracy.items import ItemRecord
    from llmbench.bench.accuracy.task import Task, TaskGroup

MAX_TIED_SHARE = 0.1
MIN_TIED_ITEMS = 30
"""bfloat16 logits tie exactly now and then, so of fewer items a tenth is chance."""
MAX_TIED_SHARE_OF_FEW = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """The scores of one task; `flags` are reasons not to believe them."""

    task: str
    primary_metric: str
    metrics: Mapping[str, MetricScore]
    num_items: int
    num_invalid: int = 0
    num_tied: int = 0
    num_truncated: int = 0
    num_shots: int = 0
    flags: tuple[str, ...] = ()

    @property
    def primary(self) -> MetricScore:
        """The number that stands for the task."""
        return self.metrics[self.primary_metric]

    def to_record(self) -> dict[str, Any]:
        """Return strict JSON types."""
        record: dict[str, Any] = strict_json.strict(self)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_record` wrote."""
        metrics = {
            name: MetricScore.from_record(score) for name, score in record["metrics"].items()
        }
        return cls(**{**record, "metrics": metrics, "flags": tuple(record["flags"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """Both means of a group.

    Attributes:
        metric: Of every member, or None for each member's primary metric.
        weighting: Which of the two means is the group's score.
        members: Tasks and groups, as the group names them.
        tasks: All tasks below it.
        by_items: Mean over the items of all tasks.
        by_tasks: Plain mean over the members; a member that is a group counts by its plain mean.
    """

    group: str
    metric: str | None
    weighting: Literal["items", "tasks"]
    members: tuple[str, ...]
    tasks: tuple[str, ...]
    by_items: MetricScore
    by_tasks: MetricScore
    num_items: int
    num_invalid: int = 0
    num_tied: int = 0
    num_truncated: int = 0
    flags: tuple[str, ...] = ()

    @property
    def primary(self) -> MetricScore:
        """The group's score, by its own weighting."""
        return self.by_items if self.weighting == "items" else self.by_tasks

    def to_record(self) -> dict[str, Any]:
        """Return strict JSON types."""
        record: dict[str, Any] = strict_json.strict(self)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_record` wrote."""
        fields = dict(record)
        for name in ("by_items", "by_tasks"):
            fields[name] = MetricScore.from_record(fields[name])
        for name in ("members", "tasks", "flags"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def has_many_ties(num_tied: int, num_valid: int) -> bool:
    """Whether so many items are ties that their score cannot be relied on."""
    limit = MAX_TIED_SHARE if num_valid >= MIN_TIED_ITEMS else MAX_TIED_SHARE_OF_FEW
    return num_tied > limit * num_valid


def score_task(task: "Task", items: "Sequence[ItemRecord]") -> TaskScore:
    """Score a task from its items, as many as there are.

    Raises:
        BenchError: two items of one document, or an item of another task.
    """
    _refuse_mixtures(task.name, items)
    valid = [item for item in items if item.invalid is None]
    names = [name for item in valid[:1] for name in item.metrics if name not in ROLLING_METRICS]
    metrics = {name: mean([item.metrics[name] for item in valid]) for name in names}
    if "f1" in task.metrics:
        metrics["f1"] = f1(valid)
    for name in ROLLING_METRICS:
        if name in task.metrics:
            metrics[name] = weighted(name, valid)
    metrics.setdefault(task.primary_metric, mean([]))
    num_tied = sum(item.is_tied for item in valid)
    score = TaskScore(
        task=task.name,
        primary_metric=task.primary_metric,
        metrics={name: noted(metric) for name, metric in metrics.items()},
        num_items=len(items),
        num_invalid=len(items) - len(valid),
        num_tied=num_tied,
        num_truncated=sum(item.num_truncated_tokens > 0 for item in items),
        num_shots=max((len(item.fewshot_ids) for item in items), default=0),
    )
    return replace(score, flags=_flags(score, items))


def score_group(group: "TaskGroup", scores: Mapping[str, TaskScore | GroupScore]) -> GroupScore:
    """Score a group from the scores of its members and of all tasks below them, by name.

    Raises:
        BenchError: a score that is not there, or a member without the group's metric.
    """
    members = [_found(group.name, scores, name) for name in group.members]
    names: dict[str, None] = {}
    for member in members:
        names |= dict.fromkeys((member.task,) if isinstance(member, TaskScore) else member.tasks)
    tasks = [_task_of(group.name, scores, name) for name in names]
    pooled = [_metric_of(group, task) for task in tasks]
    plain = [
        member.by_tasks if isinstance(member, GroupScore) else _metric_of(group, member)
        for member in members
    ]
    return GroupScore(
        group=group.name,
        metric=group.metric,
        weighting=group.weighting,
        members=tuple(group.members),
        tasks=tuple(names),
        by_items=noted(over_items(pooled)),
        by_tasks=noted(over_tasks(plain)),
        num_items=sum(task.num_items for task in tasks),
        num_invalid=sum(task.num_invalid for task in tasks),
        num_tied=sum(task.num_tied for task in tasks),
        num_truncated=sum(task.num_truncated for task in tasks),
        flags=tuple(f"{task.task}: {flag}" for task in tasks for flag in task.flags),
    )


def score_groups(
    groups: "Iterable[TaskGroup]", tasks: Mapping[str, TaskScore]
) -> dict[str, GroupScore]:
    """Score groups that stand in order, members before the groups that hold them."""
    known: dict[str, TaskScore | GroupScore] = dict(tasks)
    made: dict[str, GroupScore] = {}
    for group in groups:
        made[group.name] = known[group.name] = score_group(group, known)
    return made


def _flags(score: TaskScore, items: "Sequence[ItemRecord]") -> tuple[str, ...]:
    flags = []
    if score.num_invalid:
        reason = next(item.invalid for item in items if item.invalid is not None)
        flags.append(
            f"{score.num_invalid} of {score.num_items} items could not be scored, first: {reason}"
        )
    num_valid = score.num_items - score.num_invalid
    if has_many_ties(score.num_tied, num_valid):
        flags.append(f"{score.num_tied} of {num_valid} items are ties; the first choice was taken")
    return tuple(flags)


def _refuse_mixtures(task: str, items: "Sequence[ItemRecord]") -> None:
    seen: set[int] = set()
    for item in items:
        if item.task != task:
            raise BenchError(f"expected items of {task}, found one of {item.task}")
        if item.doc_id in seen:
            raise BenchError(f"expected one item a document, found two of {item.doc_id} ({task})")
        seen.add(item.doc_id)


def _found(
    group: str, scores: Mapping[str, TaskScore | GroupScore], name: str
) -> TaskScore | GroupScore:
    if name not in scores:
        raise BenchError(f"expected a score of {name}, a member of {group}; found none")
    return scores[name]


def _task_of(group: str, scores: Mapping[str, TaskScore | GroupScore], name: str) -> TaskScore:
    score = _found(group, scores, name)
    assert isinstance(score, TaskScore)
    return score


def _metric_of(group: "TaskGroup", score: TaskScore) -> MetricScore:
    name = group.metric or score.primary_metric
    if name not in score.metrics:
        raise BenchError(
            f"expected `{name}` of every task in {group.name}; {score.task} has "
            + ", ".join(score.metrics)
        )
    return score.metrics[name]
