"""Scheduler: who computes how many tokens in the next step, and what becomes of the result.

Each step deals out tokens so that every request's `num_computed_tokens` catches up with its
`num_tokens`; a request whose catch-up completes in the step yields new tokens, any other yields
none (the unified view of vLLM V1). `schedule()` and `update()` alternate; `add` and `abort` may
be called between any two calls, also between these.

The policy decides order and cutting (policies.py), `Step` keeps budgets and blocks (step.py).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import RequestError
from llmbench.engine.kv.manager import KVCacheManager
from llmbench.engine.policies import make_policy
from llmbench.engine.request import Request, RequestOutput, RequestStatus, TokenLogprobs
from llmbench.engine.step import Step
from llmbench.engine.stop import append_until_stop

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class SchedulerOutput:
    """Work of one step."""

    scheduled: list[tuple[Request, int]]
    """(request, tokens to compute from `num_computed_tokens` on), in running order."""
    preempted: list[Request]
    num_prefix_queried_tokens: int
    """Tokens of requests admitted in this step that were looked up in the prefix cache."""
    num_prefix_hit_tokens: int
    """Of these, tokens found there."""


@dataclass(slots=True)
class SampledTokens:
    """What the runner returns for one request of a step."""

    token_ids: list[int]
    """Accepted drafts and one token more if catch-up completed in the step, else nothing."""
    logprobs: list[TokenLogprobs]
    """One for each token, or nothing."""
    prompt_logprobs: list[TokenLogprobs]
    """Of prompt positions computed in the step, in order; empty if not asked for."""
    error: str | None = None
    """Why no token could be sampled: ends this request, and no other."""
    hidden_states: "list[Tensor]" = field(default_factory=list)
    """One [1, H] for each token, if the request asks for them."""
    prompt_hidden_states: "list[Tensor]" = field(default_factory=list)
    """One [n, H] for the n entries of `prompt_logprobs`, likewise."""


class Scheduler:
    """Queues of waiting and running requests over one KV manager."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager, max_model_len: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.kv = kv
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # Each running sequence is to get a token in each step.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._policy = make_policy(config.policy)
        self._requests: dict[str, Request] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def add(self, request: Request, *, at_front: bool = False) -> None:
        """Queue a request and set its effective `max_tokens`; refuse one that can never run."""
        room = self.check(request)
        asked = request.sampling_params.max_tokens
        request.max_tokens = room if asked is None else min(asked, room)
        request.status = RequestStatus.WAITING
        self._requests[request.request_id] = request
        if at_front:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def check(self, request: Request) -> int:
        """Return how many output tokens a request can have; queues nothing.

        Raises RequestError for one that can never run.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use")
        return self.check_length(request.num_prompt_tokens, num_unread=request.num_unread_tokens)

    def check_length(self, num_prompt: int, *, num_unread: int = 0) -> int:
        """Return how many output tokens fit behind a prompt of so many tokens.

        `num_unread` of them need no place (`Request.num_unread_tokens`). Raises RequestError
        where not one fits, or the prompt is empty.
        """
        num_pool = self.kv.max_tokens_ever()
        if num_prompt == 0:
            raise RequestError("the prompt must have at least 1 token, it has 0")
        room = min(self.max_model_len, num_pool) - num_prompt + num_unread
        if room < 1:
            if num_pool < self.max_model_len:
                limit, way_out = f"the KV pool of {num_pool} tokens", "give the KV pool more memory"
            else:
                limit = f"the model length of {self.max_model_len} tokens"
                way_out = "raise max_model_len if the model allows it"
            what = f"prompt of {num_prompt} tokens"
            if num_unread:
                error = RequestError(f"{what} does not fit in {limit}")
            else:
                error = RequestError(f"{what} and 1 output token do not fit in {limit}")
            error.add_note(f"shorten the prompt, or {way_out}")
            raise error
        return room

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state and free what it holds; None if there is none."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.finish_reason = "abort"
        self._finish(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """Decide the next step; at least one token is scheduled while anything is unfinished."""
        step = Step(
            self.waiting,
            self.running,
            self.kv,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        self._policy.deal(step)
        assert step.scheduled or not self._requests, (
            f"no progress: {len(self.waiting)} waiting, {len(self.running)} running, "
            f"{self.kv.usage()}"
        )
        return SchedulerOutput(
            step.scheduled,
            step.preempted,
            step.num_prefix_queried_tokens,
            step.num_prefix_hit_tokens,
        )

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, SampledTokens]
    ) -> list[RequestOutput]:
        """Take in a step's result; return an output for each request that has new tokens."""
        outputs: list[RequestOutput] = []
        any_finished = False
        for request, num_scheduled in output.scheduled:
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            result = sampled[request.request_id]
            if result.prompt_logprobs and request.num_output_tokens == 0:
                request.prompt_logprobs += result.prompt_logprobs
                request.prompt_hidden_states += result.prompt_hidden_states
            num_computed = request.num_computed_tokens + num_scheduled
            is_caught_up = num_computed == request.num_tokens
            assert is_caught_up == bool(result.token_ids or result.error), (
                f"{request.request_id}: {num_computed} of {request.num_tokens} tokens computed, "
                f"{len(result.token_ids)} sampled"
            )
            if is_caught_up:
                if request.spec_token_ids:
                    # Drafts behind the accepted ones have K/V that the next step overwrites.
                    num_accepted = max(len(result.token_ids) - 1, 0)
                    num_computed -= len(request.spec_token_ids) - num_accepted
                    request.spec_token_ids.clear()
                outputs.append(self._append(request, result))
                # An end inside the accepted run leaves computed tokens behind it.
                num_computed = min(num_computed, len(request.token_ids))
            request.num_computed_tokens = num_computed
            # After the append: accepted drafts fill blocks, and their ids are the block's content.
            self.kv.mark_computed(request, num_computed)
            if request.finish_reason is not None:
                self._finish(request)
                any_finished = True
            elif not self.kv.keeps_kv:
                self.kv.free(request)
                request.num_computed_tokens = 0
        if any_finished:
            self.running[:] = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError where queues, counters and blocks disagree; O(requests, blocks)."""
        queued = [*self.waiting, *self.running]
        assert len({r.request_id for r in queued}) == len(queued), "a request is queued twice"
        assert self._requests == {r.request_id: r for r in queued}
        assert len(self.running) <= self.max_num_seqs
        for request in self.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == 0
            assert not self.kv.block_ids(request), f"{request.request_id} waits and holds blocks"
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert request.finish_reason is None
            assert 0 <= request.num_computed_tokens < len(request.token_ids)
            assert request.num_output_tokens < request.max_tokens
            num_slots = len(self.kv.block_ids(request)) * self.kv.block_size
            assert request.num_computed_tokens <= num_slots
        if not self._requests:
            assert self.kv.usage().num_reserved_slots == 0, "blocks are held for nobody"
        self.kv.check_integrity()

    def _append(self, request: Request, result: SampledTokens) -> RequestOutput:
        is_first = request.num_output_tokens == 0
        if result.error is not None:
            request.finish_reason, request.error = "error", result.error
            num_kept = 0
        else:
            num_kept = append_until_stop(request, result.token_ids)
        new_logprobs = result.logprobs[:num_kept]
        request.logprobs += new_logprobs
        request.hidden_states += result.hidden_states[:num_kept]
        text_delta = ""
        if request.detokenizer is not None:
            is_last = request.finish_reason is not None
            text_delta = request.detokenizer.take_delta(finished=is_last)
        return RequestOutput(
            request_id=request.request_id,
            parent_id=request.parent_id,
            answer_index=request.answer_index,
            new_token_ids=result.token_ids[:num_kept],
            text_delta=text_delta,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=len(request.token_ids) - len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            new_logprobs=new_logprobs,
            prompt_logprobs=request.prompt_logprobs if is_first else [],
            error=request.error,
        )

    def _finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self.kv.free(request)
        del self._requests[request.request_id]
