"""How long from a command to the first token? An engine in a fresh interpreter, timed from outside.

The clock starts before the interpreter does, so importing, reading weights, preparing kernels and
the first step are all in it. The child's clock is the parent's: `time.perf_counter` counts from the
same moment in all processes of a machine.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from llmbench.bench.client.processes import peak_resident_bytes
from llmbench.bench.errors import TargetError
from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import EngineError


def time_start_up(config: EngineConfig, prompt: Sequence[int]) -> dict[str, Any]:
    """Start an engine, let it answer with one token, and return what that took."""
    task = json.dumps({"config": dataclasses.asdict(config), "prompt": list(prompt)})
    program = f"from {__name__} import answer_once; answer_once()"
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", program], input=task, capture_output=True, text=True
    )
    try:
        report: dict[str, Any] = json.loads(run.stdout)
    except ValueError:
        last_line = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise TargetError(f"an engine in a fresh process failed: {last_line}") from None
    if "error" in report:
        error = TargetError(f"an engine in a fresh process failed: {report['error']}")
        for note in report["notes"]:
            error.add_note(note)
        raise error
    for name in ("loaded", "first_token"):
        report[f"{name}_s"] = report.pop(f"{name}_at_s") - started
    return report


def answer_once() -> None:
    """What the fresh process does: read a task, answer it, report and leave."""
    task = json.load(sys.stdin)
    try:
        report = _answer(EngineConfig(**task["config"]), task["prompt"])
    except EngineError as error:
        report = {"error": str(error), "notes": list(getattr(error, "__notes__", ()))}
    print(json.dumps(report), flush=True)
    os._exit(0)  # without the seconds in which torch takes itself down


def _answer(config: EngineConfig, prompt: Sequence[int]) -> dict[str, Any]:
    from llmbench.engine.engine_core import EngineCore
    from llmbench.engine.request import SamplingParams

    core = EngineCore(config)
    loaded_at_s = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (request,) = core.make_requests(prompt, params, "first")
    core.add_request(request)
    while not request.is_finished:
        core.step()
    return {
        "loaded_at_s": loaded_at_s,
        "first_token_at_s": time.perf_counter(),
        "kernel": core.loaded.model.kernel,
        "peak_resident_bytes": peak_resident_bytes(),
        "weight_bytes": core.memory_plan.weight_bytes,
        "kv_bytes": core.memory_plan.kv_bytes,
    }
