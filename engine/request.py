"""A request: what was asked, how far it is, and what comes back.

There are no prefill and decode phases. A request has `num_computed_tokens` (tokens whose K/V
stand in the cache) and `num_tokens` (prompt + output + drafts); each step lets the first catch
up with the second. A prompt cut in chunks, a prefix-cache hit, a preemption and speculation are
all only other values of these two numbers.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from llmbench.engine.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from llmbench.engine.detokenizer import Detokenizer

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        n: Answers to the same prompt; answer i > 0 draws from its own noise.
        temperature: 0 is greedy; below 1e-5 counts as 0.
        top_p: Smallest set of likeliest tokens with this mass, in (0, 1].
        top_k: This many likeliest tokens; 0 or -1 keeps all; larger than the vocabulary keeps all.
        min_p: Drop tokens below this share of the likeliest one's probability, in [0, 1].
        seed: Makes the text a function of the request alone; None draws from the engine's seed.
        max_tokens: Most output tokens; None runs to the model's or the pool's length.
        min_tokens: No end-of-text, stop token or stop string before this many output tokens.
        stop: End when one of these appears in the text; it is cut off.
        stop_token_ids: End after one of these; it is kept in the ids, not in the text.
        ignore_eos: Do not end at the model's own end-of-text tokens.
        presence_penalty: Subtracted once from the logit of each token already in the output.
        frequency_penalty: Subtracted for each time a token stands in the output.
        repetition_penalty: Divides (multiplies, if negative) the logit of each token that stands
            in prompt or output; 1 is off (Keskar et al. 2019, section 4.1).
        logit_bias: Added to the logit of a token id; -inf forbids it.
        logprobs: Report the log-probability of each output token and of this many likeliest.
        prompt_logprobs: The same for each prompt token but the first. Neither temperature nor
            penalties enter log-probabilities: they are those of the model.
        prompt_logprobs_start: First prompt position that `prompt_logprobs` reports; what stands
            before its predecessor may come from the prefix cache. At most the prompt's length,
            which reports none.
        logprob_token_ids: Report the log-probability and rank of these ids, too, at each output
            token; implies `logprobs` 0.
        return_hidden_states: Keep the final hidden state, behind the last norm, that predicts
            each token whose log-probability is reported: of the prompt where `prompt_logprobs`
            asks for it, and each output token.
        skip_special_tokens: Leave end-of-text and the like out of the text.
        detokenize: Whether text is wanted at all.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    return_hidden_states: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {expected}, not {getattr(self, name)!r}")

        require(self.n >= 1, "n", "at least 1")
        # Written so that NaN fails each of these.
        require(0.0 <= self.temperature < float("inf"), "temperature", "finite and not negative")
        require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        require(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or a count")
        require(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        require(self.min_tokens >= 0, "min_tokens", "not negative")
        if self.max_tokens is not None:
            require(
                self.min_tokens <= self.max_tokens, "min_tokens", f"<= max_tokens {self.max_tokens}"
            )
        require(abs(self.presence_penalty) <= 2.0, "presence_penalty", "in [-2, 2]")
        require(abs(self.frequency_penalty) <= 2.0, "frequency_penalty", "in [-2, 2]")
        require(
            0.0 < self.repetition_penalty < float("inf"),
            "repetition_penalty",
            "positive and finite",
        )
        for token_id, bias in self.logit_bias.items():
            if not bias < float("inf"):
                raise RequestError(f"logit_bias of token {token_id} must be below inf, not {bias}")
        require(self.logprobs is None or self.logprobs >= 0, "logprobs", "not negative")
        require(
            self.prompt_logprobs is None or self.prompt_logprobs >= 0,
            "prompt_logprobs",
            "not negative",
        )
        require(self.prompt_logprobs_start >= 0, "prompt_logprobs_start", "not negative")
        require(
            self.prompt_logprobs is not None or not self.prompt_logprobs_start,
            "prompt_logprobs_start",
            "0 where prompt_logprobs is off",
        )
        if isinstance(self.stop, str):
            raise RequestError(f"stop must be a tuple of strings, not the string {self.stop!r}")
        require(all(self.stop), "stop", "free of empty strings")
        require(self.detokenize or not self.stop, "stop", "empty where detokenize is off")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken: temperature 0, or so small that it must be."""
        return self.temperature < 1e-5

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens to list at each output token; None reports no log-probabilities."""
        return 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (nats) of one position: of the token there, and of the likeliest ones."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), likeliest first."""
    asked: tuple[tuple[int, float, int], ...] = ()
    """(token id, log-probability, rank) of each of `logprob_token_ids`, in their order."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence in the engine; the scheduler alone changes its counters.

    `n` answers are n requests (`answer_index` 0 … n-1) of one `parent_id`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    rng_seed: int = 0
    """64-bit key of this request's sampling noise (see sampling/rng.py)."""
    parent_id: str = ""
    answer_index: int = 0
    detokenizer: "Detokenizer | None" = None
    arrival_s: float = 0.0

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output so far."""
    spec_token_ids: list[int] = field(default_factory=list)
    """Drafts that wait for verification."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    num_preemptions: int = 0
    max_tokens: int = 0
    """Output cap after the model's and the pool's length; set at admission."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Token id or string that ended the request; None for end-of-text and length."""
    error: str | None = None
    """Why the request failed, where `finish_reason` is "error"."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden_states: "list[Tensor]" = field(default_factory=list)
    """Of the output tokens, [1, H] each, on the CPU; empty if not asked for."""
    prompt_hidden_states: "list[Tensor]" = field(default_factory=list)
    """Of the reported prompt tokens, [n, H] of each step that computed some."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        if not self.parent_id:
            self.parent_id = self.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens to catch up with: prompt, output and drafts."""
        return len(self.token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far, as a new list."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def first_prompt_logprob(self) -> int:
        """First prompt position whose log-probability is reported; nothing predicts position 0."""
        return max(self.sampling_params.prompt_logprobs_start, 1)

    @property
    def max_cached_tokens(self) -> int:
        """First tokens of which K/V suffice: what is reported or sampled needs those behind."""
        if self.sampling_params.prompt_logprobs is not None and not self.num_output_tokens:
            return min(self.first_prompt_logprob, len(self.token_ids)) - 1
        return len(self.token_ids) - 1

    @property
    def num_unread_tokens(self) -> int:
        """Output tokens that need no place in the model or the pool: one that ends the request.

        Only where that token is asked about and not wanted, so that prompt and answer of all
        other requests stay within the model's length together.
        """
        params = self.sampling_params
        return int(params.max_tokens == 1 and bool(params.logprob_token_ids))

    def forget_report(self) -> None:
        """Drop what was reported of the prompt, which is going to be computed again."""
        self.prompt_logprobs.clear()
        self.prompt_hidden_states.clear()

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.status is RequestStatus.FINISHED


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one step added to one request; the last one has a `finish_reason`."""

    request_id: str
    parent_id: str
    answer_index: int
    new_token_ids: list[int]
    text_delta: str
    """New text; a tail that could still become a stop string or half a character is held back."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """All of them, on the output that carries the first new token."""
    error: str | None = None
