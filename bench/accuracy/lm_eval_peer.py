"""The reference harness on local files, timed: a script for an environment that has lm-eval.

    .peers/lm-eval/bin/python bench/accuracy/lm_eval_peer.py job.json

It imports nothing of llmbench, so it runs where llmbench is not installed. Stock tasks are kept as
they are; a small YAML for each sends its splits to local files (`include:` names the stock file).
The job is a JSON object:

    model          folder of a checkpoint
    data_dir       folder laid out as in FILES below
    tasks          {name: {"num_fewshot": 25 | null, "limit": 50 | null}}; `mmlu` is all subjects,
                   null leaves the harness's own shots, which for most tasks are none
    output         JSON file to write, anew after every task
    dtype          "float32" | "bfloat16" | "auto" (default)
    batch_size     1 (default), or sizes in rising order, of which the fastest is sought per task
    probe_items    documents to seek it on (default 8)
    threads        of torch (default: its own choice)
    max_length     of the model (default: as its config says)
    chat_template  true applies it; with it `system_instruction`, `fewshot_as_multiturn`
    files          {name: {split: [paths]}} instead of those in FILES
    adapter        true runs llmbench's own engine inside the harness, where it can be imported

The output holds, per task, `seconds` (the whole call: rows from the cache of `datasets`, prompts,
model, scores; neither the start of the harness nor loading the model), `model_seconds` (inside the
model's methods), the batch size, the harness's scores, and samples: log-likelihoods or text.
"""

import importlib.metadata
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILES: dict[str, dict[str, list[str]]] = {
    "arc_challenge": {
        "train": ["arc_challenge/train.jsonl"],
        "test": ["arc_challenge/test.jsonl"],
    },
    "arc_easy": {"train": ["arc_easy/train.jsonl"], "test": ["arc_easy/test.jsonl"]},
    "hellaswag": {"validation": ["hellaswag/val_1000.jsonl"]},
    "winogrande": {
        "train": ["winogrande/train_s.jsonl"],
        "validation": ["winogrande/validation.jsonl"],
    },
    "truthfulqa_mc1": {"validation": ["truthfulqa/validation.jsonl"]},
    "truthfulqa_mc2": {"validation": ["truthfulqa/validation.jsonl"]},
    "gsm8k": {"train": ["gsm8k/train.jsonl"], "test": ["gsm8k/test.jsonl"]},
    "piqa": {"validation": ["piqa/validation.jsonl"]},
    "wikitext": {"test": ["wikitext2/test_pages.jsonl"]},
    "kobest_boolq": {
        "train": ["kobest/boolq_train_head1000.jsonl"],
        "validation": ["kobest/boolq_dev.jsonl"],
        "test": ["kobest/boolq_test.jsonl"],
    },
    "kobest_wic": {
        "train": ["kobest/wic_train_head1000.jsonl"],
        "validation": ["kobest/wic_dev.jsonl"],
        "test": ["kobest/wic_test.jsonl"],
    },
    **{
        f"kobest_{name}": {
            "train": [f"kobest/{name}_train.jsonl"],
            "validation": [f"kobest/{name}_dev.jsonl"],
            "test": [f"kobest/{name}_test.jsonl"],
        }
        for name in ("copa", "hellaswag", "sentineg")
    },
    "mmlu": {
        "dev": ["mmlu/dev.jsonl"],
        "test": [f"mmlu/test_part{part}.jsonl" for part in (1, 2, 3)],
    },
}
"""Local files by task and split, relative to the data folder."""

STOCK = {
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "truthfulqa_mc1": "truthfulqa/truthfulqa_mc1.yaml",
    "truthfulqa_mc2": "truthfulqa/truthfulqa_mc2.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "piqa": "piqa/piqa.yaml",
    "wikitext": "wikitext/wikitext.yaml",
}
"""The harness's own file of each task, in its folder of tasks."""

SPLITS = {"train": "training_split", "validation": "validation_split", "test": "test_split"}
GROUPS = {
    "kobest": tuple(f"kobest_{name}" for name in ("boolq", "copa", "hellaswag", "sentineg", "wic")),
    "open-llm-v1": (
        "arc_challenge",
        "hellaswag",
        "mmlu",
        "truthfulqa_mc2",
        "winogrande",
        "gsm8k",
    ),
}
"""Names that stand for several tasks."""


def local_files(name: str) -> dict[str, list[str]] | None:
    """Files of a task by split; a subject of `mmlu` reads those of all subjects."""
    return FILES.get("mmlu" if name.startswith("mmlu_") else name)


def write_overrides(
    folder: Path, name: str, files: Mapping[str, list[str]], data_dir: Path, stock: Path
) -> list[str]:
    """Write a task's YAML into `folder`, or one a subject of `mmlu`; returns the tasks' names."""
    paths = {split: [data_dir / path for path in listed] for split, listed in files.items()}
    for listed in paths.values():
        for path in listed:
            if not path.is_file():
                raise SystemExit(f"{name}: no file {path}")
    if name.partition("_")[0] == "mmlu":
        return _write_subjects(folder, name, paths, stock / "mmlu" / "default")
    group, _, task = name.partition("_")
    own = f"kobest/kobest_{task}.yaml" if group == "kobest" else STOCK[name]
    _write_yaml(folder, name, stock / own, paths)
    return [name]


def _write_subjects(
    folder: Path, wanted: str, paths: Mapping[str, list[Path]], stock: Path
) -> list[str]:
    rows: dict[str, dict[str, list[str]]] = {}
    for split, listed in paths.items():
        for path in listed:
            for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
                subject = json.loads(line)["subject"]
                rows.setdefault(subject, {}).setdefault(split, []).append(line)
    names = []
    for subject, by_split in sorted(rows.items()):
        if wanted not in ("mmlu", f"mmlu_{subject}"):
            continue
        files = {}
        for split, lines in by_split.items():
            path = folder / f"{subject}-{split}.jsonl"
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            files[split] = [path]
        name = f"mmlu_{subject}"
        _write_yaml(folder, name, stock / f"{name}.yaml", files)
        names.append(name)
    return names


def _write_yaml(folder: Path, name: str, stock: Path, files: Mapping[str, list[Path]]) -> None:
    # JSON is YAML; the loader wants these very keys and takes everything else from `include`.
    override: dict[str, Any] = {
        "include": str(stock),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: [str(path) for path in paths] for split, paths in files.items()}
        },
        # A split that the stock file names and the folder lacks would be looked for in vain.
        **{key: None for split, key in SPLITS.items() if split not in files},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(override), encoding="utf-8")


class Clock:
    """Seconds inside a model's methods."""

    def __init__(self, lm: Any) -> None:
        self.seconds = 0.0
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(lm, name, self._timed(getattr(lm, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


class Harness:
    """lm-eval with one loaded model."""

    def __init__(self, job: Mapping[str, Any], folder: Path) -> None:
        import torch

        if job.get("threads"):
            torch.set_num_threads(int(job["threads"]))
        self.job = job
        self.folder = folder
        start = time.perf_counter()
        self.lm = self._load()
        self.load_seconds = time.perf_counter() - start
        self.clock = Clock(self.lm)
        self._drop_environment_report()

    @staticmethod
    def _drop_environment_report() -> None:
        """Two seconds a call that describe the machine: one run of all tasks pays them once."""
        import lm_eval.evaluator

        lm_eval.evaluator.add_env_info = lambda storage: None

    def _load(self) -> Any:
        options = {"max_length": self.job["max_length"]} if self.job.get("max_length") else {}
        if self.job.get("adapter"):
            from llmbench.bench.accuracy.lm_eval_model import LlmbenchLM

            return LlmbenchLM(
                pretrained=self.job["model"],
                dtype=self.job.get("dtype", "auto"),
                num_threads=self.job.get("threads"),
                **options,
            )
        from lm_eval.models.huggingface import HFLM

        return HFLM(
            pretrained=self.job["model"],
            dtype=self.job.get("dtype", "auto"),
            device="cpu",
            batch_size=1,
            **options,
        )

    def tasks(self, name: str) -> list[str]:
        """Override files of a task; its names in the harness."""
        import lm_eval.tasks

        stock = Path(lm_eval.tasks.__file__).parent
        files = self.job.get("files", {}).get(name) or local_files(name)
        if files is None:
            raise SystemExit(f"{name}: no local files are known; name them under `files`")
        return write_overrides(self.folder, name, files, Path(self.job["data_dir"]), stock)

    def run(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate a task at its best batch size."""
        from lm_eval.tasks import TaskManager

        names = self.tasks(name)
        manager = TaskManager(include_path=str(self.folder), include_defaults=False)
        manager.load(names)  # fills the cache of `datasets`, which is no part of the time below
        sizes = self.job.get("batch_size", 1)
        sizes = sizes if isinstance(sizes, list) else [sizes]
        probes: dict[int, float] = {}
        if len(sizes) > 1:
            # Of many tasks together one document each makes a batch, too.
            items = max(1, self.job.get("probe_items", 8) // len(names))
            items = min(settings.get("limit") or items, items)
            self._evaluate(names, manager, {**settings, "limit": 1}, sizes[0])  # first calls lag
            for size in sizes:
                self._evaluate(names, manager, {**settings, "limit": items}, size)
                probes[size] = self.clock.seconds
                if probes[size] > min(probes.values()):
                    break  # larger ones pad more and hold no more weights in the cache
        size = min(probes, key=lambda tried: probes[tried]) if probes else sizes[0]
        start = time.perf_counter()
        result = self._evaluate(names, manager, settings, size)
        seconds = time.perf_counter() - start
        samples = {task: [_sample(row) for row in rows] for task, rows in result["samples"].items()}
        return {
            "seconds": seconds,
            "model_seconds": self.clock.seconds,
            "batch_size": size,
            "probe_seconds": probes,
            "num_items": sum(counts["effective"] for counts in result["n-samples"].values()),
            "num_fewshot": result["n-shot"],
            "scores": result["results"],
            "samples": _merged(samples),
        }

    def _evaluate(
        self, names: list[str], manager: Any, settings: Mapping[str, Any], size: int
    ) -> dict[str, Any]:
        import lm_eval

        self.clock.seconds = 0.0
        has_template = bool(self.job.get("chat_template"))
        shared: dict[str, Any] = {
            "num_fewshot": settings.get("num_fewshot"),
            "limit": settings.get("limit"),
            "apply_chat_template": has_template,
            "system_instruction": self.job.get("system_instruction"),
            "fewshot_as_multiturn": bool(self.job.get("fewshot_as_multiturn", has_template)),
        }
        if self.job.get("adapter"):
            from llmbench.bench.accuracy.lm_eval_model import evaluate_with_lm_eval

            return evaluate_with_lm_eval(
                self.lm.model, names, data_dir=Path(self.job["data_dir"]), **shared
            )
        self.lm.batch_size_per_gpu = size
        result: dict[str, Any] = lm_eval.simple_evaluate(
            model=self.lm,
            tasks=names,
            task_manager=manager,
            bootstrap_iters=0,  # resampling says nothing about the model, and takes minutes
            **shared,
        )
        return result


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison needs of one document under one filter."""
    kept = {key: row[key] for key in ("doc_id", "filter", "doc_hash", "prompt_hash", "target_hash")}
    kept["metrics"] = {name: row[name] for name in row["metrics"]}
    answers = [answer for repeats in row["resps"] for answer in repeats]
    if all(isinstance(answer, str) for answer in answers):
        return {**kept, "response": answers[0], "filtered": row["filtered_resps"][0]}
    pairs = [answer if isinstance(answer, tuple | list) else (answer, None) for answer in answers]
    return {
        **kept,
        "loglikelihoods": [float(pair[0]) for pair in pairs],
        "is_greedy": [pair[1] for pair in pairs],
    }


def _merged(samples: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """One row a document: the filters of a generation side by side."""
    merged = {}
    for task, rows in samples.items():
        by_doc: dict[int, dict[str, Any]] = {}
        for row in rows:
            name = row.pop("filter")
            found = by_doc.setdefault(row["doc_id"], {**row, "filtered": {}, "metrics": {}})
            if "filtered" in row:
                found["filtered"][name] = row["filtered"]
            for metric, value in row["metrics"].items():
                found["metrics"][f"{metric},{name}"] = value
        merged[task] = [by_doc[doc] for doc in sorted(by_doc)]
    return merged


def peak_resident_bytes() -> int:
    """Most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else 1024 * int(peak)  # else KiB


@contextmanager
def quiet_standard_output() -> Iterator[None]:
    """Send the harness's own prints to standard error."""
    kept, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = kept


def main(job: dict[str, Any]) -> None:
    """Run a job's tasks one after another; the output is complete after each."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    output = Path(job["output"])
    output.parent.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, Any] = {}
    for name, settings in job["tasks"].items():
        wanted.update(dict.fromkeys(GROUPS.get(name, (name,)), settings))
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", f"{folder}/datasets")
        overrides = Path(folder) / "tasks"
        overrides.mkdir()
        harness = Harness(job, overrides)
        result: dict[str, Any] = {
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("lm_eval", "torch", "transformers", "datasets")
            },
            "load_seconds": harness.load_seconds,
            "job": job,
            "tasks": {},
        }
        for name, settings in wanted.items():
            result["tasks"][name] = harness.run(name, settings)
            result["peak_resident_bytes"] = peak_resident_bytes()
            part = output.with_suffix(".part")
            part.write_text(json.dumps(result, ensure_ascii=False, default=str), encoding="utf-8")
            part.replace(output)
            found = result["tasks"][name]
            print(
                f"{name}: {found['num_items']} items in {found['seconds']:.1f} s "
                f"(batch {found['batch_size']})",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    with quiet_standard_output():
        main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
