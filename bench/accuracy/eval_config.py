"""Settings of an evaluation: what is asked, with which shots, how it becomes tokens.

Imports no torch, so the command line can read defaults from here without loading it. The model
is not among them: the same questions go to several models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from llmbench.bench.errors import BenchConfigError

OnOverflow = Literal["truncate", "drop-shots", "error"]
PerplexityProtocol = Literal["gptq", "llamacpp", "strided"]

PERPLEXITY = "perplexity"
"""Name under which the perplexity of a text stands among the tasks."""
EVERY_TASK = "*"
"""Key of `limits` for tasks that are not named there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """What is asked of a model.

    Attributes:
        tasks: Names of tasks and groups, and `perplexity`.
        num_fewshot: Solved examples before each question; None takes each task's own number.
        limits: First N documents of each task, or by name of a task or group, `*` for the others.
        data_dir: Folder of local data, which is then the only source; None is the hub.
        include: Folders with task files of the user's own.
        seed: Of the draws of few-shot examples.
        apply_chat_template: Put prompts into the tokenizer's chat template.
        chat_template: Name of one of several templates of the tokenizer, or a template's text.
        system_instruction: Said before everything else.
        fewshot_as_multiturn: Give each example turns of its own; None does with a template.
        on_overflow: What to do with what is longer than the model reads: cut it from the left,
            as the reference harness does, and count it; leave whole examples out first, from
            the first on; or refuse.
        add_bos: Whether texts begin with the BOS token; None leaves it to the tokenizer.
        max_gen_toks: Longest generated answer, tokens; None takes each task's own length.
        max_length: Longest context and continuation, tokens; None takes the model's.
        shard: (i, n): only documents i, i + n, i + 2n, … of each task.
        text: File, or hub dataset, that `perplexity` reads.
        protocol: How `perplexity` cuts and weighs it.
        window: Tokens of its windows; None takes the protocol's.
        stride: Tokens from one window of `strided` to the next.
        joiner: What is put between the rows of a text; None takes the papers' two line feeds.
    """

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limits: Mapping[str, int] | int | None = None
    data_dir: Path | None = None
    include: tuple[Path, ...] = ()
    seed: int = 1234
    apply_chat_template: bool = False
    chat_template: str | None = None
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    on_overflow: OnOverflow = "truncate"
    add_bos: bool | None = None
    max_gen_toks: int | None = None
    max_length: int | None = None
    shard: tuple[int, int] | None = None
    text: str | None = None
    protocol: PerplexityProtocol = "gptq"
    window: int | None = None
    stride: int | None = None
    joiner: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise BenchConfigError("expected at least one task, found none")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise BenchConfigError(f"num_fewshot must not be negative, not {self.num_fewshot}")
        limits = self.limits if isinstance(self.limits, Mapping) else {EVERY_TASK: self.limits}
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise BenchConfigError(f"the limit of {name} must be at least 1, not {limit}")
        for name, literal in (("on_overflow", OnOverflow), ("protocol", PerplexityProtocol)):
            value, allowed = getattr(self, name), get_args(literal)
            if value not in allowed:
                raise BenchConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        for name in ("max_gen_toks", "max_length", "window", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BenchConfigError(f"{name} must be at least 1, not {value}")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            error = BenchConfigError("fewshot_as_multiturn needs a chat template, which is off")
            error.add_note("add --apply-chat-template")
            raise error
        if self.chat_template is not None and not self.apply_chat_template:
            error = BenchConfigError("chat_template names a template, and templates are off")
            error.add_note("add --apply-chat-template")
            raise error
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise BenchConfigError(
                f"a shard (i, n) must have 0 <= i < n, not {self.shard[0]}/{self.shard[1]}"
            )
        if (PERPLEXITY in self.tasks) != (self.text is not None):
            error = BenchConfigError(
                f"`{PERPLEXITY}` needs a text, and none is named"
                if self.text is None
                else f"a text is named, and `{PERPLEXITY}` is not among the tasks"
            )
            error.add_note(f"give both: --tasks {PERPLEXITY} --text FILE")
            raise error

    def limit_of(self, task: str, groups: Mapping[str, tuple[str, ...]]) -> int | None:
        """Return the limit of a task; the smallest of its groups' where it has none of its own.

        `groups` are the names of all tasks in each group.
        """
        if not isinstance(self.limits, Mapping):
            return self.limits
        if task in self.limits:
            return self.limits[task]
        named = [
            self.limits[group]
            for group, members in groups.items()
            if group in self.limits and task in members
        ]
        return min(named, default=self.limits.get(EVERY_TASK))
