"""Item records: what a model answered to each question, a JSON line each, written as it comes.

An item is one document of a task. Its `key` is a digest of the model and of the very tokens that
it was asked, so a record with the right key is the right answer, whoever wrote it, and a repeated
run asks only what has no record. A line that a crash tore off is dropped on the next start. At
the end the lines are put in order of the documents, so a run that was killed and repeated leaves
the same file as one that was not.
"""

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from llmbench.bench import strict_json
from llmbench.bench.errors import ResultsError

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
SYNC_SECONDS = 1.0
"""Longest work that a power failure may cost; a killed process loses nothing written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemDivergence:
    """How a candidate's distributions differ from the base's, one value a scored token.

    Tokens of all continuations one after another; log-probabilities and KL in nats.

    Attributes:
        base_key: Key of the base's answer that this was measured against.
        kl: KL(base || candidate) over the whole vocabulary.
        delta_p: Probability of the given token, candidate's minus base's.
        same_top: Whether both find the same token likeliest.
    """

    base_key: str
    kl: tuple[float, ...]
    delta_p: tuple[float, ...]
    same_top: tuple[bool, ...]
    base_logprob: tuple[float, ...]
    logprob: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRecord:
    """One model's answer to one document of a task, and its scores.

    Attributes:
        key: Digest of the model and of everything that it was asked.
        gold: Index of the right choice; indices of all true ones; or the target text, or texts
            of which any is right.
        choices: Texts of the choices, without the delimiter before them.
        loglikelihoods: Of each continuation, nats; one sum for a whole text. NaN where the model
            gave none. None for generated answers.
        is_greedy: Whether each continuation is what greedy decoding would have said.
        num_tokens: Scored tokens of each continuation.
        num_truncated_tokens: Tokens cut off the contexts for length.
        text_size: (words, bytes) of the original text, where a whole text is scored.
        filtered: The response after each filter.
        metrics: Values of this item; the task's are their means or sums.
        pick: The choice taken, or the answer extracted.
        is_tied: Whether another choice is exactly as likely.
        invalid: Why the item counts as wrong without a comparison, where it does.
    """

    task: str
    doc_id: int
    key: str
    doc_hash: str
    prompt_hash: str
    target_hash: str
    fewshot_ids: tuple[int, ...] = ()
    gold: int | tuple[int, ...] | str | tuple[str, ...]
    choices: tuple[str, ...] = ()
    loglikelihoods: tuple[float, ...] | None = None
    is_greedy: tuple[bool, ...] = ()
    num_tokens: tuple[int, ...] = ()
    num_truncated_tokens: int = 0
    text_size: tuple[int, int] | None = None
    response: str | None = None
    filtered: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    pick: int | str | None = None
    is_tied: bool = False
    invalid: str | None = None
    divergence: ItemDivergence | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON types; NaN is null, infinity the text "inf" or "-inf"."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        if self.divergence is not None:
            values["divergence"] = _finite(dataclasses.asdict(self.divergence))
        for name in ("loglikelihoods", "metrics"):
            values[name] = _finite(values[name])
        plain: dict[str, Any] = strict_json.strict({"schema_version": SCHEMA_VERSION} | values)
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], where: str = "an item record") -> Self:
        """Read what `to_json` wrote; ResultsError on anything else."""
        version = plain.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ResultsError(
                f"expected schema_version {SCHEMA_VERSION}, found {version} in {where}"
            )
        names = {name.name for name in dataclasses.fields(cls)}
        if unlike := names ^ (plain.keys() - {"schema_version"}):
            raise ResultsError(
                f"expected an item record in {where}; missing or unknown: "
                + ", ".join(sorted(unlike))
            )
        values = {name: _tuples(plain[name]) for name in names}
        values["loglikelihoods"] = _floats(plain["loglikelihoods"])
        values["metrics"] = {name: _float(value) for name, value in plain["metrics"].items()}
        if (divergence := plain["divergence"]) is not None:
            values["divergence"] = ItemDivergence(
                base_key=divergence["base_key"],
                same_top=tuple(divergence["same_top"]),
                **{
                    name: _floats(divergence[name]) or ()
                    for name in ("kl", "delta_p", "base_logprob", "logprob")
                },
            )
        return cls(**values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _floats(values: list[float | str | None] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(_float, values))


def _float(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _finite(value: Any) -> Any:
    """Return a copy with infinities as text, which JSON has no number for."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(float(value)) if isinstance(value, float) and math.isinf(value) else value


def items_path(folder: Path, task: str) -> Path:
    """Where a task's items belong in a results folder."""
    return folder / f"items-{task}.jsonl"


def read_items(path: Path) -> list[ItemRecord]:
    """Read the items of a file in order of documents; also while a run still writes to it.

    A later record of a document replaces an earlier one. No file is no items.
    """
    records, _ = _read(path)
    return _ordered(records)


def id_ranges(doc_ids: Iterable[int]) -> str:
    """Write ascending numbers as people do: "0-99,103"."""
    runs: list[list[int]] = []
    for doc_id in doc_ids:
        if runs and doc_id == runs[-1][1] + 1:
            runs[-1][1] = doc_id
        else:
            runs.append([doc_id, doc_id])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def read_id_ranges(text: str) -> set[int]:
    """Read what `id_ranges` wrote."""
    ids: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ids.update(range(int(first), int(last or first) + 1))
    return ids


class ItemFile:
    """The items of one task in a run in progress; a context manager."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Open for appending; a torn last line is cut off."""
        self.path = path
        self._clock = clock
        records, good_bytes = _read(path)
        self._items = {record.doc_id: record for record in records}
        try:
            self._file = path.open("ab", buffering=0)
            self._file.truncate(good_bytes)
            self._file.seek(good_bytes)
        except OSError as cause:
            raise _unwritable(path, cause) from cause
        self._synced_s = clock()
        self._is_synced = True

    @property
    def items(self) -> Mapping[int, ItemRecord]:
        """The last record of each document, by its number."""
        return self._items

    def append(self, record: ItemRecord) -> None:
        """Write a record; it survives the process at once, the machine within a second."""
        line = strict_json.dumps(record.to_json()).encode() + b"\n"
        size = self._file.tell()
        try:
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")
            self._is_synced = False
            if self._clock() - self._synced_s >= SYNC_SECONDS:
                self.sync()
        except OSError as cause:
            with contextlib.suppress(OSError):  # leave no half line for the next record to join
                self._file.truncate(size)
            raise _unwritable(self.path, cause) from cause
        self._items[record.doc_id] = record

    def sync(self) -> None:
        """Put on the disk what is not there yet."""
        if not self._is_synced:
            os.fsync(self._file.fileno())
            self._is_synced = True
        self._synced_s = self._clock()

    def close(self, *, in_order: bool = False) -> None:
        """Close the file; `in_order` first rewrites it whole, in order of the documents."""
        self.sync()
        self._file.close()
        if in_order:
            _write(self.path, _ordered(self._items.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self.close()


def _ordered(records: Iterable[ItemRecord]) -> list[ItemRecord]:
    last = {record.doc_id: record for record in records}
    return [last[doc_id] for doc_id in sorted(last)]


def _read(path: Path) -> tuple[list[ItemRecord], int]:
    """Return the records, and the bytes up to the end of the last whole line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as cause:
        raise ResultsError(f"cannot read {path}: {cause.strerror}") from cause
    good_bytes = content.rfind(b"\n") + 1
    if torn := len(content) - good_bytes:
        logger.warning("%s ends in a torn line of %d bytes; its item is asked again", path, torn)
    records = []
    for number, line in enumerate(content[:good_bytes].split(b"\n")[:-1], start=1):
        where = f"line {number} of {path}"
        try:
            plain = strict_json.loads(line)
        except ValueError as cause:
            error = ResultsError(f"expected strict JSON in {where}: {cause}")
            error.add_note("the file was changed or damaged; remove the line to ask its item again")
            raise error from cause
        if not isinstance(plain, dict):
            raise ResultsError(f"expected a JSON object in {where}, found {type(plain).__name__}")
        records.append(ItemRecord.from_json(plain, where))
    return records, good_bytes


def _write(path: Path, records: Iterable[ItemRecord]) -> None:
    """Write a file whole; it takes the old one's place or leaves it."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for record in records:
                file.write(strict_json.dumps(record.to_json()).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as cause:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _unwritable(path, cause) from cause


def _unwritable(path: Path, cause: OSError) -> ResultsError:
    error = ResultsError(f"cannot write to {path}: {cause.strerror or cause}")
    error.add_note("choose another folder with --output")
    return error
