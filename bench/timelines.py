"""One request's events, put in order: the input of every metric.

The times of a request follow reference definitions that are stated once, here:

    TTFT   first event that carries an output token - sent. Role-only and empty events are never
           logged as `token`, so they cannot start the clock
    TPOT   (last token - first token) / (n - 1), n >= 2 output tokens. Missing, never 0, for a
           single token, and where all tokens came in one chunk, which shows no interval
    ITL    gaps between chunks that carry tokens; the wait for the first is TTFT and not in it.
           With several tokens in a chunk this is a gap between chunks: see tokens_per_chunk
    E2EL   last token - sent

TTFT and E2EL are also given from the scheduled time: a load generator that was held back by its
concurrency cap, or was late, hides that wait if the clock starts at sending (coordinated omission).
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from llmbench.bench.client.events import Event

Outcome = Literal["completed", "failed", "aborted", "lost"]


@dataclass(slots=True, kw_only=True)
class RequestTimeline:
    """What happened to one request; times are seconds on the log's clock."""

    request_index: int
    scheduled_s: float | None = None
    admitted_s: float | None = None
    sent_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    """Arrivals of chunks that carry tokens; `token_counts` has how many each carried."""
    token_counts: list[int] = field(default_factory=list)
    end_s: float | None = None
    """When it ended in any way: finished, failed or given up."""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    reported_output_tokens: int | None = None
    """The target's own count, which stands above the count of chunks."""
    error: str | None = None
    is_aborted: bool = False

    @property
    def outcome(self) -> Outcome:
        """Lost: the log ends before the request did. Failed includes an end without a token."""
        if self.error is not None:
            return "failed"
        if self.is_aborted:
            return "aborted"
        if self.end_s is None:
            return "lost"
        return "completed" if self.num_output_tokens else "failed"

    @property
    def is_completed(self) -> bool:
        """Finished by itself with at least one token."""
        return self.outcome == "completed"

    @property
    def num_output_tokens(self) -> int:
        """Output tokens: the target's count, else the tokens that arrived."""
        if self.reported_output_tokens is not None:
            return self.reported_output_tokens
        return sum(self.token_counts)

    @property
    def chunk_tokens(self) -> list[float]:
        """Tokens of each chunk, scaled so that they sum to `num_output_tokens`."""
        total = sum(self.token_counts)
        scale = self.num_output_tokens / total if total else 0.0
        return [count * scale for count in self.token_counts]

    @property
    def ttft_s(self) -> float | None:
        """First token - sent."""
        return _difference(self.first_token_s, self.sent_s)

    @property
    def ttft_from_schedule_s(self) -> float | None:
        """First token - scheduled."""
        return _difference(self.first_token_s, self.scheduled_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first."""
        if self.num_output_tokens < 2 or len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Gaps between successive chunks that carry tokens."""
        times = self.token_times_s
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def e2el_s(self) -> float | None:
        """Last token - sent."""
        return _difference(self.last_token_s, self.sent_s)

    @property
    def e2el_from_schedule_s(self) -> float | None:
        """Last token - scheduled."""
        return _difference(self.last_token_s, self.scheduled_s)

    @property
    def client_queue_s(self) -> float | None:
        """Time held back by the concurrency cap."""
        return _difference(self.admitted_s, self.scheduled_s)

    @property
    def schedule_error_s(self) -> float | None:
        """The load generator's own lateness: sent - admitted."""
        return _difference(self.sent_s, self.admitted_s)

    @property
    def first_token_s(self) -> float | None:
        """Time of the first chunk that carries a token."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def last_token_s(self) -> float | None:
        """Time of the last chunk that carries a token."""
        return self.token_times_s[-1] if self.token_times_s else None


def request_timelines(events: Iterable[Event]) -> list[RequestTimeline]:
    """Group a log by request, in order of request index."""
    timelines: dict[int, RequestTimeline] = {}
    for event in events:
        timeline = timelines.get(event.request_index)
        if timeline is None:
            timeline = RequestTimeline(request_index=event.request_index)
            timelines[event.request_index] = timeline
        _add(timeline, event)
    return [timelines[index] for index in sorted(timelines)]


def _add(timeline: RequestTimeline, event: Event) -> None:
    if event.kind == "token":
        timeline.token_times_s.append(event.t_s)
        timeline.token_counts.append(event.num_tokens)
    elif event.kind == "scheduled":
        timeline.scheduled_s = event.t_s
    elif event.kind == "admitted":
        timeline.admitted_s = event.t_s
    elif event.kind == "sent":
        timeline.sent_s = event.t_s
    else:
        detail: dict[str, Any] = json.loads(event.detail) if event.detail else {}
        timeline.end_s = event.t_s
        if event.kind == "error":
            timeline.error = str(detail.get("reason", "unknown"))
        elif event.kind == "abort" or detail.get("finish_reason") == "abort":
            timeline.is_aborted = True
        elif detail.get("finish_reason") == "error":
            timeline.error = "the target finished it with an error"
        else:
            timeline.finish_reason = detail.get("finish_reason")
            timeline.num_prompt_tokens = detail.get("num_prompt_tokens")
            timeline.num_cached_tokens = detail.get("num_cached_tokens")
            timeline.reported_output_tokens = detail.get("num_output_tokens")


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
