"""Tokens are chosen as `sample_reference` says, in the right proportions, each row by itself."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from llmbench.engine.request import Request, SamplingParams
from llmbench.engine.sampling import rng
from llmbench.engine.sampling.logits import NO_TOKEN
from llmbench.engine.sampling.sampler import Sampler, sample_reference

GREEDY: Mapping[str, Any] = {"temperature": 0.0}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e30},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 40, "temperature": 2.0},
    {"top_k": 5000},
    {"top_p": 0.5},
    {"top_p": 0.99, "temperature": 3.0},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.8},
    {"top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"logit_bias": {3: 5.0, 7: -math.inf}, "top_p": 0.9},
    {"min_tokens": 9, "stop_token_ids": (1, 2)},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"temperature": 0.0, "repetition_penalty": 0.7, "logit_bias": {0: 1e300}},
    {"temperature": 0.0},
]


def make_request(
    rng_seed: int = 0, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params: Any
) -> Request:
    return Request(
        request_id=f"{rng_seed}-{params}",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**params),
        eos_token_ids=frozenset({0}),
        rng_seed=rng_seed,
        token_ids=[*prompt, *output],
    )


def choose(logits: Tensor, requests: list[Request]) -> list[int]:
    return [row.token_id for row in Sampler()(logits, requests)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 300, 1024], ids=str)
def test_sampler_chooses_what_the_reference_chooses(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    settings_ = [s for s in SETTINGS if all(t < vocab_size for t in s.get("logit_bias", {}))] * 6
    logits = (3 * torch.randn(len(settings_), vocab_size, generator=generator)).to(dtype)
    requests = [
        make_request(seed, output=tuple(range(seed % 5)), **s) for seed, s in enumerate(settings_)
    ]
    expected = [sample_reference(row, r) for row, r in zip(logits, requests, strict=True)]
    assert choose(logits, requests) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_sampler_on_a_gpu_chooses_what_the_reference_chooses() -> None:
    logits = 3 * torch.randn(len(SETTINGS), 1024, generator=torch.Generator().manual_seed(0))
    requests = [make_request(seed, **s) for seed, s in enumerate(SETTINGS)]
    expected = [sample_reference(row, r) for row, r in zip(logits, requests, strict=True)]
    assert choose(logits.cuda(), requests) == expected


@given(
    row=st.lists(st.sampled_from([-math.inf, -8.0, -1.0, -0.5, 0.0, 0.5, 30.0]), min_size=1),
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([1e-5, 0.1, 1.0, 10.0]),
            "top_k": st.integers(-1, 8),
            "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 1.0]),
            "min_p": st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
        }
    ),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=200, deadline=None)
def test_sampler_agrees_with_the_reference_on_ties_and_forbidden_tokens(
    row: list[float], params: dict[str, Any], seed: int
) -> None:
    logits = torch.tensor(row)
    request = make_request(seed, prompt=(0,), **params)
    assert choose(logits[None], [request]) == [sample_reference(logits, request)]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_come_in_the_analytic_proportions(params: dict[str, Any]) -> None:
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.9, -3.0, 1.5, 0.0])
    num_draws = 6_000
    requests = [make_request(rng.request_seed(0, s, 0, 0), **params) for s in range(num_draws)]
    counts = Counter(choose(logits.expand(num_draws, -1), requests))
    expected = analytic_distribution(logits.tolist(), **params)
    assert set(counts) <= set(expected)
    observed = [counts[token_id] for token_id in expected]
    result = stats.chisquare(observed, [num_draws * p for p in expected.values()])
    assert result.pvalue > 1e-3


def analytic_distribution(
    logits: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """Textbook softmax and cuts in double precision."""
    order = sorted(range(len(logits)), key=lambda token_id: -logits[token_id])
    order = order[: top_k or len(order)]
    powers = [math.exp(logits[token_id] / temperature) for token_id in order]
    probabilities = [power / sum(powers) for power in powers]
    kept = {}
    mass = 0.0
    for token_id, probability in zip(order, probabilities, strict=True):
        if mass < top_p and probability >= min_p * probabilities[0]:
            kept[token_id] = probability
        mass += probability
    return {token_id: probability / sum(kept.values()) for token_id, probability in kept.items()}


def test_positions_of_one_request_come_in_the_analytic_proportions() -> None:
    logits = torch.tensor([[0.5, 0.0, 1.0, -1.0]])
    sampler = Sampler()
    request = make_request(rng.request_seed(0, 42, 0, 0))
    for _ in range(2000):
        request.token_ids.append(sampler(logits, [request])[0].token_id)
    counts = Counter(request.output_token_ids)
    expected = torch.softmax(logits[0].double(), -1) * 2000
    assert stats.chisquare([counts[i] for i in range(4)], expected.tolist()).pvalue > 1e-3


# Case C14: the model is uniform over 64 tokens; a seeded request among others.
def generate(requests: list[Request], num_tokens: int) -> None:
    sampler = Sampler()
    for _ in range(num_tokens):
        rows = sampler(torch.zeros(len(requests), 64), requests)
        for request, row in zip(requests, rows, strict=True):
            request.token_ids.append(row.token_id)


def seeded(seed: int | None, ordinal: int = 0) -> Request:
    return make_request(rng.request_seed(1234, seed, ordinal, 0), seed=seed)


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        pytest.param([], [None], id="beside an unseeded one"),
        pytest.param([], [7], id="beside seed 7"),
        pytest.param([None], [], id="second in the batch"),
        pytest.param([7, None], [42, 8], id="in the middle"),
    ],
)
def test_seeded_text_does_not_depend_on_neighbours(
    before: list[int | None], behind: list[int | None]
) -> None:
    alone = seeded(42)
    generate([alone], 32)
    among = seeded(42, ordinal=5)
    batch = [
        *(seeded(s, i) for i, s in enumerate(before)),
        among,
        *(seeded(s, 9 + i) for i, s in enumerate(behind)),
    ]
    generate(batch, 32)
    assert among.output_token_ids == alone.output_token_ids


def test_seeded_text_goes_on_after_preemption_as_if_nothing_happened() -> None:
    whole = seeded(42)
    generate([whole], 32)
    preempted = seeded(42)
    generate([preempted], 11)
    generate([preempted], 21)  # with a fresh sampler, as if all that it remembered were gone
    assert preempted.output_token_ids == whole.output_token_ids
    assert len(set(whole.output_token_ids)) > 10


def test_seeds_42_and_43_differ() -> None:
    first, second = seeded(42), seeded(43)
    generate([first, second], 32)
    assert first.output_token_ids != second.output_token_ids


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_row_is_drawn_alike_alone_and_in_any_batch(params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(len(SETTINGS) + 1, 640, generator=generator)
    mine = make_request(99, output=(5, 6, 6), **params)
    alone = choose(logits[-1:], [mine])
    others = [make_request(seed, **s) for seed, s in enumerate(SETTINGS)]
    assert choose(logits, [*others, mine])[-1:] == alone


# Case C15: very small temperatures; the margin is that of the scripted model.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 0.0])
def test_tiny_temperature_gives_the_greedy_token(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 64, dtype=dtype)
    logits[0, 17] = logits[1, 3] = logits[2, 40] = 64.0
    requests = [
        make_request(1, temperature=temperature),
        make_request(2, temperature=1.0, logit_bias={5: -math.inf}),
        make_request(3, temperature=temperature, logit_bias={40: -math.inf, 41: 1.0}),
    ]
    assert choose(logits, requests) == [17, 3, 41]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_greedy_takes_the_lowest_id_of_equal_logits(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 100, dtype=dtype)
    logits[1, 60:70] = 2.0
    assert choose(logits, [make_request(**GREEDY), make_request(**GREEDY)]) == [0, 60]


@pytest.mark.parametrize("params", [GREEDY, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize(
    ("value", "error"),
    [(math.nan, "hold NaN"), (math.inf, "hold +inf"), (-math.inf, "is forbidden")],
)
def test_row_without_a_token_fails_alone(params: dict[str, Any], value: float, error: str) -> None:
    logits = torch.zeros(3, 64)
    logits[:, 9] = 50.0
    if value == -math.inf:
        logits[1] = value
    else:
        logits[1, 20] = value
    first, broken, last = Sampler()(logits, [make_request(i, **params) for i in range(3)])
    assert first == last == (9, None, None)
    assert broken.token_id == NO_TOKEN
    assert broken.error is not None
    assert error in broken.error


def test_bias_that_forbids_every_token_is_an_error_of_the_row() -> None:
    bias = dict.fromkeys(range(8), -math.inf)
    row = Sampler()(torch.zeros(1, 8), [make_request(logit_bias=bias)])[0]
    assert row.error == "every token of the vocabulary is forbidden"


@pytest.mark.parametrize("top_k", [-1, 0, 64, 65, 10**9])
def test_top_k_that_cuts_nothing_is_no_top_k(top_k: int) -> None:
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    tokens = choose(logits, [make_request(seed, top_k=top_k) for seed in range(50)])
    assert tokens == choose(logits, [make_request(seed) for seed in range(50)])


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(len(SETTINGS), 16, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    Sampler()(logits, [make_request(seed, **s) for seed, s in enumerate(SETTINGS)])
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_model_and_only_where_asked_for() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 4.0]] * 3)
    requests = [
        make_request(1, temperature=0.0, logit_bias={3: -math.inf}, logprobs=2),
        make_request(2, temperature=0.0),
        make_request(3, temperature=0.0, logprobs=0),
    ]
    biased, silent, bare = Sampler()(logits, requests)
    expected = torch.log_softmax(logits[0], -1)
    assert biased.token_id == 2
    assert biased.logprobs is not None
    assert biased.logprobs.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert biased.logprobs.rank == 2
    assert [token_id for token_id, _ in biased.logprobs.top] == [3, 2]
    assert silent.logprobs is None
    assert bare.logprobs is not None
    assert bare.logprobs.top == ()
