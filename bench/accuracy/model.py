"""What can be evaluated: anything that scores given continuations and goes on from a prompt.

An evaluation needs three things of a model: how likely it finds a given continuation, what it
says itself, and who it is. The last decides which stored answer is its own: `identity` holds all
that an answer may depend on, so that two models never share one. Requests are token ids, since
the evaluation itself decides how context and continuation are tokenized.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmbench.engine.models.head import Head
    from llmbench.engine.scoring import ContinuationScore, ScoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt to go on from.

    Attributes:
        prompt: Token ids, at least one.
        until: Strings that end the text, wherever token borders are; they are cut off.
        max_tokens: Most tokens of the answer.
        temperature: 0 is greedy.
        seed: Of the draws, where the temperature is above 0.
    """

    prompt: tuple[int, ...]
    until: tuple[str, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None


class EvaluatedModel(Protocol):
    """A model as an evaluation sees it."""

    @property
    def name(self) -> str:
        """As the user named it."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Of the model; its texts become ids with this one."""

    @property
    def max_length(self) -> int:
        """Longest context and continuation together, tokens."""

    @property
    def identity(self) -> dict[str, Any]:
        """All that an answer may depend on besides the request, as JSON types."""

    @property
    def notices(self) -> tuple[str, ...]:
        """What a reader of its answers should know of how they came about, a sentence each."""

    def check_scores(self) -> object:
        """Raise BenchError where the model cannot score at all; loads nothing."""

    def score(
        self, requests: "Sequence[ScoreRequest]", *, with_hidden: bool = False
    ) -> "Iterator[tuple[int, tuple[ContinuationScore, ...]]]":
        """Yield (index of the request, scores of its continuations) in order of completion.

        `with_hidden` also asks for the hidden states, which only a model with a `head` has.
        """

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, str]]:
        """Yield (index of the request, its answer's text) in order of completion."""

    def head(self) -> "Head | None":
        """What turns a final hidden state into logits; None where hidden states are not to be had.

        Divergence from a baseline needs it.
        """

    def close(self) -> None:
        """Give the memory back; what has been answered stays valid."""
