"""What a server is and can do, found out by asking it a few short things before the evaluation.

Three things are settled here, since each of them spoils a score in silence when it is wrong:

- which dialect gives log-probabilities of a prompt (server_dialects.py), and that what comes
  back is that: a number at most 0 for each token but the first, not all alike. A server that
  ignores the question answers it too, with zeros or with the log-probability of what it generated;
- that the server's tokenizer is the one at hand: by its ids where it tokenizes on request, else
  by its count of tokens;
- whether prompts can be sent as ids. As text, the server may put a BOS token in front of the one
  that is there already; then its count of tokens decides which text is the same prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmbench.bench.accuracy.server_client import HttpAnswer, ServerClient
from llmbench.bench.accuracy.server_dialects import (
    DIALECTS,
    Dialect,
    PromptToken,
    num_prompt_tokens,
)
from llmbench.bench.errors import BenchConfigError, BenchError, TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptForm = Literal["ids", "text", "text without BOS"]

PROBE_TEXT = "In 1969, 3.14% of naïve users said: 안녕하세요!\n\tif (x != y) return 'why-not';"
_ROUNDING = 1e-3  # a log-probability of a certain token may come out this far above 0
_VERSIONS = (
    ("version", "version"),  # vLLM
    ("server_info", "version"),  # SGLang
    ("get_server_info", "version"),  # SGLang before 0.5.10
    ("props", "build_info"),  # llama.cpp
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the server lists it."""

    model_id: str
    max_model_len: int | None
    software: str | None
    """The server's name in its answers, and its version."""


def find_model(client: ServerClient, model: str | None) -> ServedModel:
    """Ask what is served; BenchConfigError where `model` is not, or None does not say which."""
    answer = client.ask("GET", "v1/models", max_retries=0)
    if answer.status != 200:
        raise answer.as_error()
    content = answer.json()
    rows = content.get("data") if isinstance(content, dict) else None
    rows = [row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)]
    ids = [row["id"] for row in rows]
    if model is None and len(ids) == 1:
        model = ids[0]
    if model is None or model not in ids:
        served = ", ".join(ids) or "no model at all"
        wanted = (
            "names no model, and it is not clear which" if model is None else f"wants {model!r}"
        )
        error = BenchConfigError(f"{client.root} serves {served}; the evaluation {wanted}")
        error.add_note("give the served model's name")
        raise error
    length = rows[ids.index(model)].get("max_model_len")
    return ServedModel(
        model, length if type(length) is int else _context_length(client), _software(client, answer)
    )


def find_dialect(
    client: ServerClient, model: str, tokenizer: "PreTrainedTokenizerBase"
) -> Dialect | BenchError:
    """Return the first dialect that gives a prompt's log-probabilities, or why none does."""
    ids = probe_ids(tokenizer)
    reasons = []
    for dialect in DIALECTS:
        answer = client.ask("POST", dialect.path, dialect.body(model, ids, 1))
        if answer.status != 200:
            reasons.append(f"{dialect.name}: {_refusal(answer)}")
            continue
        try:
            tokens = dialect.read(answer.json(), ids, 1)
        except TargetError as error:
            reasons.append(f"{dialect.name}: {error}")
            continue
        values = [token.logprob for token in tokens]
        if not all(math.isfinite(value) and value <= _ROUNDING for value in values):
            reasons.append(f"{dialect.name}: not log-probabilities: {values[:5]} ...")
        elif len(set(values)) == 1:
            reasons.append(f"{dialect.name}: {values[0]} for every token")
        else:
            _check_texts(tokens, ids[1:], tokenizer)
            return dialect
    refused = BenchError(
        f"{client.root} returns no log-probabilities of a prompt, which tasks scored by "
        f"log-likelihood need ({'; '.join(reasons)})"
    )
    refused.add_note(
        "start vLLM (`vllm serve MODEL`) or SGLang (`python -m sglang.launch_server --model-path "
        "MODEL`); llama.cpp's server has none. Tasks that generate text run on any server"
    )
    return refused


def check_tokenizer(
    client: ServerClient, model: str, tokenizer: "PreTrainedTokenizerBase"
) -> Literal["ids", "count", "unchecked"]:
    """Compare the server's tokenizer with ours; return by what. BenchConfigError if they differ."""
    ours = probe_ids(tokenizer)
    # The names of vLLM and SGLang, and those of llama.cpp; each ignores the others'.
    body = {"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False}
    answer = client.ask("POST", "tokenize", body | {"content": PROBE_TEXT, "add_special": False})
    theirs = _json_object(answer).get("tokens") if answer.status == 200 else None
    if isinstance(theirs, list) and all(type(token_id) is int for token_id in theirs):
        if theirs != ours:
            raise _differs(f"{PROBE_TEXT!r} is {theirs} there and {ours} here")
        return "ids"
    count = _counted(client, model, PROBE_TEXT)
    if count is None:
        return "unchecked"
    allowed = {len(ours), len(ours) + 1, len(tokenizer.encode(PROBE_TEXT))}  # with and without BOS
    if count not in allowed:
        raise _differs(f"{PROBE_TEXT!r} is {count} tokens there and {len(ours)} here")
    return "count"


def find_prompt_form(
    client: ServerClient, model: str, tokenizer: "PreTrainedTokenizerBase"
) -> PromptForm:
    """How a prompt must be sent so that the server reads the very ids; BenchError if no way is."""
    bos = tokenizer.bos_token_id
    ids = ([bos] if isinstance(bos, int) else []) + probe_ids(tokenizer)
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
    answer = client.ask("POST", "v1/completions", body)
    if answer.status == 200:
        count = num_prompt_tokens(answer.json())
        if count not in (None, len(ids)):
            raise BenchError(
                f"{client.root} counts {count} tokens in a prompt of {len(ids)} ids; it changes "
                "prompts, so no answer would be one to the question asked"
            )
        return "ids"
    if not 400 <= answer.status < 500 or answer.status in (401, 403, 404):
        raise answer.as_error()
    counts = {}
    forms: tuple[PromptForm, ...] = ("text without BOS", "text")
    for form in forms:
        counts[form] = _counted(client, model, prompt_text(ids, form, tokenizer))
        if counts[form] == len(ids):
            return form
    error = BenchError(
        f"{client.root} takes no token ids ({_refusal(answer)}), and as text a prompt of "
        f"{len(ids)} tokens counts {counts['text without BOS']} there, {counts['text']} with BOS"
    )
    error.add_note("the server must take `prompt` as a list of ids, or count tokens in `usage`")
    raise error


def prompt_text(ids: Sequence[int], form: PromptForm, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text of a prompt for a server that takes no ids."""
    if form == "text without BOS" and ids and ids[0] == tokenizer.bos_token_id:
        ids = ids[1:]
    text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def probe_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The probe as ids, without special tokens."""
    return list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))


def _check_texts(
    tokens: Sequence[PromptToken], ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Compare the server's words for the tokens with ours, where a token is whole characters."""
    for token, token_id in zip(tokens, ids, strict=True):
        ours = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert isinstance(ours, str)
        if token.text is None or token.text.startswith("bytes:") or "\ufffd" in ours + token.text:
            continue
        piece = tokenizer.convert_ids_to_tokens(token_id)
        if _bare(token.text) not in (_bare(ours), _bare(str(piece)), f"token_id:{token_id}"):
            raise _differs(f"token {token_id} is {token.text!r} there and {ours!r} here")


def _bare(text: str) -> str:
    """Without blanks, however they are written: decoders drop the one before a first token."""
    return text.translate({ord(mark): " " for mark in "▁ĠĊĉ"}).strip()


def _differs(how: str) -> BenchConfigError:
    error = BenchConfigError(f"the server's tokenizer is not the one given: {how}")
    error.add_note("give the tokenizer of the served model with --tokenizer")
    return error


def _counted(client: ServerClient, model: str, text: str) -> int | None:
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0.0}
    answer = client.ask("POST", "v1/completions", body)
    return num_prompt_tokens(_json_object(answer)) if answer.status == 200 else None


def _refusal(answer: HttpAnswer) -> str:
    return str(answer.as_error()).removeprefix(f"{answer.url} answered ")


def _context_length(client: ServerClient) -> int | None:
    """llama.cpp tells the length of a slot among its properties."""
    settings = _json_object(client.ask("GET", "props")).get("default_generation_settings")
    length = settings.get("n_ctx") if isinstance(settings, dict) else None
    return length if type(length) is int else None


def _software(client: ServerClient, answer: HttpAnswer) -> str | None:
    found = [answer.headers.get("Server")]
    for path, key in _VERSIONS:
        version = _json_object(client.ask("GET", path)).get(key)
        if isinstance(version, str):
            found.append(version)
            break
    return " ".join(name for name in found if name) or None


def _json_object(answer: HttpAnswer) -> dict[str, Any]:
    """The answer to a question that a server need not know; empty where it does not."""
    if answer.status != 200:
        return {}
    try:
        content = answer.json()
    except TargetError:
        return {}
    return content if isinstance(content, dict) else {}
