"""KV managers: no block lost or shared wrongly, and K/V read back are those of the same prefix.

The property tests keep a shadow of the pool in which each slot holds the whole prefix that its
K/V would depend on, so a stale, aliased or unwritten slot shows as a wrong prefix.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import ConfigError
from llmbench.engine.kv.contiguous import ContiguousKVManager
from llmbench.engine.kv.factory import make_kv_manager
from llmbench.engine.kv.manager import KVCacheManager
from llmbench.engine.kv.paged import PagedKVManager
from llmbench.engine.kv.prefix_cache import HashPrefixCache
from llmbench.engine.kv.uncached import UncachedKVManager
from llmbench.engine.request import Request, SamplingParams


def make_request(request_id: str, token_ids: list[int], max_tokens: int = 8) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(),
        max_tokens=max_tokens,
    )


def make_paged(num_blocks: int = 8, block_size: int = 16) -> PagedKVManager:
    return PagedKVManager(num_blocks, block_size, HashPrefixCache(block_size))


def admit(kv: KVCacheManager, request: Request) -> int | None:
    """Match and allocate all tokens; return the matched ones, or None without room."""
    request.num_computed_tokens = num_matched = kv.match_prefix(request)
    if kv.allocate_slots(request, len(request.token_ids) - num_matched):
        return num_matched
    request.num_computed_tokens = 0
    return None


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> None:
    request.num_computed_tokens = len(request.token_ids) if num_tokens is None else num_tokens
    kv.mark_computed(request, request.num_computed_tokens)


def run_through(kv: KVCacheManager, request: Request) -> int | None:
    num_matched = admit(kv, request)
    compute(kv, request)
    kv.free(request)
    return num_matched


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_one_position_of_a_cached_prompt_is_left_to_compute(length: int, cached: int) -> None:
    """C09: a prompt of whole blocks that is cached whole still needs logits of its last token."""
    kv = make_paged()
    tokens = list(range(length))
    assert run_through(kv, make_request("first", tokens)) == 0
    assert run_through(kv, make_request("second", tokens)) == cached
    assert run_through(kv, make_request("third", tokens)) == cached


def test_blocks_are_not_found_before_they_are_computed() -> None:
    kv = make_paged()
    tokens = list(range(40))
    first = make_request("first", tokens)
    admit(kv, first)
    assert admit(kv, make_request("same step", tokens)) == 0
    compute(kv, first, 20)
    assert admit(kv, make_request("next step", tokens)) == 16


def test_open_block_is_not_found() -> None:
    kv = make_paged()
    first = make_request("first", list(range(31)))
    admit(kv, first)
    compute(kv, first)
    assert admit(kv, make_request("second", list(range(40)))) == 16


def test_accepted_tokens_fill_blocks_by_their_ids() -> None:
    kv = make_paged(block_size=2)
    first = make_request("first", [1, 2, 3])
    admit(kv, first)
    compute(kv, first)
    first.token_ids.append(4)
    assert kv.allocate_slots(first, 1)
    compute(kv, first)
    kv.free(first)
    assert admit(kv, make_request("same", [1, 2, 3, 4, 5])) == 4
    assert admit(kv, make_request("other", [1, 2, 3, 9, 5])) == 2


def test_preempted_request_finds_its_own_blocks() -> None:
    kv = make_paged(block_size=4)
    request = make_request("r", list(range(10)))
    admit(kv, request)
    compute(kv, request)
    request.token_ids += [10, 11, 12]
    kv.free(request)
    assert admit(kv, request) == 8
    assert len(kv.block_ids(request)) == 4


def test_shared_blocks_are_counted_once() -> None:
    kv = make_paged(block_size=4)
    first, second = make_request("1", list(range(9))), make_request("2", list(range(9)))
    admit(kv, first)
    compute(kv, first)
    admit(kv, second)
    assert kv.block_ids(first)[:2] == kv.block_ids(second)[:2]
    usage = kv.usage()
    assert (usage.num_reserved_slots, usage.num_used_slots) == (16, 9)
    kv.free(first)
    assert kv.usage().num_used_slots == 8
    kv.free(second)
    usage = kv.usage()
    assert (usage.num_used_slots, usage.num_cached_blocks, usage.num_free_blocks) == (0, 2, 8)


def test_end_of_an_idle_prefix_is_evicted_before_its_beginning() -> None:
    kv = make_paged(num_blocks=4, block_size=2)
    run_through(kv, make_request("long", [1, 2, 3, 4, 5, 6, 7]))
    admit(kv, make_request("new", [9, 9, 9]))  # the block of the 7 was empty: one is evicted
    assert admit(kv, make_request("again", [1, 2, 3, 4, 0, 0])) is None
    assert kv.match_prefix(make_request("again", [1, 2, 3, 4, 5, 6, 7])) == 4


def test_cached_tokens_are_counted_without_being_taken() -> None:
    kv = make_paged(num_blocks=4, block_size=2)
    assert kv.count_cached(make_request("cold", [1, 2, 3, 4, 5])) == 0
    run_through(kv, make_request("first", [1, 2, 3, 4, 5]))
    request = make_request("warm", [1, 2, 3, 4, 9])
    assert kv.count_cached(request) == 4
    assert list(kv.block_ids(request)) == []
    assert kv.usage().num_free_blocks == 4
    assert kv.match_prefix(request) == 4


@pytest.mark.parametrize(
    "manager", [ContiguousKVManager(4, 2, "max_tokens", 8), UncachedKVManager(4, 2)]
)
def test_managers_without_a_prefix_cache_count_nothing(manager: KVCacheManager) -> None:
    assert manager.count_cached(make_request("any", [1, 2, 3])) == 0


def test_failed_admission_gives_matched_blocks_back() -> None:
    kv = make_paged(num_blocks=4, block_size=2)
    run_through(kv, make_request("short", [1, 2, 3]))
    request = make_request("long", [1, 2, *range(10, 20)])
    assert admit(kv, request) is None
    assert list(kv.block_ids(request)) == []
    assert kv.usage().num_free_blocks == 4
    assert kv.usage().num_cached_blocks == 1
    kv.check_integrity()


def test_failed_growth_keeps_what_is_held() -> None:
    kv = make_paged(num_blocks=2, block_size=2)
    request = make_request("r", [1, 2, 3])
    admit(kv, request)
    compute(kv, request)
    assert not kv.allocate_slots(request, 2)
    assert len(kv.block_ids(request)) == 2
    kv.check_integrity()


def test_reset_forgets_idle_prefixes_alone() -> None:
    kv = make_paged(block_size=2)
    run_through(kv, make_request("idle", [1, 2, 3, 4, 5]))
    live = make_request("live", [7, 8, 9])
    admit(kv, live)
    compute(kv, live)
    assert kv.reset_prefix_cache() == 2
    assert kv.reset_prefix_cache() == 0
    assert admit(kv, make_request("idle again", [1, 2, 3])) == 0
    assert admit(kv, make_request("live again", [7, 8, 9])) == 2
    kv.check_integrity()


def test_contiguous_run_is_reserved_for_the_longest_output() -> None:
    kv = ContiguousKVManager(8, 4, "max_tokens", max_model_len=100)
    request = make_request("r", [1, 2, 3], max_tokens=6)
    admit(kv, request)
    compute(kv, request)
    assert list(kv.block_ids(request)) == [1, 2, 3]
    usage = kv.usage()
    assert (usage.num_reserved_slots, usage.num_used_slots, usage.num_wasted_slots) == (12, 3, 9)


def test_contiguous_run_can_be_reserved_for_the_model_length() -> None:
    kv = ContiguousKVManager(8, 4, "max_model_len", max_model_len=16)
    request = make_request("r", [1], max_tokens=1)
    admit(kv, request)
    assert len(kv.block_ids(request)) == 4


def test_reservation_for_the_model_length_ends_at_the_pool() -> None:
    kv = ContiguousKVManager(4, 16, "max_model_len", max_model_len=128)
    request = make_request("r", [1] * 8, max_tokens=4)
    assert admit(kv, request) == 0
    assert len(kv.block_ids(request)) == 4


def test_scattered_holes_do_not_make_a_run() -> None:
    kv = ContiguousKVManager(6, 2, "max_tokens", max_model_len=12)
    requests = [make_request(str(i), [1, 2], max_tokens=2) for i in range(3)]
    for request in requests:
        admit(kv, request)
    kv.free(requests[0])
    kv.free(requests[2])
    assert (kv.usage().num_free_blocks, kv.largest_hole_blocks) == (4, 2)
    assert admit(kv, make_request("long", [1] * 4, max_tokens=2)) is None
    kv.free(requests[1])
    assert kv.largest_hole_blocks == 6


def test_first_hole_that_is_long_enough_is_taken() -> None:
    kv = ContiguousKVManager(8, 1, "max_tokens", max_model_len=8)
    requests = [make_request(str(i), [1], max_tokens=n) for i, n in enumerate((1, 0, 2, 0))]
    for request in requests:
        admit(kv, request)
    kv.free(requests[0])
    kv.free(requests[2])
    late = make_request("late", [1], max_tokens=2)
    admit(kv, late)
    assert list(kv.block_ids(late)) == [4, 5, 6]


def test_uncached_scratch_lasts_one_step() -> None:
    kv = UncachedKVManager(4, 2)
    request = make_request("r", [1, 2, 3])
    assert admit(kv, request) == 0
    compute(kv, request)
    assert kv.usage().num_used_slots == 3
    kv.free(request)
    assert kv.usage().num_free_blocks == 4
    assert admit(kv, request) == 0


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"kv_manager": "paged"}, PagedKVManager),
        ({"kv_manager": "contiguous"}, ContiguousKVManager),
        ({"kv_manager": "uncached"}, UncachedKVManager),
    ],
)
def test_factory_makes_the_named_manager(settings: dict[str, Any], kind: type) -> None:
    kv = make_kv_manager(EngineConfig(model="m", block_size=8, **settings), 4, 32)
    assert isinstance(kv, kind)
    assert kv.max_tokens_ever() == 32


def test_prefix_cache_can_be_switched_off() -> None:
    kv = make_kv_manager(EngineConfig(model="m", block_size=2, prefix_cache="none"), 8, 32)
    assert not kv.has_prefix_cache
    run_through(kv, make_request("1", [1, 2, 3, 4]))
    assert run_through(kv, make_request("2", [1, 2, 3, 4])) == 0
    assert kv.usage().num_cached_blocks == 0


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 blocks"):
        make_kv_manager(EngineConfig(model="m"), 0, 32)


class ManagerMachine(RuleBasedStateMachine):
    """Sequences over two token ids, so that prefixes meet often, in a pool of 7 x 2 slots."""

    def make(self) -> KVCacheManager:
        return PagedKVManager(7, 2, HashPrefixCache(2))

    def __init__(self) -> None:
        super().__init__()
        self.kv = self.make()
        self.live: list[Request] = []
        self.slots: dict[int, tuple[int, ...]] = {}
        self.num_requests = 0

    def slot(self, request: Request, position: int) -> int:
        return self.kv.block_ids(request)[position // 2] * 2 + position % 2

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        max_tokens=st.integers(1, 4),
    )
    def start(self, token_ids: list[int], max_tokens: int) -> None:
        request = make_request(str(self.num_requests), token_ids, max_tokens)
        self.num_requests += 1
        if admit(self.kv, request) is not None:
            self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        start = request.num_computed_tokens
        end = data.draw(st.integers(start, len(request.token_ids)))
        for position in range(start, end):
            self.slots[self.slot(request, position)] = tuple(request.token_ids[: position + 1])
        compute(self.kv, request, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def append(self, data: st.DataObject, token_id: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        if request.num_output_tokens < request.max_tokens:
            num_missing = len(request.token_ids) + 1 - request.num_computed_tokens
            if self.kv.allocate_slots(request, num_missing):
                request.token_ids.append(token_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.kv.free(request)
        if admit(self.kv, request) is None:
            self.live.remove(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.kv.free(request)

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()

    @invariant()
    def kv_is_that_of_the_prefix(self) -> None:
        self.kv.check_integrity()
        for request in self.live:
            for position in range(request.num_computed_tokens):
                prefix = tuple(request.token_ids[: position + 1])
                assert self.slots[self.slot(request, position)] == prefix

    def teardown(self) -> None:
        for request in self.live:
            self.kv.free(request)
        usage = self.kv.usage()
        assert (usage.num_free_blocks, usage.num_used_slots) == (7, 0)
        self.kv.check_integrity()


class CollidingMachine(ManagerMachine):
    """One-byte keys: collisions between prefixes are common."""

    def make(self) -> KVCacheManager:
        return PagedKVManager(7, 2, HashPrefixCache(2, digest_size=1))


class CachelessMachine(ManagerMachine):
    """Paged without a prefix cache."""

    def make(self) -> KVCacheManager:
        return PagedKVManager(7, 2)


class ContiguousMachine(ManagerMachine):
    """Runs of prompt + max_tokens."""

    def make(self) -> KVCacheManager:
        return ContiguousKVManager(7, 2, "max_tokens", 14)


FAST = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = FAST
TestCollidingMachine = CollidingMachine.TestCase
TestCollidingMachine.settings = FAST
TestCachelessMachine = CachelessMachine.TestCase
TestCachelessMachine.settings = FAST
TestContiguousMachine = ContiguousMachine.TestCase
TestContiguousMachine.settings = FAST
