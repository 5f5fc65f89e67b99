"""From logits to tokens: the likeliest one, or one drawn with a single number per position.

A draw inverts the cumulative distribution: of the tokens that the cuts keep, in the order of
their ids, it takes the first whose cumulative probability exceeds that position's number
(rng.py). One number a token, and nothing but the row itself and that number decides.

Probabilities are integers here: exp(logit - peak) times a power of two, cut to 64 bits. Sums of
integers do not depend on their order, so that a token is the same whether a row is drawn alone
or in a batch, on one thread or many, over the whole vocabulary or over its likeliest 256 tokens
only; what is lost is below 2^-43 of the likeliest token's probability. `sample_reference` is the
specification: plain Python over one row.

Shapes: R rows of logits, V vocabulary, C likeliest tokens in order.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from llmbench.engine.request import Request, SamplingParams, TokenLogprobs
from llmbench.engine.sampling import rng
from llmbench.engine.sampling.logits import (
    NO_TOKEN,
    LogitEditor,
    is_edited,
    likeliest,
    top_ordered,
)
from llmbench.engine.sampling.logprobs import row_logprobs

_PASS_ENTRIES: Final = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Logits drawn from at once: on a CPU so many that their float32 and int64 copies (3 MiB) stay
in a second-level cache, elsewhere so many that they occupy the device."""
_BUCKETS: Final = 2048
_BUCKETS_PER_NAT: Final = 64.0  # 2048 / 64 = 32 nats below the peak: all but the last 1e-14
_FLOAT32_MAX: Final = torch.finfo(torch.float32).max


class SampledToken(NamedTuple):
    """What became of one row."""

    token_id: int
    """`NO_TOKEN` where there is an error."""
    logprobs: TokenLogprobs | None
    """Of the model's logits, if the request asks for them."""
    error: str | None
    """Why the row allows no token: the request ends with this, and its neighbours are unharmed."""


class Sampler:
    """Chooses the next token of each row."""

    def __init__(self) -> None:
        self._edit = LogitEditor()

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """Choose a token for each row of `logits` [R, V], of any float dtype, left as it is.

        Row i is the position behind requests[i]'s last token.
        """
        edited = [row for row, request in enumerate(requests) if is_edited(request)]
        if not edited:
            token_ids = _choose(logits, requests)
        else:
            token_ids = [NO_TOKEN] * len(requests)
            untouched = sorted(set(range(len(requests))).difference(edited))
            if untouched:
                asked = [requests[row] for row in untouched]
                _assign(token_ids, untouched, _choose(logits[untouched], asked))
            asked = [requests[row] for row in edited]
            scores = logits[edited].float()
            self._edit(scores, asked)
            _assign(token_ids, edited, _choose(scores, asked))

        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        wanted = [
            (row, num_top)
            for row, request in enumerate(requests)
            if (num_top := request.sampling_params.num_top_logprobs) is not None
            and token_ids[row] != NO_TOKEN
        ]
        if wanted:
            rows = [row for row, _ in wanted]
            found = row_logprobs(
                logits,
                [token_ids[row] for row in rows],
                [num_top for _, num_top in wanted],
                asked=[requests[row].sampling_params.logprob_token_ids for row in rows],
                rows=rows,
            )
            for row, of_row in zip(rows, found, strict=True):
                logprobs[row] = of_row
        return [
            SampledToken(token_id, of_row, None if token_id >= 0 else _why_none(logits[row]))
            for row, (token_id, of_row) in enumerate(zip(token_ids, logprobs, strict=True))
        ]


def _why_none(logits: Tensor) -> str:
    if logits.isnan().any():
        return "the model's logits hold NaN"
    if logits.isposinf().any():
        return "the model's logits hold +inf"
    return "every token of the vocabulary is forbidden"


def _choose(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Take the likeliest token of greedy rows and draw one of the others."""
    drawn = [row for row, r in enumerate(requests) if not r.sampling_params.is_greedy]
    if not drawn:
        return likeliest(logits)
    token_ids = [NO_TOKEN] * len(requests)
    if len(drawn) < len(requests):
        greedy = sorted(set(range(len(requests))).difference(drawn))
        _assign(token_ids, greedy, likeliest(logits[greedy]))
        logits = logits[drawn]
        requests = [requests[row] for row in drawn]
    numbers = [rng.uniform(r.rng_seed, len(r.token_ids), rng.TARGET) for r in requests]
    _assign(token_ids, drawn, draw(logits, [r.sampling_params for r in requests], numbers))
    return token_ids


def _assign(target: list[int], rows: Sequence[int], values: Sequence[int]) -> None:
    for row, value in zip(rows, values, strict=True):
        target[row] = value


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """Draw one token a row of edited `logits` [R, V]; every temperature is above 0.

    `numbers` are this position's `rng.uniform` of each row. Rows without a finite largest logit
    give `NO_TOKEN`.
    """
    vocab_size = logits.shape[1]
    device = logits.device
    token_ids = [NO_TOKEN] * len(params)
    by_top_k: dict[int, list[int]] = {}
    for row, p in enumerate(params):
        by_top_k.setdefault(_top_k(p, vocab_size), []).append(row)
    step = max(1, _PASS_ENTRIES.get(device.type, 1 << 26) // vocab_size)
    for top_k, same_k in by_top_k.items():
        for start in range(0, len(same_k), step):
            rows = same_k[start : start + step]
            asked = [params[row] for row in rows]
            scores = logits[rows].float()  # a copy: `rows` is a list
            peak = scores.amax(-1, keepdim=True)
            temperature = torch.tensor([min(p.temperature, _FLOAT32_MAX) for p in asked])
            # The peak goes first: the likeliest score stays 0 however small the temperature.
            scores.sub_(peak).div_(temperature.to(device)[:, None])
            is_sound: list[bool] = peak[:, 0].isfinite().tolist()
            if not all(is_sound):
                scores.masked_fill_(~peak.isfinite(), 0.0)  # drawn from as well, and thrown away
            is_whole = top_k == vocab_size
            if device.type != "cpu" and any(p.top_p < 1.0 for p in asked):
                is_whole = False  # one sort of all rows, instead of a dozen kernels for each
            draw_rows = _draw_whole if is_whole else _draw_top_k
            found = draw_rows(scores, asked, [numbers[row] for row in rows])
            for row, token_id, ok in zip(rows, found, is_sound, strict=True):
                token_ids[row] = token_id if ok else NO_TOKEN
    return token_ids


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def _draw_top_k(
    scores: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> list[int]:
    """Draw from rows [R, V] with the same top-k: all else happens among those C tokens."""
    vocab_size = scores.shape[1]
    device = scores.device
    values, ids = top_ordered(scores, _top_k(params[0], vocab_size))  # [R, C]
    weights = _weights(values, vocab_size)
    cumulative = weights.cumsum(-1)
    totals: list[int] = cumulative[:, -1].tolist()
    # top-p: the shortest head with at least this mass.
    enough = [_share_up(total, p.top_p) for total, p in zip(totals, params, strict=True)]
    length = torch.searchsorted(cumulative, torch.tensor(enough, device=device)[:, None]) + 1
    weights.masked_fill_(torch.arange(weights.shape[1], device=device) >= length, 0)
    _cut_min_p(weights, params, vocab_size)
    ids, by_id = ids.sort(-1)
    places = _invert(weights.gather(-1, by_id), numbers)
    found: list[int] = ids.gather(-1, places[:, None])[:, 0].tolist()
    return found


def _draw_whole(
    scores: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> list[int]:
    """Draw from rows [R, V] without top-k, sorting as little as top-p allows."""
    vocab_size = scores.shape[1]
    weights = _weights(scores, vocab_size)
    for row, p in enumerate(params):
        if p.top_p < 1.0:
            _cut_top_p(weights[row], scores[row], p.top_p)
    if any(p.min_p > 0.0 for p in params):
        _cut_min_p(weights, params, vocab_size)
    found: list[int] = _invert(weights, numbers).tolist()
    return found


def _cut_top_p(weights: Tensor, scores: Tensor, top_p: float) -> None:
    """Set the weights [V] of tokens outside the nucleus to 0.

    Scores are dealt into buckets; whole buckets are in or out, and only the one where the mass
    is reached needs its tokens in order. A full sort costs ten times as much on a CPU.
    """
    bucket = (scores * -_BUCKETS_PER_NAT).clamp_(max=_BUCKETS - 1).to(torch.int64)
    mass = weights.new_zeros(_BUCKETS).scatter_add_(0, bucket, weights).cumsum(0)
    enough = _share_up(int(mass[-1]), top_p)
    border = int(torch.searchsorted(mass, enough))
    inside = (bucket == border).nonzero()[:, 0]  # in the order of ids
    inside = inside[scores[inside].sort(descending=True, stable=True).indices]
    before = int(mass[border - 1]) if border else 0
    head = int(torch.searchsorted(weights[inside].cumsum(0), enough - before)) + 1
    weights[inside[head:]] = 0
    weights.masked_fill_(bucket > border, 0)


def _cut_min_p(weights: Tensor, params: Sequence[SamplingParams], vocab_size: int) -> None:
    """Set weights [R, C] below min-p's share of the likeliest token's to 0."""
    least = [_share_up(_unit(vocab_size), p.min_p) for p in params]
    weights.masked_fill_(weights < torch.tensor(least, device=weights.device)[:, None], 0)


def _weights(scores: Tensor, vocab_size: int) -> Tensor:
    """Return exp(score) as int64, in a unit so small that a vocabulary of ones is below 2^62."""
    return scores.exp().mul_(float(_unit(vocab_size))).to(torch.int64)


def _unit(vocab_size: int) -> int:
    return 1 << (62 - vocab_size.bit_length())


def _invert(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return the first place [R] of each row [R, C] whose cumulative weight exceeds u x total."""
    cumulative = weights.cumsum(-1)
    totals: list[int] = cumulative[:, -1].tolist()
    targets = [_share(total, number) for total, number in zip(totals, numbers, strict=True)]
    target = torch.tensor(targets, device=weights.device)[:, None]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _share(total: int, number: float) -> int:
    """Return the integer part of total x number, exactly: a float is a ratio of integers."""
    numerator, denominator = number.as_integer_ratio()
    return total * numerator // denominator


def _share_up(total: int, number: float) -> int:
    """Return the least integer that is no less than total x number."""
    return -_share(-total, number)


def sample_reference(logits: Tensor, request: Request) -> int:
    """Return the token of one row [V], as `Sampler` must: one plain step after the other."""
    params = request.sampling_params
    scores: list[float] = logits.float().tolist()
    vocab_size = len(scores)
    output = Counter(request.output_token_ids)
    if request.num_output_tokens < params.min_tokens:
        ends = set() if params.ignore_eos else set(request.eos_token_ids)
        for token_id in ends.union(params.stop_token_ids):
            scores[token_id] = -math.inf
    for token_id, bias in params.logit_bias.items():
        scores[token_id] = _to_float32(scores[token_id] + bias)
    for token_id in set(request.prompt_token_ids).union(output):
        score = scores[token_id]
        repetition = params.repetition_penalty
        score = score / repetition if score > 0 else score * repetition
        score -= params.frequency_penalty * output[token_id]
        score -= params.presence_penalty * (output[token_id] > 0)
        scores[token_id] = _to_float32(score)

    row = torch.tensor(scores)
    peak = row.max()
    if not peak.isfinite():
        return NO_TOKEN
    if params.is_greedy:
        return scores.index(float(peak))
    row = (row - peak) / torch.tensor(min(params.temperature, _FLOAT32_MAX))
    weights: list[int] = _weights(row, vocab_size).tolist()
    scores = row.tolist()
    kept = sorted(range(vocab_size), key=lambda token_id: (-scores[token_id], token_id))
    kept = kept[: _top_k(params, vocab_size)]
    enough = _share_up(sum(weights[token_id] for token_id in kept), params.top_p)
    mass = 0
    for length, token_id in enumerate(kept, start=1):
        mass += weights[token_id]
        if mass >= enough:
            kept = kept[:length]
            break
    least = _share_up(weights[kept[0]], params.min_p)
    kept = sorted(token_id for token_id in kept if weights[token_id] >= least)
    number = rng.uniform(request.rng_seed, len(request.token_ids), rng.TARGET)
    target = _share(sum(weights[token_id] for token_id in kept), number)
    cumulative = 0
    for token_id in kept:
        cumulative += weights[token_id]
        if cumulative > target:
            return token_id
    raise AssertionError("a share below the total is exceeded by the total")


def _to_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).clamp(max=_FLOAT32_MAX).float().item()
