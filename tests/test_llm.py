"""LLM.generate: order, parameters a prompt, penalties, interrupts, and any load whatsoever."""

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.config import KVManagerName, Policy, Reservation
from llmbench.engine.errors import RequestError
from llmbench.engine.llm import LLM, Completion, RequestResult
from llmbench.engine.request import SamplingParams

PROMPTS = [[5, 9, 11], [40, 41, 42, 43, 90, 91, 92, 93, 94], [7], [5, 9, 12]]


def greedy(max_tokens: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


@pytest.fixture
def make_llm(loaded_llama: Any) -> Callable[..., LLM]:
    def make(*, loaded: Any = None, **config: Any) -> LLM:
        settings_: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 4}
        return LLM(
            "tiny", loaded=loaded or loaded_llama, check_integrity=True, **(settings_ | config)
        )

    return make


def ids(results: list[RequestResult]) -> list[list[int]]:
    return [answer.token_ids for result in results for answer in result.answers]


def test_answers_come_in_the_order_of_the_prompts(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=2)
    lengths = [9, 1, 6, 3]
    results = llm.generate(PROMPTS, [greedy(length) for length in lengths])
    assert [result.prompt_token_ids for result in results] == PROMPTS
    assert [len(token_ids) for token_ids in ids(results)] == lengths
    alone = [llm.generate([p], greedy(n))[0] for p, n in zip(PROMPTS, lengths, strict=True)]
    assert ids(results) == ids(alone)


def test_each_prompt_has_its_own_parameters(make_llm: Callable[..., LLM]) -> None:
    params = [
        greedy(4),
        SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=5, logprobs=1),
        greedy(3, prompt_logprobs=0),
        SamplingParams(temperature=1.0, seed=2, max_tokens=5),
    ]
    results = make_llm().generate([PROMPTS[0]] * 4, params)
    assert [len(result.answers) for result in results] == [1, 2, 1, 1]
    assert [len(result.prompt_logprobs) for result in results] == [0, 0, 2, 0]
    assert [len(r.answers[0].logprobs) for r in results][:1] == [0]
    assert all(len(a.logprobs) == len(a.token_ids) for a in results[1].answers)
    assert len({tuple(token_ids) for token_ids in ids(results[1:2] + results[3:])}) == 3
    alone = [make_llm().generate([PROMPTS[0]], one)[0] for one in params]
    assert ids(results) == ids(alone)


def test_default_parameters_and_no_prompts(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    assert llm.generate([]) == []
    (result,) = llm.generate([PROMPTS[0]])
    assert 1 <= len(result.answers[0].token_ids) <= SamplingParams().max_tokens  # type: ignore[operator]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("one text", None, "prompts must be a list"),
        (PROMPTS, [greedy()], "4 prompts have 1 sampling parameters"),
        ([[5], []], None, "at least 1 token"),
        ([[5], [1000]], None, "prompt token id 1000"),
        ([[5], [7] * 300], None, "prompt of 300 tokens"),
        ([5, 7], None, "text or token ids"),
    ],
)
def test_nothing_runs_where_one_prompt_is_wrong(
    prompts: Any, params: Any, message: str, make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert not llm.core.step_records
    assert not llm.core.has_unfinished
    assert len(ids(llm.generate([[5]], greedy()))[0]) == 6


def test_row_that_allows_no_token_is_an_error_of_its_answer(make_llm: Callable[..., LLM]) -> None:
    nothing = {token_id: -float("inf") for token_id in range(128)}
    llm = make_llm()
    results = llm.generate([PROMPTS[0]] * 2, [greedy(logit_bias=nothing), greedy()])
    wrong, right = (result.answers[0] for result in results)
    assert wrong == Completion(
        text="",
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        logprobs=[],
        error="every token of the vocabulary is forbidden",
    )
    assert right.token_ids == ids(llm.generate([PROMPTS[0]], greedy()))[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")])
def test_interrupted_run_leaves_an_engine_that_can_be_used(
    error: BaseException, make_llm: Callable[..., LLM]
) -> None:
    want = ids(make_llm().generate(PROMPTS, greedy()))
    llm = make_llm()

    def interrupt(num_finished: int, num_answers: int) -> None:
        if len(llm.core.step_records) == 3:
            raise error

    with pytest.raises(type(error)):
        llm.generate(PROMPTS, greedy(20, n=2), on_progress=interrupt)
    assert not llm.core.has_unfinished
    assert llm.core.kv.usage().num_reserved_slots == 0
    assert ids(llm.generate(PROMPTS, greedy())) == want


def test_progress_counts_answers_after_each_step(make_llm: Callable[..., LLM]) -> None:
    heard: list[tuple[int, int]] = []
    llm = make_llm()
    llm.generate(
        PROMPTS[:2], [greedy(2, n=2), greedy(3)], on_progress=lambda *counts: heard.append(counts)
    )
    assert len(heard) == len(llm.core.step_records)
    assert heard == sorted(heard)
    assert heard[0] == (0, 3)
    assert heard[-1] == (3, 3)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"presence_penalty": -1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5, "logit_bias": {17: 8.0, 30: -float("inf"), 31: -3.0}},
    ],
)
def test_penalties_and_bias_are_those_of_a_plain_loop(
    params: dict[str, Any], random_llama: tuple[Any, Any], make_llm: Callable[..., LLM]
) -> None:
    prompt = [*PROMPTS[1], *PROMPTS[1][:3]]
    got = ids(make_llm(max_num_batched_tokens=5).generate([prompt, *PROMPTS], greedy(16, **params)))
    assert got[0] == plain_loop(random_llama[1], prompt, 16, greedy(16, **params))


def plain_loop(model: Any, prompt: list[int], num_tokens: int, params: SamplingParams) -> list[int]:
    """Greedy text with bias and penalties: the whole sequence again for each token."""
    output: list[int] = []
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].double().tolist()
        for token_id, bias in params.logit_bias.items():
            logits[token_id] += bias
        counts = Counter(output)
        for token_id in set(prompt + output):
            if logits[token_id] > 0:
                logits[token_id] /= params.repetition_penalty
            else:
                logits[token_id] *= params.repetition_penalty
        for token_id, count in counts.items():
            logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
        output.append(max(range(len(logits)), key=logits.__getitem__))
    return output


class RecallModel:
    """A model of exact numbers: its logits are a hash of all tokens that it finds in the cache.

    A wrong block table, slot, position or row changes the hash, and no rounding hides it.
    """

    num_layers = 1
    kernel = "recall"
    weight_bytes = 0
    num_hashes = 509

    def __init__(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(self.num_hashes, vocab_size, generator=generator)

    def make_kv_cache(self, num_slots: int) -> list[torch.Tensor]:
        return [torch.full((num_slots,), -1, dtype=torch.int64)]

    def forward(self, batch: ForwardBatch, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        (cache,) = kv_caches
        cache[batch.slot_mapping] = batch.input_ids
        hidden = []
        offsets = torch.arange(batch.block_size)
        for row, (query_len, context_len) in enumerate(
            zip(batch.query_lens, batch.context_lens, strict=True)
        ):
            blocks = batch.block_table[row, : -(-context_len // batch.block_size)].long()
            tokens = cache[(blocks[:, None] * batch.block_size + offsets).flatten()[:context_len]]
            assert (tokens >= 0).all(), "a slot is read before it is written"
            first = int(batch.query_start_loc[row])
            assert batch.positions[first].item() == context_len - query_len
            weights = torch.arange(1, context_len + 1) * 31 + 7
            hidden.append(((tokens + 1) * weights).cumsum(0)[-query_len:] % self.num_hashes)
        return torch.cat(hidden)[:, None]

    def final_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rows[hidden[:, 0]]


VOCAB_SIZE = 32
token_ids = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 12)))
    prompt_logprobs = draw(st.sampled_from([None, None, None, 0, 2]))
    start = 0 if prompt_logprobs is None else draw(st.sampled_from([0, 2, 4]))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.7, 1.0, 5.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.5, 1e-9])),
        top_k=draw(st.sampled_from([0, -1, 1, 5, 100])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        seed=draw(st.integers(-(2**70), 2**70)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, 12 if max_tokens is None else max_tokens)),
        stop_token_ids=tuple(draw(st.lists(token_ids, max_size=3))),
        ignore_eos=draw(st.booleans()),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 1e-300])),
        logit_bias=draw(
            st.dictionaries(token_ids, st.sampled_from([-float("inf"), -100.0, 3.0]), max_size=3)
        ),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=start,
        logprob_token_ids=draw(st.sampled_from([(), (), (3, 30)])),
        return_hidden_states=draw(st.booleans()),
    )


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "policy": draw(st.sampled_from(get_args(Policy))),
        "kv_manager": draw(st.sampled_from(get_args(KVManagerName))),
        "reservation": draw(st.sampled_from(get_args(Reservation))),
        "prefix_cache": draw(st.sampled_from(["hash", "none"])),
        "block_size": draw(st.sampled_from([1, 2, 5])),
        "num_kv_blocks": draw(st.integers(24, 60)),  # a longest answer fits
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([1, 3, 7, 64])),
        "seed": draw(st.integers(0, 3)),
    }


prompts_and_params = st.lists(
    st.tuples(
        # Few distinct tokens and a common head: prefixes to find.
        st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda tail: [4, 4, 9, *tail]),
        sampling_params(),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=engine_settings(), load=prompts_and_params)
def test_any_load_ends_and_each_seeded_answer_is_that_of_its_request_alone(
    config: dict[str, Any],
    load: list[tuple[list[int], SamplingParams]],
    make_llm: Callable[..., LLM],
    as_loaded: Callable[..., Any],
) -> None:
    loaded = as_loaded(
        RecallModel(VOCAB_SIZE),
        vocab_size=VOCAB_SIZE,
        max_model_len=24,
        eos_token_ids=frozenset({2, 30}),
    )
    llm = make_llm(loaded=loaded, **config)
    prompts, params = [prompt for prompt, _ in load], [one for _, one in load]
    results = llm.generate(prompts, params)
    assert llm.core.kv.usage().num_reserved_slots == 0
    for prompt, one, result in zip(prompts, params, results, strict=True):
        check_answers(prompt, one, result)
        (alone,) = make_llm(loaded=loaded, **config).generate([prompt], one)
        (warm,) = llm.generate([prompt], one)
        for again in (alone, warm):
            assert without_cache_hits(again) == without_cache_hits(result)


def check_answers(prompt: list[int], params: SamplingParams, result: RequestResult) -> None:
    assert len(result.answers) == params.n
    reported = (
        [] if params.prompt_logprobs is None else prompt[max(params.prompt_logprobs_start, 1) :]
    )
    assert [e.token_id for e in result.prompt_logprobs] == reported
    has_hidden = params.return_hidden_states and bool(reported)
    assert num_rows(result.prompt_hidden_states) == len(reported) * has_hidden
    assert result.num_cached_tokens < len(prompt)
    longest = min(params.max_tokens or 24, 24 - len(prompt))
    for answer in result.answers:
        assert answer.finish_reason in ("stop", "length")
        num_tokens = len(answer.token_ids)
        assert 1 <= num_tokens <= longest
        assert (num_tokens < longest) <= (answer.finish_reason == "stop")
        assert answer.finish_reason == "length" or num_tokens >= params.min_tokens
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {2, 30})
        ended = [token in ends for token in answer.token_ids]
        assert ended[-1] == (answer.finish_reason == "stop")
        assert not any(ended[:-1])
        forbidden = {t for t, bias in params.logit_bias.items() if bias == -float("inf")}
        assert not forbidden & set(answer.token_ids)
        has_logprobs = params.num_top_logprobs is not None
        assert [e.token_id for e in answer.logprobs] == (answer.token_ids * has_logprobs)
        assert all(len(entry.top) == (params.logprobs or 0) for entry in answer.logprobs)
        asked = [tuple(i for i, _, _ in entry.asked) for entry in answer.logprobs]
        assert asked == [params.logprob_token_ids] * len(asked)
        assert num_rows(answer.hidden_states) == num_tokens * params.return_hidden_states


def num_rows(hidden: torch.Tensor | None) -> int:
    return 0 if hidden is None else hidden.shape[0]


def without_cache_hits(result: RequestResult) -> RequestResult:
    return RequestResult(
        prompt_token_ids=result.prompt_token_ids,
        num_cached_tokens=0,
        prompt_logprobs=result.prompt_logprobs,
        answers=result.answers,
    )


STOPS = ("ab", "ba", "aab", "한", "bbb", "a한", "b\N{REPLACEMENT CHARACTER}")


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    stops=st.lists(st.sampled_from(STOPS), max_size=3, unique=True).map(tuple),
    max_tokens=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    chunk=st.sampled_from([1, 8, 64]),
)
def test_streamed_text_is_the_bytes_up_to_the_stop(
    stops: tuple[str, ...],
    max_tokens: int,
    seed: int,
    chunk: int,
    make_llm: Callable[..., LLM],
    as_loaded: Callable[..., Any],
    byte_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = byte_tokenizer()
    loaded = as_loaded(RecallModel(258), vocab_size=258, tokenizer=tokenizer)
    core = make_llm(loaded=loaded, max_num_batched_tokens=chunk).core
    # Nothing but the bytes of these: characters begin and break off, stop strings come and go.
    letters = "ab한".encode()
    byte_of = dict(zip(tokenizer.encode("ab한"), letters, strict=True))
    params = SamplingParams(
        temperature=5.0,
        seed=seed,
        max_tokens=max_tokens,
        stop=stops,
        logit_bias=dict.fromkeys(byte_of, 1000.0),
    )
    (request,) = core.make_requests("Say: ", params, "streamed")
    core.add_request(request)
    deltas: list[str] = []
    while core.has_unfinished:
        deltas += [output.text_delta for output in core.step()]
    text = bytes(byte_of[token_id] for token_id in request.output_token_ids).decode(
        "utf-8", "replace"
    )
    if request.finish_reason == "stop":
        assert isinstance(request.stop_reason, str)
        text = text[: text.index(request.stop_reason)]
    else:
        assert request.num_output_tokens == max_tokens
    assert "".join(deltas) == text
    assert request.detokenizer is not None
    assert request.detokenizer.text == text
    (result,) = make_llm(loaded=loaded).generate(["Say: "], params)
    assert result.answers[0].text == text
    # The mark of a character that the cap cut off comes too late to be a stop.
    assert not any(stop in text for stop in stops if "\N{REPLACEMENT CHARACTER}" not in stop)
