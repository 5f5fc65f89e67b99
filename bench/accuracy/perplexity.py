"""Perplexity of a text: the exponential of the mean loss a token, over windows of the text.

With nll_w the sum of -log p over the n_w scored tokens of window w, perplexity is
exp(sum nll_w / sum n_w). Windows need not score equally many tokens, so their own perplexities, or
their means, are never averaged: that would weigh the tokens of a short window more.

Per word and per byte it is comparable between models with different tokenizers: the loss of the
text's tokens is spread over the words and bytes of the raw text, as it was before tokenization.
Where not every token is scored, the unscored ones count with the mean of the others.

The interval is over windows (`intervals.ratio_interval`), since tokens of one window depend on each
other: to take each as a draw would promise too much.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmbench.bench.accuracy.intervals import ratio_interval
from llmbench.bench.accuracy.scoring import perplexity
from llmbench.bench.accuracy.text_windows import TextWindows


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLoss:
    """What one window adds: minus the log-probabilities of its scored tokens, nats; NaN allowed."""

    nll: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """A text's perplexity and what it rests on.

    Attributes:
        token: Per token; None where nothing was scored or some loss is no number.
        reason: Why it is None.
        low: Lower end of the 95 % interval, None for fewer than two windows.
        nll: Sum over the scored tokens, nats.
        num_tokens: Scored tokens.
        bits_per_byte: Loss of the text's tokens over its bytes, in bits.
        protocol: All that the numbers depend on besides the model.
    """

    token: float | None = None
    reason: str | None
    low: float | None = None
    high: float | None = None
    word: float | None = None
    byte: float | None = None
    bits_per_byte: float | None = None
    nll: float | None = None
    num_tokens: int
    num_windows: int
    num_words: int
    num_bytes: int
    protocol: str

    def to_record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def perplexity_of(losses: Sequence[WindowLoss], text: TextWindows) -> Perplexity:
    """Perplexity of the windows that were scored, in any order; costs nothing that needs a model.

    Call it with fewer losses than windows for the value so far.
    """
    num_tokens = sum(loss.num_tokens for loss in losses)
    num_words, num_bytes = text.source.num_words, text.source.num_bytes
    unsaid = sum(not math.isfinite(loss.nll) for loss in losses)
    reason = None
    if num_tokens == 0:
        reason = f"nothing is scored in {text.num_text_tokens} tokens" + (
            "" if text.has_bos else ": without BOS the first token has no context"
        )
    elif unsaid:
        reason = f"{unsaid} of {len(losses)} windows have a loss that is no number"
    facts: dict[str, Any] = {
        "reason": reason,
        "num_tokens": num_tokens,
        "num_windows": len(losses),
        "num_words": num_words,
        "num_bytes": num_bytes,
        "protocol": text.protocol,
    }
    if reason is not None:
        return Perplexity(**facts)
    nll = math.fsum(loss.nll for loss in losses)
    ends = ratio_interval([loss.nll for loss in losses], [loss.num_tokens for loss in losses])
    of_text = nll / num_tokens * text.num_text_tokens
    return Perplexity(
        token=perplexity(-nll, num_tokens),
        low=perplexity(-ends[0], 1) if ends else None,
        high=perplexity(-ends[1], 1) if ends else None,
        word=perplexity(-of_text, num_words) if num_words else None,
        byte=perplexity(-of_text, num_bytes),
        bits_per_byte=of_text / num_bytes / math.log(2),
        nll=nll,
        **facts,
    )
