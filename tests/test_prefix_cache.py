"""Prefix cache: what is found, what must never be found, and what is forgotten."""

import itertools

import pytest

from llmbench.engine.kv.prefix_cache import CachedBlock, HashPrefixCache

ONE, TWO, THREE = (1, 1), (2, 2), (3, 3)


def register(cache: HashPrefixCache, root: CachedBlock, *blocks: tuple[int, ...]) -> None:
    """Register a prefix in the next block ids."""
    parent = root
    for tokens in blocks:
        parent = cache.register(parent, tokens, len(cache) + 1)


def found(cache: HashPrefixCache, root: CachedBlock, *blocks: tuple[int, ...]) -> list[int]:
    """Look a prefix up; return block ids."""
    token_ids = list(itertools.chain(*blocks))
    return [block.block_id for block in cache.match(root, token_ids, len(blocks))]


def test_block_is_found_behind_its_own_prefix_alone() -> None:
    cache = HashPrefixCache(2)
    register(cache, cache.root(), ONE, TWO)
    assert found(cache, cache.root(), ONE, TWO) == [1, 2]
    assert found(cache, cache.root(), ONE, THREE) == [1]
    assert found(cache, cache.root(), TWO) == []
    assert found(cache, cache.root(), TWO, TWO) == []


def test_match_stops_at_the_asked_number_of_blocks() -> None:
    cache = HashPrefixCache(2)
    register(cache, cache.root(), ONE, TWO)
    assert len(cache.match(cache.root(), [1, 1, 2, 2], 1)) == 1


def test_first_of_two_equal_blocks_is_kept() -> None:
    cache = HashPrefixCache(2)
    parent = cache.register(cache.root(), ONE, 7)
    assert cache.register(cache.root(), ONE, 8) is parent
    assert 8 not in cache
    assert found(cache, cache.root(), ONE) == [7]


def test_child_of_a_duplicate_is_found_behind_the_first() -> None:
    cache = HashPrefixCache(2)
    cache.register(cache.root(), ONE, 7)
    cache.register(cache.register(cache.root(), ONE, 8), TWO, 9)
    assert found(cache, cache.root(), ONE, TWO) == [7, 9]


def test_child_is_found_again_once_its_forgotten_parent_is_back() -> None:
    cache = HashPrefixCache(2)
    register(cache, cache.root(), ONE, TWO)
    assert cache.forget(1)
    assert found(cache, cache.root(), ONE, TWO) == []
    cache.register(cache.root(), ONE, 5)
    assert found(cache, cache.root(), ONE, TWO) == [5, 2]


def test_forgotten_block_is_not_found() -> None:
    cache = HashPrefixCache(2)
    register(cache, cache.root(), ONE)
    assert cache.forget(1)
    assert not cache.forget(1)
    assert found(cache, cache.root(), ONE) == []
    cache.check_integrity()


def test_collisions_never_return_other_tokens() -> None:
    # One-byte digests: 256 keys for 16 + 256 + 4,096 prefixes.
    cache = HashPrefixCache(1, digest_size=1)
    prefixes: dict[int, tuple[int, ...]] = {}
    for length in (1, 2, 3):
        for tokens in itertools.product(range(16), repeat=length):
            parent = cache.root()
            for block in cache.match(cache.root(), tokens, length):
                assert prefixes[block.block_id] == tokens[: len(prefixes[block.block_id])]
                parent = block
            if length == len(prefixes.get(parent.block_id, ())) + 1:
                block_id = len(prefixes) + 1
                prefixes[block_id] = tokens
                cache.register(parent, tokens[-1:], block_id)
    assert len(cache) > 200
    cache.check_integrity()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), (("adapter", "a"),)),
        ((("adapter", "a"),), (("salt", "a"),)),
        ((("a", "bc"),), (("ab", "c"),)),
        ((("a", "b"), ("c", "d")), (("c", "d"), ("a", "b"))),
    ],
)
@pytest.mark.parametrize("digest_size", [1, 16])
def test_extra_keys_part_equal_tokens(
    one: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...], digest_size: int
) -> None:
    cache = HashPrefixCache(2, digest_size=digest_size)
    register(cache, cache.root(one), ONE)
    assert found(cache, cache.root(one), ONE) == [1]
    assert found(cache, cache.root(other), ONE) == []


def test_extra_keys_part_equal_tokens_when_all_roots_collide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = HashPrefixCache(2)
    monkeypatch.setattr(cache, "_key", lambda parent, token_ids: bytes(16))
    register(cache, cache.root((("salt", "a"),)), ONE)
    assert found(cache, cache.root((("salt", "a"),)), ONE) == [1]
    assert found(cache, cache.root((("salt", "b"),)), ONE) == []
