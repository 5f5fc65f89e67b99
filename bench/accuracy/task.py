"""A benchmark task as plain data: where its rows are, how they become prompts, what is counted.

A task is written as a small YAML file with the keys of lm-evaluation-harness, so that its prompts
and scores can be the same to the character. Keys of this project, for what the harness leaves to
Python functions or does not know:

    summary           one line for the list of tasks
    local_files       split → path or list of paths below --data-dir (or beside the file)
    local_filter      column → value: the rows of a local file that belong to this task
    official_sizes    split → rows of the published data set; another count is a deviation
    official_mix      {field, split, counts}: rows of the published split by how `field` starts
    doc_fields        field → template: fields added to each row, in order
    doc_to_contexts   one context an option where all share a continuation (`doc_to_target`)
    doc_to_gold       index of the right option, or a list of them, where no target says it
    doc_to_original   the text whose words and bytes are counted
    primary_metric    the metric that stands for the task: "acc_norm", "exact_match,strict-match"
    variants          name → value → keys: a task each, with the value where <name> stands
    override          true: this file replaces the task of that name
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmbench.bench.strict_json import digest

OutputType = Literal["multiple_choice", "loglikelihood_rolling", "generate_until"]
Sampler = Literal["default", "first_n"]

DEFAULT_MAX_GEN_TOKS = 256  # the harness's default budget of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How an answer is written: where it stops, how long it may be, how tokens are chosen."""

    until: tuple[str, ...]
    max_gen_toks: int = DEFAULT_MAX_GEN_TOKS
    temperature: float = 0.0
    do_sample: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFilter:
    """A named chain of functions that reads the answer out of a response."""

    name: str
    steps: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task; field names are the YAML's keys unless said otherwise."""

    name: str  # key `task`
    version: float | str  # key metadata.version
    summary: str
    output_type: OutputType
    dataset_path: str | None  # on the hub; None: only local files
    dataset_name: str | None
    local_files: Mapping[str, tuple[str, ...]]
    local_filter: Mapping[str, Any]
    official_sizes: Mapping[str, int]
    official_mix: Mapping[str, Any] | None
    training_split: str | None
    validation_split: str | None
    test_split: str | None
    fewshot_split: str | None
    num_fewshot: int | None
    sampler: Sampler
    description: str
    doc_fields: Mapping[str, str]
    doc_to_text: str
    doc_to_choice: str | tuple[str, ...] | None
    doc_to_target: str | int
    doc_to_contexts: str | None
    doc_to_gold: str | None
    doc_to_original: str | None
    gen_prefix: str | None
    target_delimiter: str
    fewshot_delimiter: str
    generation: Generation | None  # key generation_kwargs
    filters: tuple[AnswerFilter, ...]  # key filter_list
    metrics: tuple[str, ...]  # key metric_list
    metric_settings: Mapping[str, Mapping[str, Any]]  # what else stands with each metric
    primary_metric: str
    alias: str  # key task_alias
    tags: tuple[str, ...]  # key tag
    family: str | None  # the file's own name where it makes many tasks: "mmlu_<subject>"
    path: Path = field(compare=False)  # the YAML file
    definition: Mapping[str, Any] = field(repr=False)  # the keys as written, included ones merged

    @property
    def digest(self) -> str:
        """Hash of everything that the file says: another task has another one."""
        return digest(self.definition)

    @property
    def eval_split(self) -> str:
        """The split whose rows are asked: the test split, else validation, as in the harness."""
        split = self.test_split or self.validation_split
        assert split is not None  # refused when the file is read
        return split

    @property
    def shot_splits(self) -> tuple[str, ...]:
        """Where shots are drawn from, by preference."""
        if self.fewshot_split is not None:
            return (self.fewshot_split,)
        splits = (self.training_split, self.validation_split, self.test_split)
        return tuple(split for split in splits if split is not None)

    @property
    def has_fixed_shots(self) -> bool:
        """Whether the number of shots cannot be chosen: zero by definition."""
        return self.num_fewshot == 0 or self.output_type == "loglikelihood_rolling"

    @property
    def is_local(self) -> bool:
        """Whether the rows are files that the YAML file names relative to itself."""
        return self.dataset_path is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroup:
    """Tasks and groups whose mean is a score."""

    name: str
    alias: str
    summary: str
    members: tuple[str, ...]  # names of tasks and groups
    metric: str | None  # of every member; None: each member's primary metric
    weighting: Literal["items", "tasks"]  # a mean over questions, or of the members' scores
    version: float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """What a list of names stands for."""

    tasks: tuple[Task, ...]
    groups: tuple[TaskGroup, ...]  # members before the groups that hold them
