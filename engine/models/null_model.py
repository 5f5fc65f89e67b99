"""A model that computes nothing: what remains of a step is the engine's own cost.

Every request gets the same token for ever, so scheduling, batch building, sampling and
bookkeeping run as for a real model while the forward pass takes no time.
"""

import torch

from llmbench.engine.batch import ForwardBatch


class NullModel:
    """No weights, no KV; its logits always favour `token_id`."""

    num_layers = 0
    kernel = "null"
    weight_bytes = 0

    def __init__(self, vocab_size: int = 64, token_id: int = 7) -> None:
        self._logits = torch.zeros(1, vocab_size)
        self._logits[0, token_id] = 1.0
        self._hidden = torch.zeros(1, 1)

    def make_kv_cache(self, num_slots: int) -> list[torch.Tensor]:
        """Nothing to keep."""
        return []

    def forward(self, batch: ForwardBatch, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        """Zeros [T, 1]."""
        return self._hidden.expand(batch.input_ids.shape[0], 1)

    def final_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same zeros: there is no norm."""
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same logits for each row, [L, V]."""
        return self._logits.expand(hidden.shape[0], -1)
