"""Chat templates: the harness's messages and rendering, restated here and compared.

`harness_context` restates `fewshot_context`, `build_qa_turn` and `multiturn_to_singleturn` of
lm-evaluation-harness 0.4.13 with plain dictionaries, independently of the code under test.
"""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.chat import Chat, Message, single_turn
from llmbench.bench.accuracy.prompts import Prompt, build_prompts
from llmbench.bench.accuracy.task_catalog import load_tasks
from llmbench.bench.accuracy.task_data import load_task_data
from llmbench.bench.errors import BenchConfigError, BenchError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}</{{ m.role }}>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
CHOICES = """\
task: own
output_type: multiple_choice
test_split: test
fewshot_split: dev
fewshot_config: {sampler: first_n}
local_files: {test: t.jsonl, dev: t.jsonl}
doc_to_text: "Q {{q}}"
doc_to_choice: "{{c}}"
doc_to_target: "{{a}}"
"""
WRITTEN = CHOICES.replace("multiple_choice", "generate_until").replace(
    'doc_to_choice: "{{c}}"\ndoc_to_target: "{{a}}"', 'doc_to_target: "{{c[a]}}"'
)
CONTEXTS = CHOICES.replace(
    'doc_to_choice: "{{c}}"\ndoc_to_target: "{{a}}"',
    'doc_to_contexts: "{{ [q ~ c[0], q ~ c[1]] }}"\ndoc_to_target: "rest {{q}}"\n'
    'doc_to_gold: "{{a}}"',
).replace('doc_to_text: "Q {{q}}"\n', "")
ROWS = [{"q": f"{n}?", "c": [f"x{n}", f"y{n}"], "a": n % 2} for n in range(3)]


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., list[Prompt]]:
    """Build the prompts of a task of one's own, each with the first two rows as shots."""

    def build(keys: str, **how: Any) -> list[Prompt]:
        (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
        (tmp_path / "own.yaml").write_text(keys, encoding="utf-8")
        (task,) = load_tasks(["own"], include=[tmp_path / "own.yaml"]).tasks
        return build_prompts(task, load_task_data(task, None), num_fewshot=2, **how)

    return build


def harness_turn(
    question: str, answer: str | None, prefix: str, target: str, few: str
) -> list[Any]:
    needs = bool(prefix) and not (question[-1].isspace() or prefix[0].isspace())
    behind = target if (answer and not prefix) or needs else ""
    turns = [["user", question, behind]]
    if answer:
        gap = "" if not prefix or prefix[-1].isspace() or answer[0].isspace() else " "
        turns.append(["assistant", prefix + gap + answer, few])
    elif prefix:
        turns.append(["assistant", prefix, ""])
    return turns


def harness_context(
    questions: list[str],
    answers: list[str],
    *,
    system: str,
    prefix: str,
    multiturn: bool,
    last_delimiter: str,
) -> str:
    """Render the last question behind the others as shots, with TEMPLATE."""
    turns: list[Any] = [["system", system, ""]] if system else []
    for question, answer in zip(questions, answers, strict=False):
        turns += harness_turn(question, answer, prefix, " ", "\n\n")
    turns += harness_turn(questions[-1], None, prefix, last_delimiter, "")
    if not multiturn:
        head = turns[:1] if system else []
        rest = turns[len(head) :]
        tail = [rest.pop()] if prefix else []
        rest[-1][2] = ""
        joined = "".join(content + behind for _, content, behind in rest)
        turns = [*head, ["user", joined, ""], *tail]
    text = "<s>" + "".join(f"<{role}>{content}</{role}>" for role, content, _ in turns)
    return text.removesuffix("</assistant>") if prefix else text + "<assistant>"


@pytest.mark.parametrize(
    ("multiturn", "prefix", "description", "instruction"),
    list(
        itertools.product([True, False], ["", "A:", "A: "], ["", "Say.", "Say.\n\n"], [None, "Be."])
    ),
)
def test_chat_contexts_equal_the_harness_s(
    own: Callable[..., list[Prompt]],
    byte_tokenizer: Callable[..., Any],
    multiturn: bool,
    prefix: str,
    description: str,
    instruction: str | None,
) -> None:
    keys = f"gen_prefix: {json.dumps(prefix)}\ndescription: {json.dumps(description)}\n"
    chat = Chat(
        tokenizer=byte_tokenizer(chat_template=TEMPLATE),
        system_instruction=instruction,
        fewshot_as_multiturn=multiturn,
    )
    is_joined = bool(instruction and description)
    system = (instruction or "") + ("\n\n" if is_joined else "") + description
    how: dict[str, Any] = {"system": system, "prefix": prefix, "multiturn": multiturn}
    answers = ["x0", "y1"]

    questions = ["Q 0?", "Q 1?", "Q 2?"]
    wanted = harness_context(questions, answers, last_delimiter=" ", **how)
    begins = " " if prefix == "A:" else ""
    assert own(CHOICES + keys, chat=chat)[2].pairs == (
        (wanted, begins + "x2"),
        (wanted, begins + "y2"),
    )
    assert own(WRITTEN + keys, chat=chat)[2].pairs == ((wanted, ""),)

    shots = ["0?x0", "1?y1"]
    contexts = [
        harness_context([*shots, option], ["rest 0?", "rest 1?"], last_delimiter="", **how)
        for option in ("2?x2", "2?y2")
    ]
    assert own(CONTEXTS + keys, chat=chat)[2].pairs == tuple(
        (context, begins + "rest 2?") for context in contexts
    )


def test_rendered_text_is_the_template_s_own(
    own: Callable[..., list[Prompt]], byte_tokenizer: Callable[..., Any]
) -> None:
    chat = Chat(tokenizer=byte_tokenizer(chat_template=TEMPLATE), system_instruction="Be.")
    assert own(CHOICES, chat=chat)[2].pairs[0] == (
        "<s><system>Be.</system><user>Q 0?</user><assistant>x0</assistant>"
        "<user>Q 1?</user><assistant>y1</assistant><user>Q 2?</user><assistant>",
        "x2",
    )
    chat.fewshot_as_multiturn = False
    assert own(CHOICES, chat=chat)[2].pairs[0][0] == (
        "<s><system>Be.</system><user>Q 0? x0\n\nQ 1? y1\n\nQ 2?</user><assistant>"
    )


def test_template_that_takes_no_system_message_gets_none_and_says_so(
    own: Callable[..., list[Prompt]],
    byte_tokenizer: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = Chat(tokenizer=byte_tokenizer(chat_template=NO_SYSTEM + TEMPLATE))
    plain = own(CHOICES, chat=chat)
    assert not chat.has_dropped_system
    chat.system_instruction = "Be."
    with caplog.at_level(logging.WARNING):
        assert own(CHOICES, chat=chat) == plain
    assert chat.has_dropped_system
    assert [record.message for record in caplog.records] == [
        "the chat template takes no system message (no system role): left out"
    ]


@pytest.mark.parametrize("instruction", [None, "Be."])
def test_template_that_refuses_the_prompt_is_an_error(
    own: Callable[..., list[Prompt]], byte_tokenizer: Callable[..., Any], instruction: str | None
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    chat = Chat(tokenizer=byte_tokenizer(chat_template=template), system_instruction=instruction)
    with pytest.raises(BenchError, match="refuses the prompt: roles must alternate"):
        own(CHOICES, chat=chat)


def test_tokenizer_without_a_template_is_refused(byte_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(BenchConfigError, match="no chat template to apply"):
        Chat(tokenizer=byte_tokenizer())


def test_named_template_is_the_one_that_is_applied(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "short": "{{ messages[0].content }}!"}
    chat = Chat(tokenizer=tokenizer, template="short")
    assert chat.render([Message("user", "hi")], is_begun=False) == "hi!"
    assert chat.digest != Chat(tokenizer=tokenizer).digest


def test_unknown_name_of_a_template_is_refused(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    with pytest.raises(BenchConfigError, match="no chat template named short"):
        Chat(tokenizer=tokenizer, template="short")
    tokenizer.chat_template = {"default": TEMPLATE}
    with pytest.raises(BenchConfigError, match="no chat template named short") as refused:
        Chat(tokenizer=tokenizer, template="short")
    assert refused.value.__notes__ == ["it has default (--chat-template)"]


def test_digest_tells_what_stands_around_a_prompt(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    chats = [
        Chat(tokenizer=tokenizer),
        Chat(tokenizer=tokenizer, system_instruction="Be."),
        Chat(tokenizer=tokenizer, fewshot_as_multiturn=False),
        Chat(tokenizer=tokenizer, template=TEMPLATE + " "),
    ]
    assert len({chat.digest for chat in chats}) == len(chats)
    assert Chat(tokenizer=tokenizer, template=TEMPLATE).digest == chats[0].digest


def test_single_turn_changes_no_message_of_the_caller() -> None:
    messages = [
        Message("user", "a", " "),
        Message("assistant", "b", "\n"),
        Message("user", "c", "!"),
    ]
    assert single_turn(messages) == [Message("user", "a b\nc")]
    assert messages[2].delimiter == "!"
