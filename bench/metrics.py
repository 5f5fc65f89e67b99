"""The metrics of one cell of a sweep, as pure functions of its event log.

The definitions of a request's times stand in `timelines.py`. Over a run:

    duration      first send - last end, so the drain is inside (as in vLLM and SGLang)
    throughput    tokens of completed requests / duration. The steady window (first completion -
                  last send) leaves filling and draining out, and counts tokens by the time of
                  their event, not requests by their completion
    peak          most tokens in one of the equal windows, about 1 s each, that divide the run.
                  Tokens are counted, not chunks, and the windows tile the run, so the peak cannot
                  fall below the mean
    failures      a request that failed stays in the denominator of goodput and attainment.
                  Latencies are given over completed requests, and again with each failure as
                  infinitely slow
    empty         null, never 0: a metric without a sample says nothing

Nothing here knows a unit but seconds and tokens, or rounds.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from llmbench.bench.slo import Goodput
from llmbench.bench.stats import percentiles_with_failures, summarize, trend_z
from llmbench.bench.step_summary import StepSummary
from llmbench.bench.timelines import RequestTimeline, request_timelines

__all__ = ["Goodput", "RequestTimeline", "cell_metrics", "request_timelines"]

MIN_STEADY_SHARE = 0.1
"""A steady window shorter than a tenth of the run does not speak for the run."""

_Time = Callable[[RequestTimeline], float | None]
_TIMES: dict[str, _Time] = {
    "ttft_s": lambda request: request.ttft_s,
    "ttft_from_schedule_s": lambda request: request.ttft_from_schedule_s,
    "tpot_s": lambda request: request.tpot_s,
    "e2el_s": lambda request: request.e2el_s,
    "e2el_from_schedule_s": lambda request: request.e2el_from_schedule_s,
}


def cell_metrics(
    timelines: Sequence[RequestTimeline],
    *,
    num_requests: int | None = None,
    request_rate: float = math.inf,
    goodput: Goodput | None = None,
    steps: StepSummary | None = None,
) -> dict[str, Any]:
    """Return the `metrics` of a cell's record.

    `num_requests` is what the plan asked for; requests without any event count as lost.
    `request_rate` is infinite where no schedule was offered (closed loop, or all at once).
    """
    completed = [request for request in timelines if request.is_completed]
    sent = [request for request in timelines if request.sent_s is not None]
    outcomes = Counter(request.outcome for request in timelines)
    planned = max(num_requests or 0, len(timelines))
    start, end = _run_bounds(sent)
    duration = end - start
    input_tokens = sum(request.num_prompt_tokens or 0 for request in completed)
    output_tokens = sum(request.num_output_tokens for request in completed)
    metrics: dict[str, Any] = {
        "duration_s": duration if sent else None,
        "num_requests": planned,
        "num_completed": outcomes["completed"],
        "num_failed": outcomes["failed"],
        "num_aborted": outcomes["aborted"],
        "num_lost": planned - len(timelines) + outcomes["lost"],
        "finish_reasons": dict(
            Counter(request.finish_reason or "unknown" for request in completed)
        ),
        "errors": _error_counts(timelines),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput_req_s": _ratio(len(completed), duration),
        "output_throughput_tok_s": _ratio(output_tokens, duration),
        "total_throughput_tok_s": _ratio(input_tokens + output_tokens, duration),
        "peak_output_throughput_tok_s": _peak_throughput(sent, start, end),
        "steady_window": _steady_window(sent, start, end),
        "per_user_tok_s": _summary(1 / tpot for tpot in _known(completed, "tpot_s") if tpot > 0),
        "request_output_tok_s": _summary(
            request.num_output_tokens / e2el
            for request in completed
            if (e2el := request.e2el_s) is not None and e2el > 0
        ),
    }
    metrics |= _goodput(completed, planned, duration, goodput)
    metrics |= {name: _summary(_known(completed, name)) for name in _TIMES}
    metrics |= {
        "itl_s": _itl(completed),
        "tokens_per_chunk": _ratio(
            sum(sum(request.token_counts) for request in completed),
            sum(len(request.token_counts) for request in completed),
        ),
        "num_token_count_mismatches": sum(
            request.num_output_tokens != sum(request.token_counts) for request in completed
        ),
        "with_failures_as_infinite": {
            name: percentiles_with_failures(_known(completed, name), outcomes["failed"])
            for name in _TIMES
        },
    }
    metrics |= _load(sent, completed, request_rate)
    metrics |= _concurrency(sent, duration)
    has_no_prefix_cache = steps is not None and steps.num_prefix_queried_tokens == 0
    metrics["prefix_hit_rate"] = None if has_no_prefix_cache else _prefix_hit_rate(completed)
    names = [field.name for field in dataclasses.fields(StepSummary)]
    metrics |= dataclasses.asdict(steps) if steps is not None else dict.fromkeys(names)
    return metrics


def _run_bounds(sent: Sequence[RequestTimeline]) -> tuple[float, float]:
    starts = [request.sent_s for request in sent if request.sent_s is not None]
    return min(starts, default=0.0), max((_last_seen(request) for request in sent), default=0.0)


def _last_seen(request: RequestTimeline) -> float:
    """Return when the request ended, or the last sign of one that never did."""
    times = [request.sent_s, request.last_token_s, request.end_s]
    return max((time for time in times if time is not None), default=0.0)


def _error_counts(timelines: Sequence[RequestTimeline]) -> dict[str, int]:
    """Return how often each error occurred, the most frequent ten."""
    failed = [request for request in timelines if request.outcome == "failed"]
    return dict(
        Counter(request.error or "ended without a token" for request in failed).most_common(10)
    )


def _token_events(sent: Sequence[RequestTimeline]) -> tuple[np.ndarray[Any, Any], ...]:
    """Return times and tokens of all chunks; tokens that no chunk showed count at the end."""
    times: list[float] = []
    tokens: list[float] = []
    for request in sent:
        times += request.token_times_s or [_last_seen(request)]
        tokens += request.chunk_tokens or [request.num_output_tokens]
    return np.asarray(times), np.asarray(tokens)


def _peak_throughput(sent: Sequence[RequestTimeline], start: float, end: float) -> float | None:
    if end <= start:
        return None
    num_windows = max(1, round(end - start))
    times, tokens = _token_events(sent)
    counts, _ = np.histogram(times, bins=num_windows, range=(start, end), weights=tokens)
    return float(counts.max()) * num_windows / (end - start)


def _steady_window(
    sent: Sequence[RequestTimeline], start: float, end: float
) -> dict[str, float] | None:
    """Return throughput between the first completion and the last send, relative to `start`."""
    ends = [request.end_s for request in sent if request.is_completed and request.end_s is not None]
    if not ends:
        return None
    first, last = min(ends), max(request.sent_s for request in sent if request.sent_s is not None)
    if last - first < MIN_STEADY_SHARE * (end - start) or last <= first:
        return None
    times, tokens = _token_events(sent)
    num_tokens = float(tokens[(times > first) & (times <= last)].sum())
    return {
        "start_s": first - start,
        "end_s": last - start,
        "num_output_tokens": num_tokens,
        "output_throughput_tok_s": num_tokens / (last - first),
    }


def _goodput(
    completed: Sequence[RequestTimeline], planned: int, duration: float, goodput: Goodput | None
) -> dict[str, float | None]:
    """Judge times from the schedule: a request that waited in the client waited all the same."""
    if goodput is None:
        return {"request_goodput_req_s": None, "slo_attainment": None}
    num_good = sum(
        goodput.is_met(
            ttft_s=request.ttft_from_schedule_s,
            tpot_s=request.tpot_s,
            e2el_s=request.e2el_from_schedule_s,
        )
        for request in completed
    )
    return {
        "request_goodput_req_s": _ratio(num_good, duration),
        "slo_attainment": _ratio(num_good, planned),
    }


def _itl(completed: Sequence[RequestTimeline]) -> dict[str, Any]:
    gaps: list[float] = []
    groups: list[int] = []
    for request in completed:
        own = request.chunk_gaps_s
        gaps += own
        groups += [request.request_index] * len(own)
    return summarize(gaps, groups=groups).to_record()


def _load(
    sent: Sequence[RequestTimeline], completed: Sequence[RequestTimeline], request_rate: float
) -> dict[str, Any]:
    """Say what load was asked for, what was delivered, and whether the target kept up with it.

    Each rate is (n - 1) / (last - first), so that the three can be compared.
    """
    is_scheduled = math.isfinite(request_rate)
    scheduled = [request.scheduled_s for request in sent if request.scheduled_s is not None]
    in_order = sorted(completed, key=lambda request: request.scheduled_s or 0.0)
    return {
        "client_queue_s": _summary(_numbers(request.client_queue_s for request in sent)),
        "schedule_error_s": _summary(_numbers(request.schedule_error_s for request in sent)),
        "offered_rate_req_s": _rate(scheduled) if is_scheduled else None,
        "achieved_rate_req_s": _rate(_numbers(request.sent_s for request in sent)),
        "completion_rate_req_s": _rate(_numbers(request.end_s for request in completed)),
        "e2el_trend_z": trend_z(_known(in_order, "e2el_from_schedule_s")) if is_scheduled else None,
    }


def _concurrency(sent: Sequence[RequestTimeline], duration: float) -> dict[str, float | None]:
    """Return requests in flight, from send to end: the most, and the mean over time."""
    changes: list[tuple[float, int]] = []
    total = 0.0
    for request in sent:
        if request.sent_s is None:
            continue
        ended = _last_seen(request)
        total += ended - request.sent_s
        changes += [(request.sent_s, 1), (ended, -1)]
    running = peak = 0
    for _, change in sorted(changes):  # at equal times an end (-1) frees its slot first
        running += change
        peak = max(peak, running)
    return {"peak_concurrency": peak or None, "mean_concurrency": _ratio(total, duration)}


def _prefix_hit_rate(completed: Sequence[RequestTimeline]) -> float | None:
    """Return the share of prompt tokens that the target took from its prefix cache."""
    cached = _numbers(request.num_cached_tokens for request in completed)
    prompts = _numbers(request.num_prompt_tokens for request in completed)
    if len(cached) < len(completed) or len(prompts) < len(completed):
        return None
    return _ratio(sum(cached), sum(prompts))


def _known(requests: Sequence[RequestTimeline], name: str) -> list[float]:
    return _numbers(map(_TIMES[name], requests))


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _summary(values: Iterable[float]) -> dict[str, Any]:
    return summarize(list(values)).to_record()


def _rate(times: Sequence[float]) -> float | None:
    return _ratio(len(times) - 1, max(times) - min(times)) if len(times) > 1 else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
