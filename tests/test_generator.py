"""The load generator keeps its schedule, its cap and its log, on a clock that only it moves."""

import gc
import heapq
import json
from collections.abc import Sequence

import pytest

from llmbench.bench.client.events import FINAL_KINDS, Event, EventLog
from llmbench.bench.client.generator import LoadProgress, LoadSummary, TargetEvent, run_load
from llmbench.bench.errors import TargetError
from llmbench.bench.workloads.workload import RequestSpec

STEP_S = 10e-6
"""What a look at the fake clock costs, so that polling gets somewhere."""


class Clock:
    """A clock that moves by being read and by waiting."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += STEP_S
        return self.now


class FakeTarget:
    """Answers each request after a service time: first token half-way, the second at its end."""

    def __init__(
        self,
        clock: Clock,
        service_s: float,
        *,
        refuses: frozenset[int] = frozenset(),
        dies_after: float = float("inf"),
    ) -> None:
        self._clock = clock
        self._service_s = service_s
        self._refuses = refuses
        self._dies_at = clock.now + dies_after
        self._arrivals: list[tuple[float, int, bool]] = []
        self.aborted: list[int] = []
        self.gc_enabled: list[bool] = []

    def begin(self, requests: Sequence[RequestSpec]) -> None:
        self._arrivals.clear()

    def send(self, request_index: int, spec: RequestSpec) -> None:
        self.gc_enabled.append(gc.isenabled())
        now = self._clock.now
        heapq.heappush(self._arrivals, (now + self._service_s / 2, request_index, False))
        heapq.heappush(self._arrivals, (now + self._service_s, request_index, True))

    def poll(self, timeout_s: float) -> Sequence[TargetEvent]:
        deadline = self._clock.now + timeout_s
        if self._arrivals and self._arrivals[0][0] <= deadline:
            time_s, index, is_last = heapq.heappop(self._arrivals)
            self._clock.now = max(self._clock.now, time_s)
            self._check_alive()
            return [self._event(index, is_last)]
        self._clock.now = deadline
        self._check_alive()
        return []

    def abort(self, request_index: int) -> None:
        self.aborted.append(request_index)

    def _check_alive(self) -> None:
        if self._clock.now >= self._dies_at:
            raise TargetError("the engine process closed its connection")

    def _event(self, index: int, is_last: bool) -> TargetEvent:
        is_refused = index in self._refuses
        return TargetEvent(
            request_index=index,
            t_s=self._clock.now,
            num_new_tokens=0 if is_refused else 1,
            emit_s=self._clock.now,
            finish_reason="error" if is_refused else "length" if is_last else None,
            num_prompt_tokens=4,
            num_cached_tokens=0,
            num_output_tokens=0 if is_refused else 1 + is_last,
            error="prompt of 4 tokens" if is_refused else None,
        )


def load(
    target: FakeTarget,
    clock: Clock,
    offsets: list[float],
    *,
    max_concurrency: int | None = None,
    time_limit_s: float | None = None,
    cancel_after: float = float("inf"),
    progress: list[LoadProgress] | None = None,
) -> tuple[LoadSummary, EventLog]:
    requests = [
        RequestSpec(index=index, prompt_token_ids=(1, 2, 3, 4), max_tokens=2)
        for index in range(len(offsets))
    ]
    events = EventLog()
    cancel_at = clock.now + cancel_after
    summary = run_load(
        target,
        requests,
        offsets,
        events,
        max_concurrency=max_concurrency,
        time_limit_s=time_limit_s,
        clock=clock,
        on_progress=None if progress is None else progress.append,
        is_cancelled=lambda: clock.now >= cancel_at,
    )
    return summary, events


def of_kind(events: EventLog, kind: str) -> dict[int, Event]:
    return {event.request_index: event for event in events if event.kind == kind}


def test_sends_follow_the_schedule_whatever_happened_before() -> None:
    clock = Clock()
    offsets = [0.01 * index for index in range(200)]
    summary, events = load(FakeTarget(clock, 0.5), clock, offsets)
    assert summary.ended == "complete"
    sent = of_kind(events, "sent")
    for index, offset in enumerate(offsets):
        # Never early, and no later than one look at the clock and one answer in between.
        assert 0 <= sent[index].t_s - (summary.start_s + offset) < 5 * STEP_S


def test_every_request_sent_ends_exactly_once_and_last() -> None:
    clock = Clock()
    target = FakeTarget(clock, 0.03, refuses=frozenset({3}))
    _, events = load(target, clock, [0.01 * index for index in range(20)])
    for index in range(20):
        kinds = [event.kind for event in events if event.request_index == index]
        assert kinds[:3] == ["scheduled", "admitted", "sent"]
        assert [kind in FINAL_KINDS for kind in kinds] == [False] * (len(kinds) - 1) + [True]


def test_open_loop_cap_shows_as_client_queue() -> None:
    clock = Clock()
    summary, events = load(FakeTarget(clock, 1.0), clock, [0.0, 0.1, 0.2, 0.3], max_concurrency=2)
    scheduled, admitted = of_kind(events, "scheduled"), of_kind(events, "admitted")
    queued = [admitted[index].t_s - scheduled[index].t_s for index in range(4)]
    # Slots free at 1.0 s and 1.1 s, for requests due at 0.2 s and 0.3 s.
    assert queued == pytest.approx([0.0, 0.0, 0.8, 0.8], abs=0.01)
    assert scheduled[3].t_s == pytest.approx(summary.start_s + 0.3)


def test_a_slot_that_waits_delays_no_later_request() -> None:
    clock = Clock()
    _, events = load(FakeTarget(clock, 0.1), clock, [0.0, 5.0], max_concurrency=1)
    scheduled, admitted = of_kind(events, "scheduled"), of_kind(events, "admitted")
    assert admitted[1].t_s == scheduled[1].t_s


@pytest.mark.parametrize("max_concurrency", [1, 3])
def test_closed_loop_keeps_concurrency_and_queues_nothing(max_concurrency: int) -> None:
    clock = Clock()
    _, events = load(FakeTarget(clock, 0.2), clock, [0.0] * 12, max_concurrency=max_concurrency)
    in_flight, most = 0, 0
    for event in events:
        in_flight += (event.kind == "sent") - (event.kind in FINAL_KINDS)
        most = max(most, in_flight)
    assert most == max_concurrency
    scheduled, admitted = of_kind(events, "scheduled"), of_kind(events, "admitted")
    assert all(scheduled[index].t_s == admitted[index].t_s for index in range(12))


def test_all_at_once_is_due_at_the_start() -> None:
    clock = Clock()
    summary, events = load(FakeTarget(clock, 0.2), clock, [0.0] * 5)
    assert {event.t_s for event in of_kind(events, "scheduled").values()} == {summary.start_s}


def test_tokens_are_stamped_on_arrival_between_the_sends_of_a_burst() -> None:
    clock = Clock()
    _, events = load(FakeTarget(clock, 1e-4), clock, [0.0] * 50)
    order = [event.kind for event in events]
    assert order.index("token") < len(order) - 1 - order[::-1].index("sent")
    sent, ended = of_kind(events, "sent"), of_kind(events, "end")
    assert all(ended[index].t_s - sent[index].t_s < 1e-3 for index in range(50))


def test_end_carries_the_targets_counts() -> None:
    clock = Clock()
    _, events = load(FakeTarget(clock, 0.1), clock, [0.0])
    detail = of_kind(events, "end")[0].detail
    assert detail is not None
    assert json.loads(detail) == {
        "finish_reason": "length",
        "num_prompt_tokens": 4,
        "num_output_tokens": 2,
        "num_cached_tokens": 0,
    }


def test_refused_request_keeps_its_reason_and_harms_no_other() -> None:
    clock = Clock()
    target = FakeTarget(clock, 0.1, refuses=frozenset({1}))
    summary, events = load(target, clock, [0.0] * 3)
    assert summary.progress.num_completed == 2
    assert summary.progress.num_failed == 1
    detail = of_kind(events, "error")[1].detail
    assert detail is not None
    assert json.loads(detail) == {"reason": "prompt of 4 tokens"}


def test_cancelling_aborts_what_was_due_and_leaves_the_rest_unsaid() -> None:
    clock = Clock()
    target = FakeTarget(clock, 10.0)
    summary, events = load(
        target, clock, [0.0, 0.1, 0.2, 100.0], max_concurrency=2, cancel_after=1.0
    )
    assert summary.ended == "cancelled"
    assert sorted(of_kind(events, "abort")) == [0, 1, 2]
    assert sorted(of_kind(events, "sent")) == [0, 1]
    assert target.aborted == [0, 1]
    assert 3 not in {event.request_index for event in events}


def test_time_limit_ends_a_run_that_would_not_end() -> None:
    clock = Clock()
    summary, events = load(FakeTarget(clock, 1e9), clock, [0.0], time_limit_s=2.0)
    assert summary.ended == "time_limit"
    assert of_kind(events, "abort")[0].t_s - summary.start_s == pytest.approx(2.0, abs=0.3)


def test_death_of_the_target_is_an_error_of_each_request_in_flight() -> None:
    clock = Clock()
    target = FakeTarget(clock, 1.0, dies_after=0.7)
    summary, events = load(target, clock, [0.0, 0.2, 50.0])
    assert summary.ended == "target_failed"
    assert summary.reason == "the engine process closed its connection"
    assert sorted(of_kind(events, "error")) == [0, 1]
    assert sorted(of_kind(events, "token")) == [0]


def test_progress_counts_and_estimates() -> None:
    clock = Clock()
    progress: list[LoadProgress] = []
    summary, _ = load(
        FakeTarget(clock, 0.5), clock, [0.1 * index for index in range(20)], progress=progress
    )
    assert [entry.num_completed for entry in progress] == sorted(
        entry.num_completed for entry in progress
    )
    assert summary.progress.num_completed == summary.progress.num_total == 20
    assert summary.progress.ttft_p50_s == pytest.approx(0.25, abs=1e-3)
    assert summary.progress.tpot_p50_s == pytest.approx(0.25, abs=1e-3)
    assert progress[0].ttft_p50_s is None


def test_garbage_collection_pauses_for_the_run_only() -> None:
    clock = Clock()
    target = FakeTarget(clock, 0.1)
    load(target, clock, [0.0])
    assert target.gc_enabled == [False]
    assert gc.isenabled()


def test_offsets_must_match_requests() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="0 requests, but 1 arrival offsets"):
        run_load(FakeTarget(clock, 1.0), [], [0.0], EventLog(), clock=clock)
