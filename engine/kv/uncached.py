"""UncachedKVManager: no K/V outlives a step.

The baseline that shows what a KV cache is worth: each step computes every sequence from its first
token on. Attention still reads K/V through block tables, so a step needs scratch blocks for the
sequences in it; the scheduler gives them back when the step is over.
"""

from collections.abc import Sequence

from llmbench.engine.kv.block_pool import BlockPool
from llmbench.engine.kv.manager import KVUsage
from llmbench.engine.request import Request


class UncachedKVManager:
    """Scratch blocks for one step at a time."""

    keeps_kv = False
    has_prefix_cache = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}
        self._num_used = 0  # sum of the above

    def max_tokens_ever(self) -> int:
        """Tokens of the longest sequence that an empty pool can hold."""
        return self.num_blocks * self.block_size

    def match_prefix(self, request: Request) -> int:
        """Find nothing: nothing is kept."""
        return 0

    def count_cached(self, request: Request) -> int:
        """Find nothing: nothing is kept."""
        return 0

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Take scratch for the whole sequence, which must start at its first token."""
        assert request.num_computed_tokens == 0, "computed tokens without a KV cache"
        assert request.request_id not in self._tables, "scratch of the last step is still held"
        num_blocks = -(-num_new_tokens // self.block_size)
        if num_blocks > self.pool.num_free:
            return False
        self._tables[request.request_id] = self.pool.allocate(num_blocks)
        return True

    def mark_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Count the tokens as used until the scratch is given back."""
        self._num_used += num_computed_tokens - self._num_computed.get(request.request_id, 0)
        self._num_computed[request.request_id] = num_computed_tokens

    def free(self, request: Request) -> None:
        """Give the scratch back."""
        self._num_used -= self._num_computed.pop(request.request_id, 0)
        for block_id in self._tables.pop(request.request_id, ()):
            self.pool.release(block_id, reusable=False)

    def block_ids(self, request: Request) -> Sequence[int]:
        """Scratch blocks of the request in this step."""
        return self._tables.get(request.request_id, ())

    def reset_prefix_cache(self) -> int:
        """Forget nothing: there is no prefix cache."""
        return 0

    def usage(self) -> KVUsage:
        """How the pool stands now, O(1); empty between steps."""
        num_free = self.pool.num_free
        return KVUsage(
            num_blocks=self.num_blocks,
            num_free_blocks=num_free,
            num_cached_blocks=0,
            num_reserved_slots=(self.num_blocks - num_free) * self.block_size,
            num_used_slots=self._num_used,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where a block is lost, held twice or counted wrongly."""
        self.pool.check_integrity(self._tables.values())
        assert self._num_computed.keys() <= self._tables.keys()
        assert self._num_used == sum(self._num_computed.values())
