"""The raw event log of a load: what happened to each request, and when.

Recorded once while the load runs; every metric is a pure function of it, so the same run can be
reprinted under other definitions. One row an event, on one monotonic clock (`time.perf_counter`,
which all processes of a machine share):

    scheduled   when the request was due: start + its arrival offset
    admitted    when the concurrency cap let it go: at once, or when the slot it took became free.
                admitted - scheduled is time spent queueing in the client, never the target's
    sent        just before it was handed to the transport; sent - admitted is the generator's own
                lateness. Latencies count from here
    token       `num_tokens` >= 1 output tokens arrived together; t_s is the generator's receive
                time, emit_s the time at which the in-process engine gave them out
    end         finished; detail holds the target's own counts (`EndDetail`)
    error       failed or refused; detail {"reason": …}
    abort       given up by the client; detail {"reason": …}

Each request that was sent has exactly one of end, error and abort, as its last event. In a closed
loop (all arrivals at once under a concurrency cap) a request is due when a slot is free for it,
so scheduled = admitted.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

if TYPE_CHECKING:
    import pyarrow as pa

EventKind = Literal["scheduled", "admitted", "sent", "token", "end", "error", "abort"]

FINAL_KINDS: frozenset[EventKind] = frozenset({"end", "error", "abort"})


class EndDetail(TypedDict):
    """Detail of an `end` event: what the target says of the finished request."""

    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class Event(NamedTuple):
    """One row of the log."""

    request_index: int
    kind: EventKind
    t_s: float
    num_tokens: int = 0
    detail: str | None = None
    """JSON object, or None."""
    emit_s: float | None = None
    """When the engine gave the tokens out, on the same clock; None where it cannot say."""


class EventLog:
    """Events in the order in which they were recorded; appending one costs about 1 µs."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def append(
        self,
        request_index: int,
        kind: EventKind,
        t_s: float,
        num_tokens: int = 0,
        detail: str | None = None,
        emit_s: float | None = None,
    ) -> None:
        """Record one event."""
        self._events.append(Event(request_index, kind, t_s, num_tokens, detail, emit_s))

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def write_parquet(self, path: Path) -> None:
        """Write all events; the file appears whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = list(zip(*self._events, strict=True)) or [()] * len(Event._fields)
        table = pa.table(dict(zip(Event._fields, columns, strict=True)), schema=_schema())
        partial = path.with_name(path.name + ".partial")
        pq.write_table(table, partial, compression="zstd")
        partial.replace(path)

    @classmethod
    def read_parquet(cls, path: Path) -> "EventLog":
        """Read a log back, in the order in which it was recorded."""
        import pyarrow.parquet as pq

        table = pq.read_table(path, schema=_schema())
        log = cls()
        columns = (table.column(name).to_pylist() for name in Event._fields)
        log._events = [Event(*row) for row in zip(*columns, strict=True)]
        return log


def reason_detail(reason: str) -> str:
    """Detail of an `error` or `abort` event."""
    return json.dumps({"reason": reason}, ensure_ascii=False)


def end_detail(detail: EndDetail) -> str:
    """Detail of an `end` event."""
    return json.dumps(detail)


def _schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema(
        [
            ("request_index", pa.int32()),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("t_s", pa.float64()),
            ("num_tokens", pa.int32()),
            ("detail", pa.string()),
            ("emit_s", pa.float64()),
        ]
    )
