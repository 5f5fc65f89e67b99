"""Conversations in the ShareGPT form, and the one exchange that a request is made of.

A row is {"conversations": [{"from": "human" | "gpt" | …, "value": text}, …]}. Its request asks
the first human turn, with a system text before it if there is one; the model's turn right after
tells how long the answer was. Turns of the model before the first human one are left out, and
later turns too. Peers take entries 0 and 1 whatever they are, and so send the model's own words,
a system line or an empty text as the prompt (aiperf#798, guidellm#305, LMFlow#942).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llmbench.bench.workloads.rows import RowError

# What datasets call the speakers, and what chat templates call them.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, with the role by the name that chat templates use."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sound row before tokenization: the turns of the prompt and what tells its answer's length.

    `output_len` counts for more than the tokens of `reply`; a row may have neither.
    """

    messages: tuple[Message, ...]
    reply: str | None = None
    output_len: int | None = None


def parse_conversation(row: Any) -> Candidate:
    """Return the first exchange of a ShareGPT row; raise RowError where there is none."""
    if not isinstance(row, dict):
        raise RowError("row is not an object")
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise RowError("no list of conversations")
    if not turns:
        raise RowError("empty conversation")
    messages: list[Message] = []
    rest = iter(turns)
    for turn in rest:
        message = parse_turn(turn, role_key="from", text_key="value")
        is_blank = not message.content.strip()
        if message.role == "user":
            if is_blank:
                raise RowError("blank text")
            return Candidate((*messages, message), reply=_reply(rest))
        if message.role == "system" and not is_blank:
            messages.append(message)
    raise RowError("no human turn")


def _reply(rest: Iterable[Any]) -> str:
    """Return the text of the next turn, which must be the model's."""
    for turn in rest:
        message = parse_turn(turn, role_key="from", text_key="value")
        if message.role != "assistant":
            break
        if not message.content.strip():
            raise RowError("blank text")
        return message.content
    raise RowError("no reply to the first human turn")


def parse_turn(turn: Any, *, role_key: str, text_key: str) -> Message:
    """Return one turn with its role translated; its text must be text."""
    if not isinstance(turn, dict):
        raise RowError("turn is not an object")
    name = turn.get(role_key)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"role {name!s:.30} is not one of human, gpt, system")
    return Message(role, parse_text(turn.get(text_key)))


def parse_text(value: Any) -> str:
    """Return a text, or the joined text parts of OpenAI's list form."""
    if isinstance(value, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in value
        ]
        if not all(isinstance(part, str) for part in parts):
            raise RowError("content holds more than text")
        value = "".join(str(part) for part in parts)
    if not isinstance(value, str):
        raise RowError("text is missing or not a string")
    try:
        value.encode()
    except UnicodeEncodeError as cause:
        # JSON's \ud83d alone is half a character; no tokenizer takes it.
        raise RowError("text is not valid Unicode") from cause
    return value
