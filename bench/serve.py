"""One load point: warm up, offer the load, and turn what was recorded into a record.

A `Rig` is the two processes that stand through a whole sweep: the engine, loaded once, and
the load generator, joined by a connection of their own. A cell starts from the same state each
time: a few requests have been served, so that nothing runs for the first time, and the engine has
forgotten every cached prefix.
"""

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbench.bench.client.engine_process import EngineFactory, EngineProcess
from llmbench.bench.client.events import EventLog
from llmbench.bench.client.generator import LoadProgress, LoadSummary
from llmbench.bench.client.generator_process import LoadGenerator
from llmbench.bench.client.messages import RunLoad
from llmbench.bench.client.processes import connected_pair
from llmbench.bench.config import Cell
from llmbench.bench.metrics import cell_metrics, request_timelines
from llmbench.bench.results import utc_now
from llmbench.bench.slo import Goodput
from llmbench.bench.step_summary import step_summary
from llmbench.bench.strict_json import strict
from llmbench.bench.validity import judge
from llmbench.bench.workloads.arrivals import arrival_times
from llmbench.bench.workloads.workload import RequestSpec, Workload
from llmbench.engine import step_record

WARMUP_TOKENS = 16
"""Output tokens of a warm-up request: enough for every kernel to have run, few enough to be short.
"""


class Rig:
    """An engine and a load generator, each in its process; a context manager that ends both."""

    def __init__(self, make_engine: EngineFactory) -> None:
        engine_end, generator_end = connected_pair()
        self.engine = EngineProcess(make_engine, engine_end)
        self.generator = LoadGenerator(generator_end)
        self.engine_facts: dict[str, Any] = {}

    def wait_until_ready(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Return once the engine serves, or raise the error that its loading raised."""
        self.engine_facts = self.engine.wait_until_ready(on_progress)

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.generator.stop()
        self.engine.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFiles:
    """Where a cell's raw data go."""

    events: Path
    warmup_events: Path
    steps: Path


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """A cell's record, and what broke the cell, if anything did."""

    record: dict[str, Any]
    error: Exception | None


def run_cell(
    rig: Rig,
    cell: Cell,
    cell_id: str,
    workload: Workload,
    files: CellFiles,
    *,
    goodput: Goodput | None = None,
    on_progress: Callable[[str, LoadProgress], None] | None = None,
    is_cancelled: Callable[[], bool] | None = None,
) -> CellOutcome:
    """Run one cell to its end, to its cancellation or to a failure, and say what happened.

    `on_progress` hears `warm-up` or `load` and how far that is.
    """
    record: dict[str, Any] = {
        "kind": "serve-bench",
        "cell_id": cell_id,
        "status": "failed",
        "started_at": utc_now(),
        "cell": strict(cell),
        "workload_digest": workload.digest,
        "engine": rig.engine_facts,
    }
    # What an earlier, interrupted run of the cell left behind is not this run's.
    for path in (files.events, files.warmup_events, files.steps):
        path.unlink(missing_ok=True)

    def run(stage: str, load: RunLoad) -> LoadSummary:
        def report(progress: LoadProgress) -> None:
            if on_progress is not None:
                on_progress(stage, progress)

        return rig.generator.run(load, on_progress=report, is_cancelled=is_cancelled)

    error: Exception | None = None
    try:
        warmups = warmup_requests(workload.requests, cell.num_warmups)
        if warmups:
            summary = _warm_up(run, warmups, cell, files.warmup_events)
            record["warmup"] = _warmup_record(len(warmups), summary)
            if summary.ended == "target_failed":
                rig.engine.raise_failure()
            if summary.ended == "cancelled":
                record["status"] = "interrupted"
                record["ended"] = {"how": summary.ended, "reason": summary.reason}
                return CellOutcome(record, None)
        rig.engine.begin_cell()
        summary = run(
            "load",
            RunLoad(
                requests=workload.requests,
                arrival_offsets=arrival_times(
                    len(workload.requests), cell.request_rate, cell.burstiness, cell.seed
                ),
                max_concurrency=cell.max_concurrency,
                time_limit_s=cell.time_limit_s,
                events_path=files.events,
            ),
        )
        if summary.ended == "target_failed":
            rig.engine.raise_failure()
        record["engine"] = rig.engine_facts | rig.engine.end_cell(files.steps)
        record["status"] = "interrupted" if summary.ended == "cancelled" else "complete"
        record["ended"] = {"how": summary.ended, "reason": summary.reason}
    except Exception as caught:
        error = caught
        record["error"] = {
            "type": type(caught).__name__,
            "message": str(caught),
            "notes": list(getattr(caught, "__notes__", ())),
        }
    if files.events.exists():
        record |= _measure(cell, workload, files, goodput)
    return CellOutcome(record, error)


def warmup_requests(requests: Sequence[RequestSpec], num_warmups: int) -> tuple[RequestSpec, ...]:
    """Return short requests of the workload's prompt lengths, none of which is one of its own.

    Reversed prompts are made of valid tokens and share no prefix with what will be measured.
    """
    return tuple(
        dataclasses.replace(
            spec,
            index=index,
            prompt_token_ids=spec.prompt_token_ids[::-1],
            max_tokens=min(spec.max_tokens, WARMUP_TOKENS),
            text=None,
        )
        for index in range(num_warmups)
        for spec in (requests[index % len(requests)],)
    )


def _warm_up(
    run: Callable[[str, RunLoad], LoadSummary],
    requests: tuple[RequestSpec, ...],
    cell: Cell,
    events_path: Path,
) -> LoadSummary:
    """Serve the warm-up requests to their end; they are on record, and in no metric."""
    load = RunLoad(
        requests=requests,
        arrival_offsets=[0.0] * len(requests),
        max_concurrency=cell.max_concurrency,
        time_limit_s=cell.time_limit_s,
        events_path=events_path,
    )
    return run("warm-up", load)


def _warmup_record(num_requests: int, summary: LoadSummary) -> dict[str, Any]:
    return {
        "num_requests": num_requests,
        "num_completed": summary.progress.num_completed,
        "num_failed": summary.progress.num_failed,
        "duration_s": summary.progress.elapsed_s,
    }


def _measure(
    cell: Cell, workload: Workload, files: CellFiles, goodput: Goodput | None
) -> dict[str, Any]:
    timelines = request_timelines(EventLog.read_parquet(files.events))
    steps = None
    if files.steps.exists():
        steps = step_summary(step_record.read_parquet(files.steps))
    metrics = cell_metrics(
        timelines,
        num_requests=len(workload.requests),
        request_rate=cell.request_rate,
        goodput=goodput,
        steps=steps,
    )
    verdict = judge(metrics, request_rate=cell.request_rate, max_concurrency=cell.max_concurrency)
    return {"validity": verdict.to_record(), "metrics": metrics}


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event that is set, so that a cell can end in good order.

    A second one raises KeyboardInterrupt as ever. Outside the main thread, which alone gets
    signals, the event is never set.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def remember(signum: int, frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
