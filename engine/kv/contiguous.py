"""ContiguousKVManager: each sequence reserves one run of neighbouring blocks when it starts.

How engines kept K/V before paging, and the baseline that paging is compared with: the run is as
long as the sequence could ever become, so most of it is empty for most of its life (reservation),
and what ends leaves holes of the wrong size (external fragmentation). Kwon et al. 2023, figure 2,
found 20 to 38 % of such memory in use. First fit: the lowest hole that is long enough.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from llmbench.engine.config import Reservation
from llmbench.engine.kv.manager import KVUsage
from llmbench.engine.request import Request

NOTHING = range(0)


@dataclass(slots=True, eq=False)
class _Sequence:
    """The run of one live request."""

    block_ids: range
    num_computed: int = 0


class ContiguousKVManager:
    """A run of blocks for the longest that a sequence can become, held from start to end."""

    keeps_kv = True
    has_prefix_cache = False

    def __init__(
        self, num_blocks: int, block_size: int, reservation: Reservation, max_model_len: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._reservation = reservation
        self._max_model_len = max_model_len
        self._sequences: dict[str, _Sequence] = {}
        self._holes = [(1, num_blocks)] if num_blocks else []  # (first block, blocks), ascending
        self._num_free = num_blocks
        self._num_used = 0  # slots with a computed token

    @property
    def largest_hole_blocks(self) -> int:
        """Longest run of neighbouring free blocks; below the free blocks it is fragmentation."""
        return max((length for _, length in self._holes), default=0)

    def max_tokens_ever(self) -> int:
        """Tokens of the longest sequence that an empty pool can hold."""
        return self.num_blocks * self.block_size

    def match_prefix(self, request: Request) -> int:
        """Find nothing: runs are not shared."""
        return 0

    def count_cached(self, request: Request) -> int:
        """Find nothing: runs are not shared."""
        return 0

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Reserve the whole run at the first call; later calls find their slots in it."""
        sequence = self._sequences.get(request.request_id)
        num_tokens = request.num_computed_tokens + num_new_tokens
        if sequence is None:
            num_reserved = self._num_reserved_tokens(request)
            block_ids = self._take(-(-max(num_reserved, num_tokens) // self.block_size))
            if not block_ids:
                return False
            sequence = self._sequences[request.request_id] = _Sequence(block_ids)
        assert num_tokens <= len(sequence.block_ids) * self.block_size, "reservation outgrown"
        return True

    def mark_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Count the first tokens as used slots."""
        sequence = self._sequences[request.request_id]
        self._num_used += num_computed_tokens - sequence.num_computed
        sequence.num_computed = num_computed_tokens

    def free(self, request: Request) -> None:
        """Give the run back, joined with free neighbours; O(holes)."""
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return
        self._num_used -= sequence.num_computed
        first, length = sequence.block_ids.start, len(sequence.block_ids)
        self._num_free += length
        holes = self._holes
        index = bisect.bisect(holes, (first, 0))
        if index < len(holes) and holes[index][0] == first + length:
            length += holes.pop(index)[1]
        if index > 0 and sum(holes[index - 1]) == first:
            index -= 1
            before = holes.pop(index)
            first, length = before[0], before[1] + length
        holes.insert(index, (first, length))

    def block_ids(self, request: Request) -> Sequence[int]:
        """Blocks of the request's run, those without a token included."""
        sequence = self._sequences.get(request.request_id)
        return NOTHING if sequence is None else sequence.block_ids

    def reset_prefix_cache(self) -> int:
        """Forget nothing: there is no prefix cache."""
        return 0

    def usage(self) -> KVUsage:
        """How the pool stands now; O(1)."""
        return KVUsage(
            num_blocks=self.num_blocks,
            num_free_blocks=self._num_free,
            num_cached_blocks=0,
            num_reserved_slots=(self.num_blocks - self._num_free) * self.block_size,
            num_used_slots=self._num_used,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where runs and holes do not tile the pool."""
        spans = [(s.block_ids.start, len(s.block_ids)) for s in self._sequences.values()]
        end = 1
        for first, length in sorted(spans + self._holes):
            assert length > 0
            assert first == end, f"block {min(first, end)} is held twice or by nobody"
            end = first + length
        assert end == self.num_blocks + 1, f"blocks from {end} on are lost"
        for (first, length), (following, _) in zip(self._holes, self._holes[1:], strict=False):
            assert first + length < following, "neighbouring holes are not joined"
        assert self._num_free == sum(length for _, length in self._holes)
        assert self._num_used == sum(s.num_computed for s in self._sequences.values())

    def _num_reserved_tokens(self, request: Request) -> int:
        if self._reservation == "max_model_len":
            # A pool below the model's length shortens what any sequence can become.
            return min(self._max_model_len, self.max_tokens_ever())
        return request.num_prompt_tokens + request.max_tokens - request.num_unread_tokens

    def _take(self, num_blocks: int) -> range:
        for index, (first, length) in enumerate(self._holes):
            if length >= num_blocks:
                if length == num_blocks:
                    del self._holes[index]
                else:
                    self._holes[index] = (first + num_blocks, length - num_blocks)
                self._num_free -= num_blocks
                return range(first, first + num_blocks)
        return NOTHING
