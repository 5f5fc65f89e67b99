"""BlockPool: which KV blocks are held, by how many, and which is given out next.

A block is `block_size` token slots in every layer's K and V. Sequences that share a prefix share
its blocks, so a block counts its holders. Blocks held by nobody stand in one ring that is both
the free list and the LRU order of what they still keep: the front is handed out next, a block
with a reusable prefix is put at the back when its last holder leaves, one without at the front.
The ring is doubly linked through two integer lists, so a prefix hit takes a block out of its
middle in O(1) (Kwon et al. 2023, section 4; the queue follows vLLM's).

Block 0 is the null block: never handed out, padding in block tables points to it. Its place in
the ring is free, so it serves as the ring's head.
"""

from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Reference counts and free list of the blocks 1 … num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = [0] * (num_blocks + 1)
        size = num_blocks + 1
        self._next = [(block_id + 1) % size for block_id in range(size)]
        self._previous = [(block_id - 1) % size for block_id in range(size)]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the front, each with one holder; the caller checks `num_free` first."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked, {self.num_free} free"
        following, ref_counts = self._next, self.ref_counts
        block_ids = []
        block_id = following[NULL_BLOCK]
        for _ in range(num_blocks):
            block_ids.append(block_id)
            ref_counts[block_id] = 1
            block_id = following[block_id]
        following[NULL_BLOCK] = block_id
        self._previous[block_id] = NULL_BLOCK
        self.num_free -= num_blocks
        return block_ids

    def acquire(self, block_id: int) -> bool:
        """Add a holder; return whether the block was free."""
        self.ref_counts[block_id] += 1
        if self.ref_counts[block_id] > 1:
            return False
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1
        return True

    def release(self, block_id: int, *, reusable: bool) -> bool:
        """Take a holder away; return whether it was the last. `reusable` blocks go to the back."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is released but not held"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            return False
        if reusable:
            before, after = self._previous[NULL_BLOCK], NULL_BLOCK
        else:
            before, after = NULL_BLOCK, self._next[NULL_BLOCK]
        self._previous[block_id], self._next[block_id] = before, after
        self._next[before] = block_id
        self._previous[after] = block_id
        self.num_free += 1
        return True

    def free_block_ids(self) -> list[int]:
        """Free blocks in the order in which they will be handed out; O(free blocks)."""
        block_ids = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def check_integrity(self, held: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless `held`, one block table a holder, explains every count."""
        counts = [0] * (self.num_blocks + 1)
        for block_ids in held:
            table = list(block_ids)
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            for block_id in table:
                counts[block_id] += 1
        assert counts[NULL_BLOCK] == 0, "the null block was handed out"
        assert counts == self.ref_counts, f"holders {counts}, counted {self.ref_counts}"
        free = self.free_block_ids()
        expected = [b for b in range(1, self.num_blocks + 1) if not counts[b]]
        assert sorted(free) == expected, f"free list {free}, blocks without holder {expected}"
        assert len(free) == self.num_free, f"{len(free)} free blocks, counted {self.num_free}"
