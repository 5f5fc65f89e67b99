"""Greedy text of the engine equals transformers' own, whatever schedules and stores it.

Float32 on CPU. A token may differ only where the two likeliest logits of the reference lie within
1e-4 of each other; from there on the two texts are no longer comparable. Such ties are counted,
and a test with more than a few of them fails. A step's budget below 8 tokens also bounds the batch,
since every running sequence gets a token in each step.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch

from llmbench.engine.config import KVManagerName, Policy
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.llm import LLM
from llmbench.engine.request import SamplingParams

TIE_GAP = 1e-4
MAX_TIES = 2
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, detokenize=False)


def make_prompts(num_prompts: int, vocab_size: int, longest: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(3, vocab_size) for _ in range(draw.randint(1, longest))]
        for _ in range(num_prompts)
    ]
    shared = prompts[0]
    prompts[1] = shared + prompts[1]  # a prefix to find
    prompts[2] = list(shared)
    return prompts


def greedy_reference(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' `generate`, greedy; an end-of-text token is part of the answer."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


def top2_gap(model: Any, ids: list[int]) -> float:
    with torch.inference_mode():
        top = model(torch.tensor([ids])).logits[0, -1].topk(2).values
    return float(top[0] - top[1])


def count_ties(
    model: Any, prompts: list[list[int]], got: list[list[int]], want: list[list[int]]
) -> int:
    """Near ties at which answers part; any other difference fails."""
    ties = 0
    for prompt, mine, theirs in zip(prompts, got, want, strict=True):
        if mine == theirs:
            continue
        pairs = enumerate(zip(mine, theirs, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        assert first is not None, f"{len(mine)} tokens, transformers has {len(theirs)}"
        gap = top2_gap(model, prompt + theirs[:first])
        assert gap < TIE_GAP, (
            f"token {first} of the answer is {mine[first]}, transformers has {theirs[first]}, "
            f"and the two likeliest logits are {gap:.2e} apart"
        )
        ties += 1
    return ties


@pytest.fixture(scope="module")
def expected(random_llama: tuple[Path, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts with transformers' greedy answers."""
    prompts = make_prompts(8, 128, 40, seed=1)
    return prompts, [greedy_reference(random_llama[1], prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def make_llm(random_llama: tuple[Path, Any]) -> Callable[..., LLM]:
    def make(**config: Any) -> LLM:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "num_kv_blocks": 64,
            "max_num_seqs": 8,
            "check_integrity": True,
        } | config
        return LLM(str(random_llama[0]), **settings)

    return make


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [result.answers[0].token_ids for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("kv_manager", get_args(KVManagerName))
@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("chunk", [1, 3, 16, 4096])
def test_greedy_ids_do_not_depend_on_policy_manager_or_chunk(
    policy: str,
    kv_manager: str,
    chunk: int,
    random_llama: tuple[Path, Any],
    expected: tuple[list[list[int]], list[list[int]]],
    make_llm: Callable[..., LLM],
) -> None:
    prompts, want = expected
    llm = make_llm(policy=policy, kv_manager=kv_manager, max_num_batched_tokens=chunk)
    assert count_ties(random_llama[1], prompts, answers(llm, prompts), want) <= MAX_TIES


@pytest.mark.parametrize("compile_kernels", [False, True])
@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
@pytest.mark.parametrize("chunk", [1, 3, 16, 4096])
def test_greedy_ids_do_not_depend_on_batch_prefix_cache_or_kernels(
    chunk: int,
    max_num_seqs: int,
    prefix_cache: str,
    compile_kernels: bool,
    random_llama: tuple[Path, Any],
    expected: tuple[list[list[int]], list[list[int]]],
    make_llm: Callable[..., LLM],
) -> None:
    prompts, want = expected
    llm = make_llm(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        prefix_cache=prefix_cache,
        compile=compile_kernels,
    )
    for _ in range(2):  # the second time over a warm cache
        assert count_ties(random_llama[1], prompts, answers(llm, prompts), want) <= MAX_TIES
    hits = sum(record.num_prefix_hit_tokens for record in llm.core.step_records)
    assert (hits > 0) == (prefix_cache == "hash")


@pytest.mark.parametrize("policy", get_args(Policy))
def test_preempted_requests_produce_the_same_tokens(
    policy: str,
    random_llama: tuple[Path, Any],
    expected: tuple[list[list[int]], list[list[int]]],
    make_llm: Callable[..., LLM],
) -> None:
    prompts, want = expected
    llm = make_llm(policy=policy, num_kv_blocks=24, block_size=4, prefix_cache="none")
    assert count_ties(random_llama[1], prompts, answers(llm, prompts), want) <= MAX_TIES
    preemptions = sum(record.num_preempted for record in llm.core.step_records)
    assert preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("kv_manager", get_args(KVManagerName))
@pytest.mark.parametrize("seed", range(2))
def test_aborts_leave_the_other_requests_tokens_alone(
    seed: int,
    kv_manager: str,
    policy: str,
    random_llama: tuple[Path, Any],
    expected: tuple[list[list[int]], list[list[int]]],
    make_llm: Callable[..., LLM],
) -> None:
    prompts, want = expected
    core = make_llm(
        policy=policy,
        kv_manager=kv_manager,
        max_num_batched_tokens=24,
        num_kv_blocks=30,
        block_size=4,
    ).core
    draw = random.Random(seed)
    kept = {
        f"kept-{i}": core.make_requests(p, GREEDY, f"kept-{i}")[0] for i, p in enumerate(prompts)
    }
    doomed = [core.make_requests(p, GREEDY, f"doomed-{i}")[0] for i, p in enumerate(prompts)]
    for request in draw.sample([*kept.values(), *doomed], k=len(kept) + len(doomed)):
        core.add_request(request)
    while core.has_unfinished:
        core.step()
        if doomed and draw.random() < 0.5:
            core.abort(doomed.pop().request_id)
    got = [kept[f"kept-{i}"].output_token_ids for i in range(len(prompts))]
    assert count_ties(random_llama[1], prompts, got, want) <= MAX_TIES
    assert core.kv.usage().num_reserved_slots == 0


def test_every_family_answers_as_transformers_does(
    variant: str, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = tiny_model(variant)
    draw = random.Random(2)
    # Longer than what a scaled rotary table was trained on: transformers picks the table by the
    # length at hand, the engine by the longest that it allows.
    prompts = [[draw.randrange(3, 128) for _ in range(length)] for length in (17, 24, 20, 22)]
    llm = LLM(
        str(folder),
        dtype="float32",
        model_backend="native",
        max_model_len=32,
        num_kv_blocks=16,
        block_size=8,
        max_num_batched_tokens=16,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    want = [greedy_reference(model, prompt, 8) for prompt in prompts]
    assert count_ties(model, prompts, answers(llm, prompts, params), want) <= 1


class TestPromptOfWholeBlocks:
    """Case C09: a prompt that is a whole number of blocks and fully cached."""

    IDS: ClassVar = [5 + 7 * i % 50 for i in range(32)]

    def test_every_repetition_gives_the_reference_ids(
        self, random_llama: tuple[Path, Any], make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(block_size=16)
        params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, logprobs=0)
        results = [llm.generate([self.IDS], params)[0] for _ in range(3)]
        want = greedy_reference(random_llama[1], self.IDS, 8)
        assert [result.answers[0].token_ids for result in results] == [want] * 3
        assert [result.num_cached_tokens for result in results] == [0, 16, 16]
        first = [result.answers[0].logprobs[0].logprob for result in results]
        assert first == pytest.approx([first[0]] * 3, abs=1e-5)


class TestPromptLargerThanPool:
    """Case C11: a prompt within the model's length that the pool can never hold."""

    def test_it_is_refused_by_name_and_the_next_one_runs(
        self, make_llm: Callable[..., LLM]
    ) -> None:
        from llmbench.engine.errors import RequestError

        core = make_llm(num_kv_blocks=4, block_size=16, max_model_len=128).core
        big = core.make_requests(list(range(3, 103)), GREEDY, "big")[0]
        with pytest.raises(RequestError, match=r"100 .* 64 tokens"):
            core.add_request(big)
        small = core.make_requests(
            [5] * 8,
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False),
            "small",
        )[0]
        core.add_request(small)
        while core.has_unfinished:
            core.step()
        assert small.num_output_tokens == 4

    def test_one_that_outgrows_the_pool_ends_by_length(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(num_kv_blocks=4, block_size=16, max_model_len=128)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
        answer = llm.generate([[7] * 60], params)[0].answers[0]
        assert (len(answer.token_ids), answer.finish_reason) == (4, "length")


def test_logprobs_equal_the_reference(
    random_llama: tuple[Path, Any], make_llm: Callable[..., LLM]
) -> None:
    prompt = make_prompts(3, 128, 40, seed=3)[1]
    params = SamplingParams(
        temperature=0,
        max_tokens=6,
        ignore_eos=True,
        detokenize=False,
        logprobs=5,
        prompt_logprobs=3,
    )
    # Chunks and a warm prefix cache: prompt log-probabilities need every position all the same.
    llm = make_llm(max_num_batched_tokens=5)
    for _ in range(2):
        result = llm.generate([prompt], params)[0]
        answer = result.answers[0]
        ids = prompt + answer.token_ids
        with torch.inference_mode():
            want = torch.log_softmax(
                random_llama[1](torch.tensor([ids])).logits[0].double(), dim=-1
            )
        reported = [*result.prompt_logprobs, *answer.logprobs]
        assert len(reported) == len(ids) - 1
        for position, entry in enumerate(reported):
            row = want[position]
            assert entry.token_id == ids[position + 1]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            top = torch.tensor([logprob for _, logprob in entry.top])
            assert torch.allclose(top.double(), row.topk(len(top)).values, atol=1e-4)


class TestSeededSampling:
    """Case C14: what a seeded request draws is its own affair."""

    PROMPT = (5, 9, 11)

    def draw(self, core: EngineCore, others: list[SamplingParams], *, first: bool) -> list[int]:
        params = SamplingParams(
            temperature=1.0, seed=42, max_tokens=32, ignore_eos=True, detokenize=False
        )
        mine = core.make_requests(self.PROMPT, params, "mine")
        rest = [
            request
            for i, other in enumerate(others)
            for request in core.make_requests((3, 4, 5, 6), other, f"other-{i}")
        ]
        for request in mine + rest if first else rest + mine:
            core.add_request(request)
        while core.has_unfinished:
            core.step()
        return mine[0].output_token_ids

    def sampled(self, seed: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=1.0, seed=seed, max_tokens=32, ignore_eos=True, detokenize=False
        )

    def test_ids_do_not_depend_on_neighbours_chunks_or_preemption(
        self, make_llm: Callable[..., LLM]
    ) -> None:
        alone = self.draw(make_llm().core, [], first=True)
        assert len(set(alone)) > 1
        assert self.draw(make_llm().core, [self.sampled(None)], first=True) == alone
        assert self.draw(make_llm().core, [self.sampled(7)], first=True) == alone
        assert self.draw(make_llm().core, [self.sampled(7)], first=False) == alone
        assert self.draw(make_llm(max_num_batched_tokens=2).core, [], first=True) == alone
        small = make_llm(num_kv_blocks=10, block_size=4, prefix_cache="none").core
        assert self.draw(small, [self.sampled(7)], first=False) == alone
        assert any(record.num_preempted for record in small.step_records)

    def test_other_seeds_and_other_answers_draw_otherwise(
        self, make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm()
        params = [
            SamplingParams(n=n, temperature=1.0, seed=seed, max_tokens=16, detokenize=False)
            for n, seed in ((2, 42), (1, 43))
        ]
        results = llm.generate([list(self.PROMPT)] * 2, params)
        texts = [tuple(a.token_ids) for result in results for a in result.answers]
        assert len(set(texts)) == 3
        assert llm.generate([list(self.PROMPT)], params[0])[0].answers[0].token_ids == list(
            texts[0]
        )


@pytest.mark.real
def test_demo_model_answers_real_prompts_as_transformers_does(
    demo_model: Path, data_dir: Path, record_property: Callable[[str, object], None]
) -> None:
    """Thirty-two prompts of a public chat benchmark, batched, in float32."""
    import json

    from transformers import AutoModelForCausalLM

    lines = (data_dir / "mt_bench" / "question.jsonl").read_text(encoding="utf-8").splitlines()
    texts = sorted((json.loads(line)["turns"][0] for line in lines), key=len)[:32]
    llm = LLM(
        str(demo_model), dtype="float32", kv_cache_memory_bytes=2**30, max_num_batched_tokens=256
    )
    tokenizer = llm.core.tokenizer
    assert tokenizer is not None
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
        for text in texts
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False)
    got = answers(llm, prompts, params)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    want = [greedy_reference(model, prompt, 24) for prompt in prompts]
    ties = count_ties(model, prompts, got, want)
    record_property("near_ties", ties)
    assert ties <= MAX_TIES
