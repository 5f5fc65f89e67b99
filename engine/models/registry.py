"""What the engine asks of a model, and which of the two front ends runs a checkpoint.

`native` is the config-driven decoder (decoder.py), the fast path. `transformers` runs any other
decoder-only model through transformers' own code (transformers_backend.py). `auto` takes the
first that fits and says so where that is the slower one.
"""

import logging
from typing import Any, Protocol

import torch

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.config import ModelBackend
from llmbench.engine.errors import UnsupportedModelError
from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.families import architecture_of

logger = logging.getLogger(__name__)


class Model(Protocol):
    """A model over the paged KV cache."""

    @property
    def num_layers(self) -> int:
        """Layers with a KV cache of their own."""

    @property
    def kernel(self) -> str:
        """Which code runs, for the step record."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are held."""

    def make_kv_cache(self, num_slots: int) -> list[torch.Tensor]:
        """Zeroed K/V tensors [num_slots, 2 * Hkv, D], one a layer."""

    def forward(self, batch: ForwardBatch, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        """Hidden states [T, H]; writes K/V of the batch's tokens."""

    def final_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [L, H] of `forward`'s result behind the last norm: what the output head reads."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [L, V] of rows [L, H] of `forward`'s result."""


def choose_architecture(hf_config: Any, backend: ModelBackend) -> DecoderArchitecture | None:
    """The native decoder's architecture; None where transformers' code is to run the model.

    Raises:
        UnsupportedModelError: `native` was asked for and cannot run the model.
    """
    if backend == "transformers":
        return None
    try:
        return architecture_of(hf_config)
    except UnsupportedModelError as error:
        if backend == "native":
            error.add_note("--model-backend transformers may run it")
            raise
        logger.warning("%s: running transformers' own code, which is slower", error)
        return None
