"""What an evaluation is going to ask: tasks, their documents, and every prompt as text.

Everything that can be wrong without a model is found here, within seconds: an unknown task, a
missing file, a row without an answer, a template that refuses a role. Few-shot examples are drawn
for all documents before any is left out, so a limit, a shard or a resumed run asks its documents
exactly what the whole run would.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmbench.bench.accuracy.chat import Chat
from llmbench.bench.accuracy.eval_config import PERPLEXITY, EvalConfig
from llmbench.bench.accuracy.fewshot import choose_num_fewshot
from llmbench.bench.accuracy.prompts import Prompt, build_prompts
from llmbench.bench.accuracy.questions import rule_of
from llmbench.bench.accuracy.task import Task, TaskGroup, TaskSelection
from llmbench.bench.accuracy.task_catalog import load_tasks
from llmbench.bench.accuracy.task_data import load_task_data
from llmbench.bench.accuracy.text_source import JOINER, Text, read_text
from llmbench.bench.errors import BenchConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTask:
    """A task with what is asked of it.

    Attributes:
        prompts: In order of the documents; without those of other shards.
        num_docs: Documents of the whole task.
        source: Where the rows are from.
        sha256s: Of the data, by split.
        deviations: How the data differ from what the task's name promises, a sentence each.
        notice: What was asked for and does not apply to the task.
    """

    task: Task
    prompts: tuple[Prompt, ...]
    num_docs: int
    source: str
    sha256s: Mapping[str, str]
    deviations: tuple[str, ...]
    notice: str | None = None

    @property
    def num_shots(self) -> int:
        """Solved examples before each question."""
        return max((len(prompt.fewshot_ids) for prompt in self.prompts), default=0)

    @property
    def num_requests(self) -> int:
        """Continuations to score, or answers to generate."""
        return sum(len(prompt.pairs) for prompt in self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEval:
    """All that is asked, before a model is known but for its chat template.

    Attributes:
        text: What `perplexity` reads, where it is among the tasks; `text_limit` its first windows.
        chat: How prompts were rendered; None where they are plain text.
    """

    config: EvalConfig
    tasks: tuple[PreparedTask, ...]
    groups: tuple[TaskGroup, ...]
    text: Text | None
    text_limit: int | None
    chat: Chat | None

    @property
    def num_items(self) -> int:
        """Documents to ask; the windows of a text are not known before it is tokenized."""
        return sum(len(each.prompts) for each in self.tasks)

    @property
    def deviations(self) -> tuple[str, ...]:
        """How the data differ from what the tasks' names promise, each said once."""
        found = [line for each in self.tasks for line in each.deviations]
        return tuple(dict.fromkeys(found))

    @property
    def notices(self) -> tuple[str, ...]:
        """What was asked for and does not apply, and how the data deviate; each said once."""
        ignored = [each.notice for each in self.tasks if each.notice is not None]
        return (*dict.fromkeys(ignored), *self.deviations)

    def facts(self) -> dict[str, Any]:
        """What a reader of the results wants to know of the questions, as JSON types."""
        return {
            "tasks": {
                each.task.name: {
                    "version": each.task.version,
                    "digest": each.task.digest,
                    "output_type": each.task.output_type,
                    "num_fewshot": each.num_shots,
                    "num_docs": each.num_docs,
                    "num_items": len(each.prompts),
                    "source": each.source,
                    "sha256s": dict(each.sha256s),
                    "deviations": list(each.deviations),
                }
                for each in self.tasks
            },
            "groups": {group.name: list(group.members) for group in self.groups},
            "chat": None
            if self.chat is None
            else {
                "sha256": self.chat.digest,
                "name": self.chat.template,
                "template": self.chat.tokenizer.get_chat_template(self.chat.template),
                "system_instruction": self.chat.system_instruction,
                "fewshot_as_multiturn": self.chat.fewshot_as_multiturn,
                "has_dropped_system": self.chat.has_dropped_system,
            },
            "text": None
            if self.text is None
            else {"name": self.text.name, "sha256": self.text.sha256, "joiner": self.text.joiner},
        }


def prepare(
    config: EvalConfig, *, load_tokenizer: "Callable[[], PreTrainedTokenizerBase] | None" = None
) -> PreparedEval:
    """Read the tasks and their data and write every prompt.

    `load_tokenizer` is called where a chat template is asked for.

    Raises:
        BenchError: an unknown task, data that are missing or broken, or a template that fails.
    """
    names = [name for name in config.tasks if name != PERPLEXITY]
    selection = TaskSelection(tasks=(), groups=())
    if names:
        selection = load_tasks(names, include=config.include)
    members = _members(selection)
    _check_limits(config, selection, members)
    for task in selection.tasks:
        rule_of(task)  # an unknown metric or filter is an error now, not behind the first answer
    chat = None
    if config.apply_chat_template:
        if load_tokenizer is None:
            raise BenchConfigError("a chat template needs the model's tokenizer")
        multiturn = config.fewshot_as_multiturn
        chat = Chat(
            tokenizer=load_tokenizer(),
            system_instruction=config.system_instruction,
            fewshot_as_multiturn=True if multiturn is None else multiturn,
            template=config.chat_template,
        )
    text = None
    if config.text is not None:
        joiner = JOINER if config.joiner is None else config.joiner
        text = read_text(config.text, data_dir=config.data_dir, joiner=joiner)
    return PreparedEval(
        config=config,
        tasks=tuple(
            _prepare_task(task, config, config.limit_of(task.name, members), chat)
            for task in selection.tasks
        ),
        groups=selection.groups,
        text=text,
        text_limit=config.limit_of(PERPLEXITY, {}),
        chat=chat,
    )


def _prepare_task(
    task: Task, config: EvalConfig, limit: int | None, chat: Chat | None
) -> PreparedTask:
    num_shots, notice = choose_num_fewshot(task, config.num_fewshot)
    data = load_task_data(task, config.data_dir, needs_pool=num_shots > 0)
    prompts = build_prompts(
        task,
        data,
        num_fewshot=config.num_fewshot,
        seed=config.seed,
        limit=limit,
        chat=chat,
        system_instruction=config.system_instruction,
    )
    if config.shard is not None:
        index, count = config.shard
        prompts = [prompt for prompt in prompts if prompt.doc_id % count == index]
    for line in data.deviations:
        logger.info("%s: %s", task.name, line)
    return PreparedTask(
        task=task,
        prompts=tuple(prompts),
        num_docs=len(data.docs),
        source=str(data.source),
        sha256s=data.sha256s,
        deviations=data.deviations,
        notice=notice,
    )


def _members(selection: TaskSelection) -> dict[str, tuple[str, ...]]:
    """Return the names of all tasks and groups below each group and tag."""
    found = {group.name: _leaves(group, selection.groups) for group in selection.groups}
    for task in selection.tasks:
        for tag in task.tags:
            found[tag] = (*found.get(tag, ()), task.name)
    return found


def _leaves(group: TaskGroup, groups: tuple[TaskGroup, ...]) -> tuple[str, ...]:
    """Return the names of all that is below a group, groups included."""
    by_name = {each.name: each for each in groups}
    found: list[str] = []
    for name in group.members:
        found.append(name)
        if name in by_name:
            found += _leaves(by_name[name], groups)
    return tuple(dict.fromkeys(found))


def _check_limits(
    config: EvalConfig, selection: TaskSelection, members: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse a limit for a name that is not asked for: it would change nothing, silently."""
    if not isinstance(config.limits, Mapping):
        return
    known = {task.name for task in selection.tasks} | members.keys() | {"*", *config.tasks}
    if unknown := sorted(config.limits.keys() - known):
        error = BenchConfigError(f"a limit names what is not evaluated: {', '.join(unknown)}")
        error.add_note("evaluated: " + ", ".join(sorted(known - {"*"})[:20]))
        raise error
