"""One load point over real processes: what the engine does shows in the record, and only there.

The engine is scripted: the first token of a prompt tells it what to do with the request.
"""

import importlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from llmbench.bench.client.events import EventLog
from llmbench.bench.client.generator import LoadProgress
from llmbench.bench.client.processes import ChildTracebackError, call_in_process
from llmbench.bench.config import Cell
from llmbench.bench.errors import TargetError
from llmbench.bench.serve import (
    WARMUP_TOKENS,
    CellFiles,
    CellOutcome,
    Rig,
    deferred_interrupt,
    run_cell,
    warmup_requests,
)
from llmbench.bench.studies.load_generator import measure_load_generator
from llmbench.bench.workloads.workload import RequestSpec, Workload
from llmbench.engine.errors import CheckpointError, EngineError, OutOfMemoryError

ANSWER, REFUSE, CRASH, KILL, HANG = 10, 11, 12, 13, 14

SCRIPTED_ENGINES = '''
"""Engines for tests; a module of its own, because spawned processes import it by name."""
import os, signal, threading, time
from llmbench.engine.errors import CheckpointError, OutOfMemoryError, RequestError
from llmbench.engine.request import RequestOutput
from llmbench.engine.step_record import StepRecord, write_parquet

class Scripted:
    info = {"model": "scripted"}
    failure = None

    def __init__(self):
        self.hanging = {}
        self.num_cells = 0

    def submit(self, prompt, params, request_id, on_output):
        def say(new=0, total=0, reason=None):
            on_output(RequestOutput(
                request_id=request_id, parent_id=request_id, answer_index=0,
                new_token_ids=[0] * new, text_delta="", num_prompt_tokens=len(prompt),
                num_output_tokens=total, num_cached_tokens=0, finish_reason=reason))
        def answer():
            for i in range(1, params.max_tokens + 1):
                time.sleep(0.002)
                say(1, i, "length" if i == params.max_tokens else None)
        if prompt[0] == 11:
            raise RequestError(f"prompt of {len(prompt)} tokens exceeds 2")
        if prompt[0] == 12:
            self.failure = OutOfMemoryError("no memory for step 7")
            self.failure.add_note("lower --max-num-seqs")
        elif prompt[0] == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        elif prompt[0] == 14:
            self.hanging[request_id] = say
        else:
            threading.Thread(target=answer, daemon=True).start()

    def abort(self, request_id):
        if request_id in self.hanging:
            self.hanging.pop(request_id)(reason="abort")

    def begin_cell(self):
        self.num_cells += 1

    def end_cell(self, path):
        write_parquet([StepRecord(
            step=0, start_s=0.0, schedule_s=0.1, forward_s=0.8, update_s=0.1, num_waiting=0,
            num_running=1, num_seqs=1, num_prefill_tokens=3, num_decode_tokens=0,
            num_preempted=self.num_cells, num_prefix_queried_tokens=0, num_prefix_hit_tokens=0,
            kv_num_blocks=4, kv_free_blocks=3, kv_cached_blocks=0, kv_reserved_slots=16,
            kv_used_slots=3, kernel="none")], path)

    def shutdown(self):
        pass

def make_scripted(on_progress):
    on_progress("loading nothing")
    return Scripted()

def refuse_to_load(on_progress):
    error = CheckpointError("model.safetensors ends after 12 bytes")
    error.add_note("fetch it again")
    raise error

def trip_over_a_bug(on_progress):
    return {}["no such key"]

def call_with_a_bug(argument):
    raise ZeroDivisionError(argument)
'''


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The scripted engines, importable here and in every process spawned from here."""
    folder = tmp_path_factory.mktemp("engines")
    (folder / "scripted_engines.py").write_text(SCRIPTED_ENGINES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("scripted_engines")


@pytest.fixture(scope="module")
def rig(engines: ModuleType) -> Iterator[Rig]:
    """One engine and one generator for all tests that leave them whole."""
    with Rig(engines.make_scripted) as rig:
        rig.wait_until_ready()
        yield rig


def workload_of(*first_tokens: int, max_tokens: int = 3) -> Workload:
    requests = tuple(
        RequestSpec(index=index, prompt_token_ids=(first, 1, 2), max_tokens=max_tokens)
        for index, first in enumerate(first_tokens)
    )
    return Workload(requests=requests, digest="d" * 64)


def files_in(folder: Path) -> CellFiles:
    return CellFiles(
        events=folder / "events.parquet",
        warmup_events=folder / "warmup.parquet",
        steps=folder / "steps.parquet",
    )


def run(
    rig: Rig,
    workload: Workload,
    folder: Path,
    *,
    rate: float = math.inf,
    cap: int | None = None,
    num_warmups: int = 0,
    on_progress: Callable[[str, LoadProgress], None] | None = None,
    is_cancelled: Callable[[], bool] | None = None,
) -> CellOutcome:
    cell = Cell(
        request_rate=rate,
        max_concurrency=cap,
        burstiness=1.0,
        num_prompts=len(workload.requests),
        num_warmups=num_warmups,
        time_limit_s=30.0,
        seed=0,
    )
    return run_cell(
        rig,
        cell,
        "cell",
        workload,
        files_in(folder),
        on_progress=on_progress,
        is_cancelled=is_cancelled,
    )


def metrics_of(outcome: CellOutcome) -> dict[str, Any]:
    metrics: dict[str, Any] = outcome.record["metrics"]
    return metrics


def test_record_counts_what_the_engine_gave(rig: Rig, tmp_path: Path) -> None:
    outcome = run(rig, workload_of(*[ANSWER] * 6), tmp_path, rate=100.0, cap=4)
    assert outcome.error is None
    assert outcome.record["status"] == "complete"
    assert outcome.record["engine"]["model"] == "scripted"
    assert outcome.record["engine"]["peak_resident_bytes"] > 0
    metrics = metrics_of(outcome)
    assert metrics["num_completed"] == 6
    assert metrics["total_input_tokens"] == metrics["total_output_tokens"] == 18
    assert metrics["kv_usage_peak"] == pytest.approx(0.25)
    assert 0 < metrics["ttft_s"]["median"] < metrics["e2el_s"]["median"]


def test_engines_own_times_precede_arrivals(rig: Rig, tmp_path: Path) -> None:
    run(rig, workload_of(ANSWER), tmp_path)
    log = EventLog.read_parquet(tmp_path / "events.parquet")
    sent = next(event.t_s for event in log if event.kind == "sent")
    for event in log:
        if event.kind == "token":
            assert event.emit_s is not None
            assert sent < event.emit_s < event.t_s  # one clock for all processes


def test_warmups_are_on_record_and_in_no_metric(rig: Rig, tmp_path: Path) -> None:
    outcome = run(rig, workload_of(ANSWER, ANSWER), tmp_path, num_warmups=3)
    assert outcome.record["warmup"]["num_completed"] == 3
    assert metrics_of(outcome)["num_requests"] == 2
    warmups = EventLog.read_parquet(tmp_path / "warmup.parquet")
    assert len({event.request_index for event in warmups}) == 3


def test_refused_request_fails_alone(rig: Rig, tmp_path: Path) -> None:
    outcome = run(rig, workload_of(ANSWER, REFUSE, ANSWER), tmp_path)
    assert outcome.record["status"] == "complete"
    assert outcome.record["validity"]["verdict"] == "FAILED-REQUESTS"
    metrics = metrics_of(outcome)
    assert (metrics["num_completed"], metrics["num_failed"]) == (2, 1)
    assert metrics["errors"] == {"prompt of 3 tokens exceeds 2": 1}


def test_cancelled_cell_keeps_its_events_and_the_engine_serves_on(rig: Rig, tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    outcome = run(
        rig,
        workload_of(ANSWER, HANG),
        tmp_path,
        on_progress=lambda stage, progress: seen.append(progress),
        is_cancelled=lambda: bool(seen) and seen[-1].num_completed == 1,
    )
    assert outcome.record["status"] == "interrupted"
    kinds = [event.kind for event in EventLog.read_parquet(tmp_path / "events.parquet")]
    assert (kinds.count("end"), kinds.count("abort")) == (1, 1)
    again = run(rig, workload_of(ANSWER), tmp_path)
    assert metrics_of(again)["num_completed"] == 1


def test_failure_of_the_engine_is_raised_as_it_was(engines: ModuleType, tmp_path: Path) -> None:
    with Rig(engines.make_scripted) as rig:
        rig.wait_until_ready()
        outcome = run(rig, workload_of(ANSWER, CRASH), tmp_path)
    assert outcome.record["status"] == "failed"
    assert isinstance(outcome.error, OutOfMemoryError)
    assert outcome.record["error"] == {
        "type": "OutOfMemoryError",
        "message": "no memory for step 7",
        "notes": ["lower --max-num-seqs"],
    }
    assert metrics_of(outcome)["num_failed"] >= 1


def test_killed_engine_ends_the_cell_and_says_so(engines: ModuleType, tmp_path: Path) -> None:
    with Rig(engines.make_scripted) as rig:
        rig.wait_until_ready()
        outcome = run(rig, workload_of(KILL, HANG), tmp_path)
    assert isinstance(outcome.error, TargetError)
    assert "killed by SIGKILL" in str(outcome.error)
    assert "memory" in outcome.error.__notes__[0]


def test_error_of_loading_keeps_type_message_and_notes(engines: ModuleType) -> None:
    with (
        Rig(engines.refuse_to_load) as rig,
        pytest.raises(CheckpointError, match="ends after 12 bytes") as caught,
    ):
        rig.wait_until_ready()
    assert isinstance(caught.value, EngineError)
    assert caught.value.__notes__ == ["fetch it again"]


def test_bug_in_a_process_shows_its_traceback(engines: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError, match="seven") as caught:
        call_in_process(engines.call_with_a_bug, "seven", name="buggy")
    assert isinstance(caught.value.__cause__, ChildTracebackError)
    assert "in call_with_a_bug" in str(caught.value.__cause__)


def test_call_in_process_returns_the_answer() -> None:
    assert call_in_process(math.sqrt, 9.0, name="root") == 3.0


def test_warmups_share_no_prefix_with_the_workload() -> None:
    requests = tuple(
        RequestSpec(index=index, prompt_token_ids=(5, 6, 7, 8 + index), max_tokens=64)
        for index in range(3)
    )
    warmups = warmup_requests(requests, 4)
    measured_starts = {request.prompt_token_ids[0] for request in requests}
    assert [spec.index for spec in warmups] == [0, 1, 2, 3]
    assert measured_starts.isdisjoint(spec.prompt_token_ids[0] for spec in warmups)
    assert all(spec.max_tokens == WARMUP_TOKENS for spec in warmups)


@pytest.fixture
def raising_interrupt() -> Iterator[None]:
    """Python's own handler: a test run in the background of a shell starts with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("raising_interrupt")
def test_first_interrupt_is_kept_and_the_second_raised() -> None:
    with deferred_interrupt() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # to this thread, at once
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


PARENT = """
import time
from llmbench.bench.client.null_engine import make_null_engine
from llmbench.bench.serve import Rig

if __name__ == "__main__":
    with Rig(make_null_engine) as rig:
        rig.wait_until_ready()
        print("ready", flush=True)
        time.sleep(600)
"""


def test_processes_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_nothing_is_lost_at_a_high_rate() -> None:
    facts = measure_load_generator(rate=2000.0, duration_s=0.5)
    assert facts["num_sent"] == facts["num_requests"] == 1000
    assert facts["num_lost"] == 0
    assert 0 <= facts["send_error_p50_s"] <= facts["send_error_p99_s"] <= facts["send_error_max_s"]
