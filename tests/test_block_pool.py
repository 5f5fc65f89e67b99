"""Block pool: order of the free list, reference counts, and its own accounting."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmbench.engine.kv.block_pool import NULL_BLOCK, BlockPool


def test_null_block_is_never_handed_out() -> None:
    assert NULL_BLOCK not in BlockPool(4).allocate(4)


def test_reusable_blocks_are_handed_out_after_all_others_and_oldest_first() -> None:
    pool = BlockPool(4)
    one, two, three, four = pool.allocate(4)
    for block_id, reusable in ((two, True), (one, True), (three, False), (four, True)):
        pool.release(block_id, reusable=reusable)
    assert pool.allocate(4) == [three, two, one, four]


def test_acquired_block_leaves_the_middle_of_the_free_list() -> None:
    pool = BlockPool(3)
    one, two, three = pool.free_block_ids()
    assert pool.acquire(two)
    assert not pool.acquire(two)
    assert pool.free_block_ids() == [one, three]
    assert not pool.release(two, reusable=True)
    assert pool.release(two, reusable=True)
    assert pool.free_block_ids() == [one, three, two]


def test_block_without_holder_cannot_be_released() -> None:
    with pytest.raises(AssertionError, match="not held"):
        BlockPool(2).release(1, reusable=False)


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity([])


class PoolMachine(RuleBasedStateMachine):
    """Random holders of random blocks against a plain list as the free list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(5)
        self.free = [1, 2, 3, 4, 5]
        self.held: list[list[int]] = []

    @rule(num_blocks=st.integers(0, 3))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks <= len(self.free):
            expected, self.free = self.free[:num_blocks], self.free[num_blocks:]
            assert self.pool.allocate(num_blocks) == expected
            self.held.append(expected)

    @rule(block_id=st.integers(1, 5))
    def acquire(self, block_id: int) -> None:
        assert self.pool.acquire(block_id) == (block_id in self.free)
        if block_id in self.free:
            self.free.remove(block_id)
        self.held.append([block_id])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reusable=st.booleans())
    def release(self, data: st.DataObject, reusable: bool) -> None:
        table = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for block_id in table:
            is_last = not any(block_id in other for other in self.held)
            assert self.pool.release(block_id, reusable=reusable) == is_last
            if is_last:
                self.free.insert(len(self.free) if reusable else 0, block_id)

    @invariant()
    def pool_agrees(self) -> None:
        assert self.pool.free_block_ids() == self.free
        self.pool.check_integrity(self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
