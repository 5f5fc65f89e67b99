"""A sweep loses nothing that is finished and repeats nothing, however it ends."""

import dataclasses
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmbench.bench.client.engine_process import EngineFactory
from llmbench.bench.client.null_engine import NullEngine, make_null_engine
from llmbench.bench.config import Cell, ServeBenchConfig
from llmbench.bench.errors import BenchConfigError, ResultsError, TargetError
from llmbench.bench.model_facts import read_model_facts
from llmbench.bench.plan import cell_id, estimate_seconds, prepare, read_bytes_s
from llmbench.bench.results import read_results
from llmbench.bench.sweep import SweepProgress, run_serve_bench
from llmbench.bench.workloads.workload import RequestSpec, Workload, WorkloadConfig
from llmbench.engine.config import EngineConfig

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint without weights, whose tokenizer knows 256 words."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(256)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), LLAMA)


def config_for(
    model: Path,
    output: Path,
    *,
    rates: Sequence[float] = (math.inf,),
    caps: Sequence[int | None] = (None,),
) -> ServeBenchConfig:
    return ServeBenchConfig(
        engine=EngineConfig(model=str(model), load_format="dummy", device="cpu"),
        workload=WorkloadConfig(num_prompts=8, random_input_len=24, random_output_len=4),
        output=output,
        request_rates=tuple(rates),
        max_concurrencies=tuple(caps),
        num_warmups=1,
    )


def no_engine(on_progress: Callable[[str], None]) -> NullEngine:
    raise AssertionError("no cell is left to run")


def statuses(output: Path) -> list[tuple[Any, Any, str]]:
    return [
        (record["cell"]["request_rate"], record["cell"]["max_concurrency"], record["status"])
        for record in read_results(output).records
    ]


def test_cells_run_in_the_order_given_and_only_once(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path / "out", rates=(200.0, math.inf), caps=(2, None))
    heard: list[str] = []
    records = run_serve_bench(
        config,
        on_record=lambda record: heard.append(record["cell_id"]),
        make_engine=make_null_engine,
    )
    assert statuses(config.output) == [
        (200.0, 2, "complete"),
        (200.0, None, "complete"),
        ("inf", 2, "complete"),
        ("inf", None, "complete"),
    ]
    assert heard == [record["cell_id"] for record in records]
    for cell in heard:
        assert (config.output / f"events-{cell}.parquet").exists()
    # All finished: the same sweep again starts no engine and returns the same records.
    assert run_serve_bench(config, make_engine=no_engine) == records


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ServeBenchConfig:
    """A sweep of one finished cell."""
    config = config_for(model, tmp_path_factory.mktemp("sweep") / "out")
    run_serve_bench(config, make_engine=make_null_engine)
    return config


def test_other_settings_are_refused_in_the_same_folder(finished: ServeBenchConfig) -> None:
    other = dataclasses.replace(
        finished, engine=dataclasses.replace(finished.engine, max_num_seqs=7)
    )
    with pytest.raises(ResultsError, match="max_num_seqs was 64, now 7"):
        run_serve_bench(other, make_engine=no_engine)


def test_a_failed_start_leaves_finished_cells_alone(finished: ServeBenchConfig) -> None:
    before = read_results(finished.output).records
    grown = dataclasses.replace(finished, max_concurrencies=(None, 3))
    no_factory = cast(EngineFactory, math.sqrt)  # any function that spawned processes can import
    with pytest.raises(TypeError, match="must be real number"):
        run_serve_bench(grown, make_engine=no_factory)
    assert read_results(finished.output).records == before


def test_a_grown_grid_runs_only_what_is_new(finished: ServeBenchConfig) -> None:
    before = read_results(finished.output).records
    grown = dataclasses.replace(finished, max_concurrencies=(None, 5))
    heard: list[Any] = []
    records = run_serve_bench(
        grown,
        on_record=lambda record: heard.append(record["cell"]["max_concurrency"]),
        make_engine=make_null_engine,
    )
    assert heard == [5]
    assert records[: len(before)] == before
    # What else a folder holds is no verdict on the grid that was asked for.
    assert run_serve_bench(finished, make_engine=make_null_engine) == before


def at_second_cell(action: Callable[[], None]) -> Callable[[SweepProgress], None]:
    """Do something once, as soon as the load of the second cell runs."""
    done = False

    def on_progress(progress: SweepProgress) -> None:
        nonlocal done
        if progress.stage == "load" and progress.cell_number == 2 and not done:
            done = True
            action()

    return on_progress


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def kill_engine() -> None:
    for process in multiprocessing.active_children():
        if process.name == "llmbench engine":
            process.kill()


@pytest.mark.parametrize(
    ("action", "error", "status"),
    [(interrupt, KeyboardInterrupt, "interrupted"), (kill_engine, TargetError, "failed")],
)
def test_a_broken_cell_is_on_record_and_runs_again(
    model: Path,
    tmp_path: Path,
    action: Callable[[], None],
    error: type[BaseException],
    status: str,
) -> None:
    config = config_for(model, tmp_path / "out", rates=(math.inf, 20.0))
    with pytest.raises(error):
        run_serve_bench(config, on_progress=at_second_cell(action), make_engine=make_null_engine)
    assert not multiprocessing.active_children()
    first, second = read_results(config.output).records
    assert (first["status"], second["status"]) == ("complete", status)
    assert second["metrics"]["num_completed"] < 8
    assert (config.output / f"events-{second['cell_id']}.parquet").exists()
    # The same command again repeats the broken cell alone.
    records = run_serve_bench(config, make_engine=make_null_engine)
    assert [record["status"] for record in records] == ["complete", "complete"]
    assert records[0] == first


SWEEP_SCRIPT = """
import math, sys
from pathlib import Path
from llmbench.bench.client.null_engine import make_null_engine
from llmbench.bench.config import ServeBenchConfig
from llmbench.bench.sweep import run_serve_bench
from llmbench.bench.workloads.workload import WorkloadConfig
from llmbench.engine.config import EngineConfig

if __name__ == "__main__":
    model, output = sys.argv[1:]
    run_serve_bench(
        ServeBenchConfig(
            engine=EngineConfig(model=model, load_format="dummy", device="cpu"),
            workload=WorkloadConfig(num_prompts=8, random_input_len=24, random_output_len=4),
            output=Path(output),
            request_rates=(math.inf, 4.0),
            num_warmups=1,
        ),
        on_record=lambda record: print(record["cell_id"], flush=True),
        make_engine=make_null_engine,
    )
    print("torch" in sys.modules)
"""


def test_a_killed_sweep_resumes(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP_SCRIPT)
    command = [sys.executable, str(script), str(model), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        first_cell = killed.stdout.readline().strip()
        killed.kill()
    (first,) = read_results(tmp_path / "out").records
    assert first["cell_id"] == first_cell
    resumed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    second_cell, has_torch = resumed.stdout.split()
    records = read_results(tmp_path / "out").records
    assert [record["cell_id"] for record in records] == [first_cell, second_cell]
    assert records[0] == first
    # The process that plans, reports and draws never pays for torch.
    assert has_torch == "False"


CELL = Cell(
    request_rate=4.0,
    max_concurrency=8,
    burstiness=1.0,
    num_prompts=100,
    num_warmups=2,
    time_limit_s=None,
    seed=0,
)


@pytest.mark.parametrize(
    "change",
    [
        {"cell": dataclasses.replace(CELL, burstiness=0.5)},
        {"cell": dataclasses.replace(CELL, seed=1)},
        {"digest": "e" * 64},
        {"policy": "static"},
    ],
)
def test_cell_id_tells_apart_whatever_changes_a_figure(change: dict[str, Any]) -> None:
    def name(cell: Cell = CELL, digest: str = "d" * 64, policy: Any = "chunked") -> str:
        spec = RequestSpec(index=0, prompt_token_ids=(1,), max_tokens=1)
        config = ServeBenchConfig(
            engine=EngineConfig(model="m", policy=policy),
            workload=WorkloadConfig(),
            output=Path("out"),
        )
        return cell_id(cell, Workload(requests=(spec,), digest=digest), config)

    assert name() == name()
    assert name().startswith("rate=4-cap=8-")
    assert name(**change) != name()


@pytest.mark.parametrize(
    ("rate", "capacity", "expected"),
    [(4.0, None, 25.0), (4.0, 2.0, 50.0), (4.0, 10.0, 25.0), (math.inf, 5.0, 20.0)],
)
def test_a_cell_takes_its_schedule_or_what_the_engine_needs(
    rate: float, capacity: float | None, expected: float
) -> None:
    cell = dataclasses.replace(CELL, request_rate=rate)
    assert estimate_seconds(cell, capacity) == expected


def test_time_of_a_burst_is_unknown_before_it_has_run() -> None:
    assert estimate_seconds(dataclasses.replace(CELL, request_rate=math.inf), None) is None


def test_a_closed_loop_reads_the_weights_once_for_each_token_of_its_users(
    model: Path, tmp_path: Path
) -> None:
    plan = prepare(config_for(model, tmp_path / "out", rates=(math.inf,), caps=(2, 4)))
    plan = dataclasses.replace(plan, read_bytes_s=1000.0)
    steps = plan.workload.num_output_tokens / 2
    two, four = (plan.least_seconds(cell) for cell in plan.cells)
    assert two == pytest.approx(steps * plan.model.weight_bytes / 1000.0)
    assert four == pytest.approx(steps / 2 * plan.model.weight_bytes / 1000.0)
    on_a_gpu = dataclasses.replace(plan, read_bytes_s=None)
    assert on_a_gpu.least_seconds(plan.cells[0]) is None


def test_memory_is_read_at_some_speed() -> None:
    assert 1e8 < read_bytes_s() < 1e13


def test_plan_says_what_will_be_done(model: Path, tmp_path: Path) -> None:
    plan = prepare(config_for(model, tmp_path / "out", rates=(1.0, 1.0), caps=(2, 4)))
    assert [cell.max_concurrency for cell in plan.cells] == [2, 4]  # each cell once
    assert plan.workload.num_prompt_tokens == 8 * 24
    assert plan.memory.kv_tokens == 64 * 512
    assert not (tmp_path / "out").exists()


def test_kv_size_counts_heads_of_their_own_width(tmp_path: Path) -> None:
    # Case C12: head_dim 32 is not hidden / heads = 16.
    folder = write_model(tmp_path, LLAMA | {"head_dim": 32})
    facts = read_model_facts(folder, EngineConfig(model=str(folder), load_format="dummy"))
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 32 * 2


def test_facts_are_found_under_gpt2s_names(tmp_path: Path) -> None:
    config = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 128, "vocab_size": 256}
    folder = write_model(tmp_path, config)
    facts = read_model_facts(folder, EngineConfig(model=str(folder), load_format="dummy"))
    assert (facts.max_model_len, facts.intermediate_size, facts.dtype) == (128, 256, "float32")
    assert facts.kv_bytes_per_token == 2 * 3 * 64 * 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("request_rates", (0.0,), "request_rate must be positive or inf, not 0"),
        ("request_rates", (math.nan,), "request_rate must be positive or inf, not nan"),
        ("request_rates", (), "at least one request rate"),
        ("max_concurrencies", (0,), "max_concurrency must be at least 1, not 0"),
        ("burstiness", -1.0, "burstiness must be positive or inf, not -1"),
        ("num_warmups", -1, "num_warmups must not be negative, not -1"),
        ("time_limit_s", 0.0, "time_limit_s must be positive, not 0"),
    ],
)
def test_impossible_settings_are_refused(
    model: Path, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    with pytest.raises(BenchConfigError, match=message):
        dataclasses.replace(config_for(model, tmp_path), **{field: value})
