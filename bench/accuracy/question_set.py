"""All questions of an evaluation, as one model is asked them.

The prompts of a prepared evaluation become token ids here, by the model's tokenizer and up to the
longest that is read. What a run asks and what a dry run counts are the same questions, since both
take them from here. They are encoded anew each time they are gone through, so not all are in
memory together.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llmbench.bench.accuracy.encoding import Encoder
from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.model import EvaluatedModel
from llmbench.bench.accuracy.questions import Question, task_questions, window_questions
from llmbench.bench.accuracy.text_windows import TextWindows, cut_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def longest(prepared: PreparedEval, model: EvaluatedModel, *others: EvaluatedModel) -> int:
    """Return the longest context and continuation, tokens, that all these models are asked."""
    asked = prepared.config.max_length
    lengths = [each.max_length for each in (model, *others)]
    return min(lengths if asked is None else [asked, *lengths])


class QuestionSet:
    """The questions of an evaluation in the order of tasks and documents; iterable many times."""

    def __init__(
        self, prepared: PreparedEval, tokenizer: "PreTrainedTokenizerBase", max_length: int
    ) -> None:
        """`max_length` is the longest context and continuation, tokens."""
        config = prepared.config
        self._prepared = prepared
        self._encoder = Encoder(
            tokenizer, max_length, add_bos=config.add_bos, on_overflow=config.on_overflow
        )
        self.max_length = max_length
        self.windows: TextWindows | None = None
        if prepared.text is not None:
            self.windows = cut_windows(
                prepared.text,
                tokenizer,
                config.protocol,
                max_length=max_length,
                window=config.window,
                stride=config.stride,
                add_bos=config.add_bos,
                limit=prepared.text_limit,
            )

    def __len__(self) -> int:
        return sum(len(doc_ids) for _, doc_ids in self.doc_ids())

    def __iter__(self) -> Iterator[Question]:
        max_gen_toks = self._prepared.config.max_gen_toks
        for each in self._prepared.tasks:
            yield from task_questions(each.task, each.prompts, self._encoder, max_gen_toks)
        if self.windows is not None:
            wanted = set(self._window_numbers())
            for question in window_questions(self.windows):
                if question.draft.doc_id in wanted:
                    yield question

    @property
    def notices(self) -> list[str]:
        """What a reader of the scores has to know of the encoding; whole once all are encoded."""
        return list(self._encoder.notices)

    def doc_ids(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield each task with its documents, or windows, that are asked."""
        for each in self._prepared.tasks:
            yield each.task.name, [prompt.doc_id for prompt in each.prompts]
        if self.windows is not None:
            yield PERPLEXITY, self._window_numbers()

    def _window_numbers(self) -> list[int]:
        assert self.windows is not None
        index, count = self._prepared.config.shard or (0, 1)
        return [number for number in range(len(self.windows.parts)) if number % count == index]
