"""How servers are asked for log-probabilities of a prompt: the same question in three dialects.

- `prompt_logprobs`: a field of vLLM's /v1/completions. The answer holds, for each prompt token,
  the log-probabilities of it and of the likeliest token, by token id.
- `generate`: SGLang's own endpoint, with `logprob_start_len`. The answer begins at that token, so
  the shared part of the prompts may come from the prefix cache. (Its /v1/completions leaves the
  echoed log-probabilities to this endpoint.)
- `echo`: `echo` with `logprobs`, as OpenAI's first completions had it. Prompt and answer come back
  in one list, by text; some servers demand a generated token behind it, some none.

Everywhere the entry of a token tells how likely it is behind those before it, so the first one has
none. llama.cpp's server has no such thing: /v1/completions refuses `echo`, and `n_probs` of its own
/completion speaks of generated tokens alone (ggml-org/llama.cpp issues #27174 and, for what a
harness makes of that, EleutherAI/lm-evaluation-harness #4158).

An answer is read with suspicion: each list must have the length that the prompt has, the first
entry must be empty, ids must be those that were sent. A null later on is a number that JSON could
not hold, and becomes NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from llmbench.bench.errors import TargetError


@dataclass(frozen=True, slots=True)
class PromptToken:
    """What an answer says about one token of the prompt."""

    logprob: float
    is_top: bool
    """No token that the answer lists is likelier; of equally likely ids the lowest is it."""
    text: str | None
    """As the server writes it, where it does."""


class Dialect(Protocol):
    """One way to ask for the log-probabilities of prompt tokens, and to read the answer."""

    @property
    def name(self) -> str:
        """As it stands in records."""

    @property
    def path(self) -> str:
        """Endpoint, behind the server's root."""

    @property
    def num_reserved(self) -> int:
        """Positions of the context that a scored sequence must leave free."""

    def body(self, model: str, ids: Sequence[int], start: int) -> dict[str, Any]:
        """The request for the tokens `ids[start:]`, `start` at least 1."""

    def read(self, answer: Any, ids: Sequence[int], start: int) -> list[PromptToken]:
        """What the answer says of `ids[start:]`; TargetError names the field that is wrong."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsDialect:
    """vLLM's `prompt_logprobs`."""

    name: ClassVar[str] = "prompt_logprobs"
    path: ClassVar[str] = "v1/completions"
    num_reserved: ClassVar[int] = 1  # the token that must be generated

    def body(self, model: str, ids: Sequence[int], start: int) -> dict[str, Any]:
        """The request."""
        return _completion(model, ids, max_tokens=1) | {"prompt_logprobs": 1}

    def read(self, answer: Any, ids: Sequence[int], start: int) -> list[PromptToken]:
        """The tokens of the answer."""
        field = "choices[0].prompt_logprobs"
        entries = _list(_choice(answer), "prompt_logprobs", field, len(ids))
        _first_is_null(entries[0], field)
        return [self._token(entries[i], ids[i], f"{field}[{i}]") for i in range(start, len(ids))]

    def _token(self, entry: Any, token_id: int, field: str) -> PromptToken:
        own = _get(entry, str(token_id), field)
        logprob = _number(_get(own, "logprob", f"{field}.{token_id}"), field)
        is_top = True
        for other_id, other in entry.items():
            value = _number(_get(other, "logprob", f"{field}.{other_id}"), field)
            is_top &= value < logprob or (value == logprob and int(other_id) >= token_id)
        text = own.get("decoded_token")
        return PromptToken(logprob, is_top, text if isinstance(text, str) else None)


@dataclass(frozen=True, slots=True)
class GenerateDialect:
    """SGLang's /generate."""

    name: ClassVar[str] = "generate"
    path: ClassVar[str] = "generate"
    num_reserved: ClassVar[int] = 3  # its limit on inputs is the context length - 3

    def body(self, model: str, ids: Sequence[int], start: int) -> dict[str, Any]:
        """The request: it begins a token early, since the first entry is always empty."""
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "top_logprobs_num": 1,
        }

    def read(self, answer: Any, ids: Sequence[int], start: int) -> list[PromptToken]:
        """The tokens of the answer."""
        info = _get(answer, "meta_info", "the answer")
        num_entries = len(ids) - start + 1
        own = _list(info, "input_token_logprobs", "meta_info.input_token_logprobs", num_entries)
        top = _list(info, "input_top_logprobs", "meta_info.input_top_logprobs", num_entries)
        _first_is_null(
            _triple(own[0], "meta_info.input_token_logprobs[0]")[0], "input_token_logprobs"
        )
        return [self._token(own[i], top[i], ids[start - 1 + i], i) for i in range(1, num_entries)]

    def _token(self, own: Any, tops: Any, token_id: int, index: int) -> PromptToken:
        field = f"meta_info.input_token_logprobs[{index}]"
        value, found_id, text = _triple(own, field)
        # SGLang writes 0 for the last id of its vocabulary (it clips what stands for images).
        if found_id not in (token_id, 0):
            raise TargetError(f"{field} is of token {found_id}, expected {token_id}")
        logprob = _number(value, field)
        field = f"meta_info.input_top_logprobs[{index}]"
        if not isinstance(tops, list) or not tops:
            raise TargetError(f"{field} is {_short(tops)}, expected a list of the likeliest token")
        is_top = True
        for entry in tops:
            other, other_id, _ = _triple(entry, field)
            other = _number(other, field)
            is_top &= other < logprob or (other == logprob and other_id >= token_id)
        return PromptToken(logprob, is_top, text if isinstance(text, str) else None)


@dataclass(frozen=True, slots=True)
class EchoDialect:
    """OpenAI's `echo` with `logprobs`."""

    max_tokens: int
    path: ClassVar[str] = "v1/completions"

    @property
    def name(self) -> str:
        """With the number of tokens that are generated for nothing."""
        return f"echo, max_tokens {self.max_tokens}"

    @property
    def num_reserved(self) -> int:
        """The generated token, where there is one."""
        return self.max_tokens

    def body(self, model: str, ids: Sequence[int], start: int) -> dict[str, Any]:
        """The request."""
        body = _completion(model, ids, max_tokens=self.max_tokens)
        return body | {"echo": True, "logprobs": 1}

    def read(self, answer: Any, ids: Sequence[int], start: int) -> list[PromptToken]:
        """The tokens of the answer; those generated behind the prompt are not looked at."""
        field = "choices[0].logprobs"
        logprobs = _get(_choice(answer), "logprobs", "choices[0]")
        lists = [
            # End-of-text may have come in place of the generated token.
            _list(logprobs, name, f"{field}.{name}", len(ids), len(ids) + self.max_tokens)
            for name in ("tokens", "token_logprobs", "top_logprobs")
        ]
        _first_is_null(lists[1][0], f"{field}.token_logprobs")
        texts, values, tops = lists
        return [self._token(texts[i], values[i], tops[i], i) for i in range(start, len(ids))]

    def _token(self, text: Any, value: Any, tops: Any, index: int) -> PromptToken:
        logprob = _number(value, f"choices[0].logprobs.token_logprobs[{index}]")
        field = f"choices[0].logprobs.top_logprobs[{index}]"
        if not isinstance(tops, dict):
            if not math.isnan(logprob):
                raise TargetError(f"{field} is {_short(tops)}, expected an object")
            tops = {}
        is_top = all(_number(other, field) <= logprob for other in tops.values())
        return PromptToken(logprob, is_top, text if isinstance(text, str) else None)


DIALECTS: tuple[Dialect, ...] = (
    PromptLogprobsDialect(),
    GenerateDialect(),
    EchoDialect(0),
    EchoDialect(1),
)
"""In the order in which they are tried: first those whose answers carry token ids."""


def completion_text(answer: Any) -> str:
    """The text of a completion's only choice; TargetError names the field that is wrong."""
    text = _get(_choice(answer), "text", "choices[0]")
    if not isinstance(text, str):
        raise TargetError(f"choices[0].text is {_short(text)}, expected a string")
    return text


def num_prompt_tokens(answer: Any) -> int | None:
    """How many tokens the server counted in the prompt, where it says so."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int else None


def _completion(model: str, ids: Sequence[int], *, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": list(ids), "max_tokens": max_tokens, "temperature": 0.0}


def _choice(answer: Any) -> Any:
    return _list(answer, "choices", "choices", 1)[0]


def _get(container: Any, key: str, field: str) -> Any:
    if not isinstance(container, dict) or key not in container:
        raise TargetError(f"{field} has no {key!r}: it is {_short(container)}")
    return container[key]


def _list(container: Any, key: str, field: str, *lengths: int) -> list[Any]:
    found = container.get(key) if isinstance(container, dict) else None
    if not isinstance(found, list):
        raise TargetError(f"{field} is {_short(found)}, expected a list")
    if len(found) not in lengths:
        expected = " or ".join(str(length) for length in dict.fromkeys(lengths))
        raise TargetError(f"{field} has {len(found)} entries, expected {expected}")
    return found


def _triple(entry: Any, field: str) -> tuple[Any, Any, Any]:
    if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int:
        raise TargetError(f"{field} is {_short(entry)}, expected [log-probability, id, text]")
    return entry[0], entry[1], entry[2] if len(entry) > 2 else None


def _first_is_null(value: Any, field: str) -> None:
    if value is not None:
        raise TargetError(
            f"{field} begins with {_short(value)}, expected null: nothing stands before the first "
            "token, so these are not log-probabilities of the prompt"
        )


def _number(value: Any, field: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TargetError(f"{field} holds {_short(value)}, expected a number")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
