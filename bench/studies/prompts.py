"""Prompts of exact lengths for studies: random tokens, the same for the same seed.

Speed does not depend on what a prompt says, so studies draw tokens and need no data set.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmbench.bench.workloads.random_tokens import draw_sequences, ordinary_token_ids
from llmbench.bench.workloads.streams import stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptSource:
    """Draws prompts for one model from one seed."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int, seed: int
    ) -> None:
        """Without a tokenizer nobody knows which ids are special, and all are drawn."""
        if tokenizer is not None:
            self._ids = ordinary_token_ids(tokenizer, vocab_size)
        else:
            self._ids = np.arange(vocab_size, dtype=np.int64)
        self._seed = seed

    @classmethod
    def of_folder(cls, folder: Path, vocab_size: int, seed: int) -> "PromptSource":
        """Make the source of a checkpoint folder, without loading torch."""
        from llmbench.bench.workloads.tokenizer import load_tokenizer
        from llmbench.engine.models.tokenizer import has_tokenizer

        tokenizer = load_tokenizer(str(folder)) if has_tokenizer(folder) else None
        return cls(tokenizer, vocab_size, seed)

    def draw(self, lengths: Sequence[int], name: str) -> list[tuple[int, ...]]:
        """Draw a prompt for each length, no two with the same beginning.

        The same name gives the same prompts; `name` says what they are for.
        """
        return draw_sequences(self._ids, lengths, stream(self._seed, name))
