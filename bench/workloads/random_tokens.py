"""The datasets without a file: `random` and `prefix_repetition`, of exact token counts.

A prompt is drawn as ids and sent as ids, so its length is what was asked for, with every
tokenizer: ids → text → ids merges and splits tokens, and taking off or adding special tokens by a
guess is off by one or more (vllm#10847, vllm#24937). Only ordinary tokens are drawn, and nothing
is added: a prompt of length 1 is one token.

Uniform noise must not hit the prefix cache by chance (guidellm#217: up to 80 % unintended hits).
So the first token after a shared prefix differs from request to request, as long as there are
tokens enough: no two prompts then share a block that they were not meant to share.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.chat import IDS_RULE
from llmbench.bench.workloads.prompt import Prompt
from llmbench.bench.workloads.random_lengths import LengthLaw, draw_length_pairs
from llmbench.bench.workloads.streams import stream
from llmbench.bench.workloads.workload import WorkloadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int64]


def ordinary_token_ids(tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None = None) -> Ids:
    """Return the ids that are neither special nor added to the vocabulary, ascending.

    `vocab_size` is the model's; a tokenizer may know ids that the model does not.
    """
    ids = set(tokenizer.get_vocab().values())
    ids -= set(tokenizer.all_special_ids)
    ids -= set(tokenizer.added_tokens_decoder)
    if vocab_size is not None:
        ids = {token_id for token_id in ids if token_id < vocab_size}
    if not ids:
        raise WorkloadError("the tokenizer has no ordinary tokens to draw prompts from")
    return np.array(sorted(ids), dtype=np.int64)


def draw_sequences(
    ids: Ids, lengths: Sequence[int], rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Draw a sequence for each length, no two with the same first token if there are enough ids.

    If there are not, the first two tokens together differ, or the first three.
    """
    order = rng.permutation(ids)
    num_leading = 1
    while len(ids) > 1 and len(ids) ** num_leading < len(lengths):
        num_leading += 1
    sequences = []
    for index, length in enumerate(lengths):
        tokens = ids[rng.integers(0, len(ids), size=length)]
        rank = index
        for place in range(min(num_leading, length)):
            rank, digit = divmod(rank, len(ids))
            tokens[place] = order[digit]
        sequences.append(tuple(tokens.tolist()))
    return sequences


def random_prompts(
    config: WorkloadConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_model_len: int,
    vocab_size: int | None,
) -> tuple[list[Prompt], dict[str, Any]]:
    """Draw prompts of `random_prefix_len` shared tokens and a length by its law."""
    law, ratio = config.random_length_distribution, config.random_range_ratio
    pairs, num_refused = draw_length_pairs(
        LengthLaw(law, config.random_input_len, ratio),
        LengthLaw(law, config.random_output_len, ratio),
        config.num_prompts,
        max_model_len - config.random_prefix_len,
        stream(config.seed, "random/lengths"),
    )
    ids = ordinary_token_ids(tokenizer, vocab_size)
    (prefix,) = draw_sequences(
        ids, [config.random_prefix_len], stream(config.seed, "random/prefix")
    )
    bodies = draw_sequences(
        ids, [length for length, _ in pairs], stream(config.seed, "random/tokens")
    )
    prompts = [
        Prompt(prefix + body, max_tokens)
        for body, (_, max_tokens) in zip(bodies, pairs, strict=True)
    ]
    notes = {
        "num_distinct_prompts": len({prompt.token_ids for prompt in prompts}),
        "num_lengths_drawn_again": num_refused,
        "chat_template": "not applicable",
        "special_tokens": IDS_RULE,
    }
    return prompts, notes


def prefix_repetition_prompts(
    config: WorkloadConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_model_len: int,
    vocab_size: int | None,
) -> tuple[list[Prompt], dict[str, Any]]:
    """Draw prompts of a prefix that others share and a suffix of their own.

    Prefixes are used in turn, so exactly `num_prompts` are sent (vLLM rounds down to a multiple
    of the prefixes), and shuffled unless `disable_shuffle`.
    """
    num_prefixes, num_prompts = config.prefix_repetition_num_prefixes, config.num_prompts
    prefix_len = config.prefix_repetition_prefix_len
    suffix_len = config.prefix_repetition_suffix_len
    max_tokens = config.prefix_repetition_output_len
    if num_prompts < num_prefixes:
        error = WorkloadError(f"{num_prompts} prompts cannot use {num_prefixes} prefixes")
        error.add_note("lower --prefix-repetition-num-prefixes or raise --num-prompts")
        raise error
    if prefix_len + suffix_len + max_tokens > max_model_len:
        error = WorkloadError(
            f"prefix {prefix_len} + suffix {suffix_len} + output {max_tokens} tokens exceed the "
            f"model's {max_model_len}"
        )
        error.add_note("lower --prefix-repetition-prefix-len, -suffix-len or -output-len")
        raise error
    ids = ordinary_token_ids(tokenizer, vocab_size)
    prefixes = draw_sequences(
        ids, [prefix_len] * num_prefixes, stream(config.seed, "prefix_repetition/prefixes")
    )
    suffixes = draw_sequences(
        ids, [suffix_len] * num_prompts, stream(config.seed, "prefix_repetition/suffixes")
    )
    prompts = [
        Prompt(prefixes[index % num_prefixes] + suffix, max_tokens)
        for index, suffix in enumerate(suffixes)
    ]
    if not config.disable_shuffle:
        order = stream(config.seed, "prefix_repetition/order").permutation(num_prompts)
        prompts = [prompts[index] for index in order]
    notes = {
        "num_distinct_prompts": len({prompt.token_ids for prompt in prompts}),
        "num_prefixes": num_prefixes,
        "chat_template": "not applicable",
        "special_tokens": IDS_RULE,
    }
    return prompts, notes
