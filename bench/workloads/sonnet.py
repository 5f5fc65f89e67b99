"""The `sonnet` dataset: natural text of a steady length, the openings of all prompts the same.

As in vLLM: a prompt asks to pick among N lines of a text file; the first lines are the same in
every prompt (a shared prefix of about `sonnet_prefix_len` tokens), the others are drawn with
replacement. N follows from the mean length of a line, and a draw longer than `sonnet_input_len`
is drawn again. vLLM's loop never ends where no draw fits; here N shrinks by a line after
100 draws in vain, and the notes say to what.
"""

import logging
from typing import TYPE_CHECKING, Any

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.chat import ChatRenderer
from llmbench.bench.workloads.conversations import Message
from llmbench.bench.workloads.prompt import Prompt
from llmbench.bench.workloads.rows import RowError, read_text
from llmbench.bench.workloads.streams import stream
from llmbench.bench.workloads.workload import WorkloadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OPENING = "Pick as many lines as you can from these poem lines:\n"
DRAWS_PER_LENGTH = 100


def sonnet_prompts(
    config: WorkloadConfig, tokenizer: "PreTrainedTokenizerBase", max_model_len: int
) -> tuple[list[Prompt], dict[str, Any]]:
    """Draw prompts of at most `sonnet_input_len` tokens from the lines of a text file."""
    if config.sonnet_input_len + config.sonnet_output_len > max_model_len:
        error = WorkloadError(
            f"sonnet_input_len {config.sonnet_input_len} + sonnet_output_len "
            f"{config.sonnet_output_len} exceed the model's {max_model_len} tokens"
        )
        error.add_note("lower --sonnet-input-len or --sonnet-output-len")
        raise error
    lines = [
        line + "\n" for line in read_text(str(config.dataset_path)).split("\n") if line.strip()
    ]
    renderer = ChatRenderer(tokenizer, skip_chat_template=config.skip_chat_template)

    def render(chosen: list[str]) -> tuple[str, tuple[int, ...]]:
        try:
            return renderer.render([Message("user", OPENING + "".join(chosen))])
        except RowError as refusal:
            raise WorkloadError(f"cannot build a sonnet prompt: {refusal}") from refusal

    base_len = len(render([])[1])
    mean_len = sum(len(renderer.encode(line, add_special_tokens=False)) for line in lines) / len(
        lines
    )
    num_lines = round((config.sonnet_input_len - base_len) / mean_len)
    if num_lines < 1:
        error = WorkloadError(
            f"sonnet_input_len {config.sonnet_input_len} leaves no room for a line of "
            f"{mean_len:.1f} tokens after an opening of {base_len}"
        )
        error.add_note("raise --sonnet-input-len")
        raise error
    num_prefix_lines = max(round((config.sonnet_prefix_len - base_len) / mean_len), 0)
    num_prefix_lines = min(num_prefix_lines, num_lines, len(lines))
    prefix = lines[:num_prefix_lines]
    if len(render(prefix)[1]) > config.sonnet_input_len:
        error = WorkloadError(
            f"the shared prefix of {num_prefix_lines} lines is longer than sonnet_input_len "
            f"{config.sonnet_input_len}"
        )
        error.add_note("lower --sonnet-prefix-len or raise --sonnet-input-len")
        raise error

    rng = stream(config.seed, "sonnet/lines")
    prompts: list[Prompt] = []
    num_draws = 0
    while len(prompts) < config.num_prompts:
        chosen = rng.integers(0, len(lines), size=num_lines - num_prefix_lines)
        text, ids = render(prefix + [lines[index] for index in chosen])
        num_draws += 1
        if len(ids) <= config.sonnet_input_len:
            prompts.append(Prompt(ids, config.sonnet_output_len, text))
            num_draws = 0
        elif num_draws == DRAWS_PER_LENGTH:
            num_lines, num_draws = num_lines - 1, 0
            logger.warning("sonnet prompts are cut to %d lines, more do not fit", num_lines)
    notes = {
        "num_rows": len(lines),
        "num_lines_per_prompt": num_lines,
        "num_shared_lines": num_prefix_lines,
        "num_distinct_prompts": len({prompt.token_ids for prompt in prompts}),
    }
    return prompts, notes | renderer.notes
