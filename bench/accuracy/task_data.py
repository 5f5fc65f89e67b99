"""The rows of a task: what is asked, what shots are drawn from, and how both differ from the hub's.

With a data folder nothing is ever fetched. A folder may lack a split or hold a part of one; what
that changes is found by looking (counts against the published ones, a missing split, another mix)
and said in plain sentences, which stand in every result. Where there is no split to draw shots
from, they come from the questions themselves, never the one that is asked.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbench.bench import strict_json
from llmbench.bench.accuracy.data_files import read_data_file
from llmbench.bench.accuracy.task import Task
from llmbench.bench.errors import BenchError, WorkloadError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """What is asked, and what shots are drawn from."""

    task: Task
    docs: Sequence[Row]  # the evaluated split, whole
    pool: Sequence[Row] | None  # None: the task takes no shots
    pool_split: str | None
    deviations: tuple[str, ...]  # from the published data set, a sentence each
    sha256s: Mapping[str, str]  # split → hash of its files, or of its rows if from the hub
    source: str

    @property
    def must_exclude_doc(self) -> bool:
        """Whether a question has to be taken out of its own shots.

        As in the harness where the named split of shots is the test split, which includes that
        neither is named; and always where the questions themselves are the pool.
        """
        return self.task.fewshot_split == self.task.test_split or self.pool is self.docs


def load_task_data(task: Task, data_dir: Path | None, *, needs_pool: bool = True) -> TaskData:
    """Return the rows of a task, from files if there are any to read, else from the hub.

    `needs_pool` is false where no shots will be drawn.

    Raises:
        WorkloadError: a file or split that is missing, broken or empty.
        BenchError: the hub cannot be reached.
    """
    is_local = task.is_local or data_dir is not None
    needs_pool = needs_pool and not task.has_fixed_shots
    if is_local:
        folder = task.path.parent if task.is_local or data_dir is None else data_dir
        reader: _Local | _Hub = _Local(task, folder)
    else:
        reader = _Hub(task)
    docs = reader.rows(task.eval_split)
    deviations = _size_deviations(task, task.eval_split, docs, "questions", reader.source)
    deviations += _mix_deviations(task, docs)
    pool, pool_split = None, None
    if needs_pool:
        pool_split = next((name for name in task.shot_splits if reader.has(name)), task.eval_split)
        pool = docs if pool_split == task.eval_split else reader.rows(pool_split)
        wanted = task.shot_splits[0]
        where = "the questions themselves" if pool is docs else f"the {pool_split} split"
        if pool_split != wanted:
            deviations.append(f"no {wanted} split in {reader.source}: shots are drawn from {where}")
        elif pool is docs:
            deviations.append(f"{task.name} names no other split: shots are drawn from {where}")
        else:
            deviations += _size_deviations(task, pool_split, pool, "shots", reader.source)
    return TaskData(
        task=task,
        docs=docs,
        pool=pool,
        pool_split=pool_split,
        deviations=tuple(deviations),
        sha256s=dict(reader.sha256s),
        source=reader.source,
    )


class _Local:
    """Splits in files below a folder."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._task, self._folder = task, folder
        self.source = str(folder)
        self.sha256s: dict[str, str] = {}
        if not task.local_files:
            error = WorkloadError(f"{task.name} names no local files, so {folder} cannot serve it")
            error.add_note(f"add local_files to {task.path}, or leave the data folder out")
            raise error
        if not folder.is_dir():
            raise WorkloadError(f"no data folder {folder}")

    def has(self, split: str) -> bool:
        return split in self._task.local_files

    def rows(self, split: str) -> list[Row]:
        task = self._task
        if not self.has(split):
            raise WorkloadError(
                f"{task.name} is asked on the split {split}, for which it names no local file; "
                f"it has {', '.join(task.local_files)}"
            )
        paths = [self._folder / name for name in task.local_files[split]]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            error = WorkloadError(
                f"no data file {missing[0]}, the {split} split of the task {task.name}"
            )
            error.add_note(f"its layout is that of local_files in {task.path.name}")
            raise error
        files = [read_data_file(path) for path in paths]
        hashes = [file.sha256 for file in files]
        self.sha256s[split] = (
            hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
        )
        rows = [row for file in files for row in file.rows]
        for column, value in task.local_filter.items():
            bare = next((index for index, row in enumerate(rows) if column not in row), None)
            if bare is not None:
                raise WorkloadError(
                    f"row {bare} of {paths[0]} lacks the column {column}, by which {task.name} "
                    f"picks its rows"
                )
            rows = [row for row in rows if row[column] == value]
        if not rows:
            wanted = ", ".join(f"{key} = {value}" for key, value in task.local_filter.items())
            raise WorkloadError(f"no row with {wanted} in {', '.join(map(str, paths))}")
        return rows


class _Hub:
    """Splits of a data set on the hub, or in its local cache."""

    def __init__(self, task: Task) -> None:
        self._task = task
        name = f" ({task.dataset_name})" if task.dataset_name else ""
        self.source = f"{task.dataset_path}{name} on the hub"
        self.sha256s: dict[str, str] = {}

    def has(self, split: str) -> bool:
        return True  # which splits there are is part of the task

    def rows(self, split: str) -> list[Row]:
        import datasets

        task = self._task
        try:
            loaded = datasets.load_dataset(task.dataset_path, task.dataset_name, split=split)
            rows = [dict(row) for row in loaded]
        except Exception as error:  # a different class for each way in which a hub can fail
            failure = BenchError(
                f"cannot load the split {split} of {self.source} for {task.name}: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            failure.add_note("give a folder with the data files: --data-dir DIR")
            raise failure from error
        if not rows:
            raise WorkloadError(f"the split {split} of {self.source} is empty")
        hasher = hashlib.sha256()
        for row in rows:
            hasher.update(strict_json.dumps(row).encode())
        self.sha256s[split] = hasher.hexdigest()
        return rows


def _size_deviations(
    task: Task, split: str, rows: Sequence[Row], kind: str, source: str
) -> list[str]:
    official = task.official_sizes.get(split)
    if official is None or official == len(rows):
        return []
    effect = {
        "questions": "scores do not compare with published ones",
        "shots": "other shots are drawn than with the published set",
    }[kind]
    return [
        f"the {split} split in {source} has {len(rows):,} rows, the published one has "
        f"{official:,}: {effect}"
    ]


def _mix_deviations(task: Task, docs: Sequence[Row]) -> list[str]:
    """Say where a part of a split is no fair part: its kinds of rows have other shares."""
    mix = task.official_mix
    if mix is None or mix["split"] != task.eval_split:
        return []
    counts: Mapping[str, int] = mix["counts"]
    found = {
        kind: sum(str(doc.get(mix["field"], "")).startswith(kind) for doc in docs)
        for kind in counts
    }
    total, official_total = sum(found.values()), sum(counts.values())
    tolerance = 0.02  # of the rows; a random thousand of ten thousand stays within it mostly
    is_alike = total > 0 and all(
        abs(found[kind] / total - counts[kind] / official_total) <= tolerance for kind in counts
    )
    if is_alike:
        return []

    def shares(table: Mapping[str, int]) -> str:
        return ", ".join(f"{kind} {count:,}" for kind, count in table.items())

    return [
        f"the {task.eval_split} split is mixed otherwise than the published one: "
        f"{shares(found)} by {mix['field']} instead of {shares(counts)}"
    ]
