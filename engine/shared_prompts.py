"""Common prefixes of prompts: the first request computes one, the others find it in the cache.

A block can be found once it is computed, so requests with a common prefix that start in the same
step would each compute it. Therefore only one of them is queued, and the others are held back
until its blocks of the prefix are done, which takes one step, or as many as they have chunks.
Then they are queued in front of what came after them.

The n answers to one prompt are such requests, and so are the continuations of one context that
are scored against each other, and whole groups of these behind the same examples. Who computes a
block first is looked up by a hash of all tokens up to its end. Two prefixes with one hash cost a
wait and nothing else: what is shared is up to the prefix cache, which compares tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from llmbench.engine.request import Request, RequestStatus
from llmbench.engine.scheduler import Scheduler

ACROSS = 0
"""Scope of the requests that share with all others of their kind; a group has one of its own."""


@dataclass(slots=True, eq=False)
class _Member:
    """A live request that shares, and whom it waits for."""

    request: Request
    keys: list[int]
    """A hash for each whole block of its prompt, of all tokens up to the block's end."""
    leader: Request | None = None
    num_tokens: int = 0
    """Tokens that the leader has to compute first."""

    @property
    def is_ready(self) -> bool:
        """Whether the leader has come so far."""
        return self.leader is None or self.leader.num_computed_tokens >= self.num_tokens


class SharedPrompts:
    """Queues requests with a scheduler, at once or behind the one that computes their prefix."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._members: dict[str, _Member] = {}
        self._held: dict[str, _Member] = {}  # in the order of arrival
        self._leaders: dict[int, Request] = {}  # by block: the live request that came first
        self._scopes = itertools.count(ACROSS + 1)

    @property
    def num_held(self) -> int:
        """Requests that are held back."""
        return len(self._held)

    def add(self, requests: Sequence[Request], *, share_across: bool = False) -> None:
        """Queue requests, all or none; raises RequestError as `Scheduler.add`.

        They share prefixes with each other; with `share_across` also with all other requests
        that were added so.
        """
        for request in requests:
            self._scheduler.check(request)
        can_share = self._scheduler.kv.has_prefix_cache and (share_across or len(requests) > 1)
        scope = ACROSS if share_across else next(self._scopes)
        for request in requests:
            if not can_share or not (keys := self._block_keys(request, scope)):
                self._scheduler.add(request)
                continue
            member = self._members[request.request_id] = _Member(request, keys)
            self._place(member)

    def release(self) -> None:
        """Queue the requests whose prefix is computed, or whose leader ended before that."""
        for member in [m for m in self._members.values() if m.request.is_finished]:
            self._forget(member)
        ready = [member for member in self._held.values() if member.is_ready]
        orphans = [
            member
            for member in self._held.values()
            if not member.is_ready and member.leader is not None and member.leader.is_finished
        ]
        for member in (*ready, *orphans):
            del self._held[member.request.request_id]
            member.leader = None
        for member in reversed(ready):
            self._scheduler.add(member.request, at_front=True)
        for member in orphans:
            self._place(member)

    def abort(self, request: Request) -> None:
        """End a request, queued or held back; one that has ended is left alone."""
        if self._held.pop(request.request_id, None) is not None:
            request.status = RequestStatus.FINISHED
            request.finish_reason = "abort"
        elif self._scheduler.abort(request.request_id) is None:
            return
        self.release()

    def _place(self, member: _Member) -> None:
        """Hold a request behind the one that computes most of its prefix, or queue it."""
        request, kv = member.request, self._scheduler.kv
        for index in reversed(range(request.max_cached_tokens // kv.block_size)):
            leader = self._leaders.get(member.keys[index])
            if leader is None or leader is request:
                continue
            num_tokens = (index + 1) * kv.block_size
            # The cache may have it from one that is gone, and the leader be far back in the queue.
            is_there = leader.num_computed_tokens >= num_tokens
            if not is_there and kv.count_cached(request) < num_tokens:
                member.leader, member.num_tokens = leader, num_tokens
            break
        for key in member.keys:
            self._leaders.setdefault(key, request)
        if member.leader is None:
            self._scheduler.add(request)
        else:
            self._held[request.request_id] = member

    def _forget(self, member: _Member) -> None:
        del self._members[member.request.request_id]
        for key in member.keys:
            if self._leaders.get(key) is member.request:
                del self._leaders[key]

    def _block_keys(self, request: Request, scope: int) -> list[int]:
        size, token_ids = self._scheduler.kv.block_size, request.prompt_token_ids
        key = hash(scope)
        keys = []
        for end in range(size, len(token_ids) + 1, size):
            key = hash((key, *token_ids[end - size : end]))
            keys.append(key)
        return keys
