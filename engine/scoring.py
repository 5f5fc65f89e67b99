"""ScoringEngine: how likely a model finds given texts, as requests to the serving engine.

Multiple choice, perplexity and every other question of log-likelihood come down to one: the
log-probability of each token of a continuation behind a context. A continuation of k tokens is a
prompt of the context and its first k - 1 tokens that reports the k - 1, and one output token of
which the k-th is asked: every computed position is used, and paged K/V, chunks, prefix cache and
quantized kernels do for scores what they do for serving. Scores of one engine are thus scores of
the engine that will serve.

Two ways of sharing follow from that. Continuations that differ in their last token alone (MMLU's
four letters) are one request that asks for several tokens. Others of one context wait until the
first has put the context into the prefix cache, and so do items behind the same examples.
"""

import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import RequestError
from llmbench.engine.llm import RequestResult, result_of
from llmbench.engine.request import Request, SamplingParams
from llmbench.engine.request_groups import run_groups

LIVE_PER_SEQUENCE = 4
"""Requests in the engine for each that can run: enough that no step wants for work while some
are held back, few enough that their number does not grow with the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A context and what is scored behind it."""

    context: tuple[int, ...]
    """Token ids, at least one."""
    continuations: tuple[tuple[int, ...], ...]
    """Token ids, at least one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationScore:
    """What the model gives to the tokens of one continuation."""

    logprobs: tuple[float, ...]
    """Nats, one a token; NaN where the model's numbers are broken."""
    is_greedy: bool
    """Whether each token is the likeliest one, of equal ones the lowest id."""
    hidden: Tensor | None
    """Final hidden states [tokens, H] that predict them, on the CPU, in the model's type."""

    @property
    def loglikelihood(self) -> float:
        """Log-probability of the whole continuation."""
        return math.fsum(self.logprobs)


class ScoringEngine:
    """Scores and answers a list of any length with an EngineCore, in bounded memory."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._ids = itertools.count()
        self._max_live = LIVE_PER_SEQUENCE * core.config.max_num_seqs

    def score(
        self, requests: Sequence[ScoreRequest], *, with_hidden: bool = False
    ) -> Generator[tuple[int, tuple[ContinuationScore, ...]]]:
        """Yield (index, a score for each continuation) as soon as an item is done.

        Items start in their order: put those with a common beginning, or of similar length, side
        by side. Raises RequestError that names the item; lengths are checked before anything
        runs. To stop early, close the iterator.
        """
        for index, request in enumerate(requests):
            self._check(index, request)
        return self._score(requests, with_hidden)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Generator[tuple[int, RequestResult]]:
        """Yield (index, answers) of each prompt as soon as they are done.

        Raises RequestError that names the prompt; lengths are checked before anything runs.
        """
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts have {len(params)} sampling parameters")
        for index, prompt in enumerate(prompts):
            with _named(f"prompt {index}"):
                self.core.scheduler.check_length(len(prompt))
        return self._generate(prompts, params)

    def _score(
        self, requests: Sequence[ScoreRequest], with_hidden: bool
    ) -> Generator[tuple[int, tuple[ContinuationScore, ...]]]:
        groups = (
            self._make_group(index, request, with_hidden) for index, request in enumerate(requests)
        )
        with closing(self._run(groups)) as ended:
            for index, group in ended:
                yield index, self._scores(requests[index], group, with_hidden)

    def _generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Generator[tuple[int, RequestResult]]:
        def make(index: int) -> list[Request]:
            with _named(f"prompt {index}"):
                return self.core.make_requests(prompts[index], params[index], self._new_id())

        with closing(self._run(make(index) for index in range(len(prompts)))) as ended:
            for index, group in ended:
                yield index, result_of(group)

    def _run(self, groups: Iterator[list[Request]]) -> Generator[tuple[int, list[Request]]]:
        running = run_groups(self.core, groups, max_live=self._max_live, share_across=True)
        with closing(running) as steps:
            for ended in steps:
                for index, group in ended:
                    cut = next((r for r in group if r.finish_reason == "abort"), None)
                    if cut is not None:
                        raise RequestError(f"item {index} was aborted while it ran")
                    yield index, group

    def _check(self, index: int, request: ScoreRequest) -> None:
        with _named(f"item {index}"):
            if not request.context:
                raise RequestError("the context must have at least 1 token, it has 0")
            if not request.continuations:
                raise RequestError("there must be at least 1 continuation, there is none")
        for place, continuation in enumerate(request.continuations):
            with _named(f"item {index}, continuation {place}"):
                if not continuation:
                    raise RequestError("the continuation must have at least 1 token, it has 0")
                try:
                    self.core.scheduler.check_length(
                        len(request.context) + len(continuation) - 1, num_unread=1
                    )
                except RequestError as error:
                    error.add_note(
                        f"the context has {len(request.context)} tokens, the continuation "
                        f"{len(continuation)}; its last one needs no place in the prompt"
                    )
                    raise

    def _make_group(self, index: int, request: ScoreRequest, with_hidden: bool) -> list[Request]:
        """Make a request for each beginning that the continuations have."""
        group = []
        for beginning, last_ids in _beginnings(request).items():
            params = SamplingParams(
                temperature=0.0,
                max_tokens=1,
                ignore_eos=True,
                prompt_logprobs=0 if beginning else None,
                prompt_logprobs_start=len(request.context) if beginning else 0,
                logprob_token_ids=tuple(last_ids),
                return_hidden_states=with_hidden,
                detokenize=False,
            )
            with _named(f"item {index}"):
                prompt = request.context + beginning
                group += self.core.make_requests(prompt, params, self._new_id())
        return group

    def _scores(
        self, request: ScoreRequest, group: Sequence[Request], with_hidden: bool
    ) -> tuple[ContinuationScore, ...]:
        beginnings = _beginnings(request)
        ended = dict(zip(beginnings, group, strict=True))
        hidden = {beginning: self._hidden(ended[beginning]) for beginning in beginnings}
        scores = []
        for continuation in request.continuations:
            beginning = continuation[:-1]
            one = ended[beginning]
            logprobs = [entry.logprob for entry in one.prompt_logprobs]
            ranks = [entry.rank for entry in one.prompt_logprobs]
            if one.logprobs:
                place = beginnings[beginning][continuation[-1]]
                _, logprob, rank = one.logprobs[0].asked[place]
                logprobs.append(logprob)
                ranks.append(rank)
            else:  # the row allowed no token: its logits are NaN or infinite
                logprobs.append(math.nan)
            is_sound = not any(map(math.isnan, logprobs))
            scores.append(
                ContinuationScore(
                    logprobs=tuple(logprobs),
                    is_greedy=is_sound and set(ranks) == {1},
                    hidden=hidden[beginning] if with_hidden else None,
                )
            )
        return tuple(scores)

    def _hidden(self, request: Request) -> Tensor | None:
        """The final hidden states that a request reported, NaN for a row that broke."""
        parts = [*request.prompt_hidden_states, *request.hidden_states]
        if not request.sampling_params.return_hidden_states:
            return None
        if not request.hidden_states:
            loaded = self.core.loaded
            parts.append(torch.full((1, loaded.hidden_size), math.nan, dtype=loaded.dtype))
        return torch.cat(parts)

    def _new_id(self) -> str:
        return f"score-{id(self):x}-{next(self._ids)}"


def _beginnings(request: ScoreRequest) -> dict[tuple[int, ...], dict[int, int]]:
    """Return all but the last token of the continuations → the last tokens, in order, numbered."""
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for continuation in request.continuations:
        last_ids = found.setdefault(continuation[:-1], {})
        last_ids.setdefault(continuation[-1], len(last_ids))
    return found


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say of whom a RequestError speaks."""
    try:
        yield
    except RequestError as error:
        named = RequestError(f"{what}: {error}")
        for note in getattr(error, "__notes__", ()):
            named.add_note(note)
        raise named from error
