"""Settings of `serve-bench`: which engine, which requests, and the grid of loads to try.

A cell of the grid is one request rate under one cap on concurrency. Cells run in the order in
which their values are given, rates outermost.

Imports neither torch nor numpy, so the command line can read defaults from here at no cost.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from llmbench.bench.errors import BenchConfigError
from llmbench.bench.slo import Goodput
from llmbench.bench.workloads.workload import WorkloadConfig
from llmbench.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig:
    """A sweep of loads over one engine with one workload.

    Attributes:
        request_rates: Requests a second; inf sends all at once, or, under a cap, as a closed loop.
        max_concurrencies: Most requests in flight; None is no cap.
        burstiness: Shape of the gamma distributed gaps between arrivals: 1 is Poisson, below it
            arrivals cluster, inf is a constant rate.
        num_warmups: Requests before each cell that are not measured.
        goodput: What a request must meet to count as good.
        time_limit_s: Longest time of a cell; what has not ended by then is aborted.
        seed: Of the arrival times.
        output: Results folder; one that holds cells of the same sweep is resumed.
    """

    engine: EngineConfig
    workload: WorkloadConfig
    output: Path
    request_rates: tuple[float, ...] = (math.inf,)
    max_concurrencies: tuple[int | None, ...] = (None,)
    burstiness: float = 1.0
    num_warmups: int = 2
    goodput: Goodput | None = None
    time_limit_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rates or not self.max_concurrencies:
            raise BenchConfigError("at least one request rate and one concurrency are needed")
        for rate in self.request_rates:
            if not rate > 0:  # written so that NaN fails
                raise BenchConfigError(f"request_rate must be positive or inf, not {rate}")
        for cap in self.max_concurrencies:
            if cap is not None and cap < 1:
                raise BenchConfigError(f"max_concurrency must be at least 1, not {cap}")
        if not self.burstiness > 0:
            raise BenchConfigError(f"burstiness must be positive or inf, not {self.burstiness}")
        if self.num_warmups < 0:
            raise BenchConfigError(f"num_warmups must not be negative, not {self.num_warmups}")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise BenchConfigError(f"time_limit_s must be positive, not {self.time_limit_s}")

    @property
    def cells(self) -> tuple["Cell", ...]:
        """The grid, each cell once."""
        return tuple(
            dict.fromkeys(
                Cell(
                    request_rate=rate,
                    max_concurrency=cap,
                    burstiness=self.burstiness,
                    num_prompts=self.workload.num_prompts,
                    num_warmups=self.num_warmups,
                    time_limit_s=self.time_limit_s,
                    seed=self.seed,
                )
                for rate in self.request_rates
                for cap in self.max_concurrencies
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load point: how the requests of the workload are offered."""

    request_rate: float
    max_concurrency: int | None
    burstiness: float
    num_prompts: int
    num_warmups: int
    time_limit_s: float | None
    seed: int

    @property
    def label(self) -> str:
        """Short name, such as `rate=4 concurrency=8`."""
        cap = "unlimited" if self.max_concurrency is None else str(self.max_concurrency)
        return f"rate={self.request_rate:g} concurrency={cap}"
