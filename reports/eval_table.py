"""The table of an evaluation: its scores, and what a reader must know beside them.

A score never stands alone: standard error, 95 % interval, shots and items are beside it, and what
makes it worth less (few items, ties, prompts that were cut, data that are not the published ones)
is a letter that leads to a sentence. The subjects of a large group are told by its mean; all of
them are in the CSV. Built from the records of `scores.json` alone.
"""

import string
from collections.abc import Mapping, Sequence
from typing import Any

from llmbench.bench.accuracy.aggregate import has_many_ties
from llmbench.reports.format import NULL, counted, number, percent
from llmbench.reports.tables import Table, text_column

Record = Mapping[str, Any]

MANY_MEMBERS = 8
"""A group with more tasks than this is shown by its mean."""
PERPLEXITY = "perplexity"
LARGE = 1e6
"""Perplexities from here on are written as powers: nobody reads their digits."""


class Remarks:
    """Letters for sentences: the same sentence has one letter, however many rows it is about."""

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}

    def mark(self, *sentences: str) -> str:
        """Return the letters of the sentences, as they stand behind a name: ` [a,b]`."""
        letters = [self._letter(sentence) for sentence in sentences if sentence]
        return f" [{','.join(letters)}]" if letters else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """The sentences, each behind its letter."""
        return tuple(f"[{letter}] {sentence}" for sentence, letter in self._letters.items())

    def _letter(self, sentence: str) -> str:
        count = len(self._letters)
        letter = string.ascii_lowercase[count % 26] * (count // 26 + 1)
        return self._letters.setdefault(sentence, letter)


def families(scores: Record) -> dict[str, str]:
    """Return the tasks that stand in a table through their group alone, with that group's name.

    Members of such a group differ in their subject and nothing else.
    """
    found: dict[str, str] = {}
    by_size = sorted(scores["groups"].values(), key=lambda group: len(group["tasks"]))
    for group in by_size:
        if len(group["tasks"]) > MANY_MEMBERS and _is_family(group):
            found |= dict.fromkeys(group["tasks"], group["group"])
    return found


def decisive_flags(scores: Record) -> list[str]:
    """Return the reasons not to rely on the scores; those of a family's tasks as one.

    One tie among the five questions of a subject says nothing, so a family is judged as a whole.
    """
    hidden = families(scores)
    flags = [
        f"{name}: {flag}"
        for name, task in scores["tasks"].items()
        if name not in hidden
        for flag in task["flags"]
    ]
    for family in dict.fromkeys(hidden.values()):
        group = scores["groups"][family]
        num_valid = group["num_items"] - group["num_invalid"]
        if group["num_invalid"]:
            num = f"{group['num_invalid']:,} of {group['num_items']:,}"
            flags.append(f"{family}: {num} items could not be scored")
        if has_many_ties(group["num_tied"], num_valid):
            flags.append(f"{family}: {group['num_tied']:,} of {num_valid:,} items are ties")
    text = scores.get(PERPLEXITY)
    if text is not None and text["reason"] is not None:
        flags.append(f"{PERPLEXITY}: {text['reason']}")
    return flags


def task_notices(scores: Record, task: str) -> list[str]:
    """Return what the run has to say about one task."""
    start = f"{task}: "
    return [line.removeprefix(start) for line in scores["notices"] if line.startswith(start)]


def score_table(scores: Record, facts: Record) -> Table:
    """Return the table of all scores; `facts` are those of the questions, by task."""
    remarks = Remarks()
    rows: list[tuple[str, ...]] = []
    hidden = families(scores)
    for name, task in scores["tasks"].items():
        if name not in hidden:
            told = [*facts.get(name, {}).get("deviations", ()), *task_notices(scores, name)]
            rows += _task_rows(task, told, remarks)
    inner = _inner_groups(scores)
    for name, group in scores["groups"].items():
        rows += _group_rows(group, facts, hidden, remarks, is_inner=name in inner)
    if scores.get(PERPLEXITY) is not None:
        rows += _perplexity_rows(scores[PERPLEXITY], task_notices(scores, PERPLEXITY), remarks)
    names = ("task", "shots", "metric", "score", "± stderr", "95 % interval", "items")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return Table(
        columns=tuple(
            text_column(name, column) for name, column in zip(names, columns, strict=True)
        ),
        notes=(*remarks.notes, *_table_notes(hidden)),
    )


def value_text(value: float | None, unit: str) -> str:
    """Return a score in the unit that people read it in."""
    if unit == "share":
        return percent(value)
    return number(value) if value is None or value < LARGE else f"{value:.3g}"


def interval_text(low: float | None, high: float | None, unit: str) -> str:
    """Return an interval, without its unit."""
    if low is None or high is None:
        return NULL
    scale = 100.0 if unit == "share" else 1.0
    ends = [number(scale * end) if end < LARGE else f"{end:.3g}" for end in (low, high)]
    return f"[{', '.join(ends)}]"


def _task_rows(task: Record, told: Sequence[str], remarks: Remarks) -> list[tuple[str, ...]]:
    rows = []
    names = _primary_first(task)
    for place, name in enumerate(names):
        metric = task["metrics"][name]
        label = task["task"]
        if place == 0:
            label += remarks.mark(*told, *_task_remarks(task))
        shots = str(task["num_shots"])
        rows.append(_row(label, shots, name, metric, remarks))
    return rows


def _group_rows(
    group: Record,
    facts: Record,
    hidden: Mapping[str, str],
    remarks: Remarks,
    *,
    is_inner: bool,
) -> list[tuple[str, ...]]:
    both = (("by_items", "items", "over questions"), ("by_tasks", "tasks", "over tasks"))
    # The group's own mean first; of a group within a group that one alone.
    ordered = sorted(both, key=lambda entry: entry[1] != group["weighting"])[: 1 if is_inner else 2]
    shots = {facts.get(task, {}).get("num_fewshot") for task in group["tasks"]}
    known = str(shots.pop()) if len(shots) == 1 and None not in shots else NULL
    told = [line for task in group["tasks"] if task in hidden for line in _told(facts, task)]
    if len(told) > 1:
        told = [f"{told[0]} (and {len(told) - 1} more of its tasks' data)"]
    rows = []
    for place, (key, _, how) in enumerate(ordered):
        label = group["group"]
        if place == 0:
            label += remarks.mark(*told, *_family_remarks(group, hidden))
        metric_name = f"{group['metric'] or 'primary'}, mean {how}"
        rows.append(_row(label, known, metric_name, group[key], remarks))
    return rows


def _perplexity_rows(
    record: Record, told: Sequence[str], remarks: Remarks
) -> list[tuple[str, ...]]:
    sentences = dict.fromkeys([record["protocol"], *told, record["reason"] or ""])
    label = PERPLEXITY + remarks.mark(*sentences)
    items = f"{record['num_windows']:,} windows"
    rows: list[tuple[str, ...]] = [
        (
            label,
            NULL,
            "per token",
            number(record["token"], 5),
            NULL,
            interval_text(record["low"], record["high"], PERPLEXITY),
            items,
        )
    ]
    for name, key in (("per word", "word"), ("per byte", "byte"), ("bits/byte", "bits_per_byte")):
        rows.append((PERPLEXITY, NULL, name, number(record[key], 5), NULL, NULL, items))
    return rows


def _row(label: str, shots: str, name: str, metric: Record, remarks: Remarks) -> tuple[str, ...]:
    unit = metric["unit"]
    stderr = metric["stderr"]
    scale = 100.0 if unit == "share" else 1.0
    return (
        label,
        shots,
        name,
        value_text(metric["value"], unit),
        NULL if stderr is None else f"± {number(scale * stderr)}",
        interval_text(metric["low"], metric["high"], unit),
        f"{metric['n']:,}" + remarks.mark(metric["note"]),
    )


def _task_remarks(task: Record) -> list[str]:
    told = list(task["flags"])
    if task["num_tied"] and not any("ties" in flag for flag in told):
        told.append(f"{counted(task['num_tied'], 'tie')}: the first choice was taken")
    return told


def _told(facts: Record, task: str) -> list[str]:
    deviations: list[str] = list(facts.get(task, {}).get("deviations", ()))
    return deviations


def _family_remarks(group: Record, hidden: Mapping[str, str]) -> list[str]:
    """What the remarks at tasks without a row of their own come to."""
    if group["tasks"][0] not in hidden:
        return []
    told = []
    if group["num_tied"]:
        told.append(f"{counted(group['num_tied'], 'tie')}: the first choice was taken")
    if group["num_truncated"]:
        told.append(
            f"{group['num_truncated']:,} of {counted(group['num_items'], 'prompt')} lost their "
            "beginning: longer than the model reads"
        )
    return told


def _table_notes(hidden: Mapping[str, str]) -> list[str]:
    counts: dict[str, int] = {}
    for group in hidden.values():
        counts[group] = counts.get(group, 0) + 1
    return [f"the {count:,} tasks of {group} are in table.csv" for group, count in counts.items()]


def _inner_groups(scores: Record) -> set[str]:
    groups = scores["groups"]
    return {
        member
        for group in groups.values()
        if _is_family(group)
        for member in group["members"]
        if member in groups
    }


def _primary_first(task: Record) -> list[str]:
    primary = task["primary_metric"]
    return sorted(task["metrics"], key=lambda name: name != primary)


def _is_family(group: Record) -> bool:
    """Whether the members differ in their subject alone, so that their mean says what they say."""
    first = str(group["tasks"][0]).partition("_")[0]
    return all(str(task).partition("_")[0] == first for task in group["tasks"])
