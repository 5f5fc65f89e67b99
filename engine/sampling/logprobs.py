"""Log-probabilities as the model gives them: before bias, penalties, temperature and cuts.

They answer "how likely did the model find this token?", which scoring, perplexity and
log-probability fields of an API ask; what a request's settings made of the distribution is no
business of theirs. All of it is float32, from the raw logits, in chunks of rows: the only copies
of vocabulary width are those of one chunk.

A row costs one log softmax, and one comparison for the rank of each token that is asked about,
which tells whether a text is the one that greedy decoding would have chosen.

Shapes: R rows of logits, V vocabulary, P pairs of a row and a token id.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llmbench.engine.request import TokenLogprobs
from llmbench.engine.sampling.logits import top_ordered

_CHUNK_ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Logits worked on at once: on a CPU so many that two float32 copies (2 MiB) stay in a cache."""
_SORT_ABOVE = 256
"""Tokens of a row from which one sort of it is cheaper than a comparison for each of them."""


def row_logprobs(
    logits: Tensor,
    token_ids: Sequence[int],
    num_top: int | Sequence[int],
    *,
    asked: Sequence[Sequence[int]] | None = None,
    rows: Sequence[int] | None = None,
) -> list[TokenLogprobs]:
    """Return one `TokenLogprobs` a row of `logits` [R, V] for the token that stands there.

    `num_top` likeliest tokens are listed, for all rows or row by row, and `asked` are further
    token ids of each row. `rows` takes these rows of `logits` in place of all; the other
    arguments count as they do. Rank and list order equal log-probabilities by id.
    """
    vocab_size = logits.shape[1]
    num_rows = len(token_ids)
    counts = [num_top] * num_rows if isinstance(num_top, int) else list(num_top)
    step = max(1, _CHUNK_ENTRIES.get(logits.device.type, 1 << 26) // vocab_size)
    result: list[TokenLogprobs] = []
    for start in range(0, num_rows, step):
        chunk = slice(start, start + step)
        scores = logits[chunk] if rows is None else logits[list(rows[chunk])]
        more = [()] * len(counts[chunk]) if asked is None else asked[chunk]
        result += _chunk_logprobs(scores.float(), token_ids[chunk], counts[chunk], more)
    return result


def _chunk_logprobs(
    scores: Tensor,
    token_ids: Sequence[int],
    counts: Sequence[int],
    asked: Sequence[Sequence[int]],
) -> list[TokenLogprobs]:
    num_rows, vocab_size = scores.shape
    # Pairs: the token of each row, then what else is asked of it.
    pair_rows = [*range(num_rows), *(row for row, ids in enumerate(asked) for _ in ids)]
    pair_ids = [*token_ids, *(token_id for ids in asked for token_id in ids)]
    rank = _ranks_on_cpu if scores.device.type == "cpu" else _ranks_by_torch
    ranks = rank(scores, pair_rows, pair_ids)
    all_logprobs = torch.log_softmax(scores, -1)
    logprobs = _take(all_logprobs, pair_rows, pair_ids)

    width = min(max(counts), vocab_size)
    tops: list[list[tuple[int, float]]] = [[] for _ in counts]
    if width:
        # By logits: log-probabilities of different ones may be equal, in float32.
        ids = top_ordered(scores, width)[1]
        top_logprobs = all_logprobs.gather(-1, ids).tolist()
        tops = [
            list(zip(row_ids[:count], of_row[:count], strict=True))
            for row_ids, of_row, count in zip(ids.tolist(), top_logprobs, counts, strict=True)
        ]
    result = []
    place = num_rows
    for row, more in enumerate(asked):
        own = slice(place, place + len(more))
        place += len(more)
        result.append(
            TokenLogprobs(
                token_id=token_ids[row],
                logprob=logprobs[row],
                rank=ranks[row],
                top=tuple(tops[row]),
                asked=tuple(zip(more, logprobs[own], ranks[own], strict=True)),
            )
        )
    return result


def _take(values: Tensor, rows: list[int], columns: list[int]) -> list[float]:
    """Return single entries; on a CPU by numpy, whose indexing costs a fraction of torch's."""
    if values.device.type == "cpu":
        taken: list[float] = values.numpy()[rows, columns].tolist()
        return taken
    index = torch.tensor([rows, columns], device=values.device)
    taken = values[index[0], index[1]].tolist()
    return taken


def _ranks_by_torch(scores: Tensor, pair_rows: list[int], pair_ids: list[int]) -> list[int]:
    """Return 1 + the tokens before each pair's in its row: larger ones, equal ones by id."""
    vocab_size = scores.shape[1]
    ids = torch.arange(vocab_size, device=scores.device)
    rows = torch.tensor(pair_rows, device=scores.device)
    own = torch.tensor(pair_ids, device=scores.device)
    step = max(1, _CHUNK_ENTRIES.get(scores.device.type, 1 << 26) // vocab_size)
    counted = []
    for start in range(0, len(pair_rows), step):
        pairs = slice(start, start + step)
        taken, chosen = scores[rows[pairs]], own[pairs, None]  # [P, V], [P, 1]
        value = taken.gather(-1, chosen)
        is_before = (taken > value) | ((taken == value) & (ids < chosen))
        counted.append(is_before.sum(-1) + 1)
    found: list[int] = torch.cat(counted).tolist()
    return found


def _ranks_on_cpu(scores: Tensor, pair_rows: list[int], pair_ids: list[int]) -> list[int]:
    """The same by numpy, which counts booleans an order of magnitude faster than torch."""
    rows = scores.numpy()
    orders: dict[int, np.ndarray] = {}
    if len(pair_rows) > _SORT_ABOVE:
        for row, count in enumerate(np.bincount(pair_rows)):
            if count > _SORT_ABOVE:
                order = np.argsort(-rows[row], kind="stable")
                orders[row] = np.empty_like(order)
                orders[row][order] = np.arange(1, len(order) + 1)
    ranks = []
    for row, token_id in zip(pair_rows, pair_ids, strict=True):
        if row in orders:
            ranks.append(int(orders[row][token_id]))
            continue
        values = rows[row]
        value = values[token_id]
        num_before = np.count_nonzero(values[:token_id] >= value)
        ranks.append(1 + int(num_before + np.count_nonzero(values[token_id:] > value)))
    return ranks
