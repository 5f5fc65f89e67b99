"""How fast is `llmbench eval` against lm-evaluation-harness, and does it say the same?

The same tasks on the same local files, one after another, each first by llmbench and then by the
harness with its `hf` model at the fastest of several batch sizes, which is sought on a few
documents of that task. Each side runs in a process of its own that has the machine to itself. Timed
is the whole evaluation: prompts, tokens, model, scores; not starting the program or loading the
model. Beside the times stands how far the answers are apart; in float32 they are equal to rounding.

The harness lives in an environment of its own: `make .peers/lm-eval/installed`.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench.errors import BenchConfigError, BenchError
from llmbench.bench.studies.study import (
    Conclusion,
    Lab,
    ModelSettings,
    Row,
    Study,
    require_positive,
    three_digits,
    time_text,
)
from llmbench.engine.config import DType

if TYPE_CHECKING:
    from llmbench.bench.accuracy.eval_config import EvalConfig
    from llmbench.bench.accuracy.eval_plan import PreparedEval

TASKS = ("arc_challenge", "hellaswag", "mmlu", "truthfulqa_mc2", "winogrande", "gsm8k")
"""Those of the group open-llm-v1."""

SCRIPT = Path(__file__).parent.parent / "accuracy" / "lm_eval_peer.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class VsLmEvalSettings(ModelSettings):
    """Which tasks, how much of each, and where the harness is.

    Attributes:
        tasks: Names that both sides know.
        limit: First documents of each task; `mmlu_limit` of each subject, `gsm8k_limit` of GSM8K.
        data_dir: Folder of local data.
        peer_python: Interpreter of the environment that has lm-eval.
        harness_batch_sizes: In rising order; the fastest is taken, for each task anew.
        probe_items: Documents on which it is sought.
    """

    dtype: DType = "bfloat16"
    num_threads: int | None = 2
    tasks: tuple[str, ...] = TASKS
    limit: int = 50
    mmlu_limit: int = 5
    gsm8k_limit: int = 16
    data_dir: str = "data"
    peer_python: str = ".peers/lm-eval/bin/python"
    harness_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    probe_items: int = 8

    def __post_init__(self) -> None:
        require_positive(
            self, "limit", "mmlu_limit", "gsm8k_limit", "harness_batch_sizes", "probe_items"
        )
        if not self.tasks:
            raise BenchConfigError("expected at least one task, found none")

    def limit_of(self, task: str) -> int:
        """Documents of a task, or of each subject."""
        family = task.partition("_")[0]
        return {"mmlu": self.mmlu_limit, "gsm8k": self.gsm8k_limit}.get(family, self.limit)

    def eval_config(self, task: str) -> "EvalConfig":
        """Our evaluation of one task."""
        from llmbench.bench.accuracy.eval_config import EvalConfig

        return EvalConfig(
            tasks=(task,), limits=self.limit_of(task), data_dir=Path(self.data_dir).expanduser()
        )


def measure(settings: VsLmEvalSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each task, when both sides have done it."""
    from llmbench.bench.accuracy.eval_plan import prepare

    python = Path(settings.peer_python).expanduser()
    if not python.exists():
        error = BenchError(f"expected the interpreter of lm-eval's environment, found no {python}")
        error.add_note("make it with `make .peers/lm-eval/installed`, or name one: --peer-python")
        raise error
    prepared = {task: prepare(settings.eval_config(task)) for task in settings.tasks}
    for done, task in enumerate(settings.tasks):
        lab.progress(f"{task}, llmbench", 2 * done, 2 * len(settings.tasks))
        ours = _run_apart(settings, task, lab.folder / f"llmbench-{task}")
        lab.note(f"{task}: llmbench took {time_text(ours['seconds'])}, now lm-eval")
        lab.progress(f"{task}, lm-eval", 2 * done + 1, 2 * len(settings.tasks))
        theirs = _run_harness(settings, task, prepared[task], python, lab.folder)
        lab.note(f"{task}: lm-eval took {time_text(theirs['seconds'])}")
        yield _row(task, lab.folder / f"llmbench-{task}", prepared[task], ours, theirs)


def _run_apart(settings: VsLmEvalSettings, task: str, folder: Path) -> dict[str, Any]:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(evaluate_task, settings, task, folder).result()


def evaluate_task(settings: VsLmEvalSettings, task: str, folder: Path) -> dict[str, Any]:
    """Evaluate one task on the built-in engine in this process, timed; records go to `folder`."""
    import time

    from llmbench.bench.accuracy.engine_model import EngineModel
    from llmbench.bench.accuracy.eval_plan import prepare
    from llmbench.bench.accuracy.evaluation import evaluate
    from llmbench.bench.client.processes import peak_resident_bytes

    model = EngineModel(settings.engine())
    plan = model.load().memory_plan
    start = time.perf_counter()
    prepared = prepare(settings.eval_config(task))
    evaluate(prepared, model, folder)
    return {
        "seconds": time.perf_counter() - start,
        "peak_resident_bytes": peak_resident_bytes(),
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
    }


def _run_harness(
    settings: VsLmEvalSettings, task: str, prepared: "PreparedEval", python: Path, folder: Path
) -> dict[str, Any]:
    """Run the harness's side of one task in its own environment."""
    from llmbench.engine.models.source import resolve_folder

    output, job = folder / f"lm-eval-{task}.json", folder / f"lm-eval-{task}-job.json"
    job.write_text(
        json.dumps(
            {
                "model": str(resolve_folder(settings.model).resolve()),
                "data_dir": str(Path(settings.data_dir).expanduser().resolve()),
                "tasks": {
                    task: {
                        "num_fewshot": max(each.num_shots for each in prepared.tasks),
                        "limit": settings.limit_of(task),
                    }
                },
                "dtype": settings.dtype,
                "batch_size": list(settings.harness_batch_sizes),
                "probe_items": settings.probe_items,
                "threads": settings.num_threads,
                "output": str(output.resolve()),
            },
            indent=2,
        ),
        encoding="utf-8",
    )
    environment = dict(os.environ)
    if settings.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(settings.num_threads)
    done = subprocess.run(
        [python, SCRIPT, job],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise BenchError(f"lm-eval failed on {task}:\n{done.stdout[-4000:]}")
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    (found,) = result["tasks"].values()
    return {**found, "peak_resident_bytes": result["peak_resident_bytes"]}


def _row(
    task: str,
    folder: Path,
    prepared: "PreparedEval",
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
) -> Row:
    from llmbench.bench.accuracy.aggregate import score_task
    from llmbench.bench.accuracy.items import items_path, read_items
    from llmbench.bench.accuracy.lm_eval_agreement import compare_answers

    items = {
        each.task.name: read_items(items_path(folder, each.task.name)) for each in prepared.tasks
    }
    scores = {
        each.task.name: score_task(each.task, items[each.task.name]) for each in prepared.tasks
    }
    found = compare_answers(items, scores, theirs)
    if found.num_other_prompts:
        raise BenchError(
            f"{found.num_other_prompts} of {found.num_items} prompts of {task} are not those of "
            "lm-eval, so neither times nor answers can be compared"
        )
    return {
        "task": task,
        "num_items": found.num_items,
        "llmbench_s": ours["seconds"],
        "lm_eval_s": theirs["seconds"],
        "lm_eval_model_s": theirs["model_seconds"],
        "lm_eval_batch_size": theirs["batch_size"],
        "speedup_ratio": theirs["seconds"] / ours["seconds"],
        "max_logprob_difference": found.max_difference,
        "same_answer_share": (
            found.num_same_answers / found.num_answers if found.num_answers else None
        ),
        "max_score_difference": found.max_score_difference,
        "num_scores": len(found.score_differences),
        "has_equal_scores": found.has_equal_scores,
        "peak_resident_bytes": ours["peak_resident_bytes"],
        "weight_bytes": ours["weight_bytes"],
        "kv_bytes": ours["kv_bytes"],
        "lm_eval_peak_resident_bytes": theirs["peak_resident_bytes"],
    }


def conclude(rows: Sequence[Row]) -> Conclusion:
    """The tasks side by side, their sum, and how far the answers are apart."""
    ours_s = sum(row["llmbench_s"] for row in rows)
    theirs_s = sum(row["lm_eval_s"] for row in rows)
    ratio = theirs_s / ours_s
    differences = [
        row["max_logprob_difference"] for row in rows if row["max_logprob_difference"] is not None
    ]
    num_equal = sum(row["has_equal_scores"] for row in rows)
    apart = ""
    if differences:
        apart = f"log-likelihoods are at most {max(differences):.1e} nats apart, and "
    finding = (
        f"{len(rows)} task{'s' if len(rows) > 1 else ''} take llmbench {time_text(ours_s)} and "
        f"lm-eval {time_text(theirs_s)}, {three_digits(ratio)} times as long; {apart}"
        f"{num_equal} of {len(rows)} have equal scores"
    )
    table = [_table_row(row) for row in rows]
    if len(rows) > 1:
        table.append(
            {
                "task": "all",
                "num_items": sum(row["num_items"] for row in rows),
                "llmbench_s": ours_s,
                "lm_eval_s": theirs_s,
                "speedup_ratio": ratio,
            }
        )
    largest = max(rows, key=lambda row: int(row["peak_resident_bytes"]))
    return Conclusion(
        finding=finding,
        table=table,
        notes=(
            f"peak memory, llmbench: {largest['peak_resident_bytes'] / 1e6:,.0f} MB "
            f"({largest['task']}), of them weights {largest['weight_bytes'] / 1e6:,.0f}; the KV "
            f"pool may take {largest['kv_bytes'] / 1e6:,.0f}, of which it holds what was used",
            "peak memory, lm-eval: "
            f"{max(row['lm_eval_peak_resident_bytes'] for row in rows) / 1e6:,.0f} MB",
        ),
        summary={
            "speedup_ratio": ratio,
            "llmbench_s": ours_s,
            "lm_eval_s": theirs_s,
            "max_logprob_difference": max(differences, default=None),
            "num_equal_scores": num_equal,
        },
    )


def _table_row(row: Row) -> Row:
    apart = row["max_logprob_difference"]
    return {
        "task": row["task"],
        "num_items": row["num_items"],
        "llmbench_s": row["llmbench_s"],
        "lm_eval_s": row["lm_eval_s"],
        "speedup_ratio": row["speedup_ratio"],
        "max_logprob_difference": "none" if apart is None else f"{apart:.1e}",
        "same_answer_share": row["same_answer_share"],
        "scores": "equal"
        if row["has_equal_scores"]
        else f"differ by {row['max_score_difference']:.2g}",
    }


STUDY = Study(name="vs-lm-eval", settings_type=VsLmEvalSettings, measure=measure, conclude=conclude)
