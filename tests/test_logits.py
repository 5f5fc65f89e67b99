"""Edits of logits, against transformers' processors; and the order that all cuts share."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from llmbench.engine.request import Request, RequestStatus, SamplingParams
from llmbench.engine.sampling.logits import (
    NO_TOKEN,
    LogitEditor,
    is_edited,
    likeliest,
    top_ordered,
)

VOCAB_SIZE = 32
EOS = 0


def make_request(
    output: Sequence[int] = (), prompt: Sequence[int] = (5, 6, 6), **params: Any
) -> Request:
    return Request(
        request_id=f"{params}",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**params),
        eos_token_ids=frozenset({EOS, 1}),
        token_ids=[*prompt, *output],
    )


def edit(scores: Tensor, *requests: Request) -> Tensor:
    edited = scores.clone()
    LogitEditor()(edited, requests)
    return edited


@pytest.fixture
def scores() -> Tensor:
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def test_request_without_wishes_is_not_edited(scores: Tensor) -> None:
    request = make_request(output=(3, 4))
    assert not is_edited(request)
    assert torch.equal(edit(scores, request), scores)


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_min_tokens_forbids_every_end_as_transformers_does(scores: Tensor, num_output: int) -> None:
    request = make_request(output=[7] * num_output, min_tokens=3, stop_token_ids=(9,))
    processor = MinNewTokensLengthLogitsProcessor(3, 3, [EOS, 1, 9])
    assert torch.equal(
        edit(scores, request), processor(torch.tensor([request.token_ids]), scores.clone())
    )
    assert is_edited(request) == (num_output < 3)


def test_end_that_the_model_has_no_logit_for_is_passed_over() -> None:
    request = make_request(min_tokens=3)
    request.eos_token_ids = frozenset({EOS, VOCAB_SIZE})
    edited = edit(torch.zeros(1, VOCAB_SIZE), request)
    assert edited.isinf().nonzero()[:, 1].tolist() == [EOS]


def test_ignored_end_of_text_is_not_forbidden_by_min_tokens(scores: Tensor) -> None:
    request = make_request(min_tokens=3, stop_token_ids=(9,), ignore_eos=True)
    assert edit(scores, request).isinf().nonzero()[:, 1].tolist() == [9]


@pytest.mark.parametrize("bias", [{3: 2.5}, {3: -100.0, 31: 0.5, 0: -math.inf}])
def test_logit_bias_is_added_as_transformers_does(scores: Tensor, bias: dict[int, float]) -> None:
    processor = SequenceBiasLogitsProcessor([[[i], value] for i, value in bias.items()])
    expected = processor(torch.tensor([[5, 6, 6]]), scores)
    torch.testing.assert_close(edit(scores, make_request(logit_bias=bias)), expected)


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_over_prompt_and_output_is_that_of_transformers(
    scores: Tensor, penalty: float
) -> None:
    request = make_request(output=(8, 9, 8), repetition_penalty=penalty)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([request.token_ids]), scores.clone())
    torch.testing.assert_close(edit(scores, request), expected)


def test_frequency_and_presence_count_output_tokens_only(scores: Tensor) -> None:
    request = make_request(output=(8, 9, 8, 6), frequency_penalty=0.5, presence_penalty=0.25)
    change = edit(scores, request) - scores
    expected = torch.zeros(1, VOCAB_SIZE)
    expected[0, 8] = -(2 * 0.5 + 0.25)
    expected[0, [6, 9]] = -(0.5 + 0.25)
    torch.testing.assert_close(change, expected)


def test_edits_follow_one_another_in_the_documented_order() -> None:
    """Bias first, then repetition on the biased logit, then frequency and presence."""
    request = make_request(
        output=(8,),
        logit_bias={8: 3.0},
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    scores = torch.full((1, VOCAB_SIZE), -1.0)
    assert edit(scores, request)[0, 8].item() == (-1.0 + 3.0) / 2.0 - 0.5 - 0.25
    assert edit(scores, request)[0, 5].item() == -2.0


def test_row_is_edited_alike_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(2)
    requests = [
        make_request(output=(3, 3, 4), repetition_penalty=1.5),
        make_request(output=(3,)),
        make_request(output=(7, 8), presence_penalty=1.0, logit_bias={7: 1.0, 2: -1.0}),
        make_request(min_tokens=4, stop_token_ids=(3,)),
        make_request(output=(4, 4), frequency_penalty=-1.0, logit_bias={4: -math.inf}),
    ]
    scores = torch.randn(len(requests), VOCAB_SIZE, generator=generator)
    together = edit(scores, *requests)
    for row, request in enumerate(requests):
        assert torch.equal(together[row : row + 1], edit(scores[row : row + 1], request))


@pytest.mark.parametrize("penalty", [1e-300, 5e-324, 1e300])
@pytest.mark.parametrize("logit", [-math.inf, -1e38, -1.0, 0.0, 1.0, 3e38])
def test_extreme_penalty_never_makes_nan_or_plus_inf(penalty: float, logit: float) -> None:
    scores = torch.full((1, VOCAB_SIZE), logit)
    edited = edit(scores, make_request(repetition_penalty=penalty, logit_bias={5: 1e308}))
    assert not edited.isnan().any()
    assert not edited.isposinf().any()


def test_tokens_beyond_the_logits_are_passed_over(scores: Tensor) -> None:
    """A head may be narrower than the embedding that the prompt was checked against."""
    request = make_request(prompt=(5, VOCAB_SIZE + 3), output=(5,), repetition_penalty=2.0)
    reference = make_request(prompt=(5,), output=(5,), repetition_penalty=2.0)
    assert torch.equal(edit(scores, request), edit(scores, reference))


@given(
    steps=st.lists(
        st.one_of(st.integers(0, VOCAB_SIZE - 1), st.sampled_from(["drop", "finish", "restart"])),
        max_size=30,
    )
)
@settings(max_examples=50, deadline=None)
def test_remembered_counts_equal_fresh_ones_through_growth_and_rollback(
    steps: list[int | str],
) -> None:
    params: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    scores = torch.linspace(-2, 2, VOCAB_SIZE)[None]
    editor = LogitEditor()
    request = make_request(**params)
    for step in steps:
        if isinstance(step, int):
            request.token_ids.append(step)
        elif step == "drop" and request.num_output_tokens:
            request.token_ids.pop()
        elif step == "finish":
            request.status = RequestStatus.FINISHED
            request = make_request(**params)
        else:
            request = make_request(prompt=(9, 9), **params)  # another one under the same id
        edited = scores.clone()
        editor(edited, [request])
        assert torch.equal(edited, edit(scores, request))


@given(
    rows=st.lists(
        st.lists(
            st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, 1.5]), min_size=128, max_size=128
        ),
        min_size=1,
        max_size=3,
    ),
    k=st.integers(1, 130),
)
@settings(max_examples=60, deadline=None)
def test_top_is_ordered_by_value_and_then_by_id(rows: list[list[float]], k: int) -> None:
    values, ids = top_ordered(torch.tensor(rows), k)
    for row, row_values, row_ids in zip(rows, values.tolist(), ids.tolist(), strict=True):
        expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        assert row_ids == expected
        assert row_values == [row[i] for i in expected]


@pytest.mark.parametrize("vocab_size", [1, 63, 1024, 1000])
@pytest.mark.parametrize("k", [1, 3, 8, 2000])
def test_top_of_bf16_logits_is_that_of_a_stable_sort(vocab_size: int, k: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.randn(7, vocab_size, generator=generator).bfloat16().float()
    values, ids = top_ordered(scores, k)
    expected = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k])
    assert torch.equal(ids, expected.indices[:, :k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_likeliest_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [
            [0.0, 2.0, 2.0],
            [-math.inf, -math.inf, -5.0],
            [-math.inf, -math.inf, -math.inf],
            [0.0, math.nan, 1.0],
            [0.0, math.inf, 1.0],
        ],
        dtype=dtype,
    )
    assert likeliest(logits) == [1, 2, NO_TOKEN, NO_TOKEN, NO_TOKEN]
