"""PagedKVManager: blocks on demand, shared where prefixes are equal.

A sequence holds a table of blocks anywhere in the pool and takes one more when its last is full,
so at most `block_size - 1` slots of it are wasted (Kwon et al. 2023, section 4.2). A sequence
that ends or is preempted leaves its full blocks behind, findable by their content until they are
handed out anew; the next sequence with that prefix starts behind them.

Only blocks whose K/V are computed and verified are made findable: a block registered when it is
allocated would be "hit" in the same step, before anything is written to it (nano-vllm #208).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmbench.engine.kv.block_pool import BlockPool
from llmbench.engine.kv.manager import KVUsage
from llmbench.engine.kv.prefix_cache import CachedBlock, PrefixCache
from llmbench.engine.request import Request

NEVER = sys.maxsize


@dataclass(slots=True, eq=False)
class _Sequence:
    """What one live request holds."""

    next_full: int
    """Computed tokens at which the next block is registered; NEVER without a prefix cache."""
    last_cached: CachedBlock | None
    """Parent of the next block to register; None without a prefix cache."""
    block_ids: list[int] = field(default_factory=list)
    capacity: int = 0
    """Slots in `block_ids`."""
    num_computed: int = 0
    is_admitted: bool = False
    """False until slots were allocated: until then matched blocks are given back on failure."""


class PagedKVManager:
    """Blocks on demand from one pool, with an optional prefix cache."""

    keeps_kv = True

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.has_prefix_cache = prefix_cache is not None
        self.pool = BlockPool(num_blocks)
        self._cache = prefix_cache
        self._sequences: dict[str, _Sequence] = {}
        self._num_free_cached = 0  # blocks without holder that can be found
        self._num_used = 0  # slots with a computed token in held blocks

    def max_tokens_ever(self) -> int:
        """Tokens of the longest sequence that an empty pool can hold."""
        return self.num_blocks * self.block_size

    def match_prefix(self, request: Request) -> int:
        """Take the cached blocks that hold the first tokens; return their tokens."""
        if self._cache is None:
            return 0
        assert request.request_id not in self._sequences, "a live request is matched again"
        matched = self._find(self._cache, request)
        if not matched:
            return 0
        sequence = self._start(request.request_id, matched[-1])
        for block in matched:
            sequence.block_ids.append(block.block_id)
            if self.pool.acquire(block.block_id):
                self._num_free_cached -= 1
                self._num_used += self.block_size
        num_tokens = len(matched) * self.block_size
        sequence.capacity = sequence.num_computed = num_tokens
        sequence.next_full = num_tokens + self.block_size
        return num_tokens

    def count_cached(self, request: Request) -> int:
        """Return how many tokens `match_prefix` would find now; takes nothing."""
        return 0 if self._cache is None else len(self._find(self._cache, request)) * self.block_size

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Make room for tokens up to `num_computed_tokens + num_new_tokens`; all or nothing."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            root = None if self._cache is None else self._cache.root()
            sequence = self._start(request.request_id, root)
        elif num_tokens <= sequence.capacity:
            sequence.is_admitted = True
            return True
        num_missing = -(-(num_tokens - sequence.capacity) // self.block_size)
        if num_missing > self.pool.num_free:
            if not sequence.is_admitted:
                self.free(request)
            return False
        block_ids = self.pool.allocate(num_missing)
        if self._cache is not None:
            for block_id in block_ids:
                self._num_free_cached -= self._cache.forget(block_id)
        sequence.block_ids += block_ids
        sequence.capacity += num_missing * self.block_size
        sequence.is_admitted = True
        return True

    def mark_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Say that K/V of the first tokens are written and verified; registers full blocks."""
        sequence = self._sequences[request.request_id]
        self._num_used += num_computed_tokens - sequence.num_computed
        sequence.num_computed = num_computed_tokens
        while num_computed_tokens >= sequence.next_full:
            self._register(sequence, request.token_ids)

    def free(self, request: Request) -> None:
        """Give back all that the request holds, its last block first."""
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return
        size = self.block_size
        start = sequence.capacity
        # LRU order: the end of a prefix is forgotten before its beginning, without which it is
        # worth nothing.
        for block_id in reversed(sequence.block_ids):
            start -= size
            is_cached = self._cache is not None and block_id in self._cache
            if self.pool.release(block_id, reusable=is_cached):
                self._num_free_cached += is_cached
                self._num_used -= min(max(sequence.num_computed - start, 0), size)

    def block_ids(self, request: Request) -> Sequence[int]:
        """Blocks of the request in the order of its tokens; the live list, not to be changed."""
        sequence = self._sequences.get(request.request_id)
        return () if sequence is None else sequence.block_ids

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes that no live request holds; return the blocks forgotten."""
        if self._cache is None:
            return 0
        num_forgotten = sum(self._cache.forget(block) for block in self.pool.free_block_ids())
        self._num_free_cached -= num_forgotten
        return num_forgotten

    def usage(self) -> KVUsage:
        """How the pool stands now; O(1)."""
        num_free = self.pool.num_free
        return KVUsage(
            num_blocks=self.num_blocks,
            num_free_blocks=num_free,
            num_cached_blocks=self._num_free_cached,
            num_reserved_slots=(self.num_blocks - num_free) * self.block_size,
            num_used_slots=self._num_used,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where a block is lost, held twice or counted wrongly."""
        self.pool.check_integrity(s.block_ids for s in self._sequences.values())
        fills: dict[int, int] = {}
        for sequence in self._sequences.values():
            assert sequence.capacity == len(sequence.block_ids) * self.block_size
            assert sequence.num_computed <= sequence.capacity
            for index, block_id in enumerate(sequence.block_ids):
                fill = min(max(sequence.num_computed - index * self.block_size, 0), self.block_size)
                assert fills.setdefault(block_id, fill) == fill, f"block {block_id} is shared open"
        assert sum(fills.values()) == self._num_used, f"used slots counted {self._num_used}"
        if self._cache is not None:
            self._cache.check_integrity()
            num_free_cached = sum(b in self._cache for b in self.pool.free_block_ids())
            assert num_free_cached == self._num_free_cached
            held = (b for b, fill in fills.items() if fill < self.block_size)
            assert not any(b in self._cache for b in held), "an open block can be found"

    def _find(self, cache: PrefixCache, request: Request) -> list[CachedBlock]:
        max_blocks = request.max_cached_tokens // self.block_size
        return cache.match(cache.root(), request.token_ids, max_blocks)

    def _start(self, request_id: str, parent: CachedBlock | None) -> _Sequence:
        next_full = NEVER if parent is None else self.block_size
        sequence = self._sequences[request_id] = _Sequence(next_full, parent)
        return sequence

    def _register(self, sequence: _Sequence, token_ids: list[int]) -> None:
        assert self._cache is not None
        assert sequence.last_cached is not None
        end = sequence.next_full
        assert end <= len(token_ids), "a full block of unknown tokens"
        start = end - self.block_size
        block_id = sequence.block_ids[start // self.block_size]
        sequence.last_cached = self._cache.register(
            sequence.last_cached, tuple(token_ids[start:end]), block_id
        )
        sequence.next_full = end + self.block_size
