"""One model's way through all questions, resumable at every item.

    questions → those without an answer → waves of requests → answers → item records → scores

Questions are encoded task by task and asked in waves, so neither all token ids nor all answers
are in memory together. Within a wave, items that share their solved examples stand next to each
other, where the prefix cache serves them, and long ones come first, so that the last batches are
not one long item alone. Each answer is scored, compared with the baseline's and written when it
comes; what was written is not asked again.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench import strict_json
from llmbench.bench.accuracy.base_answers import BaselineAnswers
from llmbench.bench.accuracy.encoding import Encoder
from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.accuracy.eval_folder import EvalFolder, build_eval_manifest
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.eval_result import EvalResult, compare, score_items
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.model import EvaluatedModel
from llmbench.bench.accuracy.questions import Question, task_questions, window_questions
from llmbench.bench.accuracy.running_score import Estimate, RunningScore
from llmbench.bench.accuracy.text_windows import TextWindows, cut_windows

if TYPE_CHECKING:
    from llmbench.bench.accuracy.baseline_store import BaselineStore
    from llmbench.bench.accuracy.divergence import HasLogits
    from llmbench.engine.scoring import ContinuationScore

logger = logging.getLogger(__name__)

WAVE_TOKENS = 1_000_000
"""Token ids that are held at once: 36 MB as Python integers, and several hundred items."""

OnProgress = Callable[[str, int, int, Estimate | None], None]
"""(task, items done, items in all, the task's score so far)."""


def longest(prepared: PreparedEval, model: EvaluatedModel) -> int:
    """Return the longest context and continuation, tokens, that the model is asked."""
    asked = prepared.config.max_length
    return model.max_length if asked is None else min(asked, model.max_length)


@dataclass(slots=True)
class _Pending:
    """A question under way."""

    question: Question
    found: "dict[int, tuple[ContinuationScore, ...]]" = field(default_factory=dict)

    def scores(self) -> "list[ContinuationScore] | None":
        """Scores of the item's continuations in their order; None while some are missing."""
        if len(self.found) < len(self.question.requests):
            return None
        return [self.found[request][which] for request, which in self.question.places]


class EvalRun:
    """One model's way through all questions."""

    def __init__(
        self,
        prepared: PreparedEval,
        model: EvaluatedModel,
        *,
        max_length: int | None = None,
        store: "BaselineStore | None" = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """`store` takes the model's hidden states, and gives answers that it has.

        `max_length` is the longest context and continuation, tokens; the model's unless given.
        """
        self._prepared = prepared
        self._model = model
        self._baseline: BaselineAnswers | None = None
        self._store = store
        self._say = on_progress or (lambda stage, done, total, estimate: None)
        config = prepared.config
        self.digest = strict_json.digest(model.identity)
        self.max_length = max_length or longest(prepared, model)
        self._encoder = Encoder(
            model.tokenizer,
            self.max_length,
            add_bos=config.add_bos,
            on_overflow=config.on_overflow,
        )
        self.windows: TextWindows | None = None
        if prepared.text is not None:
            self.windows = cut_windows(
                prepared.text,
                model.tokenizer,
                config.protocol,
                max_length=self.max_length,
                window=config.window,
                stride=config.stride,
                add_bos=config.add_bos,
                limit=prepared.text_limit,
            )
        self._num_items = prepared.num_items + len(self._window_numbers)
        self._num_done = 0
        self._num_short_answers: Counter[str] = Counter()
        self._running = {
            each.task.name: RunningScore(each.task.name, each.task.primary_metric)
            for each in prepared.tasks
        } | {PERPLEXITY: RunningScore(PERPLEXITY, PERPLEXITY)}
        self._head: HasLogits | None = None

    def open(
        self, path: Path, *, baseline: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> EvalFolder:
        """Open the results folder, after all that can be refused without the model has been.

        `settings`, of the engine, go to the manifest.

        Raises:
            BenchError: a prompt that is too long where that is refused, a disk too small for the
                hidden states, a folder of another run.
        """
        self._look_ahead()
        manifest = build_eval_manifest(
            self._prepared,
            self._model,
            max_length=self.max_length,
            baseline=baseline,
            settings=settings,
        )
        return EvalFolder(path, manifest)

    def answer(self, folder: EvalFolder, baseline: BaselineAnswers | None = None) -> EvalResult:
        """Answer everything into a folder; whatever ends it, what was answered is kept."""
        self._baseline = baseline
        try:
            self._answer(folder)
        except BaseException:
            try:
                self._finish(folder, is_complete=False)
            except Exception as error:  # what ended the run is what the user has to know
                logger.warning("the scores so far could not be written: %s", error)
            raise
        return self._finish(folder, is_complete=True)

    def _look_ahead(self) -> None:
        """Refuse now what would be refused behind hours of work: long prompts, a full disk."""
        output_types = {each.task.output_type for each in self._prepared.tasks}
        if self.windows is not None or output_types - {"generate_until"}:
            self._model.check_scores()
        if self._store is None and self._prepared.config.on_overflow != "error":
            return
        num_tokens = num_answers = 0
        for question in self._questions():
            if self._store is not None and not self._store.has(
                question.key(self.digest), with_hidden=bool(question.requests)
            ):
                num_tokens += sum(map(len, question.continuations))
                num_answers += 1
        if self._store is not None and isinstance(self._model, EngineModel):
            self._store.require_room(
                num_tokens=num_tokens,
                hidden_size=self._model.facts.hidden_size,
                dtype=self._model.facts.dtype,
                num_answers=num_answers,
            )

    def _finish(self, folder: EvalFolder, *, is_complete: bool) -> EvalResult:
        """Score what there is and write it down."""
        answered: dict[str, list[ItemRecord]] = {}
        for task, doc_ids in self._doc_ids():
            records = folder.items(task)
            answered[task] = [records[doc_id] for doc_id in doc_ids if doc_id in records]
        result = score_items(
            self._prepared,
            answered,
            self.windows,
            model=self._model.name,
            is_complete=is_complete,
            notices=self._notices(answered),
        )
        if self._baseline is not None:
            result = compare(self._prepared, result, self._baseline.items, self._baseline.name)
        record = result.to_record()
        folder.finish(record, list(record["tasks"].values()), is_complete=is_complete)
        return result

    def _notices(self, answered: Mapping[str, Sequence[ItemRecord]]) -> list[str]:
        """What a reader of the scores has to know."""
        notices = [*self._prepared.notices, *self._encoder.notices, *self._model.notices]
        if self.windows is not None:
            notices.append(f"{PERPLEXITY}: {self.windows.protocol}")
        for task, items in answered.items():
            if num_cut := sum(item.num_truncated_tokens > 0 for item in items):
                notices.append(
                    f"{task}: {num_cut} of {len(items)} prompts lost their beginning, to fit in "
                    f"{self.max_length} tokens"
                )
        for task, count in self._num_short_answers.items():
            notices.append(
                f"{task}: {count} answers had less room than the task allows, in "
                f"{self.max_length} tokens"
            )
        return notices

    def _doc_ids(self) -> Iterator[tuple[str, Sequence[int]]]:
        for each in self._prepared.tasks:
            yield each.task.name, [prompt.doc_id for prompt in each.prompts]
        if self.windows is not None:
            yield PERPLEXITY, self._window_numbers

    @property
    def _window_numbers(self) -> list[int]:
        if self.windows is None:
            return []
        index, count = self._prepared.config.shard or (0, 1)
        return [number for number in range(len(self.windows.parts)) if number % count == index]

    def _questions(self) -> Iterator[Question]:
        for each in self._prepared.tasks:
            yield from task_questions(
                each.task, each.prompts, self._encoder, self._prepared.config.max_gen_toks
            )
        if self.windows is not None:
            wanted = set(self._window_numbers)
            for question in window_questions(self.windows):
                if question.draft.doc_id in wanted:
                    yield question

    def _answer(self, folder: EvalFolder) -> None:
        wave: list[Question] = []
        num_tokens = 0
        self._num_short_answers.clear()
        for question in self._questions():
            if question.is_answer_cut:
                self._num_short_answers[question.draft.task] += 1
            if (record := self._known(folder, question)) is not None:
                self._count(record)
                continue
            wave.append(question)
            num_tokens += question.num_read_tokens
            if num_tokens >= WAVE_TOKENS:
                self._ask(folder, wave)
                wave, num_tokens = [], 0
        self._ask(folder, wave)

    def _known(self, folder: EvalFolder, question: Question) -> ItemRecord | None:
        """Return the answer that the folder has, or the store; None where it is to be asked."""
        key = question.key(self.digest)
        found = folder.items(question.draft.task).get(question.draft.doc_id)
        if found is not None and found.key == key and self._is_whole(question, found):
            return found
        if self._store is None or not self._store.has(key, with_hidden=bool(question.requests)):
            return None
        stored = self._store.get(key)
        if stored is None:
            return None
        record = ItemRecord.from_json(stored.answer, f"the stored answer {key}")
        folder.append(record)
        return record

    def _is_whole(self, question: Question, record: ItemRecord) -> bool:
        """Whether a record has all that this run wants of the question."""
        if not question.requests:
            return True
        if self._store is not None:  # read, since what has been damaged counts as absent
            stored = self._store.get(record.key)
            if stored is None or stored.hidden is None:
                return False
        if self._baseline is None or self._baseline.store is None:
            return True
        base_key = question.key(self._baseline.digest)
        return record.divergence is not None and record.divergence.base_key == base_key

    def _ask(self, folder: EvalFolder, wave: Sequence[Question]) -> None:
        """Put a wave to the model and write the answers as they come."""
        if not wave:
            return
        ordered = in_order(wave)
        pending = [_Pending(question) for question in ordered if question.generate is None]
        flat = [(each, index) for each in pending for index in range(len(each.question.requests))]
        for each in pending:
            if not each.question.requests:  # a text without tokens
                self._write(folder, each.question, [])
        requests = [each.question.requests[index] for each, index in flat]
        for number, scores in self._model.score(requests, with_hidden=self._wants_hidden):
            each, index = flat[number]
            each.found[index] = scores
            if (whole := each.scores()) is not None:
                self._write(folder, each.question, whole)
                each.found.clear()
        generated = [question for question in ordered if question.generate is not None]
        prompts = [one.generate for one in generated if one.generate is not None]
        for number, text in self._model.generate(prompts):
            question = generated[number]
            record = question.responded(question.key(self.digest), text)
            if self._store is not None:
                self._store.put(record.key, record.to_json())
            folder.append(record)
            self._count(record)

    @property
    def _wants_hidden(self) -> bool:
        has_baseline = self._baseline is not None and self._baseline.store is not None
        return has_baseline or self._store is not None

    def _write(
        self, folder: EvalFolder, question: Question, scores: "Sequence[ContinuationScore]"
    ) -> None:
        divergence = None
        if self._baseline is not None and self._baseline.store is not None:
            if self._head is None:
                self._head = self._model.head()
                assert self._head is not None  # refused before anything was computed
            divergence = self._baseline.divergence(question, scores, self._head)
        record = question.scored(question.key(self.digest), scores, divergence)
        if self._store is not None:
            hidden = [score.hidden for score in scores if score.hidden is not None]
            self._store.put(record.key, record.to_json(), hidden)
        folder.append(record)
        self._count(record)

    def _count(self, record: ItemRecord) -> None:
        self._num_done += 1
        running = self._running[record.task]
        running.add(record)
        self._say(record.task, self._num_done, self._num_items, running.estimate)


def in_order(questions: Sequence[Question]) -> list[Question]:
    """Return questions in the order to ask them.

    Those with the same solved examples stand together; the rest goes by length, longest first.
    """
    groups: dict[Any, list[Question]] = {}
    for number, question in enumerate(questions):
        shots = question.draft.fewshot_ids
        groups.setdefault((question.draft.task, shots) if shots else number, []).append(question)
    for group in groups.values():
        group.sort(key=lambda question: -question.num_read_tokens)
    ordered = sorted(groups.values(), key=lambda group: -group[0].num_read_tokens)
    return [question for group in ordered for question in group]
