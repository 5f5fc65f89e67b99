"""The `sharegpt` dataset: one request from the first exchange of each conversation.

Unlike vLLM and SGLang, which drop prompts and replies under 4 tokens, prompts over 1,024 and pairs
over 2,048, only what the model itself cannot hold is dropped: chat messages are short, and
dropping the short ones shifts the very distribution that a real dataset is used for.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from llmbench.bench.workloads.chat import ChatRenderer
from llmbench.bench.workloads.conversations import parse_conversation
from llmbench.bench.workloads.prompt import Prompt
from llmbench.bench.workloads.rows import RowError, no_usable_row, read_json_list
from llmbench.bench.workloads.selection import select_prompts
from llmbench.bench.workloads.workload import WorkloadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sharegpt_prompts(
    config: WorkloadConfig, tokenizer: "PreTrainedTokenizerBase", max_model_len: int
) -> tuple[list[Prompt], dict[str, Any]]:
    """Draw prompts from a JSON list of conversations."""
    path = str(config.dataset_path)
    skipped: Counter[str] = Counter()
    candidates = []
    for row in read_json_list(path):
        try:
            candidates.append(parse_conversation(row))
        except RowError as reason:
            skipped[str(reason)] += 1
    if not candidates:
        error = no_usable_row(path, skipped)
        error.add_note('a row is {"conversations": [{"from": "human", "value": …}, …]}')
        raise error
    renderer = ChatRenderer(tokenizer, skip_chat_template=config.skip_chat_template)
    prompts, notes = select_prompts(
        candidates,
        config,
        renderer,
        max_model_len,
        output_len=config.sharegpt_output_len,
        default_output_len=1,  # every row has a reply; one of no tokens still takes a step
        skipped=skipped,
    )
    return prompts, notes | renderer.notes
