"""A baseline's answers on disk, from which its whole next-token distributions can be had again.

What is stored for each scored token is the final hidden state that predicts it: `H` numbers in the
type that the model computes in. The base's head turns it into all `V` logits again, so the KL
divergence from a stored baseline is exactly that from a running one. Top-k log-probabilities with
the mass of the rest are not enough: KL needs how a candidate spreads that rest over the other
V - k tokens, so it would only be a lower bound (by the log sum inequality), and lowest where models
differ most: in the tail. Nor is the size an argument: SmolLM2-135M takes 576 * 2 bytes = 1.2 kB a
token, where float32 log-probabilities of its vocabulary take 49,152 * 4 = 197 kB (171 times as
much); an 8-billion Llama 3 takes 8 kB against 513 kB.

One folder a model, named by a digest of all that an answer depends on (weights, quantization, type,
engine version, …), so that no model gets another's answers. In it, two files that only grow:
`rows.bin` with raw rows, and `index.jsonl` with a line a question that says where its rows are and
a digest over everything. Rows are written before their line, so a crash leaves at worst a torn line
or rows without one, and both are cut off at the next start. A record that fails its digest counts
as absent: it is computed again.

The folders together stay below a limit; the model that was used longest ago goes first, never one
that a process has open. `index.jsonl` is private to llmbench: an answer comes back as it was, with
the infinities that strict JSON lacks.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from llmbench.bench import strict_json
from llmbench.bench.accuracy import store_folders
from llmbench.bench.accuracy.store_folders import DEFAULT_LIMIT_BYTES
from llmbench.bench.errors import BenchError
from llmbench.engine.models.catalog import cache_root

logger = logging.getLogger(__name__)

FORMAT = 1
"""Part of a folder's name: records of another layout are never found."""
INDEX, ROWS, IDENTITY = "index.jsonl", "rows.bin", "identity.json"
ANSWER_BYTES = 2048
"""Room that is asked for a question besides its rows: most lines of the index are shorter."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PREFIX, _SUFFIX = b'{"digest": "%s", "entry": ', b"}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """What a baseline answered: `answer` as it was put in, and its hidden states.

    Attributes:
        hidden: [k, H] of each continuation, or None where the answer was stored without.
    """

    answer: dict[str, Any]
    hidden: tuple[Tensor, ...] | None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a line of the index is."""

    offset: int
    size: int
    has_hidden: bool


class BaselineStore:
    """The stored answers of one model; a context manager that holds the folder's lock."""

    def __init__(
        self,
        identity: Mapping[str, Any],
        *,
        root: Path | None = None,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ) -> None:
        """Open or make the folder of the model that `identity` (JSON types) describes.

        `root` holds the folders of all models; it is `eval` in the cache by default.

        Raises:
            BenchError: another process has it open, or the disk does not let it be written.
        """
        self.root = root if root is not None else cache_root() / "eval"
        self.limit_bytes = limit_bytes
        digest = strict_json.digest({"format": FORMAT, "identity": identity})
        self.folder = self.root / digest[:32]
        self._lock = store_folders.lock(self.folder)
        try:
            self._places, index_size, rows_size = self._read_index()
            self._index = self._open(INDEX, index_size)
            self._rows = self._open(ROWS, rows_size)
            text = strict_json.dumps({"format": FORMAT, "identity": identity}, indent=2)
            (self.folder / IDENTITY).write_text(text + "\n", encoding="utf-8")
            store_folders.mark_used(self.folder)
        except OSError as cause:
            self._lock.close()
            raise self._unwritable(cause) from cause
        except BaseException:
            self._lock.close()
            raise
        self._room_until = 0  # bytes of this folder up to which the limit has been looked after

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Size of this model's folder."""
        return os.fstat(self._index).st_size + os.fstat(self._rows).st_size

    def has(self, key: str, *, with_hidden: bool = False) -> bool:
        """Whether `key` is stored, `with_hidden`: and its hidden states too."""
        place = self._places.get(key)
        return place is not None and (place.has_hidden or not with_hidden)

    def get(self, key: str) -> StoredAnswer | None:
        """Return what was stored last under `key`; None if nothing, or if it has been damaged."""
        place = self._places.get(key)
        if place is None:
            return None
        try:
            return self._read(key, place)
        except (ValueError, KeyError, TypeError, OSError) as cause:
            logger.warning(
                "%s: the stored answer %s is damaged (%s); it will be computed again",
                self.folder,
                key,
                cause,
            )
            del self._places[key]
            return None

    def put(
        self, key: str, answer: Mapping[str, Any], hidden: Sequence[Tensor] | None = None
    ) -> None:
        """Store an answer and the hidden states [k, H] of its continuations; a later one counts.

        Continuations with the same rows, such as the one-token choices of an item, share them.

        Raises:
            BenchError: the limit or the disk has no room; what was stored before stays whole.
        """
        start = os.fstat(self._rows).st_size
        offsets: dict[bytes, int] = {}
        extents: list[list[int]] = []
        blob = bytearray()
        for rows in hidden or ():
            raw = _to_bytes(rows)
            if raw not in offsets:
                offsets[raw] = start + len(blob)
                blob += raw
            extents.append([offsets[raw], len(rows)])
        entry: dict[str, Any] = {"key": key, "answer": dict(answer), "rows": None}
        if hidden is not None:
            shapes = {(str(rows.dtype).removeprefix("torch."), rows.shape[1]) for rows in hidden}
            if len(shapes) > 1:
                raise BenchError(f"expected hidden states of one type and size, found {shapes}")
            dtype, size = shapes.pop() if shapes else ("float32", 0)
            entry["rows"] = {"dtype": dtype, "hidden_size": size, "extents": extents}
        line = _line(json.dumps(entry, ensure_ascii=False).encode(errors="surrogatepass"), blob)
        self._look_after_limit(len(blob) + len(line))
        index_size = os.fstat(self._index).st_size
        try:
            _append(self._rows, blob)
            _append(self._index, line)
        except OSError as cause:
            with contextlib.suppress(OSError):
                os.ftruncate(self._index, index_size)
                os.ftruncate(self._rows, start)
            raise self._unwritable(cause) from cause
        self._places[key] = _Place(index_size, len(line), hidden is not None)

    def require_room(
        self, *, num_tokens: int, hidden_size: int, dtype: str, num_answers: int = 0
    ) -> None:
        """Make room for what a run will add, or refuse the run before it computes anything.

        `num_tokens` and `num_answers` are those that are not stored yet. Drops other models'
        folders, those used longest ago first.

        Raises:
            BenchError: the limit or the disk is too small.
        """
        if dtype not in DTYPES:
            raise BenchError(f"expected a type among {', '.join(DTYPES)}, found {dtype}")
        needed = num_tokens * hidden_size * DTYPES[dtype].itemsize + num_answers * ANSWER_BYTES
        self._make_room(needed)
        free = store_folders.free_bytes(self.folder)
        if needed > free:
            error = BenchError(
                f"the baseline's answers need {needed:,} bytes ({num_tokens:,} tokens of "
                f"{hidden_size} {dtype} numbers), found {free:,} free on the disk of {self.root}"
            )
            error.add_note("free space, set LLMBENCH_CACHE to another disk, or lower --limit")
            raise error

    def close(self) -> None:
        """Put everything on the disk and release the folder."""
        if self._lock.closed:
            return
        try:
            for file in (self._rows, self._index):  # a line never gets there before its rows
                os.fsync(file)
            store_folders.mark_used(self.folder)
        except OSError as cause:
            raise self._unwritable(cause) from cause
        finally:
            os.close(self._rows)
            os.close(self._index)
            self._lock.close()  # closing the file gives the lock up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_after_limit(self, num_bytes: int) -> None:
        """Keep the limit while records come; other folders are looked at once a 64th of it."""
        size = self.num_bytes + num_bytes
        if size > self._room_until:
            others = self._make_room(num_bytes, ahead=self.limit_bytes // 64)
            self._room_until = min(size + self.limit_bytes // 64, self.limit_bytes - others)

    def _make_room(self, needed: int, *, ahead: int = 0) -> int:
        """Drop other models for `needed` bytes (and some `ahead`); return what the others take."""
        own = self.num_bytes
        others = store_folders.drop_least_recent(
            self.folder, self.limit_bytes - own - needed - ahead
        )
        if own + needed + others <= self.limit_bytes:
            return others
        error = BenchError(
            f"the baseline's answers need {needed:,} bytes more, found {own:,} of this model and "
            f"{others:,} of models in use in {self.root}, whose limit is {self.limit_bytes:,} bytes"
        )
        error.add_note(
            f"raise the limit, lower --limit, or delete {self.folder}: what it holds is computed "
            "again when it is needed"
        )
        raise error

    def _read_index(self) -> tuple[dict[str, _Place], int, int]:
        """Return places by key, and the sizes of the whole parts of index and rows."""
        try:
            content = (self.folder / INDEX).read_bytes()
        except FileNotFoundError:
            return {}, 0, 0
        good = content.rfind(b"\n") + 1
        if torn := len(content) - good:
            logger.warning("%s ends in a torn line of %d bytes", self.folder / INDEX, torn)
        places: dict[str, _Place] = {}
        offset = rows_end = num_bad = 0
        for line in content[:good].splitlines(keepends=True):
            try:
                entry = json.loads(line)["entry"]
                rows = entry["rows"]
                if rows is not None:
                    row_bytes = rows["hidden_size"] * DTYPES[rows["dtype"]].itemsize
                    ends = (begin + count * row_bytes for begin, count in rows["extents"])
                    rows_end = max(rows_end, *ends, 0)
                places[entry["key"]] = _Place(offset, len(line), rows is not None)
            except (ValueError, KeyError, TypeError):
                num_bad += 1
            offset += len(line)
        if num_bad:
            logger.warning("%s: %d damaged lines do not count", self.folder / INDEX, num_bad)
        try:
            found = (self.folder / ROWS).stat().st_size
        except FileNotFoundError:
            found = 0
        # With a damaged line, rows behind the last known one may be its own: they are kept.
        return places, good, found if num_bad else min(found, rows_end)

    def _read(self, key: str, place: _Place) -> StoredAnswer:
        line = os.pread(self._index, place.size, place.offset)
        entry = json.loads(line)["entry"]
        rows = entry["rows"]
        hidden = None
        blobs: dict[int, bytes] = {}  # in the order in which they were written
        if rows is not None:
            dtype, width = DTYPES[rows["dtype"]], rows["hidden_size"]
            parts = []
            end = os.fstat(self._rows).st_size
            for offset, count in rows["extents"]:
                size = count * width * dtype.itemsize
                if not 0 <= offset <= offset + size <= end:
                    raise ValueError("its rows are not there")
                raw = os.pread(self._rows, size, offset)
                parts.append(_from_bytes(raw, dtype, (count, width)))
                if raw:
                    blobs[offset] = raw
            hidden = tuple(parts)
        text = line[len(_PREFIX % bytes(32)) : -len(_SUFFIX)]
        if entry["key"] != key or _line(text, b"".join(blobs.values())) != line:
            raise ValueError("its digest does not fit")
        return StoredAnswer(answer=entry["answer"], hidden=hidden)

    def _open(self, name: str, size: int) -> int:
        """Open a file for appending behind `size` bytes; what follows them is cut off."""
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(file, size)
        return file

    def _unwritable(self, cause: OSError) -> BenchError:
        error = BenchError(f"cannot write to {self.folder}: {cause.strerror or cause}")
        error.add_note("free space, or set LLMBENCH_CACHE to another disk")
        return error


def _line(text: bytes, blob: bytes | bytearray) -> bytes:
    """Return the line of an entry's JSON, with a digest over it and its rows."""
    digest = hashlib.blake2b(text, digest_size=16)
    digest.update(blob)
    return _PREFIX % digest.hexdigest().encode() + text + _SUFFIX


def _append(file: int, content: bytes | bytearray) -> None:
    view = memoryview(content)
    while view:
        written = os.write(file, view)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]


def _to_bytes(rows: Tensor) -> bytes:
    if rows.dtype not in DTYPES.values() or rows.ndim != 2:
        raise BenchError(
            f"expected hidden states [k, H] of {', '.join(DTYPES)}, found {list(rows.shape)} of "
            f"{str(rows.dtype).removeprefix('torch.')}"
        )
    return rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _from_bytes(raw: bytes, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
