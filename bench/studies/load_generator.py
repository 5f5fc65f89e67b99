"""How punctual is the load generator itself?

A benchmark that sends late, or loses answers, measures its own client. Here the generator runs
against an engine that answers at once (`null_engine.py`), through the same processes and
connections as a real run: Poisson arrivals at a high rate, each request with a short prompt. What
is late or lost is then the generator's own doing.
"""

import tempfile
from pathlib import Path

import numpy as np

from llmbench.bench.client.engine_process import EngineProcess
from llmbench.bench.client.events import EventLog
from llmbench.bench.client.generator_process import LoadGenerator
from llmbench.bench.client.messages import RunLoad
from llmbench.bench.client.null_engine import make_null_engine
from llmbench.bench.client.processes import connected_pair
from llmbench.bench.workloads.arrivals import arrival_times
from llmbench.bench.workloads.workload import RequestSpec

PROMPT_TOKENS = 64


def measure_load_generator(
    rate: float = 2000.0, duration_s: float = 5.0, seed: int = 0
) -> dict[str, float | int]:
    """Return send-time errors (s) and losses at `rate` requests/s against the null engine.

    `send_error_*_s` is sent - due; `round_trip_p50_s` is what the way through the connections
    adds to every latency.
    """
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
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "events.parquet"
            generator.run(
                RunLoad(
                    requests=requests,
                    arrival_offsets=arrival_times(num_requests, rate, 1.0, seed),
                    max_concurrency=None,
                    time_limit_s=duration_s + 30.0,
                    events_path=path,
                )
            )
            events = EventLog.read_parquet(path)
    finally:
        generator.stop()
        engine.stop()
    due_s, sent_s, answered_s = {}, {}, {}
    for event in events:
        if event.kind == "scheduled":
            due_s[event.request_index] = event.t_s
        elif event.kind == "sent":
            sent_s[event.request_index] = event.t_s
        elif event.kind == "end":
            answered_s[event.request_index] = event.t_s
    errors_s = np.array([sent_s[index] - due_s[index] for index in sent_s])
    round_trips_s = np.array([answered_s[index] - sent_s[index] for index in answered_s])
    span_s = max(sent_s.values()) - min(sent_s.values())
    return {
        "offered_rate_req_s": rate,
        "achieved_rate_req_s": (len(sent_s) - 1) / span_s if span_s > 0 else 0.0,
        "num_requests": num_requests,
        "num_sent": len(sent_s),
        "num_lost": num_requests - len(answered_s),
        "send_error_p50_s": float(np.percentile(errors_s, 50)),
        "send_error_p99_s": float(np.percentile(errors_s, 99)),
        "send_error_max_s": float(errors_s.max()),
        "round_trip_p50_s": float(np.median(round_trips_s)),
    }
