"""A model run over whole texts, outside the scheduler: hidden states of one text at a time.

Perplexity and divergence read every position of a text and generate nothing, so they need no
queue, no sampling and no prefix cache; only the model, its attention and K/V for one text.
"""

import torch
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import ConfigError
from llmbench.engine.models.loader import LoadedModel, load_model

BLOCK_SIZE = 16


class WindowModel:
    """A loaded model with K/V for one text of at most `max_tokens`."""

    def __init__(self, config: EngineConfig, max_tokens: int) -> None:
        self.loaded: LoadedModel = load_model(config)
        if max_tokens > self.loaded.max_model_len:
            raise ConfigError(
                f"a window of {max_tokens} tokens is longer than the model's "
                f"{self.loaded.max_model_len}"
            )
        self._num_blocks = -(-max_tokens // BLOCK_SIZE)
        # Block 0 is the null block of every paged cache and is not written here.
        self._kv_caches = self.loaded.model.make_kv_cache((self._num_blocks + 1) * BLOCK_SIZE)

    @torch.inference_mode()
    def hidden(self, token_ids: list[int]) -> Tensor:
        """Hidden states [T, H] as `Model.forward` gives them, at every token of one text."""
        return self.loaded.model.forward(self._batch(token_ids), self._kv_caches)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [L, V] of rows [L, H] of `hidden`'s result."""
        return self.loaded.model.compute_logits(hidden)

    def _batch(self, token_ids: list[int]) -> ForwardBatch:
        device, length = self.loaded.device, len(token_ids)
        positions = torch.arange(length, device=device)
        blocks = torch.arange(1, self._num_blocks + 1, dtype=torch.int32, device=device)
        return ForwardBatch(
            input_ids=torch.tensor(token_ids, device=device),
            positions=positions,
            slot_mapping=positions + BLOCK_SIZE,
            query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
            block_table=blocks[None],
            logits_indices=torch.tensor([length - 1], device=device),
            block_size=BLOCK_SIZE,
            num_decodes=int(length == 1),
            query_lens=[length],
            context_lens=[length],
        )
