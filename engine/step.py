"""One step while it is dealt out: what the batching policies compose their rules from.

A step has a budget of tokens and of sequences. `continue_running` lets the running sequences
catch up; the `admit` verbs let waiting ones in, oldest first. Whatever the policy, these hold:

- A running sequence that gets no block takes the blocks of the youngest running one, which starts
  over later (preemption by recomputation, from the tail). So the oldest always moves on, and
  since no request may outgrow the pool, everything ends.
- Blocks for all tokens that a sequence has are taken when it is admitted, also if its prompt is
  computed in chunks: prompts cut in chunks cannot run out of blocks half-way against each other.
- A preempted sequence comes back once each running one could grow by a block beside it, so never
  in the step that preempted it. Otherwise the two would take blocks from each other in turns.
"""

from collections import deque

from llmbench.engine.kv.manager import KVCacheManager
from llmbench.engine.request import Request, RequestStatus


class Step:
    """Budgets, blocks and queues of one step; changes `waiting` and `running` in place."""

    def __init__(
        self,
        waiting: deque[Request],
        running: list[Request],
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        assert max_num_seqs <= max_num_batched_tokens, "a running sequence could get no token"
        self.waiting = waiting
        self.running = running
        self.scheduled: list[tuple[Request, int]] = []
        self.preempted: list[Request] = []
        self.num_tokens_left = max_num_batched_tokens
        self.num_prefix_queried_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._kv = kv
        self._max_num_seqs = max_num_seqs

    def continue_running(self) -> None:
        """Let running sequences catch up in order, keeping a token for each one behind."""
        if not self._kv.keeps_kv:
            self._recompute_running()
            return
        running, scheduled = self.running, self.scheduled
        allocate_slots = self._kv.allocate_slots
        num_left = self.num_tokens_left
        index = 0
        while index < len(running):
            request = running[index]
            num_computed = request.num_computed_tokens
            num_tokens = len(request.token_ids) - num_computed
            if request.spec_token_ids:
                _cut_drafts(request, request.max_tokens - request.num_output_tokens - 1)
                num_tokens += len(request.spec_token_ids)
            limit = num_left - (len(running) - index - 1)
            if num_tokens > limit:
                num_tokens = limit
                _cut_drafts(request, num_computed + num_tokens - len(request.token_ids))
            if not allocate_slots(request, num_tokens) and not self._take_room(request, num_tokens):
                break
            scheduled.append((request, num_tokens))
            num_left -= num_tokens
            index += 1
        self.num_tokens_left = num_left

    def admit(self, *, split: bool) -> int:
        """Admit waiting requests in order while they fit; return how many.

        With `split` the last one may be cut to what the budget leaves. Without, a prompt beyond
        the whole budget is admitted to a step that holds nothing else.
        """
        split = split and self._kv.keeps_kv
        num_admitted = 0
        while self._has_place():
            num_missing = self._match(self.waiting[0])
            if num_missing is None:
                break
            num_tokens = min(num_missing, self.num_tokens_left) if split else num_missing
            if not self._enter(0, num_missing, num_tokens):
                break
            num_admitted += 1
        return num_admitted

    def admit_alone(self) -> bool:
        """Admit the oldest waiting request if its prompt does not fit beside what is running."""
        if not self._has_place():
            return False
        request = self.waiting[0]
        num_running = sum(r.num_tokens - r.num_computed_tokens for r in self.running)
        num_beside = self.num_tokens_left - num_running
        if len(request.token_ids) <= num_beside:
            return False
        num_missing = self._match(request)
        if num_missing is None:
            return False
        if num_missing <= num_beside:
            self._withdraw(request)
            return False
        if not self._enter(0, num_missing, num_missing):
            return False
        self.num_tokens_left = 0
        return True

    def compose(self) -> None:
        """Fill the budget to the last token with whole prompts and one part of a longer one.

        The oldest prompt that does not fit whole is let in first and gets what the whole ones
        behind it leave, at least one token; from the next step on it is running, and so ahead of
        them. The search behind it ends after `max_num_seqs` requests.
        """
        if not self._kv.keeps_kv:
            self.admit(split=False)
            return
        while self._has_place():
            num_missing = self._match(self.waiting[0])
            if num_missing is None:
                return
            if num_missing <= self.num_tokens_left:
                if not self._enter(0, num_missing, num_missing):
                    return
                continue
            if self._enter(0, num_missing, 1):
                place = len(self.scheduled) - 1
                self._admit_whole_behind()
                self.scheduled[place] = (self.scheduled[place][0], 1 + self.num_tokens_left)
                self.num_tokens_left = 0
            return

    def _admit_whole_behind(self) -> None:
        index = 0
        while index < min(len(self.waiting), self._max_num_seqs) and self._has_place():
            request = self.waiting[index]
            # Short enough without a look into the prefix cache: hashing each waiting prompt in
            # each step would cost more than it finds.
            if len(request.token_ids) > self.num_tokens_left:
                index += 1
                continue
            num_missing = self._match(request)
            if num_missing is None or not self._enter(index, num_missing, num_missing):
                return

    def _recompute_running(self) -> None:
        for request in self.running:
            if request.spec_token_ids:
                _cut_drafts(request, request.max_tokens - request.num_output_tokens - 1)
            num_tokens = request.num_tokens
            if num_tokens > self.num_tokens_left and self.scheduled:
                continue
            # Without room it waits for the next step: taking it from others frees nothing, since
            # nothing is held between steps.
            if self._kv.allocate_slots(request, num_tokens):
                self.scheduled.append((request, num_tokens))
                self.num_tokens_left -= num_tokens

    def _take_room(self, request: Request, num_tokens: int) -> bool:
        while True:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
            if self._kv.allocate_slots(request, num_tokens):
                return True

    def _preempt(self, request: Request) -> None:
        self._kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.spec_token_ids.clear()
        if request.num_output_tokens == 0:
            request.forget_report()
        self.waiting.appendleft(request)
        self.preempted.append(request)

    def _has_place(self) -> bool:
        return (
            bool(self.waiting)
            and len(self.running) < self._max_num_seqs
            and self.num_tokens_left > 0
        )

    def _match(self, request: Request) -> int | None:
        """Start behind a cached prefix; return the tokens left, or None to hold it back."""
        if request.status is RequestStatus.PREEMPTED and self.running:
            num_blocks = -(-len(request.token_ids) // self._kv.block_size)
            if self._kv.usage().num_free_blocks - num_blocks < len(self.running):
                return None
        if request.max_cached_tokens > 0:
            request.num_computed_tokens = self._kv.match_prefix(request)
        return len(request.token_ids) - request.num_computed_tokens

    def _enter(self, index: int, num_missing: int, num_tokens: int) -> bool:
        """Let `waiting[index]` run with `num_tokens` of its `num_missing` tokens, if they fit."""
        request = self.waiting[index]
        exceeds_budget = num_tokens > self.num_tokens_left and bool(self.scheduled)
        if exceeds_budget or not self._kv.allocate_slots(request, num_missing):
            self._withdraw(request)
            return False
        if self._kv.has_prefix_cache and request.max_cached_tokens > 0:
            self.num_prefix_queried_tokens += len(request.token_ids)
            self.num_prefix_hit_tokens += request.num_computed_tokens
            if request.num_preemptions == 0:
                request.num_cached_tokens = request.num_computed_tokens
        del self.waiting[index]
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.scheduled.append((request, num_tokens))
        self.num_tokens_left -= num_tokens
        return True

    def _withdraw(self, request: Request) -> None:
        self._kv.free(request)
        request.num_computed_tokens = 0


def _cut_drafts(request: Request, num_drafts: int) -> None:
    del request.spec_token_ids[max(num_drafts, 0) :]
