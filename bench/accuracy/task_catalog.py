"""The tasks there are, and what a list of names stands for.

A name is a task, a group (tasks whose mean is a score), or a tag (tasks that go together). The
stock ones are the files in tasks/; a user adds a folder or a file, and states `override: true` in
a file that is to replace a stock one.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from llmbench.bench.accuracy.task import Task, TaskGroup, TaskSelection
from llmbench.bench.accuracy.task_parse import parse_group, parse_task
from llmbench.bench.accuracy.task_yaml import STOCK_FOLDER, Definition, read_definitions
from llmbench.bench.errors import BenchConfigError

_OVERRIDABLE = ("num_fewshot", "fewshot_split")  # what a group may set for its members


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskListing:
    """A line of the list of tasks."""

    name: str
    kind: Literal["task", "group"]
    num_fewshot: int | None  # None: as each member has it
    summary: str
    family: str | None  # tasks made from one file share it, as "mmlu_<subject>"


def load_tasks(names: Sequence[str], *, include: Sequence[Path] = ()) -> TaskSelection:
    """Return the tasks and groups that the names stand for, in order, each once.

    Raises:
        BenchConfigError: no such name, a broken task file, or one task with two meanings.
    """
    if not names:
        raise BenchConfigError("no task is named")
    catalog = _catalog(include)
    picked = _Picked()
    for name in names:
        _pick(catalog, name, {}, picked, ())
    return TaskSelection(tasks=tuple(picked.tasks.values()), groups=tuple(picked.groups.values()))


def list_tasks(include: Sequence[Path] = ()) -> tuple[TaskListing, ...]:
    """Return groups, then tasks, each by name."""
    lines = []
    for name, definition in _catalog(include).items():
        is_group = "group" in definition.keys
        lines.append(
            TaskListing(
                name=name,
                kind="group" if is_group else "task",
                num_fewshot=None if is_group else parse_task(definition).num_fewshot or 0,
                summary=definition.keys.get("summary", ""),
                family=definition.family,
            )
        )
    return tuple(sorted(lines, key=lambda line: (line.kind, line.name)))


@dataclass(slots=True)
class _Picked:
    tasks: dict[str, Task] = field(default_factory=dict)
    groups: dict[str, TaskGroup] = field(default_factory=dict)


def _pick(
    catalog: Mapping[str, Definition],
    name: str,
    settings: Mapping[str, Any],
    picked: _Picked,
    holders: tuple[str, ...],
) -> list[str]:
    """Add what a name stands for, and return the members that it makes in a group."""
    if name in holders:
        raise BenchConfigError(f"the group {name} holds itself ({' > '.join((*holders, name))})")
    definition = catalog.get(name)
    if definition is None:
        tagged = [found for found, each in catalog.items() if name in _tags(each)]
        if not tagged:
            raise _unknown(catalog, name, holders)
        return [item for found in tagged for item in _pick(catalog, found, settings, picked, ())]
    if "group" not in definition.keys:
        _add_task(_changed(definition, settings), picked)
        return [name]
    members: list[str] = []
    for entry in definition.keys["task"]:
        member, more = _entry(definition, entry)
        members += _pick(catalog, member, {**settings, **more}, picked, (*holders, name))
    group = parse_group(definition, members)
    if group is None:
        return members
    picked.groups[name] = group
    return [name]


def _entry(definition: Definition, entry: Any) -> tuple[str, dict[str, Any]]:
    """Split an entry of a group into the name and what it sets for it."""
    if isinstance(entry, str):
        return entry, {}
    if not isinstance(entry, dict) or not isinstance(entry.get("task"), str):
        raise definition.refuse("task", f"a member is a name or a mapping with task: {entry!r}")
    settings = {key: value for key, value in entry.items() if key != "task"}
    if unknown := set(settings) - set(_OVERRIDABLE):
        raise definition.refuse(
            "task", f"a group may set {', '.join(_OVERRIDABLE)}, found {', '.join(sorted(unknown))}"
        )
    return entry["task"], settings


def _changed(definition: Definition, settings: Mapping[str, Any]) -> Definition:
    keys = {**definition.keys, **settings}
    return Definition(
        path=definition.path, keys=keys, lines=definition.lines, family=definition.family
    )


def _add_task(definition: Definition, picked: _Picked) -> None:
    task = parse_task(definition)
    other = picked.tasks.setdefault(task.name, task)
    if other != task:
        differing = [
            key for key in _OVERRIDABLE if other.definition.get(key) != task.definition.get(key)
        ]
        error = BenchConfigError(
            f"the task {task.name} is asked for twice with different {' and '.join(differing)}"
        )
        error.add_note("evaluate one of the two groups at a time")
        raise error


def _tags(definition: Definition) -> list[str]:
    tags = definition.keys.get("tag", [])
    return [tags] if isinstance(tags, str) else tags


def _unknown(
    catalog: Mapping[str, Definition], name: str, holders: tuple[str, ...]
) -> BenchConfigError:
    where = f" (in the group {holders[-1]})" if holders else ""
    error = BenchConfigError(f"unknown task {name!r}{where}")
    known = [*catalog, *sorted({tag for each in catalog.values() for tag in _tags(each)})]
    close = difflib.get_close_matches(name, known, n=3)
    error.add_note(
        f"did you mean {', '.join(close)}?" if close else "--list-tasks names those there are"
    )
    return error


def _catalog(include: Sequence[Path]) -> dict[str, Definition]:
    """Return all definitions by name: the stock ones, and the user's over them."""
    catalog = dict(_stock())
    theirs: dict[str, Definition] = {}
    for path in include:
        for definition in _read_all(path):
            name = _name(definition)
            before = theirs.get(name) or catalog.get(name)
            if name in theirs or (name in catalog and not definition.keys.get("override", False)):
                assert before is not None
                error = definition.refuse(
                    "group" if "group" in definition.keys else "task",
                    f"{name} is the name of {before.path} already",
                )
                error.add_note("choose another name, or write override: true to replace it")
                raise error
            theirs[name] = definition
    return catalog | theirs


@lru_cache(maxsize=1)
def _stock() -> Mapping[str, Definition]:
    found = _read_files(sorted(STOCK_FOLDER.glob("*.yaml")))
    return {_name(definition): definition for definition in found}


def _read_all(path: Path) -> list[Definition]:
    if path.is_dir():
        files = sorted(file for end in ("yaml", "yml") for file in path.rglob(f"*.{end}"))
        found = _read_files(files)
        if not found:
            raise BenchConfigError(f"no task file (*.yaml with the key task or group) in {path}")
        return found
    found = _read_files([path])
    if not found:
        raise BenchConfigError(f"{path} names no task: the key task or group is missing")
    return found


def _read_files(files: Iterable[Path]) -> list[Definition]:
    return [definition for file in files for definition in read_definitions(file.resolve())]


def _name(definition: Definition) -> str:
    return str(definition.keys.get("group", definition.keys.get("task")))
