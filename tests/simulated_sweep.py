"""Results of a sweep over a simulated engine: realistic in shape, the same on every machine.

One step of the engine takes a fixed time, some more for each running sequence and for each prompt
token; requests wait while all slots are taken. Events go through the real metrics and verdict, so
reports are tested on what the bench writes.
"""

import json
import math
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmbench.bench.client.events import EventLog, end_detail, reason_detail
from llmbench.bench.metrics import cell_metrics, request_timelines
from llmbench.bench.slo import Goodput
from llmbench.bench.strict_json import strict
from llmbench.bench.validity import judge

STEP_S, SEQUENCE_S, PROMPT_TOKEN_S = 0.012, 0.0012, 0.00025
MAX_NUM_SEQS = 32
PROMPT_TOKENS = 96


def simulate(
    rate: float,
    cap: int | None,
    num_requests: int = 64,
    *,
    failing: Sequence[int] = (),
    seed: int = 0,
) -> EventLog:
    """Serve requests at `rate` under `cap`; those whose index is in `failing` are refused."""
    rng = random.Random(seed)
    log = EventLog()
    arrivals, now = [], 0.0
    for _ in range(num_requests):
        arrivals.append(now)
        now += rng.expovariate(rate) if math.isfinite(rate) else 0.0
    outputs = [rng.randint(8, 72) for _ in range(num_requests)]
    is_closed = not math.isfinite(rate) and cap is not None
    coming, waiting = deque(range(num_requests)), deque[int]()
    running: dict[int, int] = {}
    clock = 0.0
    while coming or waiting or running:
        in_flight = len(waiting) + len(running)
        while coming and arrivals[coming[0]] <= clock and (cap is None or in_flight < cap):
            index = coming.popleft()
            due = clock if is_closed else arrivals[index]
            sent = max(clock if cap is not None and in_flight else due, due)
            log.append(index, "scheduled", due)
            log.append(index, "admitted", sent)
            log.append(index, "sent", sent + 2e-5 * rng.random())
            if index in failing:
                log.append(index, "error", sent + 0.01, detail=reason_detail("refused"))
                continue
            waiting.append(index)
            in_flight += 1
        if not waiting and not running:
            clock = arrivals[coming[0]] if coming else clock
            continue
        step = STEP_S * rng.uniform(0.95, 1.15)
        if waiting and len(running) < MAX_NUM_SEQS:
            index = waiting.popleft()
            running[index] = 0
            step += PROMPT_TOKENS * PROMPT_TOKEN_S
        clock += step + SEQUENCE_S * len(running)
        for index in list(running):
            running[index] += 1
            log.append(index, "token", clock + 1e-4 * rng.random(), 1)
            if running[index] == outputs[index]:
                del running[index]
                detail = end_detail(
                    {
                        "finish_reason": "length",
                        "num_prompt_tokens": PROMPT_TOKENS,
                        "num_output_tokens": outputs[index],
                        "num_cached_tokens": 0,
                    }
                )
                log.append(index, "end", clock + 2e-4, detail=detail)
    return log


def simulated_record(
    rate: float,
    cap: int | None = None,
    *,
    num_requests: int = 64,
    status: str = "complete",
    goodput: Goodput | None = None,
    failing: Sequence[int] = (),
    events_folder: Path | None = None,
) -> dict[str, Any]:
    """Return the record of one cell; with a folder its event log is written there."""
    log = simulate(rate, cap, num_requests, failing=failing)
    cell_id = f"rate={rate:g}-cap={'none' if cap is None else cap}"
    if events_folder is not None:
        log.write_parquet(events_folder / f"events-{cell_id}.parquet")
    metrics = cell_metrics(
        request_timelines(log), num_requests=num_requests, request_rate=rate, goodput=goodput
    )
    verdict = judge(metrics, request_rate=rate, max_concurrency=cap)
    record = {
        "schema_version": 1,
        "kind": "serve-bench",
        "cell_id": cell_id,
        "status": status,
        "started_at": "2025-01-01T00:00:00+00:00",
        "cell": {"request_rate": rate, "max_concurrency": cap, "num_prompts": num_requests},
        "validity": verdict.to_record(),
        "metrics": metrics,
    }
    plain: dict[str, Any] = strict(record)
    return plain


def failed_record(rate: float = math.inf, cap: int | None = None) -> dict[str, Any]:
    """Return the record of a cell whose engine died before anything was measured."""
    plain: dict[str, Any] = strict(
        {
            "schema_version": 1,
            "kind": "serve-bench",
            "cell_id": f"rate={rate:g}-cap={'none' if cap is None else cap}",
            "status": "failed",
            "cell": {"request_rate": rate, "max_concurrency": cap, "num_prompts": 64},
            "error": {"type": "TargetError", "message": "the engine ended", "notes": []},
        }
    )
    return plain


def simulated_manifest(
    model: str = "models/SmolLM2-135M-Instruct", goodput: Goodput | None = None
) -> dict[str, Any]:
    """Return a manifest as far as reports read it."""
    plain: dict[str, Any] = strict(
        {
            "schema_version": 1,
            "kind": "serve-bench",
            "config": {
                "engine": {"model": model},
                "workload": {"dataset_name": "random", "num_prompts": 64},
                "goodput": goodput,
            },
            "hardware": {
                "cpu_model": "Example CPU @ 2.10GHz",
                "num_usable_cores": 2.0,
                "gpus": [],
            },
            "software": {"llmbench": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
            "environment": {"memory": {"total_bytes": 8 * 2**30}},
            "plan": {
                "workload": {
                    "num_requests": 64,
                    "num_prompt_tokens": 64 * PROMPT_TOKENS,
                    "max_output_tokens": 64 * 40,
                }
            },
        }
    )
    return plain


def write_folder(
    folder: Path,
    records: Sequence[dict[str, Any]],
    manifest: dict[str, Any] | None = None,
) -> Path:
    """Write a results folder; event logs are written by `simulated_record`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest or simulated_manifest()))
    (folder / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
