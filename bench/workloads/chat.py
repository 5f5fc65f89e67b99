"""From messages to the ids of a prompt, through the tokenizer's chat template.

A template writes the special tokens of its model into the text, BOS among them, so its text is
tokenized with `add_special_tokens=False`: otherwise there would be two BOS (open-r1#462). Text
that goes through no template gets what the tokenizer itself adds. Either way the ids equal those
of transformers' own calls, which also turn a control word inside a user's text into its id.

A template may refuse (`raise_exception`: no system message, turns that do not alternate); the row
is then counted under the template's own words.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2

from llmbench.bench.workloads.conversations import Message
from llmbench.bench.workloads.rows import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_RULE = "the chat template writes them; none are added to its text"
PLAIN_RULE = "the tokenizer adds its own to plain text"
IDS_RULE = "prompts are drawn as ordinary token ids and sent as they are; none are added"


class ChatRenderer:
    """Turns messages into a prompt's text and ids by one rule for all rows."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, skip_chat_template: bool) -> None:
        self.tokenizer = tokenizer
        self.has_template = bool(tokenizer.chat_template)
        self.uses_template = self.has_template and not skip_chat_template

    @property
    def notes(self) -> dict[str, str]:
        """How text becomes ids, for the record."""
        if self.uses_template:
            return {"chat_template": "applied", "special_tokens": TEMPLATE_RULE}
        why = "skipped" if self.has_template else "none in the tokenizer"
        return {"chat_template": why, "special_tokens": PLAIN_RULE}

    def render(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """Return text and ids; without a template the texts are joined by a blank line."""
        if self.uses_template:
            text = self._apply_template(messages)
        else:
            text = "\n\n".join(message.content for message in messages)
        ids = self.encode(text, add_special_tokens=not self.uses_template)
        if not ids:
            raise RowError("text has no tokens")
        return text, tuple(ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize without cutting, however long the text is."""
        # verbose=False: "longer than the model" is checked, and counted, elsewhere.
        encoding = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids: list[int] = encoding["input_ids"]
        return ids

    def _apply_template(self, messages: Sequence[Message]) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as refusal:
            raise RowError(f"chat template refused: {_one_line(refusal)}") from refusal
        except (TypeError, ValueError, LookupError, AttributeError) as fault:
            # What Python raises when a template adds None to a string, or indexes past the end.
            raise RowError(f"chat template failed: {_one_line(fault)}") from fault
        return str(text)


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 100 else words[:99] + "…"
