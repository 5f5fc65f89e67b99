"""Prompts as turns of a talk, and a model's chat template put around them as text.

A prompt is a list of messages: instruction and description are the system's, each shot is a
question of the user and an answer of the assistant, the document's question comes last. Without a
template their texts and delimiters are joined. With one, the delimiters fall away: each shot is a
turn (`fewshot_as_multiturn`), or all of them are joined into one message of the user. The rules are
those of lm-evaluation-harness 0.4.13 (`fewshot_context`, `build_qa_turn`, `multiturn_to_singleturn`
and `HFLM.apply_chat_template`). The result is text, which may start with the BOS token already:
who tokenizes it must not add another.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jinja2

from llmbench.bench.errors import BenchConfigError, BenchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """A turn, and what stands behind it where turns are joined as plain text."""

    role: Literal["system", "user", "assistant"]
    content: str
    delimiter: str = ""


def join(messages: Sequence[Message]) -> str:
    """Return the messages as plain text."""
    return "".join(message.content + message.delimiter for message in messages)


def delimit(prefix: str | None, suffix: str | None, delimiter: str) -> str:
    """Join two texts, with the delimiter unless white space stands at the joint already."""
    if not prefix or not suffix:
        return prefix or suffix or ""
    if prefix[-1].isspace() or suffix[0].isspace():
        return prefix + suffix
    return prefix + delimiter + suffix


def question_turn(question: str, prefix: str | None, delimiter: str) -> list[Message]:
    """Return the turns that ask: the user's, and how the answer has to begin, if it is said."""
    if not prefix:
        return [Message("user", question)]
    is_joined = question == "" or question[-1].isspace() or prefix[0].isspace()
    return [
        Message("user", question, "" if is_joined else delimiter),
        Message("assistant", prefix),
    ]


def shot_turns(
    question: str, answer: str, prefix: str | None, delimiter: str, closing: str
) -> list[Message]:
    """Return the turns of a shot; an empty answer is no turn, as in the harness."""
    if answer == "":
        return question_turn(question, prefix, delimiter)
    asked = (
        question_turn(question, prefix, delimiter)[0]
        if prefix
        else Message("user", question, delimiter)
    )
    return [asked, Message("assistant", delimit(prefix, answer, " "), closing)]


def single_turn(messages: Sequence[Message]) -> list[Message]:
    """Join all but the system's message, and a begun answer at the end, into one of the user."""
    head = [message for message in messages[:1] if message.role == "system"]
    turns = list(messages[len(head) :])
    tail = [turns.pop()] if turns[-1].role == "assistant" else []
    turns[-1] = replace(turns[-1], delimiter="")
    return [*head, Message("user", join(turns)), *tail]


@dataclass(kw_only=True)
class Chat:
    """How prompts are rendered with a tokenizer's chat template.

    `has_dropped_system` tells whether the template refused a system message, which is then left
    out, as the harness does.
    """

    tokenizer: Any
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True
    template: str | None = None  # a template's text, or the name of one of the tokenizer's
    has_dropped_system: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._refuse_unknown_name()
        try:
            self._template_text = str(self.tokenizer.get_chat_template(self.template))
        except (ValueError, AttributeError) as error:
            refusal = BenchConfigError(f"no chat template to apply: {error}")
            refusal.add_note("leave --apply-chat-template out for a model without one")
            raise refusal from error

    def _refuse_unknown_name(self) -> None:
        """transformers takes a name that it does not know for a template, and asks just that."""
        if self.template is None or "{" in self.template:
            return
        has = getattr(self.tokenizer, "chat_template", None)
        names = sorted(has) if isinstance(has, dict) else []
        if self.template not in names:
            refusal = BenchConfigError(f"the tokenizer has no chat template named {self.template}")
            known = f"it has {', '.join(names)}" if names else "its templates have no names"
            refusal.add_note(f"{known} (--chat-template)")
            raise refusal

    @property
    def digest(self) -> str:
        """Hash of what decides the text around a prompt."""
        parts = (self._template_text, self.system_instruction or "", str(self.fewshot_as_multiturn))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def render(self, messages: Sequence[Message], *, is_begun: bool) -> str:
        """Return the prompt; `is_begun` where the last message begins the answer."""
        turns = list(messages) if self.fewshot_as_multiturn else single_turn(messages)
        try:
            return self._apply(turns, is_begun)
        except jinja2.TemplateError as error:
            kept = [turn for turn in turns if turn.role != "system"]
            if len(kept) == len(turns):
                raise _refusal(error) from error
            reason = str(error)
        try:
            text = self._apply(kept, is_begun)
        except jinja2.TemplateError as error:
            raise _refusal(error) from error
        if not self.has_dropped_system:
            self.has_dropped_system = True
            logger.warning("the chat template takes no system message (%s): left out", reason)
        return text

    def _apply(self, turns: Sequence[Message], is_begun: bool) -> str:
        rendered = self.tokenizer.apply_chat_template(
            [{"role": turn.role, "content": turn.content} for turn in turns],
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
        )
        return str(rendered)


def _refusal(error: jinja2.TemplateError) -> BenchError:
    refusal = BenchError(f"the chat template refuses the prompt: {error}")
    refusal.add_note("try --no-fewshot-as-multiturn, or leave the chat template out")
    return refusal
