"""Answers of a baseline and a candidate to the same prompts, and where they part.

Each prompt is answered twice: greedily, and sampled at temperature 0.7 with one seed. The engine's
noise is a function of the seed and the position alone, so both models are given the same draws:
sampled answers part where the distributions do, and not by luck.

Answers are compared by token ids, since the same text can be cut into different tokens; where the
two models have different tokenizers, only their texts can be compared. The first token that
differs is where to look: all that follows is written behind a different text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from llmbench.bench.accuracy.sample_prompts import SamplePrompt
from llmbench.bench.errors import BenchError
from llmbench.bench.strict_json import strict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmbench.engine.engine_core import EngineCore

Mode = Literal["greedy", "sampled"]

MAX_TOKENS = 128
TEMPERATURE = 0.7
SCHEMA_VERSION = 1
_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswer:
    """What one model answered.

    Attributes:
        ends: Length of the text up to and with each token; half a character is not text yet.
        pieces: Each token alone, special ones too.
        finish_reason: `stop` (it ended by itself), `length`, or `error`.
    """

    text: str
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]
    pieces: tuple[str, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first token that differs.

    Attributes:
        token: Its place, from 0; None where tokens cannot be compared.
        character: Length of the text before it, which both answers share.
        base, candidate: The two tokens as text; empty where an answer has ended.
    """

    token: int | None
    character: int
    base: str
    candidate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt in one mode, answered by the candidate and by the baseline if there is one."""

    prompt: SamplePrompt
    mode: Mode
    candidate: SampleAnswer
    base: SampleAnswer | None
    divergence: Divergence | None
    """None without a baseline, and where both answers are the same."""


def answer_prompts(
    core: "EngineCore",
    prompts: Sequence[SamplePrompt],
    *,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
    system_instruction: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[tuple[str, Mode], SampleAnswer]:
    """Answers by name of the prompt and mode, all in one batch.

    A prompt becomes a user's turn where the model has a chat template, and stands as it is
    otherwise. `on_progress` hears (answers finished, answers in all).

    Raises:
        BenchError: the model has no tokenizer, or a prompt does not fit it.
    """
    from llmbench.engine.errors import RequestError
    from llmbench.engine.request import SamplingParams

    if core.tokenizer is None:
        raise BenchError(f"{core.config.model} has no tokenizer, so it can answer no prompt")
    modes: dict[Mode, SamplingParams] = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=max_tokens),
        "sampled": SamplingParams(temperature=TEMPERATURE, max_tokens=max_tokens, seed=seed),
    }
    requests = {}
    for prompt in prompts:
        ids = prompt_ids(core.tokenizer, prompt.text, system_instruction)
        for mode, params in modes.items():
            try:
                made = core.make_requests(ids, params, f"sample-{prompt.name}-{mode}")
            except RequestError as refusal:
                raise BenchError(f"sample {prompt.name}: {refusal}") from refusal
            requests[prompt.name, mode] = made[0]
    try:
        for request in requests.values():
            core.add_request(request)
        while core.has_unfinished:
            core.step()
            on_progress(sum(one.is_finished for one in requests.values()), len(requests))
    finally:  # an interrupted run leaves an engine that can be used again
        for request in requests.values():
            core.abort(request.request_id)
    return {
        key: make_answer(
            core.tokenizer,
            request.detokenizer.text if request.detokenizer is not None else "",
            request.output_token_ids,
            request.finish_reason or "error",
        )
        for key, request in requests.items()
    }


def make_answer(
    tokenizer: "PreTrainedTokenizerBase", text: str, token_ids: Sequence[int], finish_reason: str
) -> SampleAnswer:
    """An answer with the text of its tokens."""

    def decode(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    heads = [
        decode(token_ids[:end], skip_special_tokens=True) for end in range(1, len(token_ids) + 1)
    ]
    return SampleAnswer(
        text=text,
        token_ids=tuple(token_ids),
        ends=tuple(len(head.rstrip(_HALF_CHARACTER)) for head in heads),
        pieces=tuple(decode([token], skip_special_tokens=False) for token in token_ids),
        finish_reason=finish_reason,
    )


def prompt_ids(
    tokenizer: "PreTrainedTokenizerBase", text: str, system_instruction: str | None = None
) -> list[int]:
    """Token ids of a prompt: in the chat template where there is one, which writes its own BOS."""
    if not tokenizer.chat_template:
        whole = text if system_instruction is None else f"{system_instruction}\n\n{text}"
        return [int(token) for token in tokenizer(whole)["input_ids"]]
    turns = [{"role": "user", "content": text}]
    if system_instruction is not None:
        turns.insert(0, {"role": "system", "content": system_instruction})
    try:
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except TemplateError as cause:
        raise BenchError(f"the model's chat template refuses a sample: {cause}") from cause
    return [int(token) for token in tokenizer.encode(rendered, add_special_tokens=False)]


def side_by_side(
    prompts: Sequence[SamplePrompt],
    candidate: dict[tuple[str, Mode], SampleAnswer],
    base: dict[tuple[str, Mode], SampleAnswer] | None,
    *,
    is_same_vocabulary: bool = True,
) -> list[Sample]:
    """Pair the answers, prompt by prompt, and find where they part."""
    samples = []
    for prompt in prompts:
        modes: tuple[Mode, ...] = ("greedy", "sampled")
        for mode in modes:
            theirs = None if base is None else base[prompt.name, mode]
            ours = candidate[prompt.name, mode]
            parted = None
            if theirs is not None:
                parted = first_difference(theirs, ours, is_same_vocabulary=is_same_vocabulary)
            samples.append(
                Sample(prompt=prompt, mode=mode, candidate=ours, base=theirs, divergence=parted)
            )
    return samples


def first_difference(
    base: SampleAnswer, candidate: SampleAnswer, *, is_same_vocabulary: bool = True
) -> Divergence | None:
    """Where two answers part; None where they are the same."""
    shared = _shared_prefix(base.text, candidate.text)
    if not is_same_vocabulary:
        if base.text == candidate.text:
            return None
        ends = (base.text[len(shared) :][:1], candidate.text[len(shared) :][:1])
        return Divergence(token=None, character=len(shared), base=ends[0], candidate=ends[1])
    if base.token_ids == candidate.token_ids:
        return None
    pairs = zip(base.token_ids, candidate.token_ids, strict=False)
    shortest = min(len(base.token_ids), len(candidate.token_ids))
    token = next((place for place, (a, b) in enumerate(pairs) if a != b), shortest)
    # Not all that the texts share: two different tokens may begin with the same letters.
    before = candidate.ends[token - 1] if token else 0
    return Divergence(
        token=token,
        character=min(before, len(shared)),
        base=_at(base, token),
        candidate=_at(candidate, token),
    )


def to_record(
    samples: Sequence[Sample], *, candidate: str, base: str | None, seed: int, max_tokens: int
) -> dict[str, Any]:
    """Samples as plain JSON: what `samples.json` holds, and what the pages are made of."""
    plain: dict[str, Any] = strict(
        {
            "schema_version": SCHEMA_VERSION,
            "candidate": candidate,
            "base": base,
            "seed": seed,
            "temperature": TEMPERATURE,
            "max_tokens": max_tokens,
            "samples": list(samples),
        }
    )
    return plain


def _at(answer: SampleAnswer, token: int) -> str:
    return answer.pieces[token] if token < len(answer.pieces) else ""


def _shared_prefix(first: str, second: str) -> str:
    pairs = zip(first, second, strict=False)
    end = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    return first[: min(len(first), len(second)) if end is None else end]
