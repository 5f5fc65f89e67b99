"""Made-up prompts: exact token counts (case C32), no special tokens, no accidental prefixes."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.random_tokens import draw_sequences, ordinary_token_ids
from llmbench.bench.workloads.workload import Workload, WorkloadConfig, build_workload

# Decoding and encoding are no identity: "An", "s" come back as "Ans" (C16_tokenizer.json).
MERGING_VOCAB = [
    *("<pad>", "<s>", "</s>", "<unk>"),
    *" :\nABCDanswerold",
    *("An", "Ans", "we", "wer", "Answer", ": ", ": C", "ld", "rld", "orld"),
]
MERGES = [("A", "n"), ("An", "s"), ("w", "e"), ("we", "r"), ("Ans", "wer"), (":", " ")]
MERGES += [(": ", "C"), ("l", "d"), ("r", "ld"), ("o", "rld")]


def merging_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = list(dict.fromkeys(MERGING_VOCAB))
    special = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(tokens[:4])
    ]
    pipeline = {
        "version": "1.0",
        "added_tokens": special,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": MERGES,
        },
    }
    backend = Tokenizer.from_str(json.dumps(pipeline))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def tokenizers(byte_tokenizer: Callable[..., Any]) -> dict[str, Any]:
    """Case C32's three: one adds BOS, one adds nothing, one whose decoding is no identity."""
    return {
        "adds BOS": byte_tokenizer(adds_bos=True),
        "adds nothing": byte_tokenizer(),
        "merges": merging_tokenizer(),
    }


def build(tokenizer: Any, max_model_len: int = 4096, **settings: Any) -> Workload:
    return build_workload(WorkloadConfig(**settings), tokenizer, max_model_len)


def test_decoding_and_encoding_the_merging_tokenizer_changes_the_count() -> None:
    tokenizer = merging_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["An", "s", "w", "er"[0]])
    assert tokenizer(tokenizer.decode(ids))["input_ids"] != ids


@pytest.mark.parametrize("kind", ["adds BOS", "adds nothing", "merges"])
@pytest.mark.parametrize("length", [1, 2, 16, 128])
def test_random_prompt_has_the_asked_for_length(
    tokenizers: dict[str, Any], kind: str, length: int
) -> None:
    workload = build(tokenizers[kind], num_prompts=20, random_input_len=length)
    assert {len(request.prompt_token_ids) for request in workload.requests} == {length}
    assert workload.num_prompt_tokens == 20 * length


@pytest.mark.parametrize("kind", ["adds BOS", "adds nothing", "merges"])
def test_special_tokens_are_never_drawn(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    workload = build(tokenizer, num_prompts=20, random_input_len=500)
    drawn = {token for request in workload.requests for token in request.prompt_token_ids}
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    assert drawn == set(range(len(tokenizer))) - special


def test_added_tokens_are_never_drawn(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool_call>"])
    added = tokenizer.convert_tokens_to_ids("<tool_call>")
    assert added not in ordinary_token_ids(tokenizer)


def test_ids_unknown_to_the_model_are_never_drawn(tokenizers: dict[str, Any]) -> None:
    workload = build_workload(
        WorkloadConfig(num_prompts=20, random_input_len=200),
        tokenizers["adds nothing"],
        4096,
        vocab_size=50,
    )
    assert max(max(request.prompt_token_ids) for request in workload.requests) == 49


def test_vocabulary_without_ordinary_tokens_is_refused(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="no ordinary tokens"):
        ordinary_token_ids(tokenizers["adds nothing"], vocab_size=2)


def test_random_prompts_share_their_prefix_and_not_a_token_more(
    tokenizers: dict[str, Any],
) -> None:
    workload = build(
        tokenizers["adds nothing"], num_prompts=100, random_input_len=8, random_prefix_len=24
    )
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert len({prompt[:24] for prompt in prompts}) == 1
    assert len({prompt[24] for prompt in prompts}) == 100
    assert {len(prompt) for prompt in prompts} == {32}


@given(
    num_ids=st.integers(1, 40),
    lengths=st.lists(st.integers(3, 6), max_size=60),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_sequences_differ_in_as_few_leading_tokens_as_can_be(
    num_ids: int, lengths: list[int], seed: int
) -> None:
    ids = np.arange(100, 100 + num_ids)
    sequences = draw_sequences(ids, lengths, np.random.default_rng(seed))
    assert [len(sequence) for sequence in sequences] == lengths
    assert {token for sequence in sequences for token in sequence} <= set(ids.tolist())
    num_leading = 1
    while num_ids**num_leading < len(lengths) and num_leading < 3:
        num_leading += 1
    openings = {sequence[:num_leading] for sequence in sequences}
    assert len(openings) == min(len(lengths), num_ids**num_leading)


def test_random_prompts_of_a_longer_run_begin_with_those_of_a_shorter_one(
    tokenizers: dict[str, Any],
) -> None:
    short, long = (
        build(tokenizers["merges"], num_prompts=num, random_input_len=9, random_range_ratio=0.4)
        for num in (5, 20)
    )
    assert long.requests[:5] == short.requests


def test_repeated_prompts_are_told(tokenizers: dict[str, Any]) -> None:
    workload = build(tokenizers["merges"], num_prompts=50, random_input_len=1)
    num_ordinary = len(ordinary_token_ids(tokenizers["merges"]))
    assert num_ordinary < 50
    assert workload.notes["num_distinct_prompts"] == num_ordinary


@pytest.mark.parametrize("disable_shuffle", [False, True])
def test_each_prefix_is_used_as_often_as_the_others(
    tokenizers: dict[str, Any], disable_shuffle: bool
) -> None:
    workload = build(
        tokenizers["adds BOS"],
        dataset_name="prefix_repetition",
        num_prompts=23,
        prefix_repetition_num_prefixes=5,
        prefix_repetition_prefix_len=32,
        prefix_repetition_suffix_len=7,
        prefix_repetition_output_len=3,
        disable_shuffle=disable_shuffle,
    )
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert {len(prompt) for prompt in prompts} == {39}
    assert sorted(Counter(prompt[:32] for prompt in prompts).values()) == [4, 4, 5, 5, 5]
    assert len({prompt[32] for prompt in prompts}) == 23
    assert {request.max_tokens for request in workload.requests} == {3}


def test_more_prefixes_than_prompts_are_refused(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="4 prompts cannot use 10 prefixes"):
        build(tokenizers["merges"], dataset_name="prefix_repetition", num_prompts=4)


def test_prefix_repetition_too_long_for_the_model_is_refused(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="exceed the model's 512"):
        build(tokenizers["merges"], 512, dataset_name="prefix_repetition", num_prompts=40)
