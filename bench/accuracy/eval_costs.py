"""What an evaluation will read and store, before any weight is loaded.

Every prompt is tokenized as it would be asked, so the counts are exact but for what the prefix
cache saves: tokens that prompts share are counted in each of them, and computed once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

from llmbench.bench.accuracy.baseline_store import ANSWER_BYTES, DTYPES
from llmbench.bench.accuracy.encoding import Encoder
from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.model import EvaluatedModel
from llmbench.bench.accuracy.questions import Question, task_questions, window_questions
from llmbench.bench.accuracy.text_windows import cut_windows


@dataclass(slots=True, kw_only=True)
class TaskCost:
    """The work of one task.

    Attributes:
        num_requests: Continuations to score, or answers to generate.
        num_read_tokens: Of prompts and continuations, shared ones in each of them.
        num_scored_tokens: Whose distributions are looked at.
        num_generated_tokens: At most.
        longest: Tokens of the longest request.
        num_truncated: Items whose prompt is cut to what the model reads.
    """

    num_items: int = 0
    num_requests: int = 0
    num_read_tokens: int = 0
    num_scored_tokens: int = 0
    num_generated_tokens: int = 0
    longest: int = 0
    num_truncated: int = 0

    def add(self, question: Question) -> None:
        """Count a question in."""
        self.num_items += 1
        self.num_truncated += question.draft.num_truncated_tokens > 0
        if question.generate is not None:
            self.num_requests += 1
            self.num_read_tokens += len(question.generate.prompt)
            self.num_generated_tokens += question.generate.max_tokens
            whole = len(question.generate.prompt) + question.generate.max_tokens
            self.longest = max(self.longest, whole)
            return
        for request in question.requests:
            for continuation in request.continuations:
                size = len(request.context) + len(continuation)
                self.num_requests += 1
                self.num_read_tokens += size
                self.num_scored_tokens += len(continuation)
                self.longest = max(self.longest, size)

    def __add__(self, other: "TaskCost") -> "TaskCost":
        """The work of both."""
        values = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
        }
        return TaskCost(**{**values, "longest": max(self.longest, other.longest)})


def count_costs(
    prepared: PreparedEval,
    model: EvaluatedModel,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, TaskCost]:
    """Count the work of each task by its name; loads a tokenizer and nothing else.

    `on_progress` hears (items counted, items in all).
    """
    costs: dict[str, TaskCost] = {}
    for number, question in enumerate(_questions(prepared, model), start=1):
        costs.setdefault(question.draft.task, TaskCost()).add(question)
        on_progress(number, max(number, prepared.num_items))
    return costs


def store_bytes(costs: Mapping[str, TaskCost], *, hidden_size: int, dtype: str) -> int:
    """Disk that a baseline's answers take, with the hidden state of every scored token."""
    num_tokens = sum(cost.num_scored_tokens for cost in costs.values())
    num_answers = sum(cost.num_items for cost in costs.values())
    return num_tokens * hidden_size * DTYPES[dtype].itemsize + num_answers * ANSWER_BYTES


def _questions(prepared: PreparedEval, model: EvaluatedModel) -> Iterator[Question]:
    config = prepared.config
    longest = min(config.max_length or model.max_length, model.max_length)
    encoder = Encoder(
        model.tokenizer, longest, add_bos=config.add_bos, on_overflow=config.on_overflow
    )
    for each in prepared.tasks:
        yield from task_questions(each.task, each.prompts, encoder, config.max_gen_toks)
    if prepared.text is None:
        return
    windows = cut_windows(
        prepared.text,
        model.tokenizer,
        config.protocol,
        max_length=longest,
        window=config.window,
        stride=config.stride,
        add_bos=config.add_bos,
        limit=prepared.text_limit,
    )
    index, count = config.shard or (0, 1)
    for question in window_questions(windows):
        assert question.draft.task == PERPLEXITY
        if question.draft.doc_id % count == index:
            yield question
