"""What every KV manager answers: how many tokens are there already, and is there room for more.

The scheduler knows only this protocol. All managers hand out *blocks* of `block_size` token
slots (a contiguous reservation is a run of neighbouring blocks), so batch building and attention
are the same for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmbench.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """State of the pool, in token slots unless said."""

    num_blocks: int
    num_free_blocks: int
    """Blocks that can be handed out, evictable cached ones included."""
    num_cached_blocks: int
    """Blocks held by nobody that keep a reusable prefix."""
    num_reserved_slots: int
    """Slots in blocks that live sequences hold, shared blocks counted once."""
    num_used_slots: int
    """Of these, slots with a computed token."""

    @property
    def num_wasted_slots(self) -> int:
        """Reserved slots without a token: internal fragmentation and reservation."""
        return self.num_reserved_slots - self.num_used_slots


class KVCacheManager(Protocol):
    """Owner of the KV pool's blocks."""

    block_size: int
    num_blocks: int
    keeps_kv: bool
    """False: nothing outlives a step, so a sequence is always computed whole (`uncached`)."""
    has_prefix_cache: bool
    """False: `match_prefix` never finds anything, so it counts as no query."""

    def max_tokens_ever(self) -> int:
        """Tokens of the longest sequence that an empty pool can hold."""

    def match_prefix(self, request: Request) -> int:
        """Take the cached blocks that hold the request's first tokens; return those tokens.

        Called once before the first `allocate_slots` of a (re)admitted request. At most
        `max_cached_tokens`, so that each position that has to yield logits is computed. If the
        following `allocate_slots` fails the blocks are given back.
        """

    def count_cached(self, request: Request) -> int:
        """Return how many tokens `match_prefix` would find now; takes nothing."""

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Make room for tokens up to `num_computed_tokens + num_new_tokens`; all or nothing."""

    def mark_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Say that K/V of the first so many tokens are written and verified.

        Only full blocks of these enter the prefix cache.
        """

    def free(self, request: Request) -> None:
        """Give back all that the request holds; a request that holds nothing is fine."""

    def block_ids(self, request: Request) -> Sequence[int]:
        """Blocks of the request, in the order of its tokens."""

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes that no live request holds; return the blocks forgotten."""

    def usage(self) -> KVUsage:
        """How the pool stands now."""

    def check_integrity(self) -> None:
        """Raise AssertionError where a block is lost, held twice or counted wrongly."""
