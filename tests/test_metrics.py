"""Metrics against event logs whose values are worked out by hand."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.bench.client.events import Event, EventLog, end_detail, reason_detail
from llmbench.bench.metrics import cell_metrics, request_timelines
from llmbench.bench.slo import Goodput
from llmbench.bench.step_summary import step_summary
from llmbench.bench.timelines import RequestTimeline
from llmbench.engine.step_record import StepRecord


def request_events(
    index: int,
    chunks: list[tuple[float, int]],
    *,
    scheduled: float = 0.0,
    admitted: float | None = None,
    sent: float | None = None,
    end: float | None = None,
    reported: int | None = None,
    prompt: int = 10,
    cached: int = 0,
    reason: str = "length",
) -> list[Event]:
    """Events of a request that finishes; `chunks` are (time, tokens)."""
    admitted = scheduled if admitted is None else admitted
    sent = admitted if sent is None else sent
    last = chunks[-1][0] if chunks else sent
    detail = end_detail(
        {
            "finish_reason": reason,
            "num_prompt_tokens": prompt,
            "num_output_tokens": sum(n for _, n in chunks) if reported is None else reported,
            "num_cached_tokens": cached,
        }
    )
    return [
        Event(index, "scheduled", scheduled),
        Event(index, "admitted", admitted),
        Event(index, "sent", sent),
        *(Event(index, "token", time, count) for time, count in chunks),
        Event(index, "end", last if end is None else end, detail=detail),
    ]


def failed_events(index: int, *, at: float, kind: str = "error") -> list[Event]:
    final = Event(index, "error", at, detail=reason_detail("refused"))
    return [
        Event(index, "scheduled", 0.0),
        Event(index, "admitted", 0.0),
        Event(index, "sent", 0.0),
        final if kind == "error" else final._replace(kind="abort"),
    ]


def timeline(events: list[Event]) -> RequestTimeline:
    (only,) = request_timelines(events)
    return only


def metrics_of(*requests: list[Event], **options: Any) -> dict[str, Any]:
    return cell_metrics(request_timelines([e for events in requests for e in events]), **options)


# Two requests, worked out by hand. Request 0 waits 0.1 s for a slot and is sent 0.01 s late.
#   0: due 0.00, slot 0.10, sent 0.11, tokens at 0.31, 0.41, 0.61 (1 each)
#   1: due 0.50, slot 0.50, sent 0.50, tokens at 0.60 (1), 0.90 (2)
TWO = (
    request_events(0, [(0.31, 1), (0.41, 1), (0.61, 1)], admitted=0.10, sent=0.11, cached=4),
    request_events(1, [(0.60, 1), (0.90, 2)], scheduled=0.50, reason="stop", prompt=30),
)

BY_HAND: dict[str, object] = {
    "duration_s": 0.79,  # 0.11 ... 0.90
    "num_requests": 2,
    "num_completed": 2,
    "num_failed": 0,
    "num_aborted": 0,
    "num_lost": 0,
    "finish_reasons": {"length": 1, "stop": 1},
    "errors": {},
    "total_input_tokens": 40,
    "total_output_tokens": 6,
    "request_throughput_req_s": 2 / 0.79,
    "output_throughput_tok_s": 6 / 0.79,
    "total_throughput_tok_s": 46 / 0.79,
    "peak_output_throughput_tok_s": 6 / 0.79,  # a run under 1.5 s is a single window
    "steady_window": None,  # the last send comes before the first completion
    "tokens_per_chunk": 6 / 5,
    "num_token_count_mismatches": 0,
    "offered_rate_req_s": 2.0,  # 1 gap of 0.5 s
    "achieved_rate_req_s": 1 / 0.39,
    "completion_rate_req_s": 1 / 0.29,
    "prefix_hit_rate": 4 / 40,
    "peak_concurrency": 2,
    "mean_concurrency": (0.50 + 0.40) / 0.79,
    "request_goodput_req_s": None,
    "slo_attainment": None,
    "kv_usage_peak": None,
    "num_preemptions": None,
}

SAMPLES_BY_HAND = {
    "ttft_s": [0.20, 0.10],
    "ttft_from_schedule_s": [0.31, 0.10],
    "tpot_s": [0.15, 0.15],  # (0.61 - 0.31) / 2 and (0.90 - 0.60) / 2
    "itl_s": [0.10, 0.20, 0.30],
    "e2el_s": [0.50, 0.40],
    "e2el_from_schedule_s": [0.61, 0.40],
    "client_queue_s": [0.10, 0.0],
    "schedule_error_s": [0.01, 0.0],
    "per_user_tok_s": [1 / 0.15, 1 / 0.15],
    "request_output_tok_s": [3 / 0.50, 3 / 0.40],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_metric_of_two_requests_is_as_worked_out_by_hand(name: str) -> None:
    found = metrics_of(*TWO, request_rate=2.0)[name]
    expected = BY_HAND[name]
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("name", SAMPLES_BY_HAND)
def test_sample_of_two_requests_is_as_worked_out_by_hand(name: str) -> None:
    found = metrics_of(*TWO, request_rate=2.0)[name]
    values = SAMPLES_BY_HAND[name]
    assert found["n"] == len(values)
    assert found["mean"] == pytest.approx(sum(values) / len(values))
    assert found["min"] == pytest.approx(min(values))
    assert found["max"] == pytest.approx(max(values))


def test_order_of_interleaved_events_does_not_matter() -> None:
    events = sorted((e for events in TWO for e in events), key=lambda event: event.t_s)
    assert cell_metrics(request_timelines(events)) == metrics_of(*TWO)


def test_log_gives_the_same_metrics_after_a_round_trip_through_parquet(tmp_path: Any) -> None:
    log = EventLog()
    for event in (e for events in TWO for e in events):
        log.append(*event)
    log.write_parquet(tmp_path / "events.parquet")
    read = EventLog.read_parquet(tmp_path / "events.parquet")
    assert cell_metrics(request_timelines(read)) == metrics_of(*TWO)


def test_chunks_of_several_tokens_are_counted_by_token() -> None:
    """Case C28: 1 + 4 + 4 tokens at 1.0, 1.1 and 1.2 s."""
    events = request_events(0, [(1.0, 1), (1.1, 4), (1.2, 4)], reported=9)
    metrics = metrics_of(events)
    assert metrics["ttft_s"]["mean"] == pytest.approx(1.0)
    assert metrics["tpot_s"]["mean"] == pytest.approx(0.025)
    assert metrics["itl_s"]["n"] == 2  # the wait for the first token is no gap
    assert metrics["itl_s"]["mean"] == pytest.approx(0.1)
    assert metrics["request_output_tok_s"]["mean"] == pytest.approx(7.5)
    assert metrics["per_user_tok_s"]["mean"] == pytest.approx(40)
    assert metrics["tokens_per_chunk"] == 3.0
    assert metrics["peak_output_throughput_tok_s"] >= metrics["output_throughput_tok_s"]


def test_first_reasoning_token_starts_the_clock_and_the_role_does_not() -> None:
    """Case C25: role at 50 ms, reasoning at 120 and 140, null at 160, text at 900 and 920."""
    events = request_events(0, [(0.12, 1), (0.14, 1), (0.90, 1), (0.92, 1)], end=0.931)
    metrics = metrics_of(events)
    assert metrics["ttft_s"]["mean"] == pytest.approx(0.12)
    assert metrics["total_output_tokens"] == 4
    assert metrics["e2el_s"]["mean"] == pytest.approx(0.92)  # last token, not the closing event
    assert metrics["duration_s"] == pytest.approx(0.931)


def test_single_token_has_ttft_but_neither_tpot_nor_gap() -> None:
    metrics = metrics_of(request_events(0, [(0.2, 1)]))
    assert metrics["ttft_s"]["mean"] == pytest.approx(0.2)
    for name in ("tpot_s", "itl_s", "per_user_tok_s"):
        assert metrics[name]["n"] == 0
        assert metrics[name]["mean"] is None


def test_all_tokens_in_one_chunk_show_no_time_per_token() -> None:
    metrics = metrics_of(request_events(0, [(0.2, 8)]))
    assert metrics["tpot_s"]["mean"] is None
    assert metrics["per_user_tok_s"]["mean"] is None
    assert metrics["total_output_tokens"] == 8


def test_target_count_stands_above_the_count_of_chunks() -> None:
    metrics = metrics_of(request_events(0, [(0.1, 1), (0.3, 1)], reported=5))
    assert metrics["total_output_tokens"] == 5
    assert metrics["tpot_s"]["mean"] == pytest.approx(0.2 / 4)
    assert metrics["num_token_count_mismatches"] == 1
    assert metrics["peak_output_throughput_tok_s"] >= metrics["output_throughput_tok_s"]


def test_end_without_a_token_is_a_failure_and_not_a_latency_of_zero() -> None:
    metrics = metrics_of(request_events(0, [], end=0.4), request_events(1, [(0.3, 1)]))
    assert metrics["num_failed"] == 1
    assert metrics["errors"] == {"ended without a token": 1}
    assert metrics["ttft_s"]["n"] == 1
    assert metrics["ttft_s"]["min"] == pytest.approx(0.3)


def test_failures_stay_among_the_attempts_and_out_of_the_latencies() -> None:
    goodput = Goodput(ttft_s=1.0)
    good = [request_events(i, [(0.2, 1), (0.4, 1)]) for i in range(3)]
    metrics = metrics_of(*good, failed_events(3, at=1.0), goodput=goodput)
    assert (metrics["num_completed"], metrics["num_failed"]) == (3, 1)
    assert metrics["errors"] == {"refused": 1}
    assert metrics["ttft_s"]["n"] == 3
    assert metrics["slo_attainment"] == 0.75
    assert metrics["request_goodput_req_s"] == pytest.approx(3.0)  # the run lasts 1 s
    assert metrics["total_output_tokens"] == 6


def test_percentiles_with_failures_count_each_as_infinitely_slow() -> None:
    good = [request_events(i, [(0.1 * (i + 1), 1)]) for i in range(2)]
    one, two = failed_events(2, at=1.0), failed_events(3, at=1.0)
    of_three = metrics_of(*good, one)["with_failures_as_infinite"]["ttft_s"]
    of_four = metrics_of(*good, one, two)["with_failures_as_infinite"]["ttft_s"]
    assert of_three["median"] == pytest.approx(0.2)
    assert of_four["median"] is None
    assert of_four["infinite"] == ["median"]


def test_aborted_and_lost_requests_are_neither_completed_nor_failed() -> None:
    lost = failed_events(2, at=0.0)[:-1]
    metrics = metrics_of(
        request_events(0, [(0.2, 1)]),
        failed_events(1, at=0.3, kind="abort"),
        lost,
        num_requests=5,  # two were never even scheduled
    )
    counted = {name: metrics[f"num_{name}"] for name in ("completed", "failed", "aborted", "lost")}
    assert counted == {"completed": 1, "failed": 0, "aborted": 1, "lost": 3}
    assert metrics["num_requests"] == 5


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [("stop", "completed"), ("length", "completed"), ("abort", "aborted"), ("error", "failed")],
)
def test_finish_reason_decides_the_outcome(reason: str, outcome: str) -> None:
    assert timeline(request_events(0, [(0.1, 1)], reason=reason)).outcome == outcome


def test_empty_log_is_null_and_not_zero() -> None:
    metrics = cell_metrics([], num_requests=3)
    assert metrics["num_lost"] == 3
    for name in (
        "duration_s",
        "request_throughput_req_s",
        "output_throughput_tok_s",
        "peak_output_throughput_tok_s",
        "tokens_per_chunk",
        "achieved_rate_req_s",
        "prefix_hit_rate",
        "peak_concurrency",
        "mean_concurrency",
    ):
        assert metrics[name] is None
    assert metrics["ttft_s"]["mean"] is None


def test_goodput_judges_from_the_schedule() -> None:
    waited = request_events(0, [(1.0, 1), (1.1, 1)], admitted=0.9)  # 0.1 s after sending
    objective = Goodput(ttft_s=0.2)
    assert metrics_of(waited)["ttft_s"]["mean"] == pytest.approx(0.1)
    assert metrics_of(waited, goodput=objective)["slo_attainment"] == 0.0


@pytest.mark.parametrize(
    ("objectives", "is_good"),
    [
        (Goodput(ttft_s=0.2), True),
        (Goodput(ttft_s=0.19), False),
        (Goodput(tpot_s=0.1), True),
        (Goodput(tpot_s=0.09), False),
        (Goodput(e2el_s=0.4), True),
        (Goodput(e2el_s=0.39), False),
        (Goodput(ttft_s=0.2, tpot_s=0.1, e2el_s=0.39), False),
    ],
)
def test_request_is_good_only_if_every_objective_is_met(objectives: Goodput, is_good: bool) -> None:
    # Times are binary fractions of a quarter, so that the limits are met exactly.
    scale = 0.25 / 0.1
    events = request_events(0, [(0.5, 1), (0.75, 1), (1.0, 1)])
    limits = {
        name: None if (limit := getattr(objectives, name)) is None else limit * scale
        for name in ("ttft_s", "tpot_s", "e2el_s")
    }
    metrics = metrics_of(events, goodput=Goodput(**limits))
    assert metrics["slo_attainment"] == float(is_good)


def test_request_of_one_token_meets_any_tpot_objective() -> None:
    metrics = metrics_of(request_events(0, [(0.1, 1)]), goodput=Goodput(tpot_s=0.001))
    assert metrics["slo_attainment"] == 1.0


def test_steady_window_counts_tokens_by_the_time_they_arrive() -> None:
    # First completion at 1.0, last send at 3.0: tokens in (1, 3] are at 2.0 (2) and 3.0 (1).
    metrics = metrics_of(
        request_events(0, [(0.5, 1), (1.0, 1)]),
        request_events(1, [(2.0, 2), (4.0, 5)]),
        request_events(2, [(3.0, 1), (5.0, 1)], scheduled=3.0),
    )
    assert metrics["steady_window"] == {
        "start_s": 1.0,
        "end_s": 3.0,
        "num_output_tokens": 3.0,
        "output_throughput_tok_s": 1.5,
    }


def test_steady_window_that_is_too_short_to_speak_for_the_run_is_null() -> None:
    metrics = metrics_of(
        request_events(0, [(1.0, 1)]),
        request_events(1, [(20.0, 1)], scheduled=1.5),
    )
    assert metrics["steady_window"] is None


def test_peak_is_the_busiest_of_equal_windows_of_about_a_second() -> None:
    events = request_events(0, [(0.5, 1), (1.2, 3), (1.4, 3), (3.0, 1)])
    assert metrics_of(events)["peak_output_throughput_tok_s"] == pytest.approx(6.0)


def test_end_frees_its_slot_before_a_start_at_the_same_time() -> None:
    metrics = metrics_of(
        request_events(0, [(1.0, 1)]), request_events(1, [(2.0, 1)], scheduled=1.0)
    )
    assert metrics["peak_concurrency"] == 1
    assert metrics["mean_concurrency"] == pytest.approx(1.0)


def test_closed_loop_offers_no_rate() -> None:
    metrics = metrics_of(*TWO, request_rate=math.inf)
    assert metrics["offered_rate_req_s"] is None
    assert metrics["e2el_trend_z"] is None
    assert metrics["achieved_rate_req_s"] is not None


def test_latency_that_grows_along_the_schedule_has_a_positive_trend() -> None:
    growing = [request_events(i, [(i + 1.0 + i, 1)], scheduled=float(i)) for i in range(16)]
    assert metrics_of(*growing, request_rate=1.0)["e2el_trend_z"] == pytest.approx(math.sqrt(15))


def test_hits_are_null_where_nothing_was_looked_up() -> None:
    steps = step_summary([])
    assert steps.num_prefix_queried_tokens == 0
    assert metrics_of(TWO[0], steps=steps)["prefix_hit_rate"] is None


def test_unknown_cache_hits_are_null() -> None:
    events = [e for e in TWO[0] if e.kind != "end"]
    detail = json.dumps({"finish_reason": "stop", "num_prompt_tokens": 5, "num_output_tokens": 3})
    events.append(Event(0, "end", 0.7, detail=detail))
    assert metrics_of(events)["prefix_hit_rate"] is None


@given(
    requests=st.lists(
        st.tuples(
            st.floats(0, 5), st.lists(st.tuples(st.floats(0.001, 2), st.integers(1, 5)), max_size=6)
        ),
        min_size=1,
        max_size=10,
    )
)
def test_any_log_gives_strict_json_and_a_peak_not_below_the_mean(
    requests: list[tuple[float, list[tuple[float, int]]]],
) -> None:
    logs = []
    for index, (start, gaps) in enumerate(requests):
        time, chunks = start, []
        for gap, count in gaps:
            time += gap
            chunks.append((time, count))
        logs.append(request_events(index, chunks, scheduled=start))
    metrics = metrics_of(*logs, request_rate=1.0, goodput=Goodput(ttft_s=0.5))
    json.dumps(metrics, allow_nan=False)
    peak, mean = metrics["peak_output_throughput_tok_s"], metrics["output_throughput_tok_s"]
    assert peak is None or peak >= mean * (1 - 1e-9)
    assert metrics["num_completed"] + metrics["num_failed"] == metrics["num_requests"]


def step(**fields: Any) -> StepRecord:
    """A step of one second, with a pool of 10 free blocks."""
    values: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(StepRecord)}
    values |= {"kv_num_blocks": 10, "kv_free_blocks": 10, "kernel": "test"}
    values |= {"forward_s": 1.0, "num_seqs": 1, "num_decode_tokens": 1}
    return StepRecord(**(values | fields))


def test_step_means_weigh_each_step_by_its_time() -> None:
    long = step(
        schedule_s=0.5, forward_s=2.0, update_s=0.5, num_seqs=8, num_prefill_tokens=100,
        num_preempted=2, kv_free_blocks=2, kv_reserved_slots=128, kv_used_slots=96,
    )  # fmt: skip
    short = step(num_seqs=4, num_decode_tokens=4, num_preempted=1, kv_free_blocks=6)
    summary = step_summary([long, short])
    assert summary.num_steps == 2
    assert summary.num_preemptions == 3
    assert summary.kv_usage_peak == pytest.approx(0.8)
    assert summary.kv_usage_mean == pytest.approx((3 * 0.8 + 1 * 0.4) / 4)
    assert summary.kv_waste_mean == pytest.approx(0.25)  # only the long step holds slots
    assert summary.mean_batch_size == pytest.approx((3 * 8 + 1 * 4) / 4)
    assert summary.mean_step_tokens == pytest.approx((3 * 101 + 1 * 4) / 4)
    assert summary.forward_time_share == pytest.approx(3 / 4)


def test_steps_that_cannot_say_are_null() -> None:
    nothing = step_summary([])
    assert (nothing.num_steps, nothing.kv_usage_peak, nothing.mean_batch_size) == (0, None, None)
    without_pool = step_summary([step(kv_num_blocks=0)])
    assert without_pool.kv_usage_mean is None
    assert metrics_of(TWO[0], steps=without_pool)["num_steps"] == 1
