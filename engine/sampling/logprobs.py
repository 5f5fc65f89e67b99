"""Log-probabilities as the model gives them: before bias, penalties, temperature and cuts.

They answer "how likely did the model find this token?", which scoring, perplexity and
log-probability fields of an API ask; what a request's settings made of the distribution is no
business of theirs. All of it is float32, from the raw logits, in chunks of rows: the only copies
of vocabulary width are those of one chunk.

Shapes: R rows of logits, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmbench.engine.request import TokenLogprobs
from llmbench.engine.sampling.logits import top_ordered

_CHUNK_ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Logits worked on at once: on a CPU so many that two float32 copies (2 MiB) stay in a cache."""


def row_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int | Sequence[int]
) -> list[TokenLogprobs]:
    """Return one `TokenLogprobs` a row of `logits` [R, V] for the token that stands there.

    `num_top` likeliest tokens are listed, for all rows or row by row. Rank and list order equal
    log-probabilities by id.
    """
    num_rows, vocab_size = logits.shape
    counts = [num_top] * num_rows if isinstance(num_top, int) else list(num_top)
    step = max(1, _CHUNK_ENTRIES.get(logits.device.type, 1 << 26) // vocab_size)
    result: list[TokenLogprobs] = []
    for start in range(0, num_rows, step):
        chunk = slice(start, start + step)
        result += _chunk_logprobs(logits[chunk], token_ids[chunk], counts[chunk])
    return result


def _chunk_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    scores = logits.float()
    vocab_size = scores.shape[1]
    chosen_ids = torch.tensor(token_ids, device=scores.device)[:, None]  # [R, 1]
    chosen = scores.gather(-1, chosen_ids)
    # Counted as float32, exact up to 2^24: torch sums booleans several times slower.
    mask = torch.empty_like(scores)
    rank = torch.gt(scores, chosen, out=mask).sum(-1) + 1
    num_equal = torch.eq(scores, chosen, out=mask).sum(-1)
    for row in (num_equal > 1).nonzero()[:, 0].tolist():
        rank[row] += mask[row, : token_ids[row]].sum()
    ranks = [int(value) for value in rank.tolist()]

    # log softmax, in the order of operations that keeps float32's digits: the peak goes first.
    peak = scores.amax(-1, keepdim=True)
    log_total = torch.sub(scores, peak, out=mask).exp_().sum(-1, keepdim=True).log_()
    chosen_logprobs: list[float] = (chosen - peak - log_total)[:, 0].tolist()

    width = min(max(counts), vocab_size)
    tops: list[list[tuple[int, float]]] = [[] for _ in counts]
    if width:
        values, ids = top_ordered(scores, width)
        logprobs = (values - peak - log_total).tolist()
        tops = [
            list(zip(row_ids[:count], row_logprobs_[:count], strict=True))
            for row_ids, row_logprobs_, count in zip(ids.tolist(), logprobs, counts, strict=True)
        ]
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
        for token_id, logprob, rank, top in zip(
            token_ids, chosen_logprobs, ranks, tops, strict=True
        )
    ]
