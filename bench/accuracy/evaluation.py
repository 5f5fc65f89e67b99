"""The run of an evaluation: from prepared questions to scores, resumable at every item.

    questions → those without an answer → waves of requests → answers → item records → scores

Questions are encoded task by task and asked in waves, so neither all token ids nor all answers
are in memory together. Within a wave, items that share their solved examples stand next to each
other, where the prefix cache serves them, and long ones come first, so that the last batches are
not one long item alone. Each answer is scored, compared with the baseline's and written when it
comes; what was written is not asked again.

A baseline is evaluated first and given back before the candidate is loaded. Of it remain the
final hidden states of each scored token, on disk, and its head, which together give its whole
distributions (baseline_store.py).
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench import strict_json
from llmbench.bench.accuracy.encoding import Encoder
from llmbench.bench.accuracy.engine_model import EngineModel, tokenizer_digest
from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.accuracy.eval_folder import EvalFolder, baseline_folder, build_eval_manifest
from llmbench.bench.accuracy.eval_plan import PreparedEval
from llmbench.bench.accuracy.eval_result import EvalResult, compare, score_items
from llmbench.bench.accuracy.items import ItemDivergence, ItemRecord
from llmbench.bench.accuracy.model import EvaluatedModel
from llmbench.bench.accuracy.questions import Question, task_questions, window_questions
from llmbench.bench.accuracy.running_score import Estimate, RunningScore
from llmbench.bench.accuracy.text_windows import TextWindows, cut_windows
from llmbench.bench.errors import BenchError

if TYPE_CHECKING:
    from llmbench.bench.accuracy.baseline_store import BaselineStore
    from llmbench.bench.accuracy.divergence import HasLogits
    from llmbench.engine.scoring import ContinuationScore

logger = logging.getLogger(__name__)

WAVE_TOKENS = 1_000_000
"""Token ids that are held at once: 36 MB as Python integers, and several hundred items."""

OnProgress = Callable[[str, int, int, Estimate | None], None]
"""(task, items done, items in all, the task's score so far)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineAnswers:
    """A baseline that has been evaluated.

    Attributes:
        digest: Of its identity.
        items: By task.
        store: Its hidden states; None where answers alone are compared.
        head: Loads what turns them into logits.
    """

    name: str
    digest: str
    items: Mapping[str, Sequence[ItemRecord]]
    store: "BaselineStore | None" = None
    head: "Callable[[], HasLogits | None]" = lambda: None


def evaluate(
    prepared: PreparedEval,
    model: EvaluatedModel,
    folder: Path,
    *,
    baseline: EvaluatedModel | None = None,
    with_divergence: bool = True,
    store_root: Path | None = None,
    store_limit_bytes: int | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> EvalResult:
    """Evaluate a model and, first, its baseline; resumes what the folder or the cache holds.

    `store_root` replaces the cache for baselines' hidden states, `store_limit_bytes` the limit of
    its size. `settings` go to the manifest.

    Raises:
        BenchError: models that cannot be compared, a folder of another run, a baseline that does
            not fit the cache's limit. Whatever it raises, finished items are kept.
    """
    if baseline is None:
        return run_eval(prepared, model, folder, settings=settings, on_progress=on_progress)
    max_length = min(_longest(prepared, model), _longest(prepared, baseline))
    with contextlib.ExitStack() as stack:
        store = None
        if with_divergence:
            from llmbench.bench.accuracy.baseline_store import BaselineStore
            from llmbench.bench.accuracy.store_folders import DEFAULT_LIMIT_BYTES

            check_comparable(baseline, model)
            limit = DEFAULT_LIMIT_BYTES if store_limit_bytes is None else store_limit_bytes
            store = stack.enter_context(
                BaselineStore(baseline.identity, root=store_root, limit_bytes=limit)
            )
        answers = evaluate_baseline(
            prepared,
            baseline,
            baseline_folder(folder),
            store=store,
            max_length=max_length,
            settings=settings,
            on_progress=on_progress,
        )
        return run_eval(
            prepared,
            model,
            folder,
            baseline=answers,
            max_length=max_length,
            settings=settings,
            on_progress=on_progress,
        )


def evaluate_baseline(
    prepared: PreparedEval,
    model: EvaluatedModel,
    folder: Path,
    *,
    store: "BaselineStore | None",
    max_length: int | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> BaselineAnswers:
    """Evaluate a baseline, from the store where it has the answers, and give its memory back.

    With a store, hidden states are put there, and the baseline can serve any number of candidates.
    """
    run = _Run(prepared, model, max_length=max_length, store=store, on_progress=on_progress)
    result = run.into(folder, settings, baseline=None)
    model.close()
    return BaselineAnswers(
        name=model.name, digest=run.digest, items=result.items, store=store, head=model.head
    )


def run_eval(
    prepared: PreparedEval,
    model: EvaluatedModel,
    folder: Path,
    *,
    baseline: BaselineAnswers | None = None,
    max_length: int | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> EvalResult:
    """Evaluate one model; items that the folder holds are not asked again.

    `max_length` is the longest context and continuation, tokens; the model's unless given.
    """
    run = _Run(prepared, model, max_length=max_length, baseline=baseline, on_progress=on_progress)
    return run.into(folder, settings, baseline=baseline)


def check_comparable(baseline: EvaluatedModel, model: EvaluatedModel) -> None:
    """Refuse a pair whose distributions cannot be compared, before anything is computed.

    Raises:
        BenchError: another tokenizer or vocabulary, or a model without hidden states.
    """
    for each in (baseline, model):
        list(each.score((), with_hidden=True))  # a server refuses; the engine loads nothing yet
    digests = [tokenizer_digest(each.tokenizer) for each in (baseline, model)]
    if digests[0] != digests[1]:
        error = BenchError(
            f"{model.name} and its baseline {baseline.name} have different tokenizers, so their "
            "distributions over tokens cannot be compared"
        )
        error.add_note("leave divergence out with --no-divergence: answers are still compared")
        raise error


def _longest(prepared: PreparedEval, model: EvaluatedModel) -> int:
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


class _Run:
    """One model's way through all questions."""

    def __init__(
        self,
        prepared: PreparedEval,
        model: EvaluatedModel,
        *,
        max_length: int | None,
        baseline: BaselineAnswers | None = None,
        store: "BaselineStore | None" = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """`store` takes the model's hidden states, and gives answers that it has."""
        self._prepared = prepared
        self._model = model
        self._baseline = baseline
        self._store = store
        self._say = on_progress or (lambda stage, done, total, estimate: None)
        config = prepared.config
        self.digest = strict_json.digest(model.identity)
        self.max_length = max_length or _longest(prepared, model)
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
        self._heads: tuple[HasLogits, HasLogits] | None = None

    def into(
        self, path: Path, settings: Mapping[str, Any] | None, baseline: BaselineAnswers | None
    ) -> EvalResult:
        """Answer everything into a folder."""
        self._look_ahead()
        manifest = build_eval_manifest(
            self._prepared,
            self._model,
            max_length=self.max_length,
            baseline=None if baseline is None else baseline.name,
            settings=settings,
        )
        with EvalFolder(path, manifest) as folder:
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
        if self._store is not None and not self._store.has(record.key, with_hidden=True):
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
        divergence = self._divergence(question, scores)
        record = question.scored(question.key(self.digest), scores, divergence)
        if self._store is not None:
            hidden = [score.hidden for score in scores if score.hidden is not None]
            self._store.put(record.key, record.to_json(), hidden)
        folder.append(record)
        self._count(record)

    def _divergence(
        self, question: Question, scores: "Sequence[ContinuationScore]"
    ) -> ItemDivergence | None:
        """Compare an item's hidden states with those that the baseline left."""
        baseline = self._baseline
        if baseline is None or baseline.store is None:
            return None
        import torch

        from llmbench.bench.accuracy.divergence import item_divergence, token_divergence

        base_key = question.key(baseline.digest)
        stored = baseline.store.get(base_key)
        if stored is None or stored.hidden is None:
            error = BenchError(
                f"the baseline {baseline.name} has no answer to document "
                f"{question.draft.doc_id} of {question.draft.task}"
            )
            error.add_note("repeat the command: what is missing is computed again")
            raise error
        hidden = [score.hidden for score in scores if score.hidden is not None]
        if not hidden:
            return item_divergence([], base_key)
        base_head, head = self._both_heads(baseline)
        targets = [token for ids in question.continuations for token in ids]
        tokens = token_divergence(
            torch.cat(stored.hidden), base_head, torch.cat(hidden), head, targets
        )
        return item_divergence([tokens], base_key)

    def _both_heads(self, baseline: BaselineAnswers) -> "tuple[HasLogits, HasLogits]":
        if self._heads is None:
            base, own = baseline.head(), self._model.head()
            assert base is not None  # refused by check_comparable
            assert own is not None
            self._heads = (base, own)
        return self._heads

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
