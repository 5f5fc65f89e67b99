"""The results folder of an evaluation.

    manifest.json           model, questions, data, settings, versions, hardware
    items-<task>.jsonl      an item a line, written as answers come, in order at the end
    results.jsonl           one record a task: its score, or that it was interrupted
    scores.json             all scores, written at the end and when a run is interrupted
    baseline/               the same of the baseline, where there is one

A folder belongs to one model asked in one way: another model, chat template or number of shots is
refused with what differs. The same holds for `baseline/`: a baseline may come with a later run, and
another one than the folder's is refused before anything is written. Tasks, limits and shards may
differ between two runs of a folder, since an item's key says by itself whether it is the answer to
what is now asked; `scores.json` is of the last run alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llmbench.bench import strict_json
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.items import ItemFile, ItemRecord, items_path
from llmbench.bench.accuracy.model import EvaluatedModel
from llmbench.bench.accuracy.tokenization import TextIds
from llmbench.bench.environment import collect_environment
from llmbench.bench.results import ResultsFolder, build_manifest, write_json

KIND = "eval"
SCORES = "scores.json"
BASELINE = "baseline"


def baseline_folder(folder: Path) -> Path:
    """Where the baseline's own results are."""
    return folder / BASELINE


def build_eval_manifest(
    prepared: PreparedEval,
    model: EvaluatedModel,
    *,
    max_length: int,
    baseline: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Assemble a manifest; `settings` are those of the engine, which decide about speed alone."""
    config, facts = prepared.config, prepared.facts()
    chat = facts["chat"]
    return build_manifest(
        kind=KIND,
        config={
            "num_fewshot": config.num_fewshot,
            "chat_template_sha256": None if chat is None else chat["sha256"],
            "system_instruction": config.system_instruction,
            "add_bos": config.add_bos,
            "on_overflow": config.on_overflow,
            "max_gen_toks": config.max_gen_toks,
            "max_length": max_length,
            "protocol": config.protocol,
            "window": config.window,
            "stride": config.stride,
        },
        workload_digest=None,  # of each item by itself: its key
        model_digest=strict_json.digest(model.identity),
        seed=config.seed,
        environment=collect_environment(),
        plan={
            "model": model.name,
            "identity": model.identity,
            "tokenizer": model.tokenizer.name_or_path,
            "adds_bos": _adds_bos(model, config.add_bos),
            "baseline": baseline,
            "limits": config.limits,
            "shard": config.shard,
            "settings": settings,
            **facts,
        },
    )


def _adds_bos(model: EvaluatedModel, add_bos: bool | None) -> bool:
    """Whether a text that brings no BOS gets one: what `add_bos` None comes to."""
    bos_id = model.tokenizer.bos_token_id
    (ids,) = TextIds(model.tokenizer, add_bos=add_bos).encode(["a"], special=True)
    return bos_id is not None and ids[0] == bos_id


class EvalFolder:
    """The folder of a run in progress; a context manager that holds the folder's lock."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        """Start a folder, or continue one of the same model; ResultsError otherwise."""
        self._results = ResultsFolder.create_or_resume(path, manifest)
        self.path = self._results.path
        self._files: dict[str, ItemFile] = {}

    def items(self, task: str) -> Mapping[int, ItemRecord]:
        """All of a task's items that are there, by document."""
        return self._file(task).items

    def append(self, record: ItemRecord) -> None:
        """Write an item."""
        self._file(record.task).append(record)

    def finish(
        self, scores: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]], *, is_complete: bool
    ) -> None:
        """Write the scores, and put the items in order."""
        for file in self._files.values():
            file.close(in_order=is_complete)
        self._files.clear()
        status = "complete" if is_complete else "interrupted"
        for task in tasks:
            self._results.append(
                {"kind": KIND, "cell_id": task["task"], "status": status, "score": task}
            )
        write_json(self.path / SCORES, scores)

    def close(self) -> None:
        """Release the folder; what was appended is on the disk."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._results.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _file(self, task: str) -> ItemFile:
        if task not in self._files:
            self._files[task] = ItemFile(items_path(self.path, task))
        return self._files[task]
