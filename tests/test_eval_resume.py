"""A run that is stopped anywhere and repeated ends as one that never was, byte for byte.

Which requests share a batch differs between the two, and with it the last bits of a sum; so the
engine runs one sequence at a time here, but for one test: as it comes, all agrees to 1e-5.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_plan import PreparedEval, prepare
from llmbench.bench.accuracy.evaluation import evaluate
from llmbench.bench.errors import ResultsError
from llmbench.engine.config import EngineConfig

NUM_ITEMS = 12 + 6 + 3
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "compile": False,
    "kv_cache_memory_bytes": 1 << 20,
    "max_num_seqs": 1,
    "prefix_cache": "none",
}


@pytest.fixture(scope="module")
def prepared(small_tasks: Path) -> PreparedEval:
    return prepare(EvalConfig(tasks=("sums", "spoken", "letters"), include=(small_tasks,)))


@pytest.fixture
def make_model(doubles: ModuleType, byte_llama: Callable[..., Path]) -> Callable[..., Any]:
    def make(seed: int = 0) -> Any:
        return doubles.CountingModel(byte_llama(seed), **ENGINE)

    return make


def contents(folder: Path) -> dict[str, Any]:
    """Return what a run left that does not tell when and how often it ran."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("items-*.jsonl")):
        found[str(path.relative_to(folder))] = path.read_bytes()
    for path in sorted(folder.rglob("scores.json")):
        found[str(path.relative_to(folder))] = path.read_bytes()
    for path in sorted(folder.rglob("results.jsonl")):
        last = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            last[record["cell_id"]] = record
        found[str(path.relative_to(folder))] = last
    return found


def stop_after(num_items: int) -> Callable[..., None]:
    def stop(task: str, done: int, total: int, estimate: Any) -> None:
        if done == num_items:
            raise KeyboardInterrupt

    return stop


@pytest.fixture(scope="module")
def undisturbed(
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    evaluate(prepared, EngineModel(EngineConfig(model=str(byte_llama()), **ENGINE)), folder)
    return contents(folder)


@pytest.mark.parametrize("num_items", [1, 7, 15, NUM_ITEMS])
def test_an_interrupted_run_that_is_repeated_is_the_undisturbed_one(
    prepared: PreparedEval,
    make_model: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
    num_items: int,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(prepared, make_model(), tmp_path, on_progress=stop_after(num_items))
    partial = json.loads((tmp_path / "scores.json").read_text())
    assert partial["status"] == "partial"
    assert sum(task["num_items"] for task in partial["tasks"].values()) == num_items
    model = make_model()
    result = evaluate(prepared, model, tmp_path)
    assert result.is_complete
    assert len(model.asked) == NUM_ITEMS - num_items
    assert contents(tmp_path) == undisturbed


@pytest.mark.parametrize("num_items", [5, 15])
def test_with_batches_a_repeated_run_is_the_undisturbed_one_to_rounding(
    doubles: ModuleType,
    prepared: PreparedEval,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
    num_items: int,
) -> None:
    whole = evaluate(prepared, doubles.CountingModel(byte_llama()), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        evaluate(
            prepared,
            doubles.CountingModel(byte_llama()),
            tmp_path / "run",
            on_progress=stop_after(num_items),
        )
    model = doubles.CountingModel(byte_llama())
    again = evaluate(prepared, model, tmp_path / "run")
    assert len(model.asked) == NUM_ITEMS - num_items
    doubles.assert_same_answers(again.items, whole.items)
    for name, score in whole.tasks.items():
        assert again.tasks[name].primary.value == pytest.approx(score.primary.value, rel=1e-5)


def test_what_a_stopped_run_did_not_take_is_not_scored(
    small_tasks: Path, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    """The folder still has the answers to what the task's data were before."""
    tasks = tmp_path / "tasks"
    shutil.copytree(small_tasks, tasks)
    config = EvalConfig(tasks=("sums",), include=(tasks,))
    evaluate(prepare(config), make_model(), tmp_path / "run")
    file = tasks / "sums.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_text("".join(json.dumps(row | {"a": row["a"] + 50}) + "\n" for row in rows))
    with pytest.raises(KeyboardInterrupt):
        evaluate(prepare(config), make_model(), tmp_path / "run", on_progress=stop_after(2))
    partial = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert partial["tasks"]["sums"]["num_items"] == 2


def test_a_killed_run_that_is_repeated_is_the_undisturbed_one(
    prepared: PreparedEval,
    make_model: Callable[..., Any],
    small_tasks: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
) -> None:
    program = f"""
    import os, signal
    from pathlib import Path
    from llmbench.bench.accuracy.engine_model import EngineModel
    from llmbench.bench.accuracy.eval_config import EvalConfig
    from llmbench.bench.accuracy.eval_plan import prepare
    from llmbench.bench.accuracy.evaluation import evaluate
    from llmbench.engine.config import EngineConfig

    def kill(task, done, total, estimate):
        if done == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    tasks = Path({str(small_tasks)!r})
    model = EngineModel(EngineConfig(model={make_model().config.model!r}, **{ENGINE!r}))
    prepared = prepare(EvalConfig(tasks=("sums", "spoken", "letters"), include=(tasks,)))
    evaluate(prepared, model, Path({str(tmp_path)!r}), on_progress=kill)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "scores.json").exists()
    model = make_model()
    evaluate(prepared, model, tmp_path)
    assert len(model.asked) == NUM_ITEMS - 9
    assert contents(tmp_path) == undisturbed


def test_a_finished_run_that_is_repeated_asks_nothing(
    prepared: PreparedEval,
    make_model: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
) -> None:
    evaluate(prepared, make_model(), tmp_path)
    model = make_model()
    heard: list[int] = []
    evaluate(prepared, model, tmp_path, on_progress=lambda task, done, *_: heard.append(done))
    assert not model.is_loaded
    assert heard[-1] == NUM_ITEMS
    assert contents(tmp_path) == undisturbed


def test_a_torn_line_costs_its_item_alone(
    prepared: PreparedEval,
    make_model: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
) -> None:
    evaluate(prepared, make_model(), tmp_path)
    items = tmp_path / "items-sums.jsonl"
    items.write_bytes(items.read_bytes()[:-5])
    model = make_model()
    evaluate(prepared, model, tmp_path)
    assert len(model.asked) == 1
    assert contents(tmp_path) == undisturbed


def test_an_answer_to_another_question_is_not_taken(
    prepared: PreparedEval,
    make_model: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
) -> None:
    """As of a task whose data changed between two runs of a folder."""
    evaluate(prepared, make_model(), tmp_path)
    items = tmp_path / "items-sums.jsonl"
    lines = [json.loads(line) for line in items.read_text().splitlines()]
    lines[4] |= {"key": "0" * 32, "loglikelihoods": [0.0, -1.0, -2.0]}
    items.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = make_model()
    evaluate(prepared, model, tmp_path)
    assert len(model.asked) == 1
    assert contents(tmp_path) == undisturbed


def test_a_failure_keeps_what_was_answered(
    prepared: PreparedEval,
    make_model: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
) -> None:
    def fall_over(requests: Any) -> Any:
        raise RuntimeError("the engine fell over")

    model = make_model()
    model.generate = fall_over
    with pytest.raises(RuntimeError, match="fell over"):
        evaluate(prepared, model, tmp_path)
    model = make_model()
    evaluate(prepared, model, tmp_path)
    assert len(model.asked) == 6
    assert contents(tmp_path) == undisturbed


@pytest.mark.parametrize("num_items", [5, NUM_ITEMS + 4, 2 * NUM_ITEMS])
def test_a_comparison_that_is_stopped_anywhere_ends_as_the_undisturbed_one(
    prepared: PreparedEval,
    make_model: Callable[..., Any],
    tmp_path: Path,
    num_items: int,
) -> None:
    def run(name: str, on_progress: Any = None) -> tuple[Any, Any]:
        base, candidate = make_model(), make_model(1)
        evaluate(
            prepared,
            candidate,
            tmp_path / name,
            baseline=base,
            store_root=tmp_path / f"cache-{name}",
            on_progress=on_progress,
        )
        return base, candidate

    run("whole")
    heard = 0

    def stop(*_: Any) -> None:
        nonlocal heard
        heard += 1
        if heard == num_items:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop)
    base, candidate = run("stopped")
    assert len(base.asked) == max(0, NUM_ITEMS - num_items)
    assert len(candidate.asked) == NUM_ITEMS - max(0, num_items - NUM_ITEMS)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_two_runs_do_not_share_a_folder(
    prepared: PreparedEval, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    def run_again(*_: Any) -> None:
        evaluate(prepared, make_model(), tmp_path)

    with pytest.raises(ResultsError, match="in use by another run"):
        evaluate(prepared, make_model(), tmp_path, on_progress=run_again)
