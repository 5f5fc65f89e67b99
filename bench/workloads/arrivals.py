"""When requests arrive: offsets on an absolute schedule, drawn before the run starts.

Gaps between arrivals are gamma distributed with mean 1/rate and shape `burstiness`: 1 is a Poisson
process (exponential gaps), below 1 arrivals cluster, above 1 they even out, and infinity is a
constant gap. An infinite rate sends everything at once, which with a cap on concurrency is a
closed loop.

As in `vllm bench serve`, the schedule is then stretched so that the last of N requests arrives at
N/rate: what is offered over the run is the asked-for rate whatever the seed. The gaps of a
stretched schedule have mean 1/rate and variance (N - 1) / (N * burstiness + 1) / rate^2, those of
a symmetric Dirichlet distribution, which tends to the gamma's 1 / burstiness / rate^2.
"""

import math

import numpy as np

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.streams import stream


def arrival_times(
    num_requests: int, request_rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Return when each request is due, seconds from the start, in ascending order.

    `request_rate` is in requests a second; rate and burstiness may be infinite.
    """
    if num_requests < 0:
        raise WorkloadError(f"number of requests must not be negative, not {num_requests}")
    # Written so that NaN fails.
    if not request_rate > 0:
        error = WorkloadError(f"request_rate must be positive or inf, not {request_rate}")
        error.add_note("inf sends every request at once")
        raise error
    if not burstiness > 0:
        error = WorkloadError(f"burstiness must be positive or inf, not {burstiness}")
        error.add_note("1 is a Poisson process, inf a constant gap, below 1 is bursty")
        raise error
    if num_requests == 0 or math.isinf(request_rate):
        return [0.0] * num_requests
    if math.isinf(burstiness):
        return [(index + 1) / request_rate for index in range(num_requests)]
    gaps = stream(seed, "arrivals").standard_gamma(burstiness, size=num_requests)
    due = np.cumsum(gaps)
    # Gammas of a tiny shape underflow: where all do, there is nothing to stretch.
    if due[-1] < np.finfo(float).tiny:
        error = WorkloadError(
            f"burstiness {burstiness} leaves no gap between {num_requests} arrivals"
        )
        error.add_note("take a burstiness of at least 0.01")
        raise error
    last = num_requests / request_rate
    offsets: list[float] = (due / due[-1] * last).tolist()
    return offsets
