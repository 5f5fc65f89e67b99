"""The output head: from final hidden states to logits.

One matrix, and Gemma's soft cap where a model has it. It is a layer of its own because a model's
whole distribution over next tokens can be had from stored hidden states by the head alone,
without the layers below it (models/head.py).

Shapes: R rows, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from llmbench.engine.layers.linear import Linear


class OutputHead:
    """A linear layer of any weight format, and the cap on what it yields."""

    def __init__(self, linear: Linear, softcap: float | None) -> None:
        self.linear, self.softcap = linear, softcap

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, H] behind the last norm."""
        logits = self.linear(hidden)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
