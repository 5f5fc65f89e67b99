"""Is this run fit to be read? A verdict with its reasons, from the run's own metrics.

    VALID               the load was the one asked for, and every request was served
    INCOMPLETE          requests were given up or lost, so the sample is not the workload's
    FAILED-REQUESTS     requests failed; latencies of the rest look better than the target was
    CLIENT-LIMITED      the load generator sent late by more than the figures can bear: what was
                        measured is the client
    RATE-NOT-ACHIEVED   the generator kept time but the target did not keep up with the offered
                        rate. That is a finding about the target and no fault of the run, so the
                        run stays valid; latencies then depend on how long it lasted

The first that applies, in the order INCOMPLETE, FAILED-REQUESTS, CLIENT-LIMITED,
RATE-NOT-ACHIEVED, is the verdict; the reasons name all of them. Gates accept valid runs only.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["VALID", "INCOMPLETE", "FAILED-REQUESTS", "CLIENT-LIMITED", "RATE-NOT-ACHIEVED"]

MIN_SCHEDULE_ERROR_S = 0.002
"""Lateness that is never held against a run: the p99 which the generator itself must keep at
2,000 requests/s, about what waking up a process costs on a busy machine."""

MAX_SCHEDULE_ERROR_SHARE = 0.05
"""Lateness as a share of the time that it competes with. A shift of 5 % of the gap between
arrivals leaves the arrival process what it was (the gaps of a Poisson process vary by 100 % of
their mean), and 5 % of the latency is below the run-to-run noise of serving benchmarks."""

MIN_ACHIEVED_SHARE = 0.95
"""Share of the offered rate below which a target counts as not keeping up."""

MIN_TREND_Z = 1.96
"""Growth of latency along the run that chance explains in 1 of 40 runs without any."""

MAX_TOKENS_PER_CHUNK = 1.05
"""Above this, the gaps between chunks say little about single tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """The verdict on one run."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader of the figures should know although the run is sound."""

    @property
    def is_valid(self) -> bool:
        """Whether figures of the run may be compared and gated."""
        return self.verdict in ("VALID", "RATE-NOT-ACHIEVED")

    def to_record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "verdict": self.verdict,
            "is_valid": self.is_valid,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
        }


def judge(metrics: dict[str, Any], *, request_rate: float, max_concurrency: int | None) -> Validity:
    """Judge a run by its `metrics` and by the load that was asked for."""
    found: list[tuple[Verdict, str]] = []
    if reason := _incomplete(metrics):
        found.append(("INCOMPLETE", reason))
    if reason := _failed(metrics):
        found.append(("FAILED-REQUESTS", reason))
    if reason := _client_limited(metrics, request_rate, max_concurrency):
        found.append(("CLIENT-LIMITED", reason))
    if reason := _rate_not_achieved(metrics, max_concurrency):
        found.append(("RATE-NOT-ACHIEVED", reason))
    return Validity(
        verdict=found[0][0] if found else "VALID",
        reasons=tuple(reason for _, reason in found),
        notes=tuple(_notes(metrics)),
    )


def max_schedule_error_s(
    metrics: dict[str, Any], *, request_rate: float, max_concurrency: int | None
) -> float:
    """Return the lateness of sending that the run can bear.

    Open loop: against the gap between arrivals, which it distorts, and the latency from the
    schedule, which it lengthens. Closed loop: against the latency, since a slot that stands empty
    for 5 % of it costs 5 % of the throughput. All at once: against the whole run, which the last
    request can lengthen by no more than its own lateness.
    """
    latency = metrics["e2el_s"]["median"] or 0.0
    if math.isfinite(request_rate):
        rival = min(1 / request_rate, latency)
    elif max_concurrency is not None:
        rival = latency
    else:
        rival = metrics["duration_s"] or 0.0
    return max(MIN_SCHEDULE_ERROR_S, MAX_SCHEDULE_ERROR_SHARE * rival)


def _incomplete(metrics: dict[str, Any]) -> str | None:
    aborted, lost = metrics["num_aborted"], metrics["num_lost"]
    if not aborted and not lost:
        return None
    return f"of {metrics['num_requests']} requests, {aborted} were given up and {lost} never ended"


def _failed(metrics: dict[str, Any]) -> str | None:
    if not metrics["num_failed"]:
        return None
    reasons = "; ".join(f"{count} x {reason}" for reason, count in metrics["errors"].items())
    return f"{metrics['num_failed']} of {metrics['num_requests']} requests failed: {reasons}"


def _client_limited(
    metrics: dict[str, Any], request_rate: float, max_concurrency: int | None
) -> str | None:
    error = metrics["schedule_error_s"]
    limit = max_schedule_error_s(
        metrics, request_rate=request_rate, max_concurrency=max_concurrency
    )
    # The tail is judged at the highest percentile that the sample carries, where latencies are
    # read too; the mean catches rarer requests that were very late.
    tail = next((name for name in ("p99", "p95", "p90") if error[name] is not None), "max")
    late = [
        f"{name} {error[name] * 1e3:.1f} ms"
        for name in (tail, "mean")
        if error["n"] and error[name] > limit
    ]
    if not late:
        return None
    return (
        f"requests were sent late: schedule error {', '.join(late)}, "
        f"more than the {limit * 1e3:.1f} ms that this load can bear"
    )


def _rate_not_achieved(metrics: dict[str, Any], max_concurrency: int | None) -> str | None:
    offered, achieved = metrics["offered_rate_req_s"], metrics["achieved_rate_req_s"]
    if not offered:
        return None
    if max_concurrency is not None and achieved and achieved < MIN_ACHIEVED_SHARE * offered:
        return (
            f"requests went out at {achieved:.3g} req/s, {achieved / offered:.0%} of the offered "
            f"{offered:.3g}: all {max_concurrency} slots were taken"
        )
    completed, trend = metrics["completion_rate_req_s"], metrics["e2el_trend_z"]
    is_behind = completed is not None and completed < MIN_ACHIEVED_SHARE * offered
    if is_behind and trend is not None and trend > MIN_TREND_Z:
        # Either sign alone also appears in a short run that fills and drains.
        return (
            f"requests completed at {completed:.3g} req/s, {completed / offered:.0%} of the "
            f"offered {offered:.3g}, while latency kept growing: the target is saturated, or the "
            f"run too short to settle"
        )
    return None


def _notes(metrics: dict[str, Any]) -> list[str]:
    notes = []
    per_chunk = metrics["tokens_per_chunk"]
    if per_chunk is not None and per_chunk > MAX_TOKENS_PER_CHUNK:
        notes.append(
            f"{per_chunk:.2f} tokens arrive together on average: ITL is a gap between chunks, "
            "TPOT is the time per token"
        )
    if mismatches := metrics["num_token_count_mismatches"]:
        notes.append(
            f"for {mismatches} requests the target counted other tokens than arrived; "
            "its own count is used"
        )
    return notes
