"""Verdicts on runs: what spoils one, and what is a finding."""

import json
import math
from typing import Any

import pytest

from llmbench.bench.metrics import cell_metrics
from llmbench.bench.timelines import RequestTimeline
from llmbench.bench.validity import Validity, judge, max_schedule_error_s


def request(
    index: int, *, scheduled: float, late: float = 0.0, queued: float = 0.0, latency: float = 1.0
) -> RequestTimeline:
    """A completed request of two tokens."""
    sent = scheduled + queued + late
    return RequestTimeline(
        request_index=index,
        scheduled_s=scheduled,
        admitted_s=scheduled + queued,
        sent_s=sent,
        token_times_s=[sent + latency / 2, sent + latency],
        token_counts=[1, 1],
        end_s=sent + latency,
        finish_reason="length",
    )


def verdict_of(
    requests: list[RequestTimeline],
    *,
    rate: float = 10.0,
    cap: int | None = None,
    num_requests: int | None = None,
) -> Validity:
    metrics = cell_metrics(requests, request_rate=rate, num_requests=num_requests)
    return judge(metrics, request_rate=rate, max_concurrency=cap)


def steady(n: int = 40, **options: Any) -> list[RequestTimeline]:
    return [request(i, scheduled=i / 10, **options) for i in range(n)]


def test_load_that_went_as_planned_is_valid() -> None:
    validity = verdict_of(steady())
    assert validity == Validity(verdict="VALID")
    assert validity.is_valid


# Rate 10/s: gaps of 100 ms, so 5 ms can be borne.
@pytest.mark.parametrize(
    ("late", "verdict"), [(0.0049, "VALID"), (0.0051, "CLIENT-LIMITED"), (0.5, "CLIENT-LIMITED")]
)
def test_client_that_sends_late_limits_the_run(late: float, verdict: str) -> None:
    validity = verdict_of(steady(late=late))
    assert validity.verdict == verdict
    assert validity.is_valid == (verdict == "VALID")


@pytest.mark.parametrize(
    ("n", "late", "reason"),
    [
        (20, 0.01, "max 10.0 ms"),  # no percentile to judge by
        (40, 0.01, None),  # p90 is on time
        (40, 1.0, "mean 25.0 ms"),  # p90 is on time, but this one spoils the mean
        (500, 0.2, None),  # p99 is on time
    ],
)
def test_one_late_request_spoils_a_run_only_if_a_figure_shows_it(
    n: int, late: float, reason: str | None
) -> None:
    requests = [*steady(n - 1), request(n - 1, scheduled=n / 10, late=late)]
    validity = verdict_of(requests)
    if reason is None:
        assert validity.verdict == "VALID"
    else:
        assert validity.verdict == "CLIENT-LIMITED"
        assert f"schedule error {reason}, more than the 5.0 ms" in validity.reasons[0]


@pytest.mark.parametrize(
    ("rate", "cap", "limit_s"),
    [
        (10.0, None, 0.005),  # 5 % of the gap
        (0.5, None, 0.05),  # 5 % of the latency, which is shorter than the gap
        (1000.0, None, 0.002),  # the floor
        (math.inf, 8, 0.05),  # 5 % of the latency
        (math.inf, None, 0.245),  # 5 % of the run, 3.9 s of sending + 1 s
    ],
)
def test_lateness_that_a_load_can_bear_follows_what_it_distorts(
    rate: float, cap: int | None, limit_s: float
) -> None:
    metrics = cell_metrics(steady(), request_rate=rate)
    limit = max_schedule_error_s(metrics, request_rate=rate, max_concurrency=cap)
    assert limit == pytest.approx(limit_s)


def test_failed_requests_spoil_a_run() -> None:
    requests = steady()
    requests[3].error = "connection reset"
    validity = verdict_of(requests)
    assert validity.verdict == "FAILED-REQUESTS"
    assert validity.reasons == ("1 of 40 requests failed: 1 x connection reset",)
    assert not validity.is_valid


def test_aborted_requests_leave_a_run_incomplete() -> None:
    requests = steady()
    requests[3].is_aborted = True
    assert verdict_of(requests).verdict == "INCOMPLETE"


def test_request_that_was_never_sent_leaves_a_run_incomplete() -> None:
    validity = verdict_of(steady(), num_requests=42)
    assert validity.verdict == "INCOMPLETE"
    assert validity.reasons == ("of 42 requests, 0 were given up and 2 never ended",)


def test_every_reason_is_named_and_the_gravest_is_the_verdict() -> None:
    requests = steady(late=0.5)
    requests[3].error = "refused"
    validity = verdict_of(requests, num_requests=41)
    assert validity.verdict == "INCOMPLETE"
    assert len(validity.reasons) == 3


def test_saturated_target_is_a_finding_and_not_a_fault() -> None:
    # Served one after another at 5/s while 10/s are offered: each waits longer than the last.
    requests = [request(i, scheduled=i / 10, latency=0.2 + i / 10) for i in range(40)]
    validity = verdict_of(requests)
    assert validity.verdict == "RATE-NOT-ACHIEVED"
    assert validity.is_valid
    assert "completed at 5 req/s, 50% of the offered 10" in validity.reasons[0]


def test_cap_that_holds_requests_back_is_a_finding() -> None:
    requests = [request(i, scheduled=i / 10, queued=i / 10, latency=0.2) for i in range(40)]
    validity = verdict_of(requests, cap=1)
    assert validity.verdict == "RATE-NOT-ACHIEVED"
    assert "went out at 5 req/s, 50% of the offered 10: all 1 slots" in validity.reasons[0]


def test_drain_of_a_short_run_is_not_taken_for_saturation() -> None:
    # The last answer is long, so completions take longer than arrivals, but nothing grows.
    requests = [*steady(10, latency=0.1), request(10, scheduled=1.0, latency=3.0)]
    requests.reverse()
    assert verdict_of(requests).verdict == "VALID"


def test_closed_loop_cannot_miss_a_rate() -> None:
    requests = [request(i, scheduled=float(i)) for i in range(20)]
    assert verdict_of(requests, rate=math.inf, cap=1).verdict == "VALID"


def test_run_without_a_single_event_is_incomplete_and_strict_json() -> None:
    validity = verdict_of([], num_requests=5)
    assert validity.verdict == "INCOMPLETE"
    json.dumps(validity.to_record(), allow_nan=False)


def test_several_tokens_in_a_chunk_are_noted() -> None:
    requests = steady()
    for each in requests:
        each.token_counts = [1, 4]
    validity = verdict_of(requests)
    assert validity.verdict == "VALID"
    assert validity.notes[0].startswith("2.50 tokens arrive together")


def test_count_that_differs_from_what_arrived_is_noted() -> None:
    requests = steady()
    requests[0].reported_output_tokens = 3
    assert verdict_of(requests).notes[0].startswith("for 1 requests the target counted")
