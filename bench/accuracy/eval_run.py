"""One model's way through all questions, resumable at every item.

    questions → those without an answer → waves of requests → answers → item records → scores

Questions are encoded task by task and asked in waves, so neither all token ids nor all answers
are in memory together. Within a wave, items that share their solved examples stand next to each
other, where the prefix cache serves them, and long ones come first, so that the last batches are
not one long item alone. Each answer is scored, compared with the baseline's and written when it
comes; what was written is not asked again.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench import strict_json
from llmbench.bench.accuracy.base_answers import BaselineAnswers
from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.accuracy.eval_folder import EvalFolder, build_eval_manifest
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.eval_result import EvalResult, compare, score_items
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.model import EvaluatedModel
from llmbench.bench.accuracy.question_set import QuestionSet, longest
from llmbench.bench.accuracy.questions import Question
from llmbench.bench.accuracy.running_score import Estimate, RunningScore
from llmbench.bench.results import check_same_run

if TYPE_CHECKING:
    from llmbench.bench.accuracy.baseline_store import BaselineStore
    from llmbench.bench.accuracy.divergence import HasLogits
    from llmbench.engine.scoring import ContinuationScore

logger = logging.getLogger(__name__)

WAVE_TOKENS = 1_000_000
"""Token ids that are held at once: 36 MB as Python integers, and several hundred items."""

OnProgress = Callable[[str, int, int, Estimate | None], None]
"""(task, items done, items in all, the task's score so far)."""


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
        self.digest = strict_json.digest(model.identity)
        self._questions = QuestionSet(
            prepared, model.tokenizer, max_length or longest(prepared, model)
        )
        self._num_items = len(self._questions)
        self._accepted: dict[str, dict[int, ItemRecord]] = {}
        self._num_done = 0
        self._num_short_answers: Counter[str] = Counter()
        self._running = {
            each.task.name: RunningScore(each.task.name, each.task.primary_metric)
            for each in prepared.tasks
        } | {PERPLEXITY: RunningScore(PERPLEXITY, PERPLEXITY)}
        self._head: HasLogits | None = None

    def check_folder(self, path: Path) -> None:
        """Refuse a folder of another run, and write nothing; ResultsError."""
        check_same_run(path, self._manifest())

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
        return EvalFolder(path, self._manifest(baseline=baseline, settings=settings))

    def _manifest(
        self, *, baseline: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return build_eval_manifest(
            self._prepared,
            self._model,
            max_length=self._questions.max_length,
            baseline=baseline,
            settings=settings,
        )

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
        if self._questions.windows is not None or output_types - {"generate_until"}:
            self._model.check_scores()
        if self._store is None and self._prepared.config.on_overflow != "error":
            return
        num_rows = 0
        missing: set[str] = set()  # identical documents are stored once
        for question in self._questions:
            key = question.key(self.digest)
            if key not in missing and not self._has_stored(question, key):
                num_rows += question.num_stored_rows
                missing.add(key)
        if self._store is not None and isinstance(self._model, EngineModel):
            self._store.require_room(
                num_tokens=num_rows,
                hidden_size=self._model.facts.hidden_size,
                dtype=self._model.facts.dtype,
                num_answers=len(missing),
            )

    def _finish(self, folder: EvalFolder, *, is_complete: bool) -> EvalResult:
        """Score what this run took for an answer, whatever else the folder holds."""
        answered: dict[str, list[ItemRecord]] = {}
        for task, doc_ids in self._questions.doc_ids():
            records = self._accepted.get(task, {})
            answered[task] = [records[doc_id] for doc_id in doc_ids if doc_id in records]
            num_missing = len(doc_ids) - len(answered[task])
            assert not (is_complete and num_missing), f"{task}: {num_missing} items got lost"
        result = score_items(
            self._prepared,
            answered,
            self._questions.windows,
            model=self._model.name,
            is_complete=is_complete,
            notices=self._notices(answered),
        )
        if self._baseline is not None:
            result = compare(
                self._prepared,
                result,
                self._baseline.items,
                self._baseline.name,
                with_divergence=self._baseline.store is not None,
            )
        record = result.to_record()
        folder.finish(record, list(record["tasks"].values()), is_complete=is_complete)
        return result

    def _notices(self, answered: Mapping[str, Sequence[ItemRecord]]) -> list[str]:
        """What a reader of the scores has to know."""
        asked = self._questions
        notices = [*self._prepared.notices, *asked.notices, *self._model.notices]
        if asked.windows is not None:
            notices.append(f"{PERPLEXITY}: {asked.windows.protocol}")
        for task, items in answered.items():
            if num_cut := sum(item.num_truncated_tokens > 0 for item in items):
                notices.append(
                    f"{task}: {num_cut} of {len(items)} prompts lost their beginning, to fit in "
                    f"{asked.max_length} tokens"
                )
        for task, count in self._num_short_answers.items():
            notices.append(
                f"{task}: {count} answers had less room than the task allows, in "
                f"{asked.max_length} tokens"
            )
        return notices

    def _answer(self, folder: EvalFolder) -> None:
        wave: list[Question] = []
        num_tokens = 0
        self._num_short_answers.clear()
        self._accepted.clear()
        for question in self._questions:
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
        """Return the answer that the folder has, or the store; None where it is to be asked.

        Either may come from an identical document, or from other solved examples that were cut to
        the same tokens: the record is made anew from its answer alone.
        """
        key = question.key(self.digest)
        found = folder.items(question.draft.task).get(question.draft.doc_id)
        if found is not None and found.key == key and self._is_whole(question, found):
            record = question.answered_as(found)
            if not _is_same(record, found):
                folder.append(record)
            return record
        if self._store is None or not self._has_stored(question, key):
            return None
        stored = self._store.get(key)
        if stored is None:
            return None
        record = question.answered_as(
            ItemRecord.from_json(stored.answer, f"the stored answer {key}")
        )
        folder.append(record)
        return record

    def _has_stored(self, question: Question, key: str) -> bool:
        return self._store is not None and self._store.has(key, with_hidden=bool(question.requests))

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
            if self._store is not None and not self._has_stored(question, record.key):
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
        if self._store is not None and not self._has_stored(question, record.key):
            hidden = [score.hidden for score in scores if score.hidden is not None]
            self._store.put(record.key, record.to_json(), hidden)
        folder.append(record)
        self._count(record)

    def _count(self, record: ItemRecord) -> None:
        self._accepted.setdefault(record.task, {})[record.doc_id] = record
        self._num_done += 1
        running = self._running[record.task]
        running.add(record)
        self._say(record.task, self._num_done, self._num_items, running.estimate)


def _is_same(record: ItemRecord, other: ItemRecord) -> bool:
    """Whether two records are written alike but for the divergence, where NaN equals NaN."""
    plain, as_other = (
        dataclasses.replace(each, divergence=None).to_json() for each in (record, other)
    )
    return plain == as_other


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
