"""What an evaluation will read and store, before any weight is loaded.

Every prompt is tokenized as it would be asked, so the counts are exact but for what the prefix
cache saves: tokens that prompts share are counted in each of them, and computed once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from llmbench.bench.accuracy.baseline_store import ANSWER_BYTES, DTYPES
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.model import EvaluatedModel
from llmbench.bench.accuracy.question_set import QuestionSet, longest
from llmbench.bench.accuracy.questions import Question


@dataclass(slots=True, kw_only=True)
class TaskCost:
    """The work of one task.

    Attributes:
        num_requests: Continuations to score, or answers to generate.
        num_read_tokens: Of prompts and continuations, shared ones in each of them.
        num_scored_tokens: Whose distributions are looked at.
        num_stored_rows: Hidden states that a baseline's store keeps of them.
        num_generated_tokens: At most.
        longest: Tokens of the longest request.
        num_truncated: Items whose prompt is cut to what the model reads.
    """

    num_items: int = 0
    num_requests: int = 0
    num_read_tokens: int = 0
    num_scored_tokens: int = 0
    num_stored_rows: int = 0
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
        self.num_stored_rows += question.num_stored_rows
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
    baseline: EvaluatedModel | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, TaskCost]:
    """Count the work of each task by its name; loads a tokenizer and nothing else.

    A `baseline` that reads less cuts the prompts of both. `on_progress` hears (items counted, items
    in all).
    """
    costs: dict[str, TaskCost] = {}
    others = () if baseline is None else (baseline,)
    questions = QuestionSet(prepared, model.tokenizer, longest(prepared, model, *others))
    num_items = len(questions)
    for number, question in enumerate(questions, start=1):
        costs.setdefault(question.draft.task, TaskCost()).add(question)
        on_progress(number, num_items)
    return costs


def store_bytes(costs: Mapping[str, TaskCost], *, hidden_size: int, dtype: str) -> int:
    """Disk that a baseline's answers take, with the hidden states of all scored tokens."""
    num_rows = sum(cost.num_stored_rows for cost in costs.values())
    num_answers = sum(cost.num_items for cost in costs.values())
    return num_rows * hidden_size * DTYPES[dtype].itemsize + num_answers * ANSWER_BYTES
