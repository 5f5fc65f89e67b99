"""What an attention back end does: write this step's K/V, and read all of a sequence's K/V.

K/V of a layer live in one tensor of token slots, `kv_cache: [num_slots, 2 * Hkv, D]`, the key
heads of a token before its value heads, so that both are written and gathered in one operation.
A sequence's slots are found through its block table (Kwon et al. 2023, section 4.1). Attention
reads only from the cache, also for tokens of the same step: writing comes first. A cache of 8 bits
has rows of another width (int8_cache.py).

Legend: T tokens in the step · H / Hkv query / KV heads · D head dimension.
"""

from typing import Protocol

import torch

from llmbench.engine.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Attention over the paged KV cache."""

    name: str

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch
    ) -> None:
        """Put `key` and `value` [T, Hkv, D] at the batch's slots."""

    def attend(
        self,
        query: torch.Tensor,  # [T, H, D]
        kv_cache: torch.Tensor,  # [num_slots, 2 * Hkv, D]
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of each query token over its own sequence; returns [T, H, D]."""
