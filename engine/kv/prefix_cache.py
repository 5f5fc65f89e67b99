"""Prefix cache: which block holds the K/V of which tokens behind which tokens.

K and V of a token depend on all tokens before it, so a full block is known by its own token ids
and by the block before it: key = blake2b(key of the parent, token ids), a hash chain whose root
stands for everything else that K/V depend on (typed extra keys: adapter, salt, …). Two different
prefixes with one key must never share K/V (vLLM #12621, where hashes could be predicted), so a
hit also compares the token ids, the block's and those of all its ancestors.

Equal blocks that two sequences computed side by side are harmless: the first one registered is
the one found. The cache never holds blocks itself: BlockPool's free ring is the LRU order, and a
block that is handed out anew is forgotten here first.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

ExtraKeys = tuple[tuple[str, str], ...]
"""(kind, value) pairs, such as ("adapter", "sql")."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One full block in the tree of prefixes; `block_id` 0 is a root."""

    key: bytes
    parent: "CachedBlock | None"
    token_ids: tuple[int, ...]
    block_id: int
    extra_keys: ExtraKeys = ()
    """Of a root, which has no tokens."""


class PrefixCache(Protocol):
    """What the paged manager asks of a prefix cache."""

    def root(self, extra_keys: ExtraKeys = ()) -> CachedBlock:
        """Return what the first block of a sequence with these extra keys hangs on."""

    def match(
        self, root: CachedBlock, token_ids: Sequence[int], max_blocks: int
    ) -> list[CachedBlock]:
        """Return the longest run of cached blocks that holds the first tokens; takes none."""

    def register(
        self, parent: CachedBlock, token_ids: tuple[int, ...], block_id: int
    ) -> CachedBlock:
        """Make a full, computed block findable; return the parent for the block after it."""

    def forget(self, block_id: int) -> bool:
        """Make a block unfindable; return whether it was findable."""

    def __contains__(self, block_id: int) -> bool: ...

    def __len__(self) -> int: ...

    def check_integrity(self) -> None:
        """Raise AssertionError where the two directions of the map disagree."""


class HashPrefixCache:
    """Prefix cache by a chain of hashes."""

    def __init__(self, block_size: int, *, digest_size: int = 16) -> None:
        self.block_size = block_size
        self._digest_size = digest_size  # bytes
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def root(self, extra_keys: ExtraKeys = ()) -> CachedBlock:
        """Return what the first block of a sequence with these extra keys hangs on."""
        digest = blake2b(digest_size=self._digest_size, person=b"root")
        for part in (part for pair in extra_keys for part in pair):
            encoded = part.encode()
            # The length in front keeps ("a", "bc") and ("ab", "c") apart.
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return CachedBlock(digest.digest(), None, (), 0, extra_keys)

    def match(
        self, root: CachedBlock, token_ids: Sequence[int], max_blocks: int
    ) -> list[CachedBlock]:
        """Return the longest run of cached blocks that holds the first tokens; takes none."""
        size = self.block_size
        matched: list[CachedBlock] = []
        parent = root
        for start in range(0, max_blocks * size, size):
            content = tuple(token_ids[start : start + size])
            found = self._by_key.get(self._key(parent, content))
            if found is None or found.token_ids != content or not _is_same(found.parent, parent):
                break
            # The ancestor compared may be an equal one that is forgotten by now: from here on the
            # comparison ends at the first step again.
            found.parent = parent
            matched.append(found)
            parent = found
        return matched

    def register(
        self, parent: CachedBlock, token_ids: tuple[int, ...], block_id: int
    ) -> CachedBlock:
        """Make a full, computed block findable; return the parent for the block after it."""
        assert block_id not in self._by_block, f"block {block_id} is registered twice"
        block = CachedBlock(self._key(parent, token_ids), parent, token_ids, block_id)
        known = self._by_key.get(block.key)
        if known is None:
            self._by_key[block.key] = self._by_block[block_id] = block
            return block
        # Equal contents: the first one stays. A collision: the new one stays unfindable, yet is
        # a sound parent, since a hit compares ancestors by their tokens.
        return known if _is_same(known, block) else block

    def forget(self, block_id: int) -> bool:
        """Make a block unfindable; return whether it was findable."""
        block = self._by_block.pop(block_id, None)
        if block is None:
            return False
        del self._by_key[block.key]
        return True

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def check_integrity(self) -> None:
        """Raise AssertionError where the two directions of the map disagree."""
        assert len(self._by_key) == len(self._by_block)
        for block_id, block in self._by_block.items():
            assert block.block_id == block_id
            assert self._by_key[block.key] is block
            assert block.parent is not None
            assert self._key(block.parent, block.token_ids) == block.key

    def _key(self, parent: CachedBlock, token_ids: tuple[int, ...]) -> bytes:
        payload = parent.key + array("q", token_ids).tobytes()
        return blake2b(payload, digest_size=self._digest_size, person=b"block").digest()


def _is_same(one: CachedBlock | None, other: CachedBlock | None) -> bool:
    """Compare two prefixes by content, from their last block to where they meet."""
    while one is not other:
        if one is None or other is None or one.token_ids != other.token_ids:
            return False
        if one.extra_keys != other.extra_keys:
            return False
        one, other = one.parent, other.parent
    return True
