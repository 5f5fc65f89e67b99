"""Schedule, run and update: aborts, refusals, failures, shared prompts, step records."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch

from llmbench.engine.config import EngineConfig, KVManagerName, Policy
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import RequestError
from llmbench.engine.models.null_model import NullModel
from llmbench.engine.request import Request, RequestStatus, SamplingParams
from llmbench.engine.step_record import StepRecord

BLOCK_SIZE = 4
MAX_MODEL_LEN = 256
PROMPT = [5, 9, 11, 40, 41, 42, 43, 90, 91, 92]


def greedy(max_tokens: int | None = 6, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


@pytest.fixture
def make_core(loaded_llama: Any) -> Callable[..., EngineCore]:
    def make(*, loaded: Any = None, **config: Any) -> EngineCore:
        settings: dict[str, Any] = {
            "num_kv_blocks": 64,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 4,
            "check_integrity": True,
        } | config
        return EngineCore(EngineConfig(model="tiny", **settings), loaded=loaded or loaded_llama)

    return make


def add(
    core: EngineCore,
    request_id: str,
    prompt: Sequence[int] = PROMPT,
    params: SamplingParams | None = None,
) -> list[Request]:
    requests = core.make_requests(prompt, params or greedy(), request_id)
    core.add_requests(requests)
    return requests


def finish(core: EngineCore) -> None:
    for _ in range(1000):
        if not core.has_unfinished:
            return
        core.step()
    raise AssertionError("the engine does not come to an end")


def answer_of(core: EngineCore, request_id: str, **changes: Any) -> list[int]:
    (request,) = add(core, request_id, **changes)
    finish(core)
    return request.output_token_ids


def assert_nothing_is_held(core: EngineCore) -> None:
    assert not core.has_unfinished
    assert core.kv.usage().num_reserved_slots == 0
    core.scheduler.check_integrity()


class TestAbort:
    """A request can be ended in every state, and takes nothing with it."""

    @pytest.mark.parametrize("kv_manager", get_args(KVManagerName))
    @pytest.mark.parametrize(
        ("state", "num_steps", "config"),
        [
            ("waiting", 0, {}),
            ("waiting behind another", 2, {"max_num_seqs": 1}),
            ("inside its prompt", 1, {"max_num_batched_tokens": 4}),
            ("running", 3, {}),
            ("finished", 20, {}),
        ],
    )
    def test_abort_in_any_state_frees_all_and_harms_nobody(
        self,
        state: str,
        num_steps: int,
        config: dict[str, Any],
        kv_manager: str,
        make_core: Callable[..., EngineCore],
    ) -> None:
        want = answer_of(make_core(), "alone", prompt=PROMPT[:3])
        core = make_core(kv_manager=kv_manager, **config)
        others = add(core, "before", PROMPT[:3]) if state == "waiting behind another" else []
        (doomed,) = add(core, "doomed")
        others += add(core, "behind", PROMPT[:3])
        for _ in range(num_steps):
            core.step()
        is_over = state == "finished"
        assert doomed.is_finished == is_over
        core.abort("doomed")
        core.scheduler.check_integrity()
        assert doomed.is_finished
        assert doomed.finish_reason == ("length" if is_over else "abort")
        finish(core)
        assert [other.output_token_ids for other in others] == [want] * len(others)
        assert_nothing_is_held(core)
        assert answer_of(core, "doomed", prompt=PROMPT[:3]) == want  # its id is free again

    def test_abort_of_a_preempted_request(self, make_core: Callable[..., EngineCore]) -> None:
        core = make_core(num_kv_blocks=7, prefix_cache="none")
        (kept,) = add(core, "kept", params=greedy(12))
        (doomed,) = add(core, "doomed", params=greedy(12))
        while doomed.status is not RequestStatus.PREEMPTED:
            core.step()
        assert doomed.num_output_tokens > 0
        core.abort("doomed")
        finish(core)
        assert kept.output_token_ids == answer_of(make_core(), "alone", params=greedy(12))
        assert_nothing_is_held(core)

    def test_abort_by_the_prompts_name_ends_all_its_answers(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        params = SamplingParams(n=3, max_tokens=50, ignore_eos=True, detokenize=False)
        requests = core.make_requests([5, 6, 7], params, "prompt")
        core.add_requests(requests)
        core.step()
        core.abort("prompt")
        assert [request.finish_reason for request in requests] == ["abort"] * 3
        assert not core.has_unfinished

    def test_unknown_and_repeated_aborts_do_nothing(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        core.abort("nobody")
        add(core, "doomed")
        core.step()
        core.abort("doomed")
        core.abort("doomed")
        assert_nothing_is_held(core)

    def test_many_more_requests_than_places_come_and_go(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(max_num_seqs=2, num_kv_blocks=7, prefix_cache="none")
        for round_ in range(6):
            for index in range(3):
                add(core, f"{round_}-{index}", params=greedy(12))
            for _ in range(6):
                core.step()
            core.abort(f"{round_}-{round_ % 3}")
        finish(core)
        assert_nothing_is_held(core)


class TestRefusal:
    """A request that can never run is refused by name, and the others are unharmed."""

    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ([], {}, "at least 1 token, it has 0"),
            ([5, 128], {}, "prompt token id 128 is outside the vocabulary of 128 tokens"),
            ([-1], {}, "prompt token id -1 is outside"),
            ([5], {"stop_token_ids": (128,)}, "stop token id 128 is outside"),
            ([5], {"stop_token_ids": ("5",)}, "stop token id '5' is outside"),
            ([5], {"logit_bias": {500: 1.0}}, "logit_bias token id 500 is outside"),
            ([5], {"stop": ("end",)}, "stop strings need a tokenizer"),
            ([5], {"logprobs": 129}, "logprobs must be at most the vocabulary's 128 .* not 129"),
            ([5], {"prompt_logprobs": 129}, "prompt_logprobs must be at most"),
            ([5], {"logprob_token_ids": (3, 128)}, "logprob_token_ids token id 128 is outside"),
            (
                [5, 6],
                {"prompt_logprobs": 0, "prompt_logprobs_start": 3},
                "prompt_logprobs_start must be at most the prompt's 2 tokens, not 3",
            ),
            ([5] * 256, {}, r"prompt of 256 tokens .* model length of 256 tokens"),
            ([5] * 260, {}, r"prompt of 260 tokens .* model length of 256 tokens"),
            ([1.5], {}, "text or token ids"),
            (["a", "b"], {}, "text or token ids"),
            (7, {}, "text or token ids"),
            ("text", {}, "needs a tokenizer"),
        ],
    )
    def test_what_can_never_run_is_refused(
        self,
        prompt: Any,
        params: dict[str, Any],
        message: str,
        make_core: Callable[..., EngineCore],
    ) -> None:
        core = make_core()
        (running,) = add(core, "running")
        core.step()
        with pytest.raises(RequestError, match=message):
            add(core, "wrong", prompt, greedy(**params))
        finish(core)
        assert running.output_token_ids == answer_of(core, "again")
        assert_nothing_is_held(core)

    def test_prompt_beyond_the_pool_names_both_sizes(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(num_kv_blocks=4)
        with pytest.raises(RequestError, match=r"prompt of 16 tokens .* KV pool of 16 tokens") as e:
            add(core, "big", [5] * 16)
        assert "give the KV pool more memory" in e.value.__notes__[0]
        assert len(answer_of(core, "small")) == 6

    def test_id_in_use_is_refused_and_its_owner_runs_on(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        (owner,) = add(core, "same")
        core.step()
        with pytest.raises(RequestError, match="'same' is already running"):
            add(core, "same")
        finish(core)
        assert len(owner.output_token_ids) == 6
        add(core, "same")  # and free again
        finish(core)

    def test_answers_are_queued_all_or_none(self, make_core: Callable[..., EngineCore]) -> None:
        core = make_core()
        (owner,) = add(core, "twice-1")
        with pytest.raises(RequestError, match="'twice-1' is already running"):
            add(core, "twice", params=greedy(n=2))
        finish(core)
        assert owner.finish_reason == "length"
        assert_nothing_is_held(core)
        assert len(add(core, "twice", params=greedy(n=2))) == 2

    def test_text_that_is_no_unicode_is_refused(
        self,
        make_core: Callable[..., EngineCore],
        as_loaded: Callable[..., Any],
        byte_tokenizer: Callable[..., Any],
    ) -> None:
        core = make_core(
            loaded=as_loaded(NullModel(258), vocab_size=258, tokenizer=byte_tokenizer())
        )
        with pytest.raises(RequestError, match="the tokenizer cannot read the prompt"):
            core.make_requests("half a pair: \ud83d", greedy(), "wrong")

    def test_numbers_of_other_types_are_token_ids_too(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        want = answer_of(make_core(), "plain")
        prompt: Any = torch.tensor(PROMPT)
        core = make_core()
        assert answer_of(core, "tensor", prompt=prompt) == want
        (request,) = core.make_requests(prompt.numpy(), greedy(), "numpy")
        assert all(type(token_id) is int for token_id in request.prompt_token_ids)


class TestSharedPrompt:
    """The n answers to a prompt differ, and compute it once."""

    PARAMS = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)

    def answers(self, core: EngineCore) -> list[list[int]]:
        requests = add(core, "shared", params=self.PARAMS)
        finish(core)
        assert_nothing_is_held(core)
        return [request.output_token_ids for request in requests]

    @pytest.mark.parametrize("policy", get_args(Policy))
    @pytest.mark.parametrize("chunk", [6, 512])
    def test_prompt_is_computed_once(
        self, policy: str, chunk: int, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(policy=policy, max_num_batched_tokens=chunk)
        answers = self.answers(core)
        assert len({tuple(answer) for answer in answers}) == 3
        num_cached = 8  # of 10 tokens; the open block is computed by each
        prefill = sum(record.num_prefill_tokens for record in core.step_records)
        assert prefill == len(PROMPT) + 2 * (len(PROMPT) - num_cached)
        assert sum(record.num_prefix_hit_tokens for record in core.step_records) == 2 * num_cached

    @pytest.mark.parametrize(
        "config",
        [
            {"prefix_cache": "none"},
            {"kv_manager": "contiguous"},
            {"kv_manager": "uncached"},
            {"num_kv_blocks": 8},
            {"max_num_seqs": 1},
        ],
    )
    def test_answers_do_not_depend_on_sharing(
        self, config: dict[str, Any], make_core: Callable[..., EngineCore]
    ) -> None:
        assert self.answers(make_core(**config)) == self.answers(make_core())

    def test_answer_i_is_that_of_its_own_noise(self, make_core: Callable[..., EngineCore]) -> None:
        core = make_core()
        three = self.answers(core)
        requests = add(
            core,
            "two",
            params=SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True),
        )
        finish(core)
        assert [request.output_token_ids for request in requests] == three[:2]

    @pytest.mark.parametrize("aborted", [0, 1, 2])
    def test_others_run_on_if_one_is_aborted_inside_the_prompt(
        self, aborted: int, make_core: Callable[..., EngineCore]
    ) -> None:
        want = self.answers(make_core())
        core = make_core(max_num_batched_tokens=4)
        requests = add(core, "shared", params=self.PARAMS)
        core.step()
        assert core.step_records[-1].num_waiting == 2
        core.abort(f"shared-{aborted}")
        finish(core)
        assert_nothing_is_held(core)
        assert requests.pop(aborted).finish_reason == "abort"
        del want[aborted]
        assert [request.output_token_ids for request in requests] == want

    def test_all_can_be_aborted_while_some_are_held_back(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(max_num_batched_tokens=4)
        requests = add(core, "shared", params=self.PARAMS)
        core.step()
        for request in reversed(requests):
            core.abort(request.request_id)
        assert {request.finish_reason for request in requests} == {"abort"}
        assert_nothing_is_held(core)

    @pytest.mark.parametrize(("start", "num_shared"), [(0, 0), (4, 0), (5, 4), (9, 8), (10, 8)])
    def test_prompt_logprobs_are_those_of_each_answer(
        self, start: int, num_shared: int, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        params = greedy(n=2, prompt_logprobs=0, prompt_logprobs_start=start)
        requests = add(core, "shared", params=params)
        finish(core)
        want = PROMPT[max(start, 1) :]
        for request in requests:
            assert [entry.token_id for entry in request.prompt_logprobs] == want
        assert totals(core.step_records)["num_prefill_tokens"] == 2 * len(PROMPT) - num_shared


class TestCommonPrefix:
    """Different prompts of one group, or of several, compute what they share once."""

    COMMON = PROMPT[:8]  # two blocks

    def group(
        self, core: EngineCore, name: str, tails: Sequence[Sequence[int]], **options: Any
    ) -> list[Request]:
        requests = [
            request
            for index, tail in enumerate(tails)
            for request in core.make_requests([*self.COMMON, *tail], greedy(2), f"{name}-{index}")
        ]
        core.add_requests(requests, **options)
        return requests

    def prefill(self, core: EngineCore) -> int:
        finish(core)
        assert_nothing_is_held(core)
        return totals(core.step_records)["num_prefill_tokens"]

    @pytest.mark.parametrize("chunk", [3, 512])
    def test_of_a_group_is_computed_once(
        self, chunk: int, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(max_num_batched_tokens=chunk)
        requests = self.group(core, "group", [[1], [2, 3], [4]])
        assert self.prefill(core) == 8 + 4
        want = [answer_of(make_core(), "alone", prompt=r.prompt_token_ids)[:2] for r in requests]
        assert [request.output_token_ids for request in requests] == want

    @pytest.mark.parametrize(("share_across", "num_computed"), [(True, 8 + 4), (False, 2 * 8 + 4)])
    def test_of_several_groups_is_computed_once_if_asked_for(
        self, share_across: bool, num_computed: int, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        self.group(core, "one", [[1], [2]], share_across=share_across)
        self.group(core, "two", [[3], [4]], share_across=share_across)
        assert self.prefill(core) == num_computed

    def test_longest_one_is_waited_for(self, make_core: Callable[..., EngineCore]) -> None:
        core = make_core()
        block = [70, 71, 72, 73]
        self.group(core, "group", [[1], [*block, 2], [*block, 3]])
        assert self.prefill(core) == (8 + 1) + (4 + 1) + 1

    def test_what_is_cached_already_is_not_waited_for(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        self.group(core, "before", [[1]])
        finish(core)
        self.group(core, "group", [[2], [3], [4]])
        core.step()
        assert core.step_records[-1].num_seqs == 3

    def test_prompts_of_less_than_a_block_in_common_run_together(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        requests = [
            request
            for index in range(3)
            for request in core.make_requests([5, 6, 7, 80 + index, 9], greedy(), f"r-{index}")
        ]
        core.add_requests(requests)
        core.step()
        assert core.step_records[-1].num_seqs == 3
        finish(core)

    @pytest.mark.parametrize("aborted", ["group-0", "group-1", "group-2"])
    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    def test_others_run_on_if_one_is_aborted(
        self, aborted: str, num_steps: int, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(max_num_batched_tokens=5)
        requests = self.group(core, "group", [[1, 2, 3, 4, 5, 6], [2], [3]])
        for _ in range(num_steps):
            core.step()
        core.abort(aborted)
        finish(core)
        assert_nothing_is_held(core)
        for request in requests:
            was_aborted = request.request_id == aborted
            assert request.finish_reason == ("abort" if was_aborted else "length")
            assert request.num_output_tokens == (0 if was_aborted else 2)

    def test_one_that_can_never_run_keeps_the_group_out(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        with pytest.raises(RequestError, match="prompt of 308 tokens"):
            self.group(core, "group", [[1], [2] * 300])
        assert not core.has_unfinished
        assert_nothing_is_held(core)


class TestFailedStep:
    """A step that fails takes its requests with it, and leaves an engine as good as new."""

    @pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), MemoryError()])
    @pytest.mark.parametrize("part", ["schedule", "execute", "update", "release"])
    @pytest.mark.parametrize("kv_manager", get_args(KVManagerName))
    def test_engine_can_be_used_again(
        self,
        error: BaseException,
        part: str,
        kv_manager: str,
        make_core: Callable[..., EngineCore],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        core = make_core(kv_manager=kv_manager)
        requests = [add(core, f"request-{index}")[0] for index in range(6)]
        core.step()
        place: Any = {"execute": core.runner, "release": core._prompts}.get(part, core.scheduler)
        works = getattr(place, part)

        def fails_behind_its_work(*args: Any) -> None:
            works(*args)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(place, part, fails_behind_its_work)
            with pytest.raises(type(error)):
                core.step()
        assert_nothing_is_held(core)
        assert {request.finish_reason for request in requests} == {"error"}
        assert all("the step failed" in (request.error or "") for request in requests)
        want = answer_of(make_core(), "alone")
        assert [answer_of(core, f"request-{index}") for index in range(6)] == [want] * 6


def totals(records: Sequence[StepRecord]) -> dict[str, int]:
    names = (
        "num_prefill_tokens",
        "num_decode_tokens",
        "num_prefix_queried_tokens",
        "num_prefix_hit_tokens",
        "num_preempted",
    )
    return {name: sum(getattr(record, name) for record in records) for name in names}


class TestStepRecords:
    """The records of a run add up to what the requests saw."""

    def run(self, core: EngineCore) -> list[Request]:
        prompts = [PROMPT, PROMPT[:3], [*PROMPT, *PROMPT], PROMPT]
        requests = [
            add(core, f"request-{index}", prompt, greedy(8))[0]
            for index, prompt in enumerate(prompts)
        ]
        finish(core)
        return requests

    @pytest.mark.parametrize("policy", get_args(Policy))
    @pytest.mark.parametrize("config", [{}, {"prefix_cache": "none"}, {"kv_manager": "contiguous"}])
    def test_scheduled_tokens_are_those_of_the_requests(
        self, config: dict[str, Any], policy: str, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(policy=policy, max_num_batched_tokens=12, **config)
        requests = self.run(core)
        found = totals(core.step_records)
        num_prompt = sum(r.num_prompt_tokens for r in requests)
        num_hit = sum(r.num_cached_tokens for r in requests)
        # The first output token comes with the prompt, each other one with a decode.
        assert found["num_decode_tokens"] == sum(r.num_output_tokens - 1 for r in requests)
        assert found["num_prefill_tokens"] == num_prompt - num_hit
        assert found["num_prefix_hit_tokens"] == num_hit
        assert found["num_prefix_queried_tokens"] == (0 if config else num_prompt)
        assert found["num_preempted"] == 0

    def test_uncached_computes_every_sequence_whole_in_every_step(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(kv_manager="uncached")
        requests = self.run(core)
        found = totals(core.step_records)
        assert found["num_decode_tokens"] == 0
        assert found["num_prefill_tokens"] == sum(
            length for r in requests for length in range(r.num_prompt_tokens, len(r.token_ids))
        )

    def test_preemptions_are_those_of_the_requests(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(num_kv_blocks=10, prefix_cache="none")
        requests = self.run(core)
        num_preempted = totals(core.step_records)["num_preempted"]
        assert num_preempted == sum(request.num_preemptions for request in requests) > 0

    @pytest.mark.parametrize("kv_manager", get_args(KVManagerName))
    def test_pool_figures_hold_together_in_every_step(
        self, kv_manager: str, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core(kv_manager=kv_manager, num_kv_blocks=24)
        self.run(core)
        for index, record in enumerate(core.step_records):
            assert record.step == index
            assert record.kv_num_blocks == 24
            num_held = record.kv_num_blocks - record.kv_free_blocks
            assert record.kv_reserved_slots == num_held * BLOCK_SIZE
            assert 0 < record.kv_used_slots <= record.kv_reserved_slots
            assert 0 <= record.kv_cached_blocks <= record.kv_free_blocks
            assert record.num_seqs <= 4
            assert record.kernel == core.loaded.model.kernel

    @pytest.mark.parametrize(
        ("config", "reserved"),
        [
            ({"kv_manager": "paged"}, lambda tokens: -(-tokens // 4) * 4),
            ({"kv_manager": "uncached"}, lambda tokens: -(-tokens // 4) * 4),
            ({"kv_manager": "contiguous"}, lambda tokens: 20),  # 10 prompt + 8 output tokens
            (
                {"kv_manager": "contiguous", "reservation": "max_model_len"},
                lambda tokens: MAX_MODEL_LEN,
            ),
        ],
    )
    def test_reserved_used_and_wasted_slots_of_one_sequence(
        self,
        config: dict[str, Any],
        reserved: Callable[[int], int],
        make_core: Callable[..., EngineCore],
    ) -> None:
        core = make_core(**config)
        add(core, "one", params=greedy(8))
        finish(core)
        for record, num_tokens in zip(core.step_records, range(10, 18), strict=True):
            assert record.kv_used_slots == num_tokens
            assert record.kv_reserved_slots == reserved(num_tokens)
            assert record.kv_wasted_slots == reserved(num_tokens) - num_tokens

    def test_times_follow_one_another(self, make_core: Callable[..., EngineCore]) -> None:
        core = make_core()
        self.run(core)
        records = core.step_records
        for record, following in itertools.pairwise(records):
            parts = (record.schedule_s, record.forward_s, record.update_s)
            assert min(parts) >= 0
            assert record.duration_s == sum(parts)
            assert record.start_s + record.duration_s <= following.start_s + 1e-9


class TestPrefixCache:
    def test_reset_forgets_what_no_live_request_holds(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        core = make_core()
        want = answer_of(core, "first")
        (second,) = add(core, "second")
        finish(core)
        assert second.num_cached_tokens == 8
        # 15 tokens were computed: the last one of the answer never is.
        assert core.reset_prefix_cache() == 3
        (third,) = add(core, "third")
        finish(core)
        assert third.num_cached_tokens == 0
        assert second.output_token_ids == third.output_token_ids == want

    def test_live_request_keeps_its_blocks_at_a_reset(
        self, make_core: Callable[..., EngineCore]
    ) -> None:
        want = answer_of(make_core(), "alone")
        core = make_core()
        (live,) = add(core, "live")
        core.step()
        assert core.reset_prefix_cache() == 0
        finish(core)
        assert live.output_token_ids == want


@pytest.mark.parametrize(
    ("num_kv_blocks", "num_output"), [(64, MAX_MODEL_LEN - len(PROMPT)), (8, 32 - len(PROMPT))]
)
def test_answer_without_a_cap_runs_to_the_model_or_pool_length(
    num_kv_blocks: int, num_output: int, make_core: Callable[..., EngineCore]
) -> None:
    core = make_core(num_kv_blocks=num_kv_blocks)
    (request,) = add(core, "endless", params=greedy(None))
    finish(core)
    assert request.num_output_tokens == num_output
    assert request.finish_reason == "length"


def test_null_model_leaves_the_steps_of_the_engine_alone(
    make_core: Callable[..., EngineCore], as_loaded: Callable[..., Any]
) -> None:
    core = make_core(loaded=as_loaded(NullModel(64, token_id=7)))
    requests = [add(core, f"stream-{i}", [i], greedy(5))[0] for i in range(4)]
    finish(core)
    assert [request.output_token_ids for request in requests] == [[7] * 5] * 4
    assert [r.num_prefill_tokens for r in core.step_records] == [4, 0, 0, 0, 0]
    assert [r.num_decode_tokens for r in core.step_records] == [0, 4, 4, 4, 4]
    assert {record.kernel for record in core.step_records} == {"null"}


def test_progress_tells_the_memory_arithmetic(loaded_llama: Any) -> None:
    heard: list[str] = []
    config = EngineConfig(model="tiny", num_kv_blocks=8)
    core = EngineCore(config, loaded=loaded_llama, on_progress=heard.append)
    assert heard == [str(core.memory_plan)]
