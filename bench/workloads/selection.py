"""Which rows of a file become requests: shuffled, tokenized, fitted, and repeated if need be.

Rows are tokenized only until there are enough, so a file of 90,000 talks costs no more than the
prompts that are sent. A row whose prompt and answer do not fit the model together is passed over
and counted, never cut: a cut prompt is another prompt. Where the file holds fewer usable rows
than asked for, rows are sent again from the first on, and the notes say how often; repeats meet
their own prefixes in the cache.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.chat import ChatRenderer
from llmbench.bench.workloads.conversations import Candidate
from llmbench.bench.workloads.prompt import Prompt
from llmbench.bench.workloads.rows import RowError, count_reasons, no_usable_row
from llmbench.bench.workloads.streams import stream
from llmbench.bench.workloads.workload import WorkloadConfig

logger = logging.getLogger(__name__)


def select_prompts(
    candidates: Sequence[Candidate],
    config: WorkloadConfig,
    renderer: ChatRenderer,
    max_model_len: int,
    *,
    output_len: int | None,
    default_output_len: int,
    skipped: Counter[str],
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return exactly `num_prompts` prompts and the notes about rows; adds to `skipped`.

    `output_len` overrides what the rows say, `default_output_len` serves rows that say nothing.
    """
    num_rows = len(candidates) + skipped.total()
    order = list(range(len(candidates)))
    if not config.disable_shuffle:
        order = stream(config.seed, f"{config.dataset_name}/rows").permutation(order).tolist()
    prompts: list[Prompt] = []
    num_examined = 0
    for row in order:
        if len(prompts) == config.num_prompts:
            break
        num_examined += 1
        candidate = candidates[row]
        try:
            text, ids = renderer.render(candidate.messages)
        except RowError as reason:
            skipped[str(reason)] += 1
            continue
        max_tokens = output_len or candidate.output_len
        if max_tokens is None and candidate.reply is not None:
            max_tokens = len(renderer.encode(candidate.reply, add_special_tokens=False))
        max_tokens = max_tokens or default_output_len
        if len(ids) + max_tokens > max_model_len:
            skipped[f"prompt + output longer than the model's {max_model_len} tokens"] += 1
            continue
        prompts.append(Prompt(ids, max_tokens, text))
    path = str(config.dataset_path)
    if not prompts:
        raise no_usable_row(path, skipped)
    notes: dict[str, Any] = {
        "num_rows": num_rows,
        "num_usable_rows": num_rows - skipped.total(),
        "num_unexamined_rows": len(candidates) - num_examined,
        "skipped": dict(skipped),
        "num_distinct_prompts": len(prompts),
    }
    return _repeat(prompts, config, path, skipped, notes), notes


def _repeat(
    prompts: list[Prompt],
    config: WorkloadConfig,
    path: str,
    skipped: Counter[str],
    notes: dict[str, Any],
) -> list[Prompt]:
    """Fill up to `num_prompts`; `max_repeats` in the notes is how often a row is sent at most."""
    num_usable, num_asked = len(prompts), config.num_prompts
    notes["max_repeats"] = -(-num_asked // num_usable)
    if num_usable == num_asked:
        return prompts
    if config.no_oversample:
        error = WorkloadError(f"only {num_usable} usable rows in {path}, {num_asked} asked for")
        error.add_note(f"--num-prompts {num_usable}, or drop --no-oversample to send rows again")
        if skipped:
            error.add_note(f"skipped rows: {count_reasons(skipped)}")
        raise error
    logger.warning(
        "%s has %d usable rows for %d prompts: rows are sent up to %d times, and repeats may hit "
        "the prefix cache",
        path,
        num_usable,
        num_asked,
        notes["max_repeats"],
    )
    return [prompts[index % num_usable] for index in range(num_asked)]
