"""An evaluation of a model, and of the baseline that it is held against.

The baseline is evaluated first and given back before the candidate is loaded, so the two are
never in memory together. Everything that can be refused is refused before either is loaded:
models that cannot be compared, a folder of another run, prompts that are too long, a full disk.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmbench.bench.accuracy.base_answers import BaselineAnswers
from llmbench.bench.accuracy.engine_model import EngineModel, tokenizer_digest
from llmbench.bench.accuracy.eval_folder import baseline_folder
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.eval_result import EvalResult
from llmbench.bench.accuracy.eval_run import EvalRun, OnProgress
from llmbench.bench.accuracy.model import EvaluatedModel
from llmbench.bench.accuracy.question_set import longest
from llmbench.bench.errors import BenchError


def evaluate(
    prepared: PreparedEval,
    model: EvaluatedModel,
    folder: Path,
    *,
    baseline: EvaluatedModel | None = None,
    with_divergence: bool = True,
    store_root: Path | None = None,
    store_limit_bytes: int | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> EvalResult:
    """Evaluate a model and, first, its baseline; resumes what the folder or the cache holds.

    `store_root` replaces the cache for baselines' hidden states, `store_limit_bytes` the limit of
    its size. `settings` go to the manifest.

    Raises:
        BenchError: models that cannot be compared, a folder of another run, a baseline that does
            not fit the cache's limit. Whatever it raises, finished items are kept.
    """
    if baseline is None:
        return run_eval(prepared, model, folder, settings=settings, on_progress=on_progress)
    max_length = longest(prepared, model, baseline)
    run = EvalRun(prepared, model, max_length=max_length, on_progress=on_progress)
    with contextlib.ExitStack() as stack:
        store = None
        if with_divergence:
            from llmbench.bench.accuracy.baseline_store import BaselineStore
            from llmbench.bench.accuracy.store_folders import DEFAULT_LIMIT_BYTES

            check_comparable(baseline, model)
            limit = DEFAULT_LIMIT_BYTES if store_limit_bytes is None else store_limit_bytes
            store = stack.enter_context(
                BaselineStore(baseline.identity, root=store_root, limit_bytes=limit)
            )
        base_run = EvalRun(
            prepared, baseline, max_length=max_length, store=store, on_progress=on_progress
        )
        base_run.check_folder(baseline_folder(folder))  # before the run's own folder names it
        opened = stack.enter_context(run.open(folder, baseline=baseline.name, settings=settings))
        with base_run.open(baseline_folder(opened.path), settings=settings) as base_folder:
            base_result = base_run.answer(base_folder)
        baseline.close()  # its memory is the candidate's now
        answers = BaselineAnswers(
            name=baseline.name,
            digest=base_run.digest,
            items=base_result.items,
            store=store,
            load_head=baseline.head,
        )
        return run.answer(opened, answers)


def run_eval(
    prepared: PreparedEval,
    model: EvaluatedModel,
    folder: Path,
    *,
    baseline: BaselineAnswers | None = None,
    max_length: int | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> EvalResult:
    """Evaluate one model; items that the folder holds are not asked again.

    `max_length` is the longest context and continuation, tokens; the model's unless given.
    """
    run = EvalRun(prepared, model, max_length=max_length, on_progress=on_progress)
    name = None if baseline is None else baseline.name
    with run.open(folder, baseline=name, settings=settings) as opened:
        return run.answer(opened, baseline)


def check_comparable(baseline: EvaluatedModel, model: EvaluatedModel) -> None:
    """Refuse a pair whose distributions cannot be compared, before anything is computed.

    Raises:
        BenchError: another tokenizer or vocabulary, or a model without hidden states.
    """
    for each in (baseline, model):
        list(each.score((), with_hidden=True))  # a server refuses; the engine loads nothing yet
    digests = [tokenizer_digest(each.tokenizer) for each in (baseline, model)]
    if digests[0] != digests[1]:
        error = BenchError(
            f"{model.name} and its baseline {baseline.name} have different tokenizers, so their "
            "distributions over tokens cannot be compared"
        )
        error.add_note("leave divergence out with --no-divergence: answers are still compared")
        raise error
    sizes = [each.facts.vocab_size for each in (baseline, model) if isinstance(each, EngineModel)]
    if len(set(sizes)) > 1:  # with the same tokenizer: one head was padded
        error = BenchError(
            f"expected the {sizes[0]:,} logits of the baseline {baseline.name}, found "
            f"{sizes[1]:,} of {model.name}: distributions over them cannot be compared"
        )
        error.add_note("leave divergence out with --no-divergence: answers are still compared")
        raise error
