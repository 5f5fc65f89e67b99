"""How punctual is the load generator itself?

A benchmark that sends late, or loses answers, measures its own client. Here the generator runs
against an engine that answers at once (`null_engine.py`), through the same processes and
connections as a real run: Poisson arrivals at a high rate, each request with a short prompt. What
is late or lost is then the generator's own doing.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmbench.bench.studies.study import Conclusion, Lab, Row, Study, require_positive, time_text

PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGeneratorSettings:
    """Rates to send at, requests a second, and for how long."""

    request_rates: tuple[float, ...] = (500.0, 1000.0, 2000.0)
    duration_s: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "request_rates", "duration_s")


def measure(settings: LoadGeneratorSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each rate."""
    rates = settings.request_rates
    for done, rate in enumerate(rates):
        lab.progress(f"{rate:g} requests/s", done, len(rates))
        path = lab.folder / f"events-rate={rate:g}.parquet"
        yield measure_load_generator(rate, settings.duration_s, settings.seed, events_path=path)


def measure_load_generator(
    rate: float = 2000.0,
    duration_s: float = 5.0,
    seed: int = 0,
    *,
    events_path: Path | None = None,
) -> Row:
    """Return send-time errors (s) and losses at `rate` requests/s against the null engine.

    `send_error_*_s` is sent - due; `round_trip_p50_s` is what the way through the connections
    adds to every latency. The event log stays in `events_path`, if one is given.
    """
    if events_path is not None:
        return _row(rate, duration_s, seed, events_path)
    with tempfile.TemporaryDirectory() as folder:
        return _row(rate, duration_s, seed, Path(folder) / "events.parquet")


def _row(rate: float, duration_s: float, seed: int, events_path: Path) -> Row:
    from llmbench.bench.client.engine_process import EngineProcess
    from llmbench.bench.client.events import EventLog
    from llmbench.bench.client.generator_process import LoadGenerator
    from llmbench.bench.client.messages import RunLoad
    from llmbench.bench.client.null_engine import make_null_engine
    from llmbench.bench.client.processes import connected_pair
    from llmbench.bench.stats import summarize
    from llmbench.bench.timelines import request_timelines
    from llmbench.bench.workloads.arrivals import arrival_times
    from llmbench.bench.workloads.workload import RequestSpec

    num_requests = max(1, round(rate * duration_s))
    requests = tuple(
        RequestSpec(index=index, prompt_token_ids=(index % 997,) * PROMPT_TOKENS, max_tokens=1)
        for index in range(num_requests)
    )
    engine_end, generator_end = connected_pair()
    engine = EngineProcess(make_null_engine, engine_end)
    generator = LoadGenerator(generator_end)
    try:
        engine.wait_until_ready()
        generator.run(
            RunLoad(
                requests=requests,
                arrival_offsets=arrival_times(num_requests, rate, 1.0, seed),
                max_concurrency=None,
                time_limit_s=duration_s + 30.0,
                events_path=events_path,
            )
        )
    finally:
        generator.stop()
        engine.stop()
    timelines = request_timelines(EventLog.read_parquet(events_path))
    sent = [request.sent_s for request in timelines if request.sent_s is not None]
    span_s = max(sent) - min(sent)
    num_answered = sum(request.is_completed for request in timelines)
    errors = summarize(
        [
            request.sent_s - request.scheduled_s
            for request in timelines
            if request.sent_s is not None and request.scheduled_s is not None
        ]
    )
    trips = summarize([request.e2el_s for request in timelines if request.e2el_s is not None])
    return {
        "request_rate_req_s": rate,
        "achieved_rate_req_s": (len(sent) - 1) / span_s if span_s > 0 else None,
        "num_requests": num_requests,
        "num_sent": len(sent),
        "num_lost": num_requests - num_answered,
        "send_error_p50_s": errors.median,
        "send_error_p99_s": errors.p99,
        "send_error_max_s": errors.max,
        "round_trip_p50_s": trips.median,
    }


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Say what the highest rate shows."""
    columns = (
        "request_rate_req_s",
        "achieved_rate_req_s",
        "num_requests",
        "num_lost",
        "send_error_p50_s",
        "send_error_p99_s",
        "send_error_max_s",
        "round_trip_p50_s",
    )
    fastest = max(rows, key=lambda row: row["request_rate_req_s"])
    p99 = fastest["send_error_p99_s"]
    punctual = (
        f"99 of 100 requests leave within {time_text(p99)} of their time"
        if p99 is not None
        else f"every request leaves within {time_text(fastest['send_error_max_s'])} of its time"
    )
    lost = f"{fastest['num_lost']:,}" if fastest["num_lost"] else "none"
    return Conclusion(
        finding=(
            f"at {fastest['request_rate_req_s']:,.6g} requests/s {punctual}, and {lost} of "
            f"{fastest['num_requests']:,} is lost"
        ),
        table=[{name: row[name] for name in columns} for row in rows],
        summary={"send_error_p99_s": p99, "num_lost": sum(row["num_lost"] for row in rows)},
    )


STUDY = Study(
    name="load-generator",
    settings_type=LoadGeneratorSettings,
    measure=measure,
    conclude=conclude,
)
