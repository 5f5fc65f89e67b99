"""The `custom` dataset: a user's own JSONL, one request a line.

A line holds one of
    {"prompt": text}
    {"messages": [{"role": …, "content": …}, …]}       sent whole; a last turn of the model's is
                                                       taken off and tells the answer's length
    {"conversations": [{"from": …, "value": …}, …]}    first exchange only, as in `sharegpt`
and, if it likes, the tokens to generate as "max_tokens" or "output_len".
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from llmbench.bench.workloads.chat import ChatRenderer
from llmbench.bench.workloads.conversations import (
    Candidate,
    Message,
    parse_conversation,
    parse_text,
    parse_turn,
)
from llmbench.bench.workloads.prompt import Prompt
from llmbench.bench.workloads.rows import RowError, no_usable_row, read_json_lines
from llmbench.bench.workloads.selection import select_prompts
from llmbench.bench.workloads.workload import WorkloadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = ("prompt", "messages", "conversations")


def custom_prompts(
    config: WorkloadConfig, tokenizer: "PreTrainedTokenizerBase", max_model_len: int
) -> tuple[list[Prompt], dict[str, Any]]:
    """Draw prompts from a JSONL file."""
    path = str(config.dataset_path)
    skipped: Counter[str] = Counter()
    candidates = []
    for row in read_json_lines(path, skipped):
        try:
            candidates.append(parse_custom(row))
        except RowError as reason:
            skipped[str(reason)] += 1
    if not candidates:
        error = no_usable_row(path, skipped)
        error.add_note(f"a line has one of {', '.join(FORMS)}, and perhaps max_tokens")
        raise error
    renderer = ChatRenderer(tokenizer, skip_chat_template=config.skip_chat_template)
    prompts, notes = select_prompts(
        candidates,
        config,
        renderer,
        max_model_len,
        output_len=None,
        default_output_len=config.custom_output_len,
        skipped=skipped,
    )
    return prompts, notes | renderer.notes


def parse_custom(row: dict[str, Any]) -> Candidate:
    """Return what one line asks; raise RowError where it is unclear or nothing."""
    forms = [form for form in FORMS if form in row]
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise RowError(f"expected one of {', '.join(FORMS)}, found {found}")
    output_len = _output_len(row)
    if forms == ["conversations"]:
        candidate = parse_conversation(row)
        return Candidate(candidate.messages, candidate.reply, output_len)
    if forms == ["prompt"]:
        messages = [Message("user", parse_text(row["prompt"]))]
    else:
        turns = row["messages"]
        if not isinstance(turns, list) or not turns:
            raise RowError("messages is not a list of turns")
        messages = [parse_turn(turn, role_key="role", text_key="content") for turn in turns]
    reply = None
    if messages[-1].role == "assistant":
        reply = messages.pop().content
    if not any(message.content.strip() for message in messages):
        raise RowError("blank text")
    return Candidate(tuple(messages), reply, output_len)


def _output_len(row: dict[str, Any]) -> int | None:
    value = row.get("max_tokens", row.get("output_len"))
    if value is None:
        return None
    # bool is an int to Python; JSON's true is no length.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RowError("max_tokens is not a positive whole number")
    return value
