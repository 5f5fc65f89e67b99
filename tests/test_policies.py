"""Batching policies: who is scheduled with whom, and for how many tokens.

Steps are written as {request: tokens}; each scheduled request that has caught up gets one token.
"""

from typing import get_args

import pytest

from llmbench.engine.config import EngineConfig, KVManagerName, Policy
from llmbench.engine.kv.factory import make_kv_manager
from llmbench.engine.request import Request, SamplingParams
from llmbench.engine.scheduler import SampledTokens, Scheduler


class Engine:
    """A scheduler whose every sampled token is 1."""

    def __init__(
        self,
        policy: Policy,
        *,
        budget: int = 10,
        max_num_seqs: int = 8,
        num_blocks: int = 100,
        kv_manager: KVManagerName = "paged",
    ) -> None:
        config = EngineConfig(
            model="m",
            policy=policy,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            kv_manager=kv_manager,
            prefix_cache="none",
            block_size=2,
        )
        self.scheduler = Scheduler(config, make_kv_manager(config, num_blocks, 400), 400)

    def add(self, request_id: str, num_prompt: int, max_tokens: int = 3) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(
            Request(
                request_id=request_id, prompt_token_ids=[0] * num_prompt, sampling_params=params
            )
        )

    def step(self) -> dict[str, int]:
        output = self.scheduler.schedule()
        sampled = {
            r.request_id: SampledTokens(
                [1] if r.num_computed_tokens + n == r.num_tokens else [], [], []
            )
            for r, n in output.scheduled
        }
        self.scheduler.update(output, sampled)
        self.scheduler.check_integrity()
        return {r.request_id: n for r, n in output.scheduled}

    def steps(self, num_steps: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(num_steps)]


def test_static_batch_is_closed_until_all_of_it_is_done() -> None:
    engine = Engine("static", max_num_seqs=2)
    engine.add("a", 3, max_tokens=2)
    engine.add("b", 3, max_tokens=4)
    engine.add("c", 3, max_tokens=1)
    assert engine.steps(5) == [
        {"a": 3, "b": 3},
        {"a": 1, "b": 1},
        {"b": 1},
        {"b": 1},
        {"c": 3},
    ]


def test_static_batch_is_filled_before_its_first_decode() -> None:
    engine = Engine("static", budget=6)
    for name in "abc":
        engine.add(name, 4, max_tokens=2)
    assert engine.steps(4) == [{"a": 4}, {"b": 4}, {"c": 4}, {"a": 1, "b": 1, "c": 1}]


def test_prefill_first_never_mixes_prompts_and_decodes() -> None:
    engine = Engine("prefill_first")
    engine.add("a", 4)
    first = engine.step()
    engine.add("b", 6)
    engine.add("c", 4)
    engine.add("d", 1)
    assert [first, *engine.steps(3)] == [
        {"a": 4},
        {"b": 6, "c": 4},
        {"d": 1},
        {"a": 1, "b": 1, "c": 1, "d": 1},
    ]


def test_prefill_first_decodes_while_no_prompt_has_room() -> None:
    engine = Engine("prefill_first", num_blocks=4)
    engine.add("a", 4, max_tokens=2)
    engine.add("b", 5, max_tokens=1)
    assert engine.steps(3) == [{"a": 4}, {"a": 1}, {"b": 5}]


def test_mixed_puts_whole_prompts_beside_decodes() -> None:
    engine = Engine("mixed")
    engine.add("a", 4)
    first = engine.step()
    engine.add("b", 6)
    engine.add("c", 4)
    assert [first, *engine.steps(2)] == [{"a": 4}, {"a": 1, "b": 6}, {"a": 1, "b": 1, "c": 4}]


@pytest.mark.parametrize("num_prompt", [10, 25])
def test_mixed_alternates_decodes_with_prompts_that_need_a_step_alone(num_prompt: int) -> None:
    engine = Engine("mixed")
    engine.add("a", 4, max_tokens=9)
    engine.step()
    engine.add("b", num_prompt)
    engine.add("c", num_prompt)
    assert engine.steps(4) == [
        {"b": num_prompt},
        {"a": 1, "b": 1},
        {"c": num_prompt},
        {"a": 1, "b": 1, "c": 1},
    ]


@pytest.mark.parametrize("policy", ["static", "prefill_first", "mixed"])
def test_prompt_beyond_the_budget_stands_alone_and_whole(policy: Policy) -> None:
    engine = Engine(policy)
    engine.add("a", 30, max_tokens=1)
    engine.add("b", 2, max_tokens=1)
    assert engine.steps(2) == [{"a": 30}, {"b": 2}]


@pytest.mark.parametrize("policy", ["static", "prefill_first", "mixed"])
def test_short_prompt_is_not_joined_by_one_beyond_the_budget(policy: Policy) -> None:
    engine = Engine(policy)
    engine.add("a", 2, max_tokens=1)
    engine.add("b", 30, max_tokens=1)
    assert engine.steps(2) == [{"a": 2}, {"b": 30}]


def test_chunked_decodes_first_and_fills_with_chunks_in_order() -> None:
    engine = Engine("chunked")
    engine.add("a", 4, max_tokens=9)
    first = engine.step()
    engine.add("b", 12)
    engine.add("c", 3)
    engine.add("d", 9)
    assert [first, *engine.steps(3)] == [
        {"a": 4},
        {"a": 1, "b": 9},
        {"a": 1, "b": 3, "c": 3, "d": 3},
        {"a": 1, "b": 1, "c": 1, "d": 6},
    ]


@pytest.mark.parametrize("policy", ["chunked", "splitfuse"])
def test_no_decode_waits_for_a_prompt_in_chunks(policy: Policy) -> None:
    engine = Engine(policy, budget=4)
    engine.add("a", 2, max_tokens=20)
    engine.step()
    engine.add("b", 30)
    engine.add("c", 30)
    assert all(step["a"] == 1 for step in engine.steps(15))


def test_splitfuse_splits_the_oldest_long_prompt_around_whole_short_ones() -> None:
    engine = Engine("splitfuse")
    engine.add("long", 14, max_tokens=9)
    engine.add("longer", 16)
    engine.add("short", 3)
    engine.add("shorter", 2)
    assert engine.steps(2) == [
        {"long": 5, "short": 3, "shorter": 2},
        {"long": 8, "short": 1, "shorter": 1},
    ]
    assert engine.step() == {"long": 1, "short": 1, "shorter": 1, "longer": 7}


def test_splitfuse_budget_is_met_exactly_while_work_is_left() -> None:
    engine = Engine("splitfuse", max_num_seqs=20)
    lengths = [3, 17, 5, 8, 1, 22, 4, 9]
    for index, length in enumerate(lengths):
        engine.add(str(index), length, max_tokens=1)
    num_full_steps, rest = divmod(sum(lengths), 10)
    assert [sum(step.values()) for step in engine.steps(num_full_steps + 1)] == [10] * 6 + [rest]


def test_splitfuse_gives_the_oldest_prompt_a_token_under_a_stream_of_short_ones() -> None:
    engine = Engine("splitfuse", budget=8, max_num_seqs=8)
    engine.add("long", 40, max_tokens=1)
    waited = 0
    while True:
        for index in range(4):
            engine.add(f"short {waited} {index}", 4, max_tokens=1)
        if "long" not in engine.step():
            break
        waited += 1
    # From the second step on it is running, ahead of all the others.
    assert waited == 6


@pytest.mark.parametrize("policy", get_args(Policy))
def test_uncached_sequences_are_computed_whole_each_step(policy: Policy) -> None:
    engine = Engine(policy, kv_manager="uncached", budget=20)
    engine.add("a", 4)
    engine.add("b", 6)
    assert engine.steps(3) == [{"a": 4, "b": 6}, {"a": 5, "b": 7}, {"a": 6, "b": 8}]


def test_uncached_sequence_beyond_the_budget_stands_alone() -> None:
    engine = Engine("chunked", kv_manager="uncached", budget=5)
    engine.add("a", 7, max_tokens=2)
    engine.add("b", 3, max_tokens=1)
    assert engine.steps(3) == [{"a": 7}, {"a": 8}, {"b": 3}]


@pytest.mark.parametrize("policy", get_args(Policy))
def test_decodes_and_long_prompt_end_under_an_endless_stream_of_prompts(policy: Policy) -> None:
    engine = Engine(policy, max_num_seqs=3)
    engine.add("decode", 2, max_tokens=10)
    engine.step()
    engine.add("long", 25, max_tokens=2)
    for index in range(100):
        engine.add(f"stream {index}", 9, max_tokens=2)
        engine.step()
        if all(name not in waiting_or_running(engine) for name in ("decode", "long")):
            return
    pytest.fail(f"still unfinished after 100 steps: {waiting_or_running(engine)}")


def waiting_or_running(engine: Engine) -> set[str]:
    return {r.request_id for r in (*engine.scheduler.waiting, *engine.scheduler.running)}
