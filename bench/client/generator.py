"""The load generator: sends each request when it is due and records what comes back.

Sends follow an absolute schedule: request i is due at start + offset i, whatever happened to
those before it. A schedule of relative sleeps drifts, because every send and every late wake-up
is added to all that follow. Between sends the one thread waits on the target with the time to the
next send as its timeout, so answers are stamped on arrival and never delay a send; the last
fraction of a millisecond is spent polling, because an operating system wakes sleepers late.

Loads: *open loop*, requests come when they come (finite rate), optionally with a cap on those in
flight, behind which the client queues visibly; *closed loop*, a fixed number in flight, the next
one sent when one ends (all offsets 0 and a cap); *all at once* (all offsets 0, no cap).
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from llmbench.bench.client.events import EventLog, end_detail, reason_detail
from llmbench.bench.errors import TargetError

if TYPE_CHECKING:
    from llmbench.bench.workloads.workload import RequestSpec

Clock = Callable[[], float]

POLL_WINDOW_S = 150e-6
"""Poll instead of sleeping this long before a send: the kernel's timer slack of 50 µs plus the
time in which a sleeper is woken and scheduled."""

START_DELAY_S = 0.02
"""Between the start of a run and its first arrival, so that the first send is no special case."""

TICK_S = 0.25
"""Between looks at progress, cancellation and the time limit."""

RECENT = 256
"""The progress medians cover this many latest requests, so that they cost no send its time."""


class TargetEvent(NamedTuple):
    """What a target says of one request at one time."""

    request_index: int
    t_s: float
    """When it reached the generator."""
    num_new_tokens: int
    emit_s: float | None
    """When the target gave it out, on the generator's clock; None where it cannot say."""
    finish_reason: str | None
    """None while more is to come."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error: str | None


class Target(Protocol):
    """Something that answers requests."""

    def begin(self, requests: Sequence["RequestSpec"]) -> None:
        """Prepare for a run of these requests, so that `send` costs little."""

    def send(self, request_index: int, spec: "RequestSpec") -> None:
        """Hand over one request."""

    def poll(self, timeout_s: float) -> Sequence[TargetEvent]:
        """Return what arrived, as soon as anything has; TargetError where the target is gone."""

    def abort(self, request_index: int) -> None:
        """Give up one request; nothing that still arrives for it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How a run stands; the medians are over recent requests and only for the eye."""

    num_total: int
    num_sent: int
    num_completed: int
    num_failed: int
    num_output_tokens: int
    elapsed_s: float
    ttft_p50_s: float | None
    tpot_p50_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """How a run ended; times on the generator's clock."""

    ended: Literal["complete", "cancelled", "time_limit", "target_failed"]
    reason: str | None
    start_s: float
    """The origin of the schedule."""
    end_s: float
    progress: LoadProgress


def run_load(
    target: Target,
    requests: Sequence["RequestSpec"],
    arrival_offsets: Sequence[float],
    events: EventLog,
    *,
    max_concurrency: int | None = None,
    time_limit_s: float | None = None,
    clock: Clock = time.perf_counter,
    on_progress: Callable[[LoadProgress], None] | None = None,
    is_cancelled: Callable[[], bool] | None = None,
) -> LoadSummary:
    """Send all requests, wait for all answers, and record every event.

    Offsets are seconds from the start and do not decrease. Whatever ends the run early, requests
    that were due by then have an `abort` or `error` event; those due later have no event at all.
    """
    if len(requests) != len(arrival_offsets):
        raise ValueError(f"{len(requests)} requests, but {len(arrival_offsets)} arrival offsets")
    target.begin(requests)
    with _garbage_collection_off():
        load = _Load(target, requests, arrival_offsets, events, max_concurrency, clock)
        return load.run(time_limit_s, on_progress, is_cancelled)


class _Load:
    """State of one run."""

    def __init__(
        self,
        target: Target,
        requests: Sequence["RequestSpec"],
        arrival_offsets: Sequence[float],
        events: EventLog,
        max_concurrency: int | None,
        clock: Clock,
    ) -> None:
        self._target = target
        self._requests = requests
        self._events = events
        self._clock = clock
        self._is_closed_loop = max_concurrency is not None and not any(arrival_offsets)
        self._start_s = clock() + START_DELAY_S
        self._due_s = [self._start_s + offset for offset in arrival_offsets]
        # When each free slot became free, oldest first; None where there is no cap.
        self._free_slots = (
            None if max_concurrency is None else deque([self._start_s] * max_concurrency)
        )
        self._next = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._num_completed = 0
        self._num_failed = 0
        self._num_output_tokens = 0
        self._ttfts_s: deque[float] = deque(maxlen=RECENT)
        self._tpots_s: deque[float] = deque(maxlen=RECENT)

    def run(
        self,
        time_limit_s: float | None,
        on_progress: Callable[[LoadProgress], None] | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> LoadSummary:
        next_tick_s = self._start_s
        while self._next < len(self._requests) or self._in_flight:
            now = self._clock()
            if now >= next_tick_s:
                next_tick_s = now + TICK_S
                if on_progress is not None:
                    on_progress(self._progress(now))
                if is_cancelled is not None and is_cancelled():
                    return self._give_up("cancelled", "interrupted")
                if time_limit_s is not None and now - self._start_s >= time_limit_s:
                    return self._give_up("time_limit", f"time limit of {time_limit_s:g} s")
            wait_s = next_tick_s - now
            if self._can_send():
                wait_s = min(wait_s, self._due_s[self._next] - now - POLL_WINDOW_S)
            try:
                # One send at a time, so that answers to a burst are stamped between its sends.
                if self._can_send() and self._due_s[self._next] <= now:
                    self._send()
                    wait_s = 0.0
                for event in self._target.poll(max(wait_s, 0.0)):
                    self._receive(event)
            except TargetError as error:
                return self._give_up("target_failed", str(error))
        return self._summary("complete", None)

    def _can_send(self) -> bool:
        return self._next < len(self._requests) and (
            self._free_slots is None or len(self._free_slots) > 0
        )

    def _send(self) -> None:
        index = self._next
        self._next += 1
        due_s = admitted_s = self._due_s[index]
        if self._free_slots is not None:
            admitted_s = max(due_s, self._free_slots.popleft())
        sent_s = self._clock()
        # In flight from here on: a send that fails is a failed request.
        self._in_flight[index] = _InFlight(sent_s)
        self._events.append(index, "scheduled", admitted_s if self._is_closed_loop else due_s)
        self._events.append(index, "admitted", admitted_s)
        self._events.append(index, "sent", sent_s)
        self._target.send(index, self._requests[index])

    def _receive(self, event: TargetEvent) -> None:
        index, t_s = event.request_index, event.t_s
        request = self._in_flight.get(index)
        if request is None:  # given up already
            return
        if event.num_new_tokens > 0:
            self._events.append(index, "token", t_s, event.num_new_tokens, None, event.emit_s)
            self._num_output_tokens += event.num_new_tokens
            if request.num_tokens == 0:
                request.first_token_s = t_s
                self._ttfts_s.append(t_s - request.sent_s)
            request.num_tokens += event.num_new_tokens
            request.last_token_s = t_s
        if event.error is not None or event.finish_reason == "error":
            reason = event.error or "the target gave no reason"
            self._events.append(index, "error", t_s, 0, reason_detail(reason), event.emit_s)
            self._num_failed += 1
        elif event.finish_reason == "abort":
            detail = reason_detail("aborted by the target")
            self._events.append(index, "abort", t_s, 0, detail, event.emit_s)
            self._num_failed += 1
        elif event.finish_reason is not None:
            detail = end_detail(
                {
                    "finish_reason": event.finish_reason,
                    "num_prompt_tokens": event.num_prompt_tokens,
                    "num_output_tokens": event.num_output_tokens,
                    "num_cached_tokens": event.num_cached_tokens,
                }
            )
            self._events.append(index, "end", t_s, 0, detail, event.emit_s)
            self._num_completed += 1
            if request.num_tokens > 1:
                decode_s = request.last_token_s - request.first_token_s
                self._tpots_s.append(decode_s / (request.num_tokens - 1))
        else:
            return
        del self._in_flight[index]
        if self._free_slots is not None:
            self._free_slots.append(t_s)

    def _give_up(
        self, ended: Literal["cancelled", "time_limit", "target_failed"], reason: str
    ) -> LoadSummary:
        """End every request that was due by now."""
        now = self._clock()
        kind: Literal["abort", "error"] = "error" if ended == "target_failed" else "abort"
        detail = reason_detail(reason)
        for index in self._in_flight:
            if kind == "abort":
                self._target.abort(index)
            self._events.append(index, kind, now, 0, detail)
        self._num_failed += len(self._in_flight)
        self._in_flight.clear()
        if not self._is_closed_loop:  # there, what waits for a slot is not due
            while self._next < len(self._requests) and self._due_s[self._next] <= now:
                self._events.append(self._next, "scheduled", self._due_s[self._next])
                self._events.append(self._next, kind, now, 0, detail)
                self._num_failed += 1
                self._next += 1
        return self._summary(ended, reason)

    def _summary(
        self,
        ended: Literal["complete", "cancelled", "time_limit", "target_failed"],
        reason: str | None,
    ) -> LoadSummary:
        now = self._clock()
        return LoadSummary(
            ended=ended,
            reason=reason,
            start_s=self._start_s,
            end_s=now,
            progress=self._progress(now),
        )

    def _progress(self, now: float) -> LoadProgress:
        return LoadProgress(
            num_total=len(self._requests),
            num_sent=self._next,
            num_completed=self._num_completed,
            num_failed=self._num_failed,
            num_output_tokens=self._num_output_tokens,
            elapsed_s=max(0.0, now - self._start_s),
            ttft_p50_s=statistics.median(self._ttfts_s) if self._ttfts_s else None,
            tpot_p50_s=statistics.median(self._tpots_s) if self._tpots_s else None,
        )


@dataclass(slots=True)
class _InFlight:
    """A request that was sent and has not ended."""

    sent_s: float
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Keep collections, which stop the thread for milliseconds, out of a run."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
