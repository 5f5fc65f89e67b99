"""A model behind any OpenAI-compatible server, evaluated like the built-in one.

Prompts go out as token ids, tokenized here with the served model's tokenizer, so that the server
answers the very question that the built-in engine would be asked. The probes of server_probe.py
run first. A server without log-probabilities of prompts still generates: its refusal is raised
when the first score is asked for, or before anything is asked with `check_scores`.

What stays unknown behind a URL: weights, their precision and the kernels. The identity of an
answer is therefore as much as the server tells, and a server that was restarted with other weights
under the same name looks the same, which the notices say.
"""

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmbench.bench.accuracy.answers import cut_at_stops
from llmbench.bench.accuracy.engine_model import tokenizer_digest
from llmbench.bench.accuracy.model import GenerateRequest
from llmbench.bench.accuracy.server_client import FIRST_PAUSE_S, MAX_RETRIES, Job, ServerClient
from llmbench.bench.accuracy.server_dialects import (
    Dialect,
    GenerateDialect,
    PromptLogprobsDialect,
    completion_text,
    num_prompt_tokens,
)
from llmbench.bench.accuracy.server_probe import (
    check_tokenizer,
    find_dialect,
    find_model,
    find_prompt_form,
    prompt_text,
)
from llmbench.bench.errors import BenchConfigError, BenchError, TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmbench.engine.models.head import Head
    from llmbench.engine.scoring import ContinuationScore, ScoreRequest

# Servers may take defaults out of the checkpoint's generation_config.json, such as a repetition
# penalty, which would change greedy answers.
_NEUTRAL = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_NEUTRAL_EXTENSIONS = {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}
"""Of vLLM and SGLang."""
UNSEEN_WEIGHTS = (
    "a server does not show its weights: one that is started again with others under the same "
    "name cannot be told from the first, and a folder of results would mix the two"
)
_LONGEST_BELIEVED = 10**7  # tokenizers without a limit say 10^30


class ServerModel:
    """An EvaluatedModel over HTTP; `close` ends its connections."""

    def __init__(
        self,
        base_url: str,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 16,
        timeout_s: float = 600.0,
        max_length: int | None = None,
        max_retries: int = MAX_RETRIES,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Connect and probe.

        `model` may be left out where the server has one alone; `api_key` None takes the
        environment's OPENAI_API_KEY; `max_length` is needed where the server tells no length.
        """
        self._tokenizer = tokenizer
        self._client = ServerClient(
            base_url,
            api_key=api_key if api_key is not None else os.environ.get("OPENAI_API_KEY"),
            concurrency=concurrency,
            timeout_s=timeout_s,
            max_retries=max_retries,
            first_pause_s=first_pause_s,
        )
        try:
            self._probe(model, max_length)
        except BaseException:
            self._client.close()
            raise

    def _probe(self, model: str | None, max_length: int | None) -> None:
        self._served = find_model(self._client, model)
        self.name = self._served.model_id
        self._tokenizer_check = check_tokenizer(self._client, self.name, self._tokenizer)
        self._prompt_form = find_prompt_form(self._client, self.name, self._tokenizer)
        self._dialect = find_dialect(self._client, self.name, self._tokenizer)
        self._is_extended = isinstance(self._dialect, PromptLogprobsDialect | GenerateDialect)
        self._special_ids = {
            added.content: token_id
            for token_id, added in self._tokenizer.added_tokens_decoder.items()
            if added.special
        }
        self._num_retokenized = 0
        self._max_length = self._longest(max_length)

    def _longest(self, asked: int | None) -> int:
        """How much a request may hold: what is asked for, and what the server has room for."""
        context = self._served.max_model_len
        self._is_length_guessed = context is None and asked is None
        if context is None and asked is not None:
            return asked
        if context is None:
            context = self._tokenizer.model_max_length
            if not 0 < context < _LONGEST_BELIEVED:
                error = BenchConfigError(
                    f"neither {self._client.root} nor the tokenizer says how long a prompt may be"
                )
                error.add_note("give the server's length, less a token or two, with --max-length")
                raise error
        reserved = 1 if isinstance(self._dialect, BenchError) else self._dialect.num_reserved
        # An evaluation may ask for a token more than max_length: the last one is not fed.
        room = context - reserved - 1
        if room < 1:
            raise BenchConfigError(f"a context of {context} tokens is too short to score in")
        return room if asked is None else min(room, asked)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The one given, found to be the server's as far as it can be told."""
        return self._tokenizer

    @property
    def max_length(self) -> int:
        """Longest context and continuation; the server's context less what its dialect needs."""
        return self._max_length

    @property
    def identity(self) -> dict[str, Any]:
        """What the server tells of itself, and how it is asked."""
        dialect = None if isinstance(self._dialect, BenchError) else self._dialect.name
        return {
            "kind": "server",
            "base_url": self._client.root,
            "model": self.name,
            "software": self._served.software,
            "tokenizer": tokenizer_digest(self._tokenizer),
            "dialect": dialect,
            "prompt_form": self._prompt_form,
        }

    @property
    def notices(self) -> tuple[str, ...]:
        """What a reader of the results should know, as sentences; repeats so far included."""
        found = [UNSEEN_WEIGHTS]
        if self._tokenizer_check != "ids":
            how = {"count": "only by its count of tokens", "unchecked": "not at all"}
            found.append(
                "whether the server's tokenizer is the one given was checked "
                + how[self._tokenizer_check]
            )
        if self._prompt_form != "ids":
            found.append(
                "the server takes no token ids; prompts were sent as text, and "
                f"{self._num_retokenized} of them came out with another number of tokens"
            )
        if self._is_length_guessed:
            found.append("the server does not tell its context length; the tokenizer's was taken")
        if repeats := self._client.repeats:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(repeats.items()))
            found.append(f"requests sent again: {repeats.total()} ({reasons})")
        return tuple(found)

    def check_scores(self) -> Dialect:
        """The dialect of log-likelihoods; raises BenchError where the server has none."""
        if isinstance(self._dialect, BenchError):
            raise self._dialect
        return self._dialect

    def score(
        self, requests: "Sequence[ScoreRequest]", *, with_hidden: bool = False
    ) -> "Iterator[tuple[int, tuple[ContinuationScore, ...]]]":
        """Yield (index of the request, scores of its continuations) in order of completion.

        Continuations of one request are sent one behind the other.
        """
        if with_hidden:
            raise BenchError(
                "a server does not give hidden states; divergence needs the built-in engine. Flips "
                "and paired tests still work"
            )
        return self._score(requests, self.check_scores()) if requests else iter(())

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, str]]:
        """Yield (index of the request, its answer's text) in order of completion."""
        jobs = (Job("v1/completions", (self._generation(request),)) for request in requests)
        for index, (answer,) in self._client.map(jobs):
            request = requests[index]
            try:
                text = completion_text(answer)
            except TargetError as error:
                raise TargetError(f"answer to request {index}: {error}") from error
            self._check_count(num_prompt_tokens(answer), len(request.prompt), index)
            # Some servers keep the stop string, and some know only a few of them.
            yield index, cut_at_stops(text, request.until)

    def head(self) -> "Head | None":
        """None: a server gives no hidden states."""
        return None

    def close(self) -> None:
        """Drop what is under way and end the connections."""
        self._client.close()

    def _score(
        self, requests: "Sequence[ScoreRequest]", dialect: Dialect
    ) -> "Iterator[tuple[int, tuple[ContinuationScore, ...]]]":
        from llmbench.engine.scoring import ContinuationScore  # torch, once something is scored

        jobs = (
            Job(
                dialect.path,
                [
                    dialect.body(self.name, request.context + continuation, len(request.context))
                    for continuation in request.continuations
                ],
            )
            for request in requests
        )
        for index, answers in self._client.map(jobs):
            request = requests[index]
            scores = []
            for place, (continuation, answer) in enumerate(
                zip(request.continuations, answers, strict=True)
            ):
                ids = request.context + continuation
                try:
                    self._check_count(num_prompt_tokens(answer), len(ids), index)
                    tokens = dialect.read(answer, ids, len(request.context))
                except TargetError as error:
                    raise TargetError(
                        f"answer to request {index}, continuation {place}: {error}"
                    ) from error
                logprobs = tuple(token.logprob for token in tokens)
                is_greedy = all(token.is_top for token in tokens)
                scores.append(
                    ContinuationScore(
                        logprobs=logprobs,
                        is_greedy=is_greedy and not any(map(math.isnan, logprobs)),
                        hidden=None,
                    )
                )
            yield index, tuple(scores)

    def _generation(self, request: GenerateRequest) -> dict[str, Any]:
        prompt: str | list[int] = list(request.prompt)
        if self._prompt_form != "ids":
            prompt = prompt_text(request.prompt, self._prompt_form, self._tokenizer)
        stops = [stop for stop in request.until if stop]
        body: dict[str, Any] = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            **_NEUTRAL,
        }
        if stops:
            body["stop"] = stops
        if request.seed is not None:
            body["seed"] = request.seed
        if self._is_extended:
            # A special token leaves no text behind, so a stop that is one is met as an id.
            ids = [self._special_ids[stop] for stop in stops if stop in self._special_ids]
            body |= _NEUTRAL_EXTENSIONS | ({"stop_token_ids": ids} if ids else {})
        return body

    def _check_count(self, found: int | None, expected: int, index: int) -> None:
        if found is None or found == expected:
            return
        if self._prompt_form != "ids":
            self._num_retokenized += 1
            return
        raise TargetError(
            f"request {index}: the server counts {found} tokens in a prompt of {expected} ids"
        )
