"""Everything that is asked about one document, as text: built before any model is touched.

Contexts, continuations and hashes are those of lm-evaluation-harness 0.4.13 to the byte, so that
scores compare with published ones and runs pair, question by question, with the harness's sample
files: description, shots, question; a delimiter in front of each scored choice.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmbench.bench.accuracy.chat import (
    Chat,
    Message,
    delimit,
    join,
    question_turn,
    shot_turns,
)
from llmbench.bench.accuracy.fewshot import DEFAULT_SEED, choose_num_fewshot, draw_shots
from llmbench.bench.accuracy.task import Generation, Task
from llmbench.bench.accuracy.task_data import TaskData
from llmbench.bench.accuracy.templates import as_text, as_value
from llmbench.bench.errors import BenchConfigError, WorkloadError

Gold = int | tuple[int, ...] | str | tuple[str, ...]
"""Index, or indices, of what is right; or the text to write, or texts of which any is right."""

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked about one document."""

    task: str
    doc_id: int  # position in the evaluated split
    doc: Mapping[str, Any]  # the row, with the task's added fields
    fewshot_ids: tuple[int, ...]  # positions in the pool
    pairs: Pairs  # (context, continuation) a choice; (context, "") to write
    choices: tuple[str, ...]  # without delimiter; () unless there are choices
    gold: Gold
    text_size: tuple[int, int] | None  # words and bytes of the original text, where it is scored
    generation: Generation | None
    doc_hash: str
    prompt_hash: str
    target_hash: str
    rebuild: Callable[[tuple[int, ...]], Pairs] = field(repr=False, compare=False)

    def shorter(self, num_dropped: int) -> Pairs | None:
        """The pairs without the first shots; None where there are not so many."""
        if num_dropped > len(self.fewshot_ids):
            return None
        return self.rebuild(self.fewshot_ids[num_dropped:])


def build_prompts(
    task: Task,
    data: TaskData,
    *,
    num_fewshot: int | None = None,
    seed: int = DEFAULT_SEED,
    limit: int | None = None,
    chat: Chat | None = None,
    system_instruction: str | None = None,
) -> list[Prompt]:
    """Return the prompts of the first `limit` documents, with the shots of a whole run.

    `system_instruction` is for prompts without a chat template; with one, the chat has its own.

    Raises:
        WorkloadError: a row that the task's templates do not fit, or too few rows for the shots.
    """
    if limit is not None and limit < 1:
        raise BenchConfigError(f"the limit must be at least 1 document, found {limit}")
    count, _ = choose_num_fewshot(task, num_fewshot)
    if count and data.pool is None:
        raise WorkloadError(f"{task.name} needs {count} shots, its data was loaded without any")
    draws = draw_shots(
        data.docs,
        data.pool or (),
        count,
        seed=seed,
        sampler=task.sampler,
        must_exclude_doc=data.must_exclude_doc,
        where=f"the {data.pool_split} split of {task.name}",
    )
    builder = _Builder(task, data, chat, system_instruction)
    return [builder.prompt(doc_id, draws[doc_id]) for doc_id in range(len(data.docs))[:limit]]


class _Row:
    """A document, and the task's templates read on it."""

    def __init__(self, task: Task, row: Mapping[str, Any], place: str) -> None:
        self.task, self._place = task, place
        self.doc: dict[str, Any] = dict(row)
        added = {
            name: self._field(source, f"doc_fields.{name}")
            for name, source in task.doc_fields.items()
        }
        self.doc |= added

    def _field(self, source: str, key: str) -> Any:
        is_value = source.startswith("{{") and source.endswith("}}")
        return (as_value if is_value else as_text)(source, self.doc, self.where(key))

    def where(self, key: str) -> str:
        return f"{key} of the task {self.task.name}, {self._place}"

    def refuse(self, key: str, problem: str) -> WorkloadError:
        return WorkloadError(f"{self.where(key)}: {problem}")

    def text(self, source: str, key: str) -> str:
        found = as_text(source, self.doc, self.where(key))
        if not isinstance(found, str):
            raise self.refuse(key, f"needs a text, found {found!r}")
        return found

    def choices(self) -> tuple[str, ...]:
        """The choices' texts; where the options stand in the contexts, these."""
        key = "doc_to_choice" if self.task.doc_to_contexts is None else "doc_to_contexts"
        source = self.task.doc_to_contexts or self.task.doc_to_choice
        if source is None:
            return ()
        found = source if isinstance(source, tuple) else as_value(source, self.doc, self.where(key))
        if not isinstance(found, list | tuple) or len(found) < 2:
            raise self.refuse(key, f"needs a list of at least two texts, found {found!r}")
        if not all(isinstance(choice, str) for choice in found):
            error = self.refuse(key, f"needs texts, found {found!r}")
            error.add_note("turn numbers into texts: {{ choices | map('string') | list }}")
            raise error
        return tuple(found)

    def target(self) -> Any:
        """What the harness calls the target: an index, a text, or a list of either."""
        source = self.task.doc_to_target
        if isinstance(source, int):
            return source
        found = as_text(source, self.doc, self.where("doc_to_target"))
        if source in self.doc or not isinstance(found, str):
            return found
        has_choices = self.task.doc_to_choice is not None
        if found.isdecimal() and has_choices:  # not isdigit(): "²" is a digit and no number
            return int(found)
        if len(found) > 1 and found[0] == "[" and found[-1] == "]":
            try:
                return ast.literal_eval(found)
            except (SyntaxError, ValueError):
                return found
        return found

    def gold(self, choices: Sequence[str], target: Any) -> int | tuple[int, ...]:
        """The index or indices of the right choices."""
        key, found = "doc_to_target", target
        if self.task.doc_to_gold is not None:
            key = "doc_to_gold"
            found = as_value(self.task.doc_to_gold, self.doc, self.where(key))
        if isinstance(found, list):
            if not found:
                raise self.refuse(key, "no choice is right")
            return tuple(self._index(item, choices, key) for item in found)
        return self._index(found, choices, key)

    def _index(self, found: Any, choices: Sequence[str], key: str) -> int:
        if isinstance(found, str) and found in choices:
            return choices.index(found)
        if isinstance(found, int) and 0 <= found < len(choices):
            return int(found)
        raise self.refuse(
            key, f"{found!r} is neither one of the {len(choices)} choices nor its index"
        )

    def answer(self) -> tuple[str, str]:
        """The question and the answer of a shot."""
        target = self.target()
        if self.task.doc_to_contexts is not None:
            choices = self.choices()
            gold = self.gold(choices, target)
            question = choices[gold if isinstance(gold, int) else gold[0]]
            return question, str(target)
        answers = self.answers(target)
        question = self.text(self.task.doc_to_text, "doc_to_text")
        return question, answers if isinstance(answers, str) else answers[0]

    def answers(self, target: Any) -> str | tuple[str, ...]:
        """The text to write; of a list of targets, all texts, of which any is right."""
        if not isinstance(target, list):
            return self._answer(target)
        if not target:
            raise self.refuse("doc_to_target", "no answer is right")
        return tuple(map(self._answer, target))

    def _answer(self, target: Any) -> str:
        choices = self.choices() if isinstance(target, int) else ()
        return choices[self._index(target, choices, "doc_to_target")] if choices else str(target)

    def prefix(self) -> str | None:
        source = self.task.gen_prefix
        return self.text(source, "gen_prefix") if source else None


class _Builder:
    """The prompts of one task, with every shot rendered once."""

    def __init__(
        self, task: Task, data: TaskData, chat: Chat | None, system_instruction: str | None
    ) -> None:
        self._task, self._data, self._chat = task, data, chat
        self._instruction = chat.system_instruction if chat else system_instruction
        self._shots: dict[int, list[Message]] = {}
        self._shot_texts: dict[int, str] = {}

    def prompt(self, doc_id: int, shots: tuple[int, ...]) -> Prompt:
        """Build the prompt of a document."""
        task = self._task
        row = _Row(task, self._data.docs[doc_id], f"row {doc_id} of the split {task.eval_split}")
        target = row.target()
        choices: tuple[str, ...] = ()
        gold: Gold
        text_size = None
        if task.output_type == "loglikelihood_rolling":
            gold, text = "", str(target)
            source = task.doc_to_original
            original = row.text(source, "doc_to_original") if source else text
            text_size = len(re.split(r"\s+", original)), len(original.encode())
        elif task.output_type == "multiple_choice":
            choices = row.choices()
            gold = row.gold(choices, target)
        else:
            gold = row.answers(target)

        def build(shots: tuple[int, ...]) -> Pairs:
            if task.output_type == "loglikelihood_rolling":
                return (("", str(target)),)
            if task.output_type == "multiple_choice":
                return self._choice_pairs(row, shots, choices, target)
            question = row.text(task.doc_to_text, "doc_to_text")
            return ((self._context(row, shots, question), ""),)

        pairs = build(shots)
        is_rolling = task.output_type == "loglikelihood_rolling"
        prompt_text = pairs[0][1 if is_rolling else 0]
        return Prompt(
            task=task.name,
            doc_id=doc_id,
            doc=row.doc,
            fewshot_ids=shots,
            pairs=pairs,
            choices=choices,
            gold=gold,
            text_size=text_size,
            generation=task.generation,
            doc_hash=_hash(json.dumps(row.doc, indent=2, default=str, ensure_ascii=False)),
            prompt_hash=_hash(prompt_text),
            target_hash=_hash(str(target)),
            rebuild=build,
        )

    def _choice_pairs(
        self, row: _Row, shots: tuple[int, ...], choices: Sequence[str], target: Any
    ) -> Pairs:
        task = self._task
        delimiter = task.target_delimiter
        if self._chat is not None:  # a turn of the assistant starts with the answer itself
            begun = task.gen_prefix or ""
            delimiter = delimiter if begun and not begun[-1].isspace() else ""
        if task.doc_to_contexts is not None:
            return tuple(
                (self._context(row, shots, question), f"{delimiter}{target}")
                for question in choices
            )
        question = row.text(task.doc_to_text, "doc_to_text")
        context = self._context(row, shots, question)
        return tuple((context, delimiter + choice) for choice in choices)

    def _context(self, row: _Row, shots: tuple[int, ...], question: str) -> str:
        task = self._task
        description = row.text(task.description, "description") if task.description else ""
        system = delimit(self._instruction, description, task.fewshot_delimiter)
        prefix = row.prefix()
        # Options that stand in the context are complete: nothing is put behind them.
        delimiter = "" if task.doc_to_contexts is not None else task.target_delimiter
        asked = question_turn(question, prefix, delimiter)
        if self._chat is None:
            return system + "".join(self._shot_text(index) for index in shots) + join(asked)
        messages = [Message("system", system)] if system else []
        for index in shots:
            messages += self._shot(index)
        return self._chat.render([*messages, *asked], is_begun=bool(prefix))

    def _shot_text(self, index: int) -> str:
        if index not in self._shot_texts:
            self._shot_texts[index] = join(self._shot(index))
        return self._shot_texts[index]

    def _shot(self, index: int) -> list[Message]:
        if index not in self._shots:
            task = self._task
            assert self._data.pool is not None
            place = f"row {index} of the split {self._data.pool_split}"
            row = _Row(task, self._data.pool[index], place)
            question, answer = row.answer()
            self._shots[index] = shot_turns(
                question, answer, row.prefix(), task.target_delimiter, task.fewshot_delimiter
            )
        return self._shots[index]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
