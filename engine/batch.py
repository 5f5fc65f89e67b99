"""ForwardBatch: all that a model and its attention layers know of a step.

Requests are flattened: the tokens of all sequences stand one after another, without padding.
Sequences with a single query token (decodes) come first, so that attention can take them
together.

Legend: B sequences · T tokens in this step · W blocks in the longest table · L rows with logits.
"""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """Inputs of one forward pass, on the model's device; the lists are host copies."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each token in its sequence
    slot_mapping: torch.Tensor  # [T] int64, block id * block_size + offset, where K/V are written
    query_start_loc: torch.Tensor  # [B + 1] int32, first token of each sequence
    seq_lens: torch.Tensor  # [B] int32, tokens of each sequence that attention sees
    block_table: torch.Tensor  # [B, W] int32, block ids of each sequence; later entries are stale
    logits_indices: torch.Tensor  # [L] int64, rows of [T] whose logits are wanted
    block_size: int
    num_decodes: int
    """The first `num_decodes` sequences have one query token each."""
    query_lens: list[int]  # [B]
    context_lens: list[int]  # [B], seq_lens on the host
    derived: dict[str, Any] = field(default_factory=dict)
    """What a back end computed from the rest, once a step; keyed by the back end."""

    @property
    def num_seqs(self) -> int:
        """Sequences in the step (B)."""
        return len(self.query_lens)
