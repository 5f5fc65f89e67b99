"""lm-evaluation-harness on the same files and the same model: equal prompts, numbers and scores.

The model is tiny and random, in float32, so that a difference is one of rules and not of rounding.
Its tokenizer is a real one: tokens span words, and there is a chat template.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_plan import PreparedEval, prepare
from llmbench.bench.accuracy.evaluation import evaluate
from llmbench.bench.accuracy.lm_eval_agreement import Agreement, compare_answers
from llmbench.engine.config import EngineConfig

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.real]

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPT = REPOSITORY / "bench" / "accuracy" / "lm_eval_peer.py"
TASKS = {
    "arc_challenge": 2,
    "hellaswag": 3,
    "mmlu": 1,
    "truthfulqa_mc2": 2,
    "winogrande": 4,
    "gsm8k": 2,
    "truthfulqa_mc1": 2,
    "arc_easy": 3,
    "piqa": 3,
    "wikitext": 2,
    "kobest_boolq": 3,
    "kobest_copa": 3,
    "kobest_hellaswag": 3,
    "kobest_sentineg": 3,
    "kobest_wic": 3,
}
"""Documents of each task, of each subject of MMLU."""
GENERATED = ("gsm8k",)
CHAT_TASKS = ("arc_easy", "gsm8k", "kobest_wic")
ADAPTER_TASKS = ("arc_easy", "mmlu_anatomy", "wikitext", "gsm8k", "kobest_boolq")

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A random Llama of two narrow layers with the demo model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2560,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run_harness(
    peer: Callable[[str], Any],
    model_folder: Path,
    data_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Run the harness in its own environment; its result by task."""
    python = peer("lm-eval").python

    def run(tasks: dict[str, Any], **settings: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("harness")
        job = {
            "model": str(model_folder),
            "data_dir": str(data_dir.resolve()),
            "tasks": tasks,
            "dtype": "float32",
            "threads": 1,
            "output": str(folder / "output.json"),
            **settings,
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        done = subprocess.run(
            [python, SCRIPT, folder / "job.json"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / ".typing")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=3600,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        output = json.loads((folder / "output.json").read_text(encoding="utf-8"))
        found: dict[str, Any] = output["tasks"]
        return found

    return run


class Ours:
    """The same questions to the built-in engine."""

    def __init__(self, prepared: PreparedEval, model: EngineModel, folder: Path) -> None:
        self.result = evaluate(prepared, model, folder)
        self.prepared = prepared

    def shots(self, task: str) -> int:
        """Examples before each question of a task or of a subject."""
        return max(each.num_shots for each in self.prepared.tasks if is_of(each.task.name, task))

    def against(self, task: str, harness: dict[str, Any]) -> Agreement:
        """How far the two are apart on a task."""
        items = {name: each for name, each in self.result.items.items() if is_of(name, task)}
        scores = {name: each for name, each in self.result.tasks.items() if is_of(name, task)}
        return compare_answers(items, scores, harness)


def is_of(name: str, task: str) -> bool:
    return name == task or (task == "mmlu" and name.startswith("mmlu_"))


@pytest.fixture(scope="module")
def engine_model(model_folder: Path) -> EngineModel:
    return EngineModel(EngineConfig(model=str(model_folder), dtype="float32", num_threads=1))


@pytest.fixture(scope="module")
def ours(
    engine_model: EngineModel, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Ours:
    config = EvalConfig(tasks=tuple(TASKS), limits=TASKS, data_dir=data_dir)
    return Ours(prepare(config), engine_model, tmp_path_factory.mktemp("ours") / "run")


@pytest.fixture(scope="module")
def harness(run_harness: Run, ours: Ours) -> dict[str, Any]:
    """The harness's `hf` model, one request at a time."""
    return run_harness(
        {task: {"num_fewshot": ours.shots(task), "limit": limit} for task, limit in TASKS.items()}
    )


@pytest.mark.parametrize("task", TASKS)
def test_numbers_and_scores_are_those_of_the_harness(
    ours: Ours, harness: dict[str, Any], task: str
) -> None:
    found = ours.against(task, harness[task])
    assert found.num_other_prompts == 0
    assert_close(found, task, 1e-4)
    assert found.num_same_answers == found.num_answers
    assert found.score_differences
    assert found.max_score_difference < (1e-4 if task == "wikitext" else 1e-6) * largest(
        harness[task]
    )


def assert_close(found: Agreement, task: str, tolerance: float) -> None:
    """Log-likelihoods agree; a task whose answers are generated has none, every other has."""
    if task in GENERATED:
        assert found.max_difference is None
    else:
        assert found.max_difference is not None
        assert found.max_difference < tolerance


def largest(result: dict[str, Any]) -> float:
    """Largest score of a task, at least 1; a perplexity of a random model is very large."""
    values = [value for scores in result["scores"].values() for value in scores.values()]
    return max([1.0, *(float(value) for value in values if isinstance(value, int | float))])


def test_numbers_are_those_of_the_harness_with_a_chat_template(
    engine_model: EngineModel, run_harness: Run, data_dir: Path, tmp_path: Path
) -> None:
    config = EvalConfig(
        tasks=CHAT_TASKS,
        num_fewshot=2,
        limits=2,
        data_dir=data_dir,
        apply_chat_template=True,
        system_instruction="Answer briefly.",
    )
    prepared = prepare(config, load_tokenizer=lambda: engine_model.tokenizer)
    ours = Ours(prepared, engine_model, tmp_path / "run")
    theirs = run_harness(
        {task: {"num_fewshot": 2, "limit": 2} for task in CHAT_TASKS},
        chat_template=True,
        system_instruction="Answer briefly.",
    )
    for task in CHAT_TASKS:
        found = ours.against(task, theirs[task])
        assert found.num_other_prompts == 0
        assert_close(found, task, 1e-4)
        assert found.num_same_answers == found.num_answers


def test_engine_inside_the_harness_gives_the_same_numbers(
    engine_model: EngineModel, run_harness: Run, data_dir: Path, tmp_path: Path
) -> None:
    limits = dict.fromkeys(ADAPTER_TASKS, 2)
    prepared = prepare(EvalConfig(tasks=ADAPTER_TASKS, limits=limits, data_dir=data_dir))
    ours = Ours(prepared, engine_model, tmp_path / "run")
    theirs = run_harness(
        {task: {"num_fewshot": ours.shots(task), "limit": 2} for task in ADAPTER_TASKS},
        adapter=True,
    )
    for task in ADAPTER_TASKS:
        found = ours.against(task, theirs[task])
        assert found.num_other_prompts == 0
        assert_close(found, task, 1e-5)
        assert found.num_same_answers == found.num_answers
        assert found.score_differences
        assert found.max_score_difference < 1e-5 * largest(theirs[task])
