"""LLM: generate answers to a list of prompts, the engine's simplest door."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmbench.engine.config import EngineConfig
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import RequestError
from llmbench.engine.models.loader import LoadedModel
from llmbench.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class Completion:
    """One answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs]
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """A prompt with its `SamplingParams.n` answers."""

    prompt_token_ids: list[int]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs]
    """Of each prompt token but the first."""
    answers: list[Completion] = field(default_factory=list)


class LLM:
    """A loaded model that answers prompts, all of them batched together."""

    def __init__(self, model: str, *, loaded: LoadedModel | None = None, **config: Any) -> None:
        """Load `model`; `config` are fields of EngineConfig."""
        self.core = EngineCore(EngineConfig(model=model, **config), loaded=loaded)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestResult]:
        """Answer the prompts (texts or token ids), in their order.

        `sampling_params` is one for all prompts or one a prompt. Every prompt is checked before
        the first token is computed; raises RequestError for one that can never run.
        `on_progress` hears (answers finished, answers in all) after each step.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list; this is one text")
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts have {len(params)} sampling parameters")
        groups = [
            self.core.make_requests(prompt, one, f"llm-{next(self._ids)}")
            for prompt, one in zip(prompts, params, strict=True)
        ]
        requests = [request for group in groups for request in group]
        try:
            for group in groups:
                self.core.add_requests(group)
            while self.core.has_unfinished:
                self.core.step()
                if on_progress is not None:
                    on_progress(sum(r.is_finished for r in requests), len(requests))
        finally:  # an interrupted run leaves an engine that can be used again
            for request in requests:
                self.core.abort(request.request_id)
        return [_result(group) for group in groups]


def _result(group: list[Request]) -> RequestResult:
    first = group[0]
    return RequestResult(
        prompt_token_ids=first.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
        answers=[
            Completion(
                text=request.detokenizer.text if request.detokenizer is not None else "",
                token_ids=request.output_token_ids,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                logprobs=request.logprobs,
                error=request.error,
            )
            for request in group
        ],
    )
