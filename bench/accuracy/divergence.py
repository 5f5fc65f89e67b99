"""How far a model's next-token distributions are from a baseline's, on the same text.

KL(base || candidate) at a position is the expected loss of log-likelihood, in nats, of reading
the base's own predictions with the candidate (Kullback and Leibler 1951). It is computed over
the whole vocabulary: both models' logits stand side by side for a few rows at a time and are
never stored. Unlike accuracy it moves before answers do, and unlike perplexity it cannot improve
by accident.

A final hidden state and the head determine the whole distribution, so a stored hidden state
gives an exact KL years later, at a fraction of a distribution's size. For a good candidate the
divergence is a small difference of large logarithms: heads multiply in float32, whatever type
the models compute in, since logits rounded to bfloat16 alone make a KL of 1e-4 nats, and sums run
in float64. Scores of tasks use the type of computation, so the log-probabilities here differ from
theirs by that rounding.

A token that one model excludes (logit -inf) has probability 0. Where only the base excludes it,
it adds nothing (0 log 0 = 0); where only the candidate does, the divergence is infinite, and is
reported as such. A NaN among a row's logits makes all its scores NaN.

Shapes: `R` positions of a call · `V` vocabulary · `H` hidden size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from llmbench.bench.accuracy.divergence_summary import clustered_mean
from llmbench.bench.accuracy.items import ItemDivergence
from llmbench.bench.errors import BenchError

CHUNK_ENTRIES = 1 << 19
"""Logits of each model that are worked on at once: 4 MiB in float64, which a cache holds."""
LOGIT_ROWS = 128
"""Positions whose logits are held at once, per model: 64 MiB in float32 at a vocabulary of
131,072, and enough rows that a head's weights are not read in vain."""


class HasLogits(Protocol):
    """What turns final hidden states into logits: a model's head, or a whole model."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V], float32 or wider, of final hidden states [R, H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDivergence:
    """A candidate against the base at each of R positions, on the CPU.

    Attributes:
        kl: KL(base || candidate) in nats, float64; 0 or more, inf, or NaN.
        delta_p: Probability of the target, candidate's minus base's, float64.
        same_top: Whether both find the same token likeliest (ties: the lowest id), bool.
        base_logprob: Of the target under the base, nats, float64.
        logprob: Of the target under the candidate.
    """

    kl: Tensor
    delta_p: Tensor
    same_top: Tensor
    base_logprob: Tensor
    logprob: Tensor

    def __len__(self) -> int:
        return len(self.kl)


def token_divergence(
    base_hidden: Tensor,
    base_head: HasLogits,
    hidden: Tensor,
    head: HasLogits,
    targets: Tensor | Sequence[int],
) -> TokenDivergence:
    """Compare two models by the final hidden states [R, H] that predict `targets` [R].

    The hidden sizes may differ, the vocabulary may not. Holds LOGIT_ROWS rows of logits a model.

    Raises:
        BenchError: rows or vocabularies do not correspond, or a head gives logits of less than
            float32.
    """
    targets = torch.as_tensor(targets, dtype=torch.int64)
    if not len(base_hidden) == len(hidden) == len(targets):
        raise BenchError(
            f"expected hidden states of {len(targets)} targets, found {len(base_hidden)} of the "
            f"base and {len(hidden)} of the candidate"
        )
    return _concatenate(
        [
            score_rows(
                _wide_logits(base_head, base_hidden[rows]),
                _wide_logits(head, hidden[rows]),
                targets[rows],
            )
            for rows in row_slices(len(targets), LOGIT_ROWS)
        ]
    )


def _wide_logits(head: HasLogits, hidden: Tensor) -> Tensor:
    logits = head.logits(hidden)
    if logits.dtype not in (torch.float32, torch.float64):
        raise BenchError(
            f"expected float32 logits, found {str(logits.dtype).removeprefix('torch.')}: their "
            "rounding is larger than a small divergence"
        )
    return logits


@torch.inference_mode()
def score_rows(base: Tensor, candidate: Tensor, targets: Tensor) -> TokenDivergence:
    """Compare two models by their logits [R, V] where `targets` [R] follow; V must agree.

    The two may lie on different devices; the work is done on the candidate's.
    """
    num_rows, vocab_size = candidate.shape
    if base.shape[1] != vocab_size:
        error = BenchError(
            f"expected the base's vocabulary of {base.shape[1]} tokens, found {vocab_size}: "
            "distributions over different vocabularies cannot be compared"
        )
        error.add_note("compare models that share a tokenizer")
        raise error
    device = candidate.device
    parts = []
    for rows in row_slices(num_rows, max(1, CHUNK_ENTRIES // vocab_size)):
        of_base, of_candidate = base[rows].to(device), candidate[rows]
        log_p = torch.log_softmax(of_base, dim=-1, dtype=torch.float64)
        log_q = torch.log_softmax(of_candidate, dim=-1, dtype=torch.float64)
        chosen = targets[rows, None].to(device)
        base_logprob, logprob = (log.gather(-1, chosen)[:, 0] for log in (log_p, log_q))
        same_top = of_base.argmax(dim=-1) == of_candidate.argmax(dim=-1)
        is_defined = ~(log_p[:, 0].isnan() | log_q[:, 0].isnan())  # one NaN makes a row of them
        # In place: log_q becomes the difference, log_p the probabilities.
        torch.sub(log_p, log_q, out=log_q)
        terms = log_p.exp_().mul_(log_q)
        kl = terms.sum(dim=-1)
        if kl.isnan().any():
            kl = terms.nansum(dim=-1)  # 0 log 0 = 0, and not 0 times inf
        kl.clamp_(min=0)
        parts.append(
            TokenDivergence(
                kl=kl.where(is_defined, math.nan).cpu(),
                delta_p=(logprob.exp() - base_logprob.exp()).where(is_defined, math.nan).cpu(),
                same_top=(same_top & is_defined).cpu(),
                base_logprob=base_logprob.cpu(),
                logprob=logprob.cpu(),
            )
        )
    return _concatenate(parts)


def item_divergence(parts: Sequence[TokenDivergence], base_key: str) -> ItemDivergence:
    """Put an item's continuations one after another, as its record holds them."""
    whole = _concatenate(list(parts))
    return ItemDivergence(
        base_key=base_key,
        kl=tuple(whole.kl.tolist()),
        delta_p=tuple(whole.delta_p.tolist()),
        same_top=tuple(whole.same_top.tolist()),
        base_logprob=tuple(whole.base_logprob.tolist()),
        logprob=tuple(whole.logprob.tolist()),
    )


def row_slices(num_rows: int, step: int) -> Iterator[slice]:
    """Cut rows into runs of `step`."""
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _concatenate(parts: list[TokenDivergence]) -> TokenDivergence:
    if not parts:
        empty = torch.empty(0, dtype=torch.float64)
        return TokenDivergence(
            kl=empty,
            delta_p=empty,
            same_top=empty.bool(),
            base_logprob=empty,
            logprob=empty,
        )
    names = TokenDivergence.__dataclass_fields__
    return TokenDivergence(
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A model's perplexity and its divergence from the base, over one text.

    Attributes:
        kl_sem: Standard error of the mean over windows, whose positions depend on one another;
            None for a single window.
        top1_agreement: Share of positions where both find the same token likeliest.
    """

    perplexity: float
    base_perplexity: float
    kl_mean: float
    kl_sem: float | None
    kl_p99: float
    top1_agreement: float
    num_tokens: int


class QualityTotals:
    """Gathers the positions of one candidate, window by window."""

    def __init__(self) -> None:
        self._nll = self._base_nll = 0.0
        self._kl: list[Tensor] = []
        self._window_ends: list[int] = []
        self._num_same = 0
        self.num_tokens = 0

    def add(self, scores: TokenDivergence) -> None:
        """Add some positions of the present window."""
        self._base_nll -= float(scores.base_logprob.sum())
        self._nll -= float(scores.logprob.sum())
        self._kl.append(scores.kl)
        self._num_same += int(scores.same_top.sum())
        self.num_tokens += len(scores)

    def end_window(self) -> None:
        """Say that the next positions belong to another window."""
        self._window_ends.append(self.num_tokens)

    @property
    def perplexity(self) -> float:
        """Of the positions so far."""
        return math.exp(self._nll / self.num_tokens)

    def result(self) -> Quality:
        """All of it."""
        kl = torch.cat(self._kl).numpy()
        windows = np.split(kl, self._window_ends[:-1])
        mean = clustered_mean([float(window.sum()) for window in windows], list(map(len, windows)))
        return Quality(
            perplexity=self.perplexity,
            base_perplexity=math.exp(self._base_nll / self.num_tokens),
            kl_mean=mean.value,
            kl_sem=mean.se,
            kl_p99=float(np.percentile(kl, 99)),
            top1_agreement=self._num_same / self.num_tokens,
            num_tokens=self.num_tokens,
        )
