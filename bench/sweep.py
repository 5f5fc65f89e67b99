"""A sweep: the cells of a grid one after another, each on disk before the next begins.

A cell's name carries a digest of what was asked for: the load, the requests, the engine's
settings. The folder's manifest adds the model, the hardware and released versions, and refuses
another one of these; edits to a checkout between two runs are not seen. Running the same sweep
again therefore skips what is finished, whatever ended it before: Ctrl-C, a crash, a lost machine.
A grid with more cells continues the same folder.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llmbench.bench.client.built_in_engine import BuiltInEngineFactory
from llmbench.bench.client.engine_process import EngineFactory
from llmbench.bench.client.generator import LoadProgress
from llmbench.bench.config import Cell, ServeBenchConfig
from llmbench.bench.environment import collect_environment
from llmbench.bench.plan import Plan, estimate_seconds, prepare
from llmbench.bench.results import ResultsFolder, build_manifest
from llmbench.bench.serve import CellFiles, Rig, deferred_interrupt, run_cell
from llmbench.bench.workloads.workload import Workload

logger = logging.getLogger(__name__)

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """Where a sweep stands.

    Attributes:
        stage: `prepare` (requests are drawn), `start` (the engine loads), then for each cell
            `warm-up` and `load`.
        text: What is being done, for the stages before the first cell.
        cell_number: From 1, among all cells; 0 before the first.
        num_cells: All cells, finished ones included.
        load: Progress within the cell.
        elapsed_s: Since the sweep began.
        remaining_s: Estimate for all cells that are left; None while nothing is known.
    """

    stage: Literal["prepare", "start", "warm-up", "load"]
    text: str = ""
    cell_number: int = 0
    num_cells: int = 0
    cell: Cell | None = None
    load: LoadProgress | None = None
    elapsed_s: float = 0.0
    remaining_s: float | None = None


def run_serve_bench(
    config: ServeBenchConfig,
    *,
    on_progress: Callable[[SweepProgress], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
    make_engine: EngineFactory | None = None,
) -> list[Record]:
    """Run the cells that are not finished; return the records of all cells of this grid.

    Ctrl-C keeps what is there, marks the running cell as interrupted and raises
    KeyboardInterrupt. A failure of the engine is on record as that of its cell, and raised.
    `make_engine` replaces the engine that `config.engine` names.
    """
    started = time.perf_counter()

    def say(progress: SweepProgress) -> None:
        if on_progress is not None:
            elapsed_s = time.perf_counter() - started
            on_progress(dataclasses.replace(progress, elapsed_s=elapsed_s))

    plan = prepare(config, on_progress=lambda text: say(SweepProgress(stage="prepare", text=text)))
    with ResultsFolder.create_or_resume(config.output, manifest_of(config, plan)) as folder:
        done = folder.finished_cell_ids
        remaining = [cell for cell in plan.cells if plan.cell_ids[cell] not in done]
        logger.info("%d of %d cells are finished", len(done), len(plan.cells))
        if remaining:
            factory = make_engine or BuiltInEngineFactory(config.engine)
            with Rig(factory) as rig:
                rig.wait_until_ready(
                    lambda text: say(
                        SweepProgress(stage="start", text=text, num_cells=len(plan.cells))
                    )
                )
                sweep = _Sweep(config, plan, folder, rig, say, on_record)
                for cell in remaining:
                    sweep.run(cell)
        asked_for = set(plan.cell_ids.values())
        return [record for record in folder.records if record["cell_id"] in asked_for]


class _Sweep:
    """What the cells of a running sweep share."""

    def __init__(
        self,
        config: ServeBenchConfig,
        plan: Plan,
        folder: ResultsFolder,
        rig: Rig,
        say: Callable[[SweepProgress], None],
        on_record: Callable[[Record], None] | None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._folder = folder
        self._rig = rig
        self._say = say
        self._on_record = on_record

    def run(self, cell: Cell) -> None:
        """Run a cell and write its record, however it ends."""
        cell_id = self._plan.cell_ids[cell]
        with deferred_interrupt() as interrupted:
            outcome = run_cell(
                self._rig,
                cell,
                cell_id,
                self._plan.workload,
                CellFiles(
                    events=self._folder.events_path(cell_id),
                    warmup_events=self._folder.path / f"warmup-{cell_id}.parquet",
                    steps=self._folder.steps_path(cell_id),
                ),
                goodput=self._config.goodput,
                on_progress=lambda stage, load: self._report(cell, stage, load),
                is_cancelled=interrupted.is_set,
            )
            record = self._folder.append(outcome.record)
        if self._on_record is not None:
            self._on_record(record)
        if outcome.error is not None:
            raise outcome.error
        if interrupted.is_set():
            raise KeyboardInterrupt

    def _report(self, cell: Cell, stage: str, load: LoadProgress) -> None:
        self._say(
            SweepProgress(
                stage="warm-up" if stage == "warm-up" else "load",
                cell_number=self._plan.cells.index(cell) + 1,
                num_cells=len(self._plan.cells),
                cell=cell,
                load=load,
                remaining_s=self._remaining_s(cell, load if stage == "load" else None),
            )
        )

    def _remaining_s(self, cell: Cell, load: LoadProgress | None) -> float | None:
        """Estimate from the fastest throughput seen so far, which is the nearest to capacity."""
        finished = [record for record in self._folder.records if record["status"] == "complete"]
        throughputs = [record["metrics"]["request_throughput_req_s"] for record in finished]
        elapsed_s = load.elapsed_s if load is not None else 0.0
        if load is not None and math.isinf(cell.request_rate) and elapsed_s > 0:
            throughputs.append(load.num_completed / elapsed_s)
        capacity_req_s = max((rate for rate in throughputs if rate), default=None)
        done = self._folder.finished_cell_ids
        times_s = [
            estimate_seconds(other, capacity_req_s)
            for other in self._plan.cells
            if self._plan.cell_ids[other] not in done
        ]
        known = [time_s for time_s in times_s if time_s is not None]
        return max(sum(known) - elapsed_s, 0.0) if len(known) == len(times_s) else None


def manifest_of(config: ServeBenchConfig, plan: Plan) -> dict[str, Any]:
    """Return the manifest of a sweep: its settings apart from the grid, which may grow."""
    return build_manifest(
        kind="serve-bench",
        config={
            "engine": config.engine,
            "workload": config.workload,
            "goodput": config.goodput,
        },
        workload_digest=plan.workload.digest,
        model_digest=plan.model.digest,
        seed=config.seed,
        environment=collect_environment(),
        plan={
            "request_rates": config.request_rates,
            "max_concurrencies": config.max_concurrencies,
            "burstiness": config.burstiness,
            "num_warmups": config.num_warmups,
            "time_limit_s": config.time_limit_s,
            "workload": workload_facts(plan.workload),
        },
    )


def workload_facts(workload: Workload) -> dict[str, Any]:
    """Return what a reader wants to know of the requests."""
    return {
        "num_requests": len(workload.requests),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "max_output_tokens": workload.num_output_tokens,
        "notes": workload.notes,
    }
