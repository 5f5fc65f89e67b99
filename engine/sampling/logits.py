"""What a request asks to be done to its logits before a token is chosen.

The order is that of vLLM and transformers: forbid end-of-text (`min_tokens`), add `logit_bias`,
penalize repeated tokens, divide by the temperature, then cut the tail (top-k, top-p, min-p). The
first three are here; they touch few tokens of few rows, so they gather exactly those entries,
change them and put them back: a row that asks for nothing costs nothing, and the cost of a
penalty grows with the distinct tokens of its request and not with the vocabulary. The cuts only
ever keep the head of one order, likeliest first and equal values by id; `top_ordered` is that
order, exact even where values tie at the border, which bf16 logits often do.

Shapes: R rows of logits, V vocabulary.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from llmbench.engine.request import Request, SamplingParams

NO_TOKEN: Final = -1
"""Stands for the token of a row whose logits allow none: all -inf, or NaN or +inf among them."""

_TOP_BLOCK = 64  # entries; a block's maximum stands for it in the search for the top k
_FLOAT32_MAX = torch.finfo(torch.float32).max


def is_edited(request: Request) -> bool:
    """Whether the next token's logits are changed beyond temperature and cuts."""
    params = request.sampling_params
    return bool(
        params.logit_bias
        or _is_penalized(params)
        or (params.min_tokens and request.num_output_tokens < params.min_tokens)
    )


def _is_penalized(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


class _TokenCounts:
    """The distinct tokens of one request and how often each stands in its output.

    It follows the request as it grows, so that a step costs its new tokens and not all of them.
    Prompt tokens are in it, with count 0, where the repetition penalty asks for them.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.request = request
        self.token_ids = array("q")
        self.counts = array("q")
        self._places: dict[int, int] = {}
        self._num_seen = request.num_prompt_tokens
        if request.sampling_params.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(request.prompt_token_ids):
                # A head may be narrower than the embedding that the prompt was checked against.
                if token_id < vocab_size:
                    self._add(token_id, 0)

    def _add(self, token_id: int, count: int) -> None:
        place = self._places.setdefault(token_id, len(self.token_ids))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(count)
        else:
            self.counts[place] += count

    def follows(self, request: Request) -> bool:
        """Whether this is that very request, and none of its counted tokens was taken back."""
        return self.request is request and self._num_seen <= len(request.token_ids)

    def catch_up(self) -> None:
        for token_id in self.request.token_ids[self._num_seen :]:
            self._add(token_id, 1)
        self._num_seen = len(self.request.token_ids)


class LogitEditor:
    """Applies min_tokens, logit_bias and the penalties; remembers token counts between steps."""

    def __init__(self) -> None:
        self._counts: dict[str, _TokenCounts] = {}

    def __call__(self, scores: Tensor, requests: Sequence[Request]) -> None:
        """Change `scores` [R, V] float32 in place; row i holds requests[i]'s next token."""
        self._forbid_ends(scores, requests)
        self._add_bias(scores, requests)
        self._penalize(scores, requests)

    def _forbid_ends(self, scores: Tensor, requests: Sequence[Request]) -> None:
        rows: list[int] = []
        columns: list[int] = []
        for row, request in enumerate(requests):
            params = request.sampling_params
            if request.num_output_tokens >= params.min_tokens:
                continue
            ends = set(params.stop_token_ids)
            if not params.ignore_eos:
                ends |= request.eos_token_ids
            # The tokenizer may know of ends that the model has no logit for.
            present = [token_id for token_id in ends if token_id < scores.shape[1]]
            rows += [row] * len(present)
            columns += present
        if rows:
            scores[_index(rows, columns, scores)] = -math.inf

    def _add_bias(self, scores: Tensor, requests: Sequence[Request]) -> None:
        rows: list[int] = []
        columns: list[int] = []
        biases: list[float] = []
        for row, request in enumerate(requests):
            bias = request.sampling_params.logit_bias
            rows += [row] * len(bias)
            columns += bias.keys()
            biases += bias.values()
        if rows:
            index = _index(rows, columns, scores)
            added = torch.tensor(biases, dtype=torch.float64, device=scores.device)
            _put(scores, index, scores[index].double() + added)

    def _penalize(self, scores: Tensor, requests: Sequence[Request]) -> None:
        rows: list[int] = []
        lengths: list[int] = []
        columns = array("q")
        counted = array("q")
        strengths: list[tuple[float, float, float]] = []
        for row, request in enumerate(requests):
            params = request.sampling_params
            if not _is_penalized(params):
                continue
            counts = self._counts_of(request, scores.shape[1])
            rows.append(row)
            lengths.append(len(counts.token_ids))
            columns += counts.token_ids
            counted += counts.counts
            strengths.append(
                (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            )
        if not columns:
            return
        device = scores.device
        repeats = torch.tensor(lengths, device=device)
        places = torch.frombuffer(columns, dtype=torch.int64).to(device)
        times = torch.frombuffer(counted, dtype=torch.int64).to(device)
        index = (torch.tensor(rows, device=device).repeat_interleave(repeats), places)
        each = torch.tensor(strengths, dtype=torch.float64, device=device)
        repetition, frequency, presence = each.repeat_interleave(repeats, 0).unbind(-1)
        # float64: a penalty of 1e-300 must not divide by zero.
        values = scores[index].double()
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * times + presence * (times > 0)
        _put(scores, index, values)

    def _counts_of(self, request: Request, vocab_size: int) -> _TokenCounts:
        counts = self._counts.get(request.request_id)
        if counts is None or not counts.follows(request):
            # A new request is a rare event: the time to forget those that are over.
            self._counts = {k: c for k, c in self._counts.items() if not c.request.is_finished}
            counts = self._counts[request.request_id] = _TokenCounts(request, vocab_size)
        counts.catch_up()
        return counts


def _index(rows: list[int], columns: list[int], scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows, device=scores.device), torch.tensor(columns, device=scores.device)


def _put(scores: Tensor, index: tuple[Tensor, Tensor], values: Tensor) -> None:
    """Store float64 values; what float32 cannot hold becomes its largest number, not inf."""
    scores[index] = values.clamp(max=_FLOAT32_MAX).float()


def likeliest(logits: Tensor) -> list[int]:
    """Return the token of the largest logit of each row [R, V], the lowest id of equal ones.

    A row whose largest logit is not finite gives `NO_TOKEN`. On a CPU this goes through numpy:
    its argmax is vectorized, and ten times as fast as torch's (64 x 49,152 bf16: 1.5 ms against
    15 ms), conversion of one row at a time included.
    """
    if logits.device.type == "cpu":
        token_ids = []
        for row in logits:
            values = row.float().numpy()
            token_id = int(values.argmax())
            token_ids.append(token_id if math.isfinite(values[token_id]) else NO_TOKEN)
        return token_ids
    best = logits.argmax(-1, keepdim=True)
    best.masked_fill_(~logits.gather(-1, best).isfinite(), NO_TOKEN)
    found: list[int] = best[:, 0].tolist()
    return found


def top_ordered(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row of `scores` [R, V] as (values, ids), both [R, k].

    Largest first; equal values by id, also where they straddle the border of the k.
    """
    num_rows, vocab_size = scores.shape
    if k >= vocab_size:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    if vocab_size % _TOP_BLOCK == 0 and 2 * k * _TOP_BLOCK <= vocab_size:
        # The k largest entries lie in at most k blocks: those with the k largest maxima.
        blocks = scores.view(num_rows, -1, _TOP_BLOCK)
        maxima = blocks.amax(-1)
        chosen = maxima.topk(k).indices  # [R, k]
        inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _TOP_BLOCK)).flatten(1)
        values, places = inside.topk(k)
        ids = chosen.gather(1, places // _TOP_BLOCK) * _TOP_BLOCK + places % _TOP_BLOCK
        border = values[:, -1:]
        missed = (maxima >= border).sum(-1) - (maxima.gather(1, chosen) >= border).sum(-1)
        has_more_ties = (missed > 0) | ((inside >= border).sum(-1) > k)
    else:
        values, ids = scores.topk(k)
        has_more_ties = (scores >= values[:, -1:]).sum(-1) > k
    # Which of the values equal to the last one `topk` picks is not defined: take the lowest ids.
    for row in has_more_ties.nonzero()[:, 0].tolist():
        border = values[row, -1]
        num_above = int((values[row] > border).sum())
        ids[row, num_above:] = (scores[row] == border).nonzero()[: k - num_above, 0]
    ids = ids.sort(-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
