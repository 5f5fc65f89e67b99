"""One item as a model is asked it: token ids, their digest, and what the answers are worth.

A question is built from one document before anything is computed. It carries the draft of its
item record, so answering it is filling in what was missing. Its digest covers the very ids, the
settings of a generation, the document and the task's definition; with the model's identity it is
the item's key. Batching, the order of items and how the ids came about are not part of it.
"""

import dataclasses
import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmbench.bench import strict_json
from llmbench.bench.accuracy.answers import ExactMatch, build_filters, cut_at_stops
from llmbench.bench.accuracy.encoding import Encoder
from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.accuracy.items import ItemDivergence, ItemRecord
from llmbench.bench.accuracy.model import GenerateRequest
from llmbench.bench.accuracy.prompts import Gold, Prompt
from llmbench.bench.accuracy.scoring import (
    ItemScore,
    score_choices,
    score_generation,
    score_rolling,
)
from llmbench.bench.accuracy.task import Task
from llmbench.bench.accuracy.text_windows import TextWindows

if TYPE_CHECKING:
    from llmbench.engine.scoring import ContinuationScore, ScoreRequest

Worth = Callable[[ItemRecord], ItemScore]
"""What an answered item is worth; its record lacks only that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a model is asked about one document.

    Attributes:
        draft: The item's record without key and answer.
        requests: Continuations to score; empty where an answer is generated.
        places: Of each continuation of the item, in its order: (request, continuation in it).
        is_whole_text: Whether the continuations are one text, and their sum the answer.
        is_answer_cut: Whether the answer may be shorter than the task allows.
        digest: Of all that is asked and what it is scored by, without the model.
        worth: The task's rule.
    """

    draft: ItemRecord
    requests: "tuple[ScoreRequest, ...]" = ()
    places: tuple[tuple[int, int], ...] = ()
    generate: GenerateRequest | None = None
    is_whole_text: bool = False
    is_answer_cut: bool = False
    digest: str
    worth: Worth

    @property
    def num_read_tokens(self) -> int:
        """Tokens that a model reads at most, without regard to shared ones."""
        if self.generate is not None:
            return len(self.generate.prompt)
        return sum(
            len(request.context) + sum(map(len, request.continuations)) for request in self.requests
        )

    @property
    def continuations(self) -> list[tuple[int, ...]]:
        """Scored ids, in the item's order."""
        return [self.requests[request].continuations[which] for request, which in self.places]

    @property
    def num_stored_rows(self) -> int:
        """Hidden states that a store keeps: those that continuations share are kept once.

        Continuations that differ in their last token alone are predicted from the same states.
        """
        return sum(
            len(prefix) + 1
            for request in self.requests
            for prefix in {continuation[:-1] for continuation in request.continuations}
        )

    def key(self, model_digest: str) -> str:
        """Return the key of the answer that the model of this digest gives."""
        text = f"{model_digest} {self.digest}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def scored(
        self,
        key: str,
        scores: "Sequence[ContinuationScore]",
        divergence: ItemDivergence | None = None,
    ) -> ItemRecord:
        """Return the record, from the scores of the continuations in the item's order."""
        logs = tuple(score.loglikelihood for score in scores)
        greedy = tuple(score.is_greedy for score in scores)
        sizes = tuple(len(score.logprobs) for score in scores)
        if self.is_whole_text:
            logs, greedy, sizes = (math.fsum(logs),), (all(greedy),), (sum(sizes),)
        return self._filled(
            key=key,
            loglikelihoods=logs,
            is_greedy=greedy,
            num_tokens=sizes,
            divergence=divergence,
        )

    def responded(self, key: str, text: str) -> ItemRecord:
        """Return the record, from the text that was generated."""
        assert self.generate is not None
        return self._filled(key=key, response=cut_at_stops(text, self.generate.until))

    def answered_as(self, other: ItemRecord) -> ItemRecord:
        """Return the record, from one with the same key: maybe that of an identical document.

        Only the answer is taken over; what tells the documents apart is this one's own.
        """
        return self._filled(
            key=other.key,
            loglikelihoods=other.loglikelihoods,
            is_greedy=other.is_greedy,
            num_tokens=other.num_tokens,
            response=other.response,
            divergence=other.divergence,
        )

    def _filled(self, **answer: Any) -> ItemRecord:
        record = dataclasses.replace(self.draft, **answer)
        score = self.worth(record)
        return dataclasses.replace(
            record,
            metrics=score.metrics,
            pick=score.pick,
            is_tied=score.is_tied,
            invalid=score.invalid,
            filtered=score.filtered,
        )


def task_questions(
    task: Task, prompts: Sequence[Prompt], encoder: Encoder, max_gen_toks: int | None = None
) -> Iterator[Question]:
    """Encode a task's prompts one after another, many texts at a time.

    `max_gen_toks` takes the place of the task's own.

    Raises:
        WorkloadError: a prompt that cannot be encoded, or is too long where that is refused.
    """
    worth = rule_of(task)
    where = [f"document {prompt.doc_id} of {task.name}" for prompt in prompts]
    if task.output_type == "multiple_choice":
        pairs = [prompt.pairs for prompt in prompts]
        shorter = (lambda index, n: prompts[index].shorter(n)) if encoder.drops_shots else None
        items = encoder.items(pairs, where=where, shorter=shorter)
        dropped: list[int] = []
        num_separate = 0
        for prompt, item in zip(prompts, items, strict=True):
            dropped.append(item.num_dropped_shots)
            num_separate += item.num_separate
            asked = _without_shots(prompt, item.num_dropped_shots)
            requests, places = item.requests()
            yield _question(task, asked, worth, item.num_dropped, tuple(requests), tuple(places))
        encoder.note_dropped_shots(task.name, dropped)
        encoder.note_separate(task.name, num_separate)
    elif task.output_type == "loglikelihood_rolling":
        for prompt, place in zip(prompts, where, strict=True):
            yield _whole_text(task, prompt, worth, encoder, place)
    else:
        yield from _generations(task, prompts, worth, encoder, max_gen_toks, where)


def window_questions(text: TextWindows) -> Iterator[Question]:
    """Return the windows of a text as the items of a task named `perplexity`."""
    for index, request in enumerate(text.requests()):
        ids = _ids_digest([request.context, *request.continuations])
        draft = ItemRecord(
            task=PERPLEXITY,
            doc_id=index,
            key="",
            doc_hash=text.source.sha256,
            prompt_hash=ids,
            target_hash=text.source.sha256,
            gold="",
        )
        yield Question(
            draft=draft,
            requests=(request,),
            places=((0, 0),),
            is_whole_text=True,
            digest=strict_json.digest([PERPLEXITY, text.source.sha256, ids]),
            worth=_window_worth,
        )


def rule_of(task: Task) -> Worth:
    """Return what turns a task's answered items into scores.

    Raises:
        BenchConfigError: a metric or filter that is not known.
    """
    if task.output_type == "multiple_choice":
        return lambda record: score_choices(
            record.loglikelihoods or (),
            record.choices,
            _indices(record.gold),
            task.metrics,
            is_greedy=record.is_greedy,
        )
    if task.output_type == "loglikelihood_rolling":
        return lambda record: score_rolling(
            (record.loglikelihoods or (math.nan,))[0], *(record.text_size or (0, 0))
        )
    filters = build_filters([{"name": one.name, "filter": one.steps} for one in task.filters])
    match = ExactMatch.from_metric(task.metric_settings.get("exact_match", {}))
    return lambda record: score_generation(
        record.response or "", _texts(record.gold), filters, match
    )


def _question(
    task: Task,
    prompt: Prompt,
    worth: Worth,
    num_dropped: int,
    requests: "tuple[ScoreRequest, ...]" = (),
    places: tuple[tuple[int, int], ...] = (),
    generate: GenerateRequest | None = None,
    *,
    is_answer_cut: bool = False,
) -> Question:
    asked: list[Any]
    if generate is not None:
        asked = [
            _ids_digest([generate.prompt]),
            generate.until,
            generate.max_tokens,
            generate.temperature,
            generate.seed,
        ]
    else:
        asked = [_ids_digest([each.context, *each.continuations]) for each in requests]
    draft = ItemRecord(
        task=task.name,
        doc_id=prompt.doc_id,
        key="",
        doc_hash=prompt.doc_hash,
        prompt_hash=prompt.prompt_hash,
        target_hash=prompt.target_hash,
        fewshot_ids=prompt.fewshot_ids,
        gold=prompt.gold,
        choices=prompt.choices,
        num_truncated_tokens=num_dropped,
        text_size=prompt.text_size,
    )
    return Question(
        draft=draft,
        requests=requests,
        places=places,
        generate=generate,
        is_whole_text=task.output_type == "loglikelihood_rolling",
        is_answer_cut=is_answer_cut,
        digest=strict_json.digest(
            [task.name, task.digest, prompt.doc_hash, prompt.target_hash, asked]
        ),
        worth=worth,
    )


def _whole_text(task: Task, prompt: Prompt, worth: Worth, encoder: Encoder, where: str) -> Question:
    from llmbench.engine.scoring import ScoreRequest

    windows = [window for _, text in prompt.pairs for window in encoder.rolling(text)]
    requests = tuple(
        ScoreRequest(context=one.context_ids, continuations=(one.continuation_ids,))
        for one in windows
    )
    places = tuple((index, 0) for index in range(len(requests)))
    return _question(task, prompt, worth, 0, requests, places)


def _generations(
    task: Task,
    prompts: Sequence[Prompt],
    worth: Worth,
    encoder: Encoder,
    max_gen_toks: int | None,
    where: Sequence[str],
) -> Iterator[Question]:
    settings = task.generation
    assert settings is not None  # refused when the task is read
    contexts = [prompt.pairs[0][0] for prompt in prompts]
    budget = max_gen_toks or settings.max_gen_toks

    def shorter(index: int, num_dropped: int) -> str | None:
        pairs = prompts[index].shorter(num_dropped)
        return None if pairs is None else pairs[0][0]

    encoded = encoder.prompts(
        contexts, budget, where=where, shorter=shorter if encoder.drops_shots else None
    )
    encoder.note_dropped_shots(task.name, [made.num_dropped_shots for made in encoded])
    for prompt, made in zip(prompts, encoded, strict=True):
        request = GenerateRequest(
            prompt=made.ids,
            until=settings.until,
            max_tokens=made.max_tokens,
            temperature=settings.temperature if settings.do_sample else 0.0,
            seed=prompt.doc_id,
        )
        yield _question(
            task,
            _without_shots(prompt, made.num_dropped_shots),
            worth,
            made.num_dropped,
            generate=request,
            is_answer_cut=made.is_cut,
        )


def _without_shots(prompt: Prompt, num_dropped: int) -> Prompt:
    if not num_dropped:
        return prompt
    return dataclasses.replace(prompt, fewshot_ids=prompt.fewshot_ids[num_dropped:])


def _window_worth(record: ItemRecord) -> ItemScore:
    value = (record.loglikelihoods or (math.nan,))[0]
    invalid = None if math.isfinite(value) else f"the window's log-likelihood is {value}"
    return ItemScore(metrics={}, invalid=invalid)


def _indices(gold: Gold) -> int | tuple[int, ...]:
    if isinstance(gold, int):
        return gold
    return tuple(index for index in gold if isinstance(index, int))  # multiple choice


def _texts(gold: Gold) -> str | tuple[str, ...]:
    return tuple(map(str, gold)) if isinstance(gold, tuple) else str(gold)


def _ids_digest(sequences: Sequence[Sequence[int]]) -> str:
    """Return a digest of sequences of token ids, borders between them included."""
    state = hashlib.blake2b(digest_size=16)
    for ids in sequences:
        state.update(len(ids).to_bytes(8, "little"))
        state.update(array("q", ids).tobytes())
    return state.hexdigest()
