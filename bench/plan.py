"""What a sweep is going to do: its cells, the time they take, the memory the engine needs.

Everything that can go wrong cheaply goes wrong here: an unknown model, a broken checkpoint, a
dataset without a usable row, a model that does not fit. Nothing is loaded but the tokenizer.
"""

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmbench.bench.config import Cell, ServeBenchConfig
from llmbench.bench.environment import gpu_facts, memory_facts, usable_cores
from llmbench.bench.model_facts import ModelFacts, read_model_facts
from llmbench.bench.strict_json import digest
from llmbench.bench.workloads.tokenizer import load_tokenizer
from llmbench.bench.workloads.workload import Workload, build_workload
from llmbench.engine.config import EngineConfig
from llmbench.engine.memory import MemoryPlan
from llmbench.engine.models.source import resolve_folder

PROBE_BYTES = 64 * 1024**2
"""Read by each core to time the memory: more than the caches of one hold."""

DIGEST_CHARACTERS = 10
"""Of a cell's name: 40 bits, so that two cells of a folder never share one by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sweep is going to do.

    Attributes:
        memory: How the engine is going to divide the memory that is free now.
        read_bytes_s: How fast this machine reads memory; None where the model runs on a GPU.
    """

    cells: tuple[Cell, ...]
    cell_ids: Mapping[Cell, str]
    workload: Workload
    model: ModelFacts
    memory: MemoryPlan
    max_num_seqs: int
    read_bytes_s: float | None

    def least_seconds(self, cell: Cell) -> float | None:
        """About the shortest time that a cell can take; None where nothing bounds it.

        Its schedule, or the steps that its answers take at their full length, each of which reads
        all weights once.
        """
        times = [estimate_seconds(cell, None)]
        if self.read_bytes_s is not None:
            most = min(cell.max_concurrency or cell.num_prompts, cell.num_prompts)
            num_steps = self.workload.num_output_tokens / min(most, self.max_num_seqs)
            times.append(num_steps * self.model.weight_bytes / self.read_bytes_s)
        return max((time for time in times if time is not None), default=None)


def prepare(config: ServeBenchConfig, *, on_progress: Callable[[str], None] | None = None) -> Plan:
    """Check the model, draw the requests and name the cells."""
    say = on_progress or (lambda _: None)
    engine = config.engine
    say(f"reading {engine.model}")
    folder = resolve_folder(engine.model, with_weights=engine.load_format != "dummy")
    model = read_model_facts(folder, engine)
    free_bytes, is_cpu = _free_bytes(engine)
    memory = model.memory_plan(engine, free_bytes, is_cpu=is_cpu)
    say("drawing requests")
    tokenizer_folder = (
        resolve_folder(engine.tokenizer, with_weights=False) if (engine.tokenizer) else folder
    )
    tokenizer = load_tokenizer(str(tokenizer_folder), trust_remote_code=engine.trust_remote_code)
    workload = build_workload(
        config.workload, tokenizer, model.max_model_len, vocab_size=model.vocab_size
    )
    return Plan(
        cells=config.cells,
        cell_ids={cell: cell_id(cell, workload, config) for cell in config.cells},
        workload=workload,
        model=model,
        memory=memory,
        max_num_seqs=engine.max_num_seqs,
        read_bytes_s=read_bytes_s() if is_cpu else None,
    )


def cell_id(cell: Cell, workload: Workload, config: ServeBenchConfig) -> str:
    """Name a cell: its coordinates for the eye, and a digest of all that its figures depend on."""
    cap = "none" if cell.max_concurrency is None else cell.max_concurrency
    identity = digest({"cell": cell, "workload": workload.digest, "engine": config.engine})
    return f"rate={cell.request_rate:g}-cap={cap}-{identity[:DIGEST_CHARACTERS]}"


def estimate_seconds(cell: Cell, capacity_req_s: float | None) -> float | None:
    """Time of a cell: its schedule, or the target's capacity where that is the slower of them."""
    times = []
    if math.isfinite(cell.request_rate):
        times.append(cell.num_prompts / cell.request_rate)
    if capacity_req_s is not None:
        times.append(cell.num_prompts / capacity_req_s)
    return max(times, default=None)


def read_bytes_s() -> float:
    """Measure how fast all cores together read memory, bytes a second; takes about 50 ms."""
    num_threads = max(1, round(usable_cores()))  # a container may have a part of one
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        parts = [np.ones(PROBE_BYTES // 8) for _ in range(num_threads)]
        durations = []
        for _ in range(3):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            durations.append(time.perf_counter() - start)
    return PROBE_BYTES * len(parts) / min(durations)


def _free_bytes(engine: EngineConfig) -> tuple[int, bool]:
    """Return the free memory of the device that the engine will take, and whether it is a CPU."""
    if engine.device != "cpu":
        for gpu in gpu_facts():
            if gpu["memory_free_bytes"] is not None:
                return int(gpu["memory_free_bytes"]), False
    memory = memory_facts()
    available = memory["available_bytes"] or 0
    return min(available, memory["limit_bytes"] or available), True
