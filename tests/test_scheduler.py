"""Scheduler: every request gets exactly its tokens, whatever policy, pool and company it has.

The model here is content-addressed: what it writes to a KV slot is the whole prefix, and the next
token is a hash of the prefixes that it reads back through the block table. A slot that is stale,
shared wrongly or never written gives another token than the loop without any engine does.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmbench.engine.config import EngineConfig, Policy
from llmbench.engine.errors import RequestError
from llmbench.engine.kv.factory import make_kv_manager
from llmbench.engine.request import (
    Request,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    TokenLogprobs,
)
from llmbench.engine.scheduler import SampledTokens, Scheduler, SchedulerOutput

EOS = 5


def next_token(prefix: tuple[int, ...]) -> int:
    """Token 0 … 5 behind a prefix; pure, so that it needs no engine."""
    return random.Random(repr(prefix)).randrange(6)


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tuple(tokens)))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, ())


class ContentModel:
    """Runner over a shadow of the KV pool, with a proposer that is sometimes right."""

    def __init__(self, scheduler: Scheduler, noise: random.Random | None = None) -> None:
        self.scheduler = scheduler
        self.noise = noise
        self.slots: dict[int, tuple[int, ...]] = {}

    def execute(self, output: SchedulerOutput) -> dict[str, SampledTokens]:
        """Write all slots of the step, then read; sequences in one step see each other's writes."""
        for request, num_scheduled in output.scheduled:
            tokens = request.token_ids + request.spec_token_ids
            start = request.num_computed_tokens
            for position in range(start, start + num_scheduled):
                self.slots[self.slot(request, position)] = tuple(tokens[: position + 1])
        return {request.request_id: self.sample(request, n) for request, n in output.scheduled}

    def sample(self, request: Request, num_scheduled: int) -> SampledTokens:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_scheduled
        prompt_logprobs = []
        if request.sampling_params.prompt_logprobs is not None:
            first = max(start + 1, request.first_prompt_logprob)
            positions = range(first, min(end + 1, request.num_prompt_tokens))
            prompt_logprobs = [logprob(request.prompt_token_ids[p]) for p in positions]
        if end < request.num_tokens:
            return SampledTokens([], [], prompt_logprobs)
        accepted = []
        for position in range(len(request.token_ids) - 1, end):
            accepted.append(next_token(self.read(request, position)))
            drafts = request.spec_token_ids[len(accepted) - 1 :]
            if not drafts or drafts[0] != accepted[-1]:
                break
        return SampledTokens(accepted, [logprob(t) for t in accepted], prompt_logprobs)

    def read(self, request: Request, position: int) -> tuple[int, ...]:
        prefix = self.slots[self.slot(request, position)]
        for earlier in range(position):
            assert self.slots[self.slot(request, earlier)] == prefix[: earlier + 1]
        return prefix

    def slot(self, request: Request, position: int) -> int:
        size = self.scheduler.kv.block_size
        return self.scheduler.kv.block_ids(request)[position // size] * size + position % size

    def propose(self, request: Request) -> None:
        if self.noise is None or request.num_computed_tokens != len(request.token_ids) - 1:
            return
        tokens = list(request.token_ids)
        for _ in range(self.noise.randrange(4)):
            right = next_token(tuple(tokens))
            tokens.append(right if self.noise.random() < 0.7 else self.noise.randrange(6))
        request.spec_token_ids = tokens[len(request.token_ids) :]


@dataclass
class Arrival:
    """One request of a random load."""

    step: int
    prompt: list[int]
    max_tokens: int | None
    abort_after: int | None
    abort_in_flight: bool
    prompt_logprobs_start: int | None


@dataclass
class Collected:
    """Everything that came back for one request."""

    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [t for output in self.outputs for t in output.new_token_ids]


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 6),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        max_tokens=st.one_of(st.none(), st.integers(1, 6)),
        abort_after=st.one_of(st.none(), st.none(), st.integers(0, 8)),
        abort_in_flight=st.booleans(),
        prompt_logprobs_start=st.sampled_from([None, None, 0, 1, 3, 6]),
    ),
    min_size=1,
    max_size=7,
)

MANAGERS: dict[str, dict[str, Any]] = {
    "paged": {"kv_manager": "paged"},
    "paged without cache": {"kv_manager": "paged", "prefix_cache": "none"},
    "contiguous": {"kv_manager": "contiguous"},
    "contiguous to model length": {"kv_manager": "contiguous", "reservation": "max_model_len"},
    "uncached": {"kv_manager": "uncached"},
}
MAX_MODEL_LEN = 14


def check_budget(output: SchedulerOutput, config: EngineConfig) -> None:
    num_tokens = sum(n for _, n in output.scheduled)
    assert len(output.scheduled) <= config.max_num_seqs
    assert all(n >= 1 for _, n in output.scheduled)
    assert len({id(r) for r, _ in output.scheduled}) == len(output.scheduled)
    is_whole = config.policy not in ("chunked", "splitfuse") or config.kv_manager == "uncached"
    if is_whole:
        assert num_tokens <= config.max_num_batched_tokens or len(output.scheduled) == 1
        assert all(r.num_computed_tokens + n == r.num_tokens for r, n in output.scheduled)
    else:
        assert num_tokens <= config.max_num_batched_tokens


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("policy", get_args(Policy))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    load=arrivals,
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 12),
    num_blocks=st.integers(3, 12),
    draft_seed=st.one_of(st.none(), st.integers(0, 99)),
)
def test_any_load_ends_with_exactly_its_tokens(
    policy: Policy,
    manager: str,
    load: list[Arrival],
    max_num_seqs: int,
    budget: int,
    num_blocks: int,
    draft_seed: int | None,
) -> None:
    config = EngineConfig(
        model="m",
        policy=policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=2,
        **MANAGERS[manager],
    )
    scheduler = Scheduler(config, make_kv_manager(config, num_blocks, MAX_MODEL_LEN), MAX_MODEL_LEN)
    noise = None if draft_seed is None else random.Random(draft_seed)
    model = ContentModel(scheduler, noise)
    requests = {
        str(index): Request(
            request_id=str(index),
            prompt_token_ids=arrival.prompt,
            sampling_params=SamplingParams(
                max_tokens=arrival.max_tokens,
                prompt_logprobs=None if arrival.prompt_logprobs_start is None else 0,
                prompt_logprobs_start=arrival.prompt_logprobs_start or 0,
            ),
            eos_token_ids=frozenset({EOS}),
        )
        for index, arrival in enumerate(load)
    }
    collected = {request_id: Collected() for request_id in requests}
    room = min(MAX_MODEL_LEN, num_blocks * 2)

    def abort_due(step: int, *, in_flight: bool) -> None:
        for request_id, arrival in zip(requests, load, strict=True):
            due = arrival.abort_after is not None and step == arrival.step + arrival.abort_after
            if due and arrival.abort_in_flight == in_flight:
                scheduler.abort(request_id)

    step = 0
    while scheduler.has_unfinished or step <= max(arrival.step for arrival in load):
        for request_id, arrival in zip(requests, load, strict=True):
            if arrival.step == step:
                if len(arrival.prompt) >= room:
                    with pytest.raises(RequestError):
                        scheduler.add(requests[request_id])
                else:
                    scheduler.add(requests[request_id])
        abort_due(step, in_flight=False)
        output = scheduler.schedule()
        check_budget(output, config)
        sampled = model.execute(output)
        abort_due(step, in_flight=True)
        for result in scheduler.update(output, sampled):
            collected[result.request_id].outputs.append(result)
        scheduler.check_integrity()
        for request in scheduler.running:
            model.propose(request)
        step += 1
        assert step < 1000, "no end"

    assert scheduler.kv.usage().num_free_blocks == num_blocks
    for request_id, arrival in zip(requests, load, strict=True):
        request, outputs = requests[request_id], collected[request_id].outputs
        if len(arrival.prompt) >= room:
            continue
        cap = min(arrival.max_tokens or MAX_MODEL_LEN, room - len(arrival.prompt))
        expected = expected_tokens(arrival.prompt, cap)
        token_ids = collected[request_id].token_ids
        assert request.status is RequestStatus.FINISHED
        if request.finish_reason == "abort":
            assert token_ids == expected[: len(token_ids)]
        else:
            assert token_ids == request.output_token_ids == expected
            assert request.finish_reason == ("stop" if expected[-1] == EOS else "length")
            assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
            assert outputs[-1].finish_reason == request.finish_reason
        assert [p.token_id for p in request.logprobs] == token_ids
        if outputs:
            start = arrival.prompt_logprobs_start
            asked = [] if start is None else arrival.prompt[max(start, 1) :]
            assert [p.token_id for p in outputs[0].prompt_logprobs] == asked
            assert not any(output.prompt_logprobs for output in outputs[1:])


def make_engine(num_blocks: int, max_model_len: int, **config: Any) -> ContentModel:
    made = EngineConfig(model="m", **config)
    kv = make_kv_manager(made, num_blocks, max_model_len)
    return ContentModel(Scheduler(made, kv, max_model_len))


def make_request(request_id: str, prompt: list[int], **params: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**params),
    )


def step(model: ContentModel) -> SchedulerOutput:
    output = model.scheduler.schedule()
    snapshot = replace(output, scheduled=list(output.scheduled))
    model.scheduler.update(output, model.execute(output))
    model.scheduler.check_integrity()
    return snapshot


@pytest.mark.parametrize("manager", MANAGERS)
def test_request_beyond_the_pool_is_refused_and_the_next_one_runs(manager: str) -> None:
    """C11: a prompt within the model's length, yet larger than the pool of 64 tokens."""
    model = make_engine(4, 128, block_size=16, **MANAGERS[manager])
    with pytest.raises(RequestError, match=r"100 tokens .* 64 tokens") as refused:
        model.scheduler.add(make_request("big", list(range(100))))
    assert "memory" in refused.value.__notes__[0]
    small = make_request("small", [1] * 8, max_tokens=4, ignore_eos=True)
    model.scheduler.add(small)
    while model.scheduler.has_unfinished:
        step(model)
    assert (small.num_output_tokens, small.finish_reason) == (4, "length")


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("max_tokens", [20, None])
def test_output_that_would_outgrow_the_pool_ends_at_it(
    manager: str, policy: Policy, max_tokens: int | None
) -> None:
    """C11: prompt 60 + max_tokens 20 in a pool of 64 tokens."""
    model = make_engine(4, 128, block_size=16, policy=policy, **MANAGERS[manager])
    request = make_request("r", [1] * 60, max_tokens=max_tokens, ignore_eos=True)
    model.scheduler.add(request)
    while model.scheduler.has_unfinished:
        step(model)
    assert (len(request.token_ids), request.finish_reason) == (64, "length")
    assert request.num_preemptions == 0


def test_prompt_that_leaves_no_room_for_output_is_refused() -> None:
    model = make_engine(100, 32, block_size=16)
    with pytest.raises(RequestError, match=r"32 tokens .* model length of 32 tokens"):
        model.scheduler.add(make_request("r", [1] * 32))
    model.scheduler.add(make_request("r", [1] * 31))


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="at least 1 token"):
        make_engine(4, 32).scheduler.add(make_request("r", []))


def test_request_id_in_use_is_refused() -> None:
    model = make_engine(4, 32)
    model.scheduler.add(make_request("r", [1]))
    with pytest.raises(RequestError, match="in use"):
        model.scheduler.add(make_request("r", [1]))
    model.scheduler.abort("r")
    model.scheduler.add(make_request("r", [1]))


def test_abort_of_an_unknown_request_is_none() -> None:
    assert make_engine(4, 32).scheduler.abort("nobody") is None


def test_whole_cached_prompt_computes_its_last_block() -> None:
    """C09: 32 ids in blocks of 16, sent three times."""
    model = make_engine(8, 64, block_size=16)
    cached, queried, hit, texts = [], [], [], []
    for index in range(3):
        request = make_request(str(index), list(range(32)), max_tokens=8, ignore_eos=True)
        model.scheduler.add(request)
        first = step(model)
        queried.append(first.num_prefix_queried_tokens)
        hit.append(first.num_prefix_hit_tokens)
        while model.scheduler.has_unfinished:
            step(model)
        cached.append(request.num_cached_tokens)
        texts.append(request.output_token_ids)
    assert cached == hit == [0, 16, 16]
    assert queried == [32, 32, 32]
    assert texts[0] == texts[1] == texts[2]


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    model = make_engine(8, 64, block_size=4)
    for index in range(2):
        model.scheduler.add(make_request(str(index), [1] * 20, max_tokens=1, prompt_logprobs=0))
        output = step(model)
        assert [n for _, n in output.scheduled] == [20]
        assert output.num_prefix_queried_tokens == 0


@pytest.mark.parametrize(
    ("start", "num_computed"),
    [(0, 20), (1, 20), (4, 20), (5, 16), (8, 16), (9, 12), (16, 8), (17, 4), (19, 4), (20, 4)],
)
def test_prefix_cache_serves_what_stands_before_the_reported_positions(
    start: int, num_computed: int
) -> None:
    model = make_engine(8, 64, block_size=4)
    prompt = list(range(20))
    for name, scheduled in (("cold", 20), ("warm", num_computed)):
        request = make_request(
            name, prompt, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start
        )
        model.scheduler.add(request)
        output = step(model)
        assert [n for _, n in output.scheduled] == [scheduled]
        assert request.num_cached_tokens == 20 - scheduled
        assert [p.token_id for p in request.prompt_logprobs] == prompt[max(start, 1) :]


def test_youngest_is_preempted_and_comes_back_first() -> None:
    model = make_engine(4, 64, block_size=2, prefix_cache="none")
    for name in ("old", "young"):
        model.scheduler.add(make_request(name, [1] * 4, max_tokens=4, ignore_eos=True))
    model.scheduler.add(make_request("late", [1], max_tokens=1))
    step(model)
    output = step(model)
    young = output.preempted[0]
    assert [r.request_id for r, _ in output.scheduled] == ["old"]
    assert (young.request_id, young.num_preemptions) == ("young", 1)
    assert young.status is RequestStatus.PREEMPTED
    assert [r.request_id for r in model.scheduler.waiting] == ["young", "late"]
    while model.scheduler.has_unfinished:
        step(model)
    assert young.num_preemptions == 1


@pytest.mark.parametrize(("num_blocks", "next_step"), [(5, ["old"]), (6, ["old", "young"])])
def test_preempted_request_comes_back_when_the_running_one_can_still_grow(
    num_blocks: int, next_step: list[str]
) -> None:
    model = make_engine(num_blocks, 64, block_size=2, prefix_cache="none")
    for name, num_prompt, max_tokens in (("old", 2, 6), ("short", 4, 2), ("young", 4, 3)):
        model.scheduler.add(
            make_request(name, [1] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
        )
    step(model)
    young = step(model).preempted[0]
    # `old` holds 2 blocks, `young` needs 3: 3 or 4 are free now that `short` has ended.
    assert [r.request_id for r, _ in step(model).scheduled] == next_step
    while model.scheduler.has_unfinished:
        step(model)
    assert (young.request_id, young.num_preemptions) == ("young", 1)


def test_preemption_clears_drafts() -> None:
    model = make_engine(4, 64, block_size=2, prefix_cache="none")
    requests = [make_request(n, [1] * 4, max_tokens=4, ignore_eos=True) for n in ("old", "young")]
    for request in requests:
        model.scheduler.add(request)
    step(model)
    requests[1].spec_token_ids = [1, 1]
    assert step(model).preempted == [requests[1]]
    assert requests[1].spec_token_ids == []


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    model = make_engine(4, 64, block_size=2)
    requests = [make_request(n, [i] * 4, max_tokens=3, ignore_eos=True) for i, n in enumerate("ab")]
    for request in requests:
        model.scheduler.add(request)
    num_hit = 0
    while model.scheduler.has_unfinished:
        num_hit += step(model).num_prefix_hit_tokens
    assert requests[1].num_preemptions == 1
    assert num_hit > 0
    assert requests[1].num_cached_tokens == 0


def test_drafts_never_reach_beyond_the_cap() -> None:
    model = make_engine(8, 64, block_size=2)
    request = make_request("r", [1, 1], max_tokens=3, ignore_eos=True)
    model.scheduler.add(request)
    step(model)
    request.spec_token_ids = [0] * 6
    # Two output tokens are left: one draft and the token behind it.
    assert step(model).scheduled == [(request, 2)]


def test_drafts_leave_a_token_of_the_budget_to_each_sequence_behind() -> None:
    model = make_engine(20, 64, block_size=2, max_num_batched_tokens=4)
    requests = [make_request(n, [1], max_tokens=9, ignore_eos=True) for n in "abc"]
    for request in requests:
        model.scheduler.add(request)
    step(model)
    for request in requests:
        request.spec_token_ids = [0, 0]
    assert [n for _, n in step(model).scheduled] == [2, 1, 1]


def test_requests_beyond_the_token_budget_wait_their_turn() -> None:
    model = make_engine(20, 64, block_size=2, max_num_batched_tokens=1)
    for name in "ab":
        model.scheduler.add(make_request(name, [1, 1], max_tokens=1))
    names = [[(r.request_id, n) for r, n in step(model).scheduled] for _ in range(4)]
    assert names == [[("a", 1)], [("a", 1)], [("b", 1)], [("b", 1)]]


def test_schedule_without_requests_is_empty() -> None:
    model = make_engine(4, 32)
    assert step(model).scheduled == []
    assert not model.scheduler.has_unfinished
