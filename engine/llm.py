"""LLM: generate answers to a list of prompts, the engine's simplest door."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmbench.engine.config import EngineConfig
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import RequestError
from llmbench.engine.models.loader import LoadedModel
from llmbench.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from llmbench.engine.request_groups import run_groups


@dataclass(slots=True, kw_only=True)
class Completion:
    """One answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs]
    error: str | None = None
    hidden_states: Tensor | None = field(default=None, compare=False)
    """[output tokens, H] where the request asks for them."""


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """A prompt with its `SamplingParams.n` answers."""

    prompt_token_ids: list[int]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs]
    """Of each prompt token that is asked for, never of the first."""
    prompt_hidden_states: Tensor | None = field(default=None, compare=False)
    """[entries of `prompt_logprobs`, H] where the request asks for them."""
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
        with closing(run_groups(self.core, iter(groups))) as steps:
            for _ in steps:
                if on_progress is not None:
                    on_progress(sum(r.is_finished for r in requests), len(requests))
        return [result_of(group) for group in groups]


def result_of(group: Sequence[Request]) -> RequestResult:
    """Return what the ended answers to one prompt make up."""
    first = group[0]
    return RequestResult(
        prompt_token_ids=first.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
        prompt_hidden_states=_join(first.prompt_hidden_states),
        answers=[
            Completion(
                text=request.detokenizer.text if request.detokenizer is not None else "",
                token_ids=request.output_token_ids,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                logprobs=request.logprobs,
                error=request.error,
                hidden_states=_join(request.hidden_states),
            )
            for request in group
        ],
    )


def _join(parts: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(parts)) if parts else None
