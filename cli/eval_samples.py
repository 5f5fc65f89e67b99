"""`llmbench eval --samples`: answers of both models to the same prompts, kept for the pages."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmbench.bench.accuracy.sample_prompts import (
    SamplePrompt,
    builtin_prompts,
    choose_prompts,
    read_prompts,
)
from llmbench.cli.options import KNOWN_ERRORS, as_settings_error
from llmbench.cli.progress import Progress

if TYPE_CHECKING:
    from llmbench.bench.accuracy.model import EvaluatedModel

SEED = 0
SAMPLES = "samples.json"


def sample_prompts(count: int | None, path: Path | None) -> tuple[SamplePrompt, ...]:
    """The prompts of --samples; all of --samples-file where no number is given."""
    if count is None and path is None:
        return ()
    try:
        prompts = builtin_prompts() if path is None else read_prompts(path)
        return prompts if count is None else choose_prompts(prompts, count)
    except KNOWN_ERRORS as refusal:
        raise as_settings_error(refusal) from refusal


def write_answers(
    candidate: "EvaluatedModel",
    base: "EvaluatedModel | None",
    prompts: Sequence[SamplePrompt],
    system_instruction: str | None,
    folder: Path,
    progress: Progress,
) -> None:
    """Answer the prompts with both models, one of them in memory at a time.

    Answers that the folder has already are left as they are.
    """
    from llmbench.bench import strict_json
    from llmbench.bench.accuracy.engine_model import EngineModel, tokenizer_digest
    from llmbench.bench.accuracy.sample_answers import (
        MAX_TOKENS,
        answer_prompts,
        side_by_side,
        to_record,
    )
    from llmbench.bench.results import write_json

    models = {"candidate": candidate, "base": base}
    identities = [None if model is None else model.identity for model in models.values()]
    key = strict_json.digest([identities, list(prompts), system_instruction, SEED, MAX_TOKENS])
    path = folder / SAMPLES
    if path.exists() and strict_json.loads(path.read_bytes()).get("key") == key:
        return
    answers = {}
    # The candidate is in memory from its evaluation, so it goes first.
    for side, model in models.items():
        if isinstance(model, EngineModel):
            show = functools.partial(progress.update, f"sample answers of {model.name}")
            answers[side] = answer_prompts(
                model.load(),
                prompts,
                seed=SEED,
                system_instruction=system_instruction,
                on_progress=show,
            )
            model.close()
    is_same = base is None or tokenizer_digest(base.tokenizer) == tokenizer_digest(
        candidate.tokenizer
    )
    pairs = side_by_side(
        prompts, answers["candidate"], answers.get("base"), is_same_vocabulary=is_same
    )
    base_name = None if base is None else base.name
    record = to_record(
        pairs, candidate=candidate.name, base=base_name, seed=SEED, max_tokens=MAX_TOKENS
    )
    write_json(path, {"key": key, **record})
