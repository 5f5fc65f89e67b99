"""The datasets by name: each draws prompts that fit the model, and notes what it did.

Two are made up token by token (`random`, `prefix_repetition`), three are read from a file
(`sharegpt`, `custom`, `sonnet`). A new one is a function from settings and tokenizer to prompts
and notes, and a line here.
"""

from typing import TYPE_CHECKING, Any

from llmbench.bench.workloads.custom import custom_prompts
from llmbench.bench.workloads.prompt import Prompt
from llmbench.bench.workloads.random_tokens import prefix_repetition_prompts, random_prompts
from llmbench.bench.workloads.sharegpt import sharegpt_prompts
from llmbench.bench.workloads.sonnet import sonnet_prompts
from llmbench.bench.workloads.streams import stream
from llmbench.bench.workloads.workload import WorkloadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MADE_UP = {"random": random_prompts, "prefix_repetition": prefix_repetition_prompts}
FROM_FILE = {"sharegpt": sharegpt_prompts, "custom": custom_prompts, "sonnet": sonnet_prompts}


def draw_prompts(
    config: WorkloadConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_model_len: int,
    vocab_size: int | None = None,
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return `num_prompts` prompts of the dataset, and its notes for the record."""
    name = config.dataset_name
    if name in MADE_UP:
        prompts, notes = MADE_UP[name](config, tokenizer, max_model_len, vocab_size)
    else:
        prompts, notes = FROM_FILE[name](config, tokenizer, max_model_len)
    return prompts, {"dataset": name} | notes


def sampling_seeds(config: WorkloadConfig, num: int) -> list[int | None]:
    """Return a seed a request, so that sampled texts repeat too; greedy ones need none."""
    if config.temperature == 0:
        return [None] * num
    seeds: list[int | None] = stream(config.seed, "sampling").integers(0, 2**63, size=num).tolist()
    return seeds
