"""What a sweep is going to do: its cells, the time they take, the memory the engine needs.

Everything that can go wrong cheaply goes wrong here: an unknown model, a broken checkpoint, a
dataset without a usable row, a model that does not fit. Nothing is loaded but the tokenizer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmbench.bench.config import Cell, ServeBenchConfig
from llmbench.bench.environment import gpu_facts, memory_facts
from llmbench.bench.model_facts import ModelFacts, read_model_facts
from llmbench.bench.strict_json import digest
from llmbench.bench.workloads.tokenizer import load_tokenizer
from llmbench.bench.workloads.workload import Workload, build_workload
from llmbench.engine.config import EngineConfig
from llmbench.engine.memory import MemoryPlan
from llmbench.engine.models.source import resolve_folder

DIGEST_CHARACTERS = 10
"""Of a cell's name: 40 bits, so that two cells of a folder never share one by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sweep is going to do.

    Attributes:
        memory: How the engine is going to divide the memory that is free now.
    """

    cells: tuple[Cell, ...]
    cell_ids: Mapping[Cell, str]
    workload: Workload
    model: ModelFacts
    memory: MemoryPlan

    def least_seconds(self, cell: Cell) -> float | None:
        """Shortest time that a cell can take; None where only the engine's speed decides."""
        return estimate_seconds(cell, None)


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


def _free_bytes(engine: EngineConfig) -> tuple[int, bool]:
    """Return the free memory of the device that the engine will take, and whether it is a CPU."""
    if engine.device != "cpu":
        for gpu in gpu_facts():
            if gpu["memory_free_bytes"] is not None:
                return int(gpu["memory_free_bytes"]), False
    memory = memory_facts()
    available = memory["available_bytes"] or 0
    return min(available, memory["limit_bytes"] or available), True
