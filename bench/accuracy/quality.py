"""Perplexity of one or several quantized models, and their divergence from the base.

All models are in memory together and read the same windows in turn, so the base is computed once
for any number of candidates and no distribution is written down.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from llmbench.bench.accuracy.divergence import (
    LOGIT_ROWS,
    Quality,
    QualityTotals,
    row_slices,
    score_rows,
)
from llmbench.bench.accuracy.text_windows import TextWindows, cut_text
from llmbench.bench.errors import BenchError
from llmbench.bench.model_facts import read_model_facts
from llmbench.engine.config import EngineConfig
from llmbench.engine.models.source import resolve_folder
from llmbench.engine.window import WindowModel

WINDOW = 2048


def evaluate_quality(
    base: EngineConfig,
    candidates: Mapping[str, EngineConfig],
    text: Path,
    *,
    window: int = WINDOW,
    limit_windows: int | None = None,
    on_progress: Callable[[int, int, Mapping[str, float]], None] = lambda done, total, ppl: None,
) -> tuple[dict[str, Quality], TextWindows]:
    """Quality of each candidate by name, and the windows that it was measured on.

    `on_progress` is told the windows done, their number, and each candidate's perplexity so far.

    Raises:
        BenchError: the text is unusable, or a candidate has another vocabulary than the base.
    """
    length = min(window, _longest(base))
    reference = WindowModel(replace(base, max_model_len=length), length)
    models = {
        name: WindowModel(replace(config, max_model_len=length), length)
        for name, config in candidates.items()
    }
    for name, model in models.items():
        if model.loaded.vocab_size != reference.loaded.vocab_size:
            raise BenchError(
                f"{name} has a vocabulary of {model.loaded.vocab_size}, "
                f"the base {reference.loaded.vocab_size}: their distributions cannot be compared"
            )
    if reference.loaded.tokenizer is None:
        raise BenchError(f"{base.model} has no tokenizer, so a text cannot be read")
    cut = cut_text(text, reference.loaded.tokenizer, window=length, limit=limit_windows)
    totals = {name: QualityTotals() for name in models}
    for done, tokens in enumerate(cut.windows, start=1):
        _add_window(list(tokens), reference, models, totals)
        perplexities = {name: total.perplexity for name, total in totals.items()}
        on_progress(done, len(cut.windows), perplexities)
    return {name: total.result() for name, total in totals.items()}, cut


def _longest(config: EngineConfig) -> int:
    return read_model_facts(resolve_folder(config.model), config).max_model_len


@torch.inference_mode()
def _add_window(
    tokens: list[int],
    reference: WindowModel,
    models: Mapping[str, WindowModel],
    totals: Mapping[str, QualityTotals],
) -> None:
    targets = torch.tensor(tokens[1:])
    hidden = reference.hidden(tokens)[:-1]
    others = {name: model.hidden(tokens)[:-1] for name, model in models.items()}
    for rows in row_slices(len(targets), LOGIT_ROWS):
        logits = reference.logits(hidden[rows])
        for name, model in models.items():
            scores = score_rows(logits, model.logits(others[name][rows]), targets[rows])
            totals[name].add(scores)
    for total in totals.values():
        total.end_window()
