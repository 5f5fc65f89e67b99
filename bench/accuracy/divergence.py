"""How far a model's next-token distributions are from a baseline's, on the same text.

KL(base || candidate) at a position is the expected loss of log-likelihood, in nats, of reading
the base's own predictions with the candidate (Kullback and Leibler 1951). It is computed over
the whole vocabulary from both models' logits, which stand side by side for a few rows at a time
and are never stored. Unlike accuracy it moves before answers do, and unlike perplexity it cannot
improve by accident.

Shapes: `R` positions of a call · `V` vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK_ENTRIES = 1 << 20
"""Logits of each model that are worked on at once: 4 MiB in float32, which a cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Every position's scores, in nats, as float32 [R]."""

    nll: Tensor
    kl: Tensor
    is_same_top: Tensor


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """[R] float32, minus the log-probability of each row's target."""
    return torch.cat(
        [
            torch.nn.functional.cross_entropy(logits[rows].float(), targets[rows], reduction="none")
            for rows in _chunks(logits)
        ]
    )


def score_rows(base: Tensor, candidate: Tensor, targets: Tensor) -> RowScores:
    """Scores of a candidate's logits [R, V] against the base's, with targets [R]."""
    nll, kl, same = [], [], []
    for rows in _chunks(base):
        log_p = torch.log_softmax(base[rows].float(), dim=-1)
        log_q = torch.log_softmax(candidate[rows].float(), dim=-1)
        nll.append(-log_q.gather(-1, targets[rows, None])[:, 0])
        same.append(log_p.argmax(dim=-1) == log_q.argmax(dim=-1))
        # In place: log_q becomes the difference, log_p the probabilities.
        torch.sub(log_p, log_q, out=log_q)
        kl.append(log_p.exp_().mul_(log_q).sum(dim=-1).clamp_(min=0))
    return RowScores(nll=torch.cat(nll), kl=torch.cat(kl), is_same_top=torch.cat(same))


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

    def add(self, base_nll: Tensor, scores: RowScores) -> None:
        """Add some positions of the present window."""
        self._base_nll += float(base_nll.double().sum())
        self._nll += float(scores.nll.double().sum())
        self._kl.append(scores.kl.cpu())
        self._num_same += int(scores.is_same_top.sum())
        self.num_tokens += len(scores.kl)

    def end_window(self) -> None:
        """Say that the next positions belong to another window."""
        self._window_ends.append(self.num_tokens)

    @property
    def perplexity(self) -> float:
        """Of the positions so far."""
        return math.exp(self._nll / self.num_tokens)

    def result(self) -> Quality:
        """All of it."""
        kl = torch.cat(self._kl).double().numpy()
        means = np.array([window.mean() for window in np.split(kl, self._window_ends[:-1])])
        sem = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
        return Quality(
            perplexity=self.perplexity,
            base_perplexity=math.exp(self._base_nll / self.num_tokens),
            kl_mean=float(kl.mean()),
            kl_sem=sem,
            kl_p99=float(np.percentile(kl, 99)),
            top1_agreement=self._num_same / self.num_tokens,
            num_tokens=self.num_tokens,
        )


def _chunks(logits: Tensor) -> list[slice]:
    num_rows, vocab_size = logits.shape
    step = max(1, CHUNK_ENTRIES // vocab_size)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
