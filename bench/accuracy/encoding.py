"""Texts of an evaluation as token ids, by the rules of lm-evaluation-harness 0.4.13.

Whether two tools agree on a score is decided here. A continuation is not tokenized by itself, as a
tokenizer would cut it differently behind its context: the two are tokenized as one text, and what
lies beyond the length of the context's own ids is the continuation. Blanks at the end of a context
belong to the continuation, since most tokens begin with their blank. A text without a context is
scored behind the *prefix token*: BOS, or EOS in a vocabulary that has none.

Three things go wrong in such rules, and each is looked after here:

- A token may span the join, so that no ids are left for the continuation ("Ans" + "wer" is one
  token). It is then tokenized alone, counted, and said (`note_separate`).
- A tokenizer that adds BOS meets a text that has one, from a chat template. Two BOS cost points,
  so every text has exactly one (`TextIds`): whole texts too, where the harness scores them behind
  two of them if the tokenizer adds its own.
- What is longer than the model reads loses its beginning: instruction and first shots. It is
  counted, or refused, or whole shots are left out first (`Shorter`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from llmbench.bench.accuracy.tokenization import CHUNK_TEXTS, Ids, TextIds
from llmbench.bench.errors import BenchConfigError, WorkloadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmbench.bench.accuracy.eval_config import OnOverflow
    from llmbench.engine.scoring import ScoreRequest

Pairs = Sequence[tuple[str, str]]
Join = Literal["clean", "spanned", "separate"]
"""How context and continuation met: on a token's border; within a token, where the context's ids
are those of the context alone; or within a token that left nothing to the continuation."""

Shorter = Callable[[int, int], Pairs | None]
"""(index of the item, n) to its pairs without their first n shots; None where there are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPair:
    """A context and the continuation that is scored behind it; each has at least one id."""

    context_ids: Ids
    continuation_ids: Ids
    num_dropped: int = 0
    """Ids cut off the beginning of the context for length."""
    join: Join = "clean"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedItem:
    """All pairs of one document, and how many whole shots were left out for length."""

    pairs: tuple[EncodedPair, ...]
    num_dropped_shots: int = 0

    @property
    def num_dropped(self) -> int:
        """Most ids that any of the contexts lost."""
        return max((pair.num_dropped for pair in self.pairs), default=0)

    @property
    def num_separate(self) -> int:
        """Continuations that a token across the join left without ids of their own."""
        return sum(pair.join == "separate" for pair in self.pairs)

    def requests(self) -> "tuple[list[ScoreRequest], list[tuple[int, int]]]":
        """Return requests, one a context, and (request, continuation) of each pair."""
        from llmbench.engine.scoring import ScoreRequest  # plans are made without torch

        grouped: dict[Ids, list[Ids]] = {}
        rows: dict[Ids, int] = {}
        places = []
        for pair in self.pairs:
            continuations = grouped.setdefault(pair.context_ids, [])
            row = rows.setdefault(pair.context_ids, len(rows))
            places.append((row, len(continuations)))
            continuations.append(pair.continuation_ids)
        made = [
            ScoreRequest(context=context, continuations=tuple(continuations))
            for context, continuations in grouped.items()
        ]
        return made, places


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt to go on from, at least one id, and the longest answer that it leaves room for."""

    ids: Ids
    max_tokens: int
    num_dropped: int = 0
    is_cut: bool = False
    """Whether the answer may be shorter than was asked for."""
    num_dropped_shots: int = 0


class Encoder:
    """Turns texts into ids for a model that reads `max_length` tokens at most.

    Attributes:
        prefix_id: What a text without a context is scored behind.
        drops_shots: Whether whole shots are to be left out of what is too long.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_length: int,
        *,
        add_bos: bool | None = None,
        on_overflow: "OnOverflow" = "truncate",
    ) -> None:
        """`add_bos` None leaves BOS to the tokenizer.

        Raises:
            BenchConfigError: a tokenizer without BOS and EOS, or a length that holds nothing.
        """
        if max_length < 1:
            raise BenchConfigError(f"max_length {max_length} leaves no token to score")
        self._ids = TextIds(tokenizer, add_bos=add_bos)
        self._max_length = max_length
        self._on_overflow = on_overflow
        self.drops_shots = on_overflow == "drop-shots"
        self.prefix_id = self._ids.prefix_id
        self._noted: dict[tuple[str, str], str] = {}

    @property
    def notices(self) -> tuple[str, ...]:
        """What tokenizer and lengths do that a reader of the scores should know."""
        return (*self._ids.notices, *self._noted.values())

    def note_dropped_shots(self, task: str, counts: Sequence[int]) -> None:
        """Take down how many shots were left out of each item of a task."""
        fewer = sorted(Counter(count for count in counts if count).items())
        if fewer:
            told = ", ".join(f"{items} without {shots}" for shots, items in fewer)
            self._noted["dropped", task] = (
                f"{task}: {sum(items for _, items in fewer)} of {len(counts)} prompts lost their "
                f"first shots, to fit in {self._max_length} tokens: {told}"
            )

    def note_separate(self, task: str, count: int) -> None:
        """Take down how many continuations of a task were tokenized alone."""
        if count:
            self._noted["separate", task] = (
                f"{task}: {count} continuations were tokenized alone, since a token spans their "
                f"beginning and their context's end"
            )

    def pair(self, context: str, continuation: str, *, where: str = "a request") -> EncodedPair:
        """Encode one continuation behind its context; `where` is named in errors.

        Raises:
            WorkloadError: the continuation has no tokens or more than the model reads, or, with
                `on_overflow="error"`, both together are too long.
        """
        return self.item([(context, continuation)], where=where).pairs[0]

    def item(self, pairs: Pairs, *, where: str = "a request") -> EncodedItem:
        """Encode all pairs of a document; errors as of `pair`."""
        return next(self.items([pairs], where=[where]))

    def items(
        self,
        items: Sequence[Pairs],
        *,
        where: Sequence[str] | None = None,
        shorter: Shorter | None = None,
    ) -> Iterator[EncodedItem]:
        """Encode documents in order, many texts at a time; the ids are those of `item`.

        With `shorter`, an item that is too long is first tried with fewer shots, and what even
        then is cut keeps its BOS. Errors as of `pair`.
        """
        start = 0
        while start < len(items):
            end, num_texts = start, 0
            while end < len(items) and num_texts < CHUNK_TEXTS:
                num_texts += len(items[end])
                end += 1
            encoded = self._joined([pair for pairs in items[start:end] for pair in pairs])
            for index in range(start, end):
                place = where[index] if where is not None else f"item {index}"
                made = [next(encoded) for _ in items[index]]
                yield self._fitted(index, made, place, shorter)
            start = end

    def rolling(self, text: str) -> list[EncodedPair]:
        """Cut a whole text into windows in which each of its tokens is scored exactly once.

        The first stands behind the prefix token, every later one behind the one token before it;
        the last is filled up with earlier tokens as context. No windows for a text without
        tokens. Nothing is lost of a long text, so none is refused.
        """
        ids = self._ids.encode([text], special=False)[0]
        if ids[:1] == (self.prefix_id,):
            ids = ids[1:]
        return list(self._windows(ids))

    def prompt(self, context: str, max_gen_toks: int, *, where: str = "a prompt") -> EncodedPrompt:
        """Encode a prompt that leaves room for `max_gen_toks` tokens.

        As in the harness, the prompt keeps its last max_length - max_gen_toks ids. Where that is
        none, the prompt is kept whole and the answer is cut.

        Raises:
            WorkloadError: prompt and answer leave each other no room, or, with
                `on_overflow="error"`, either would be cut.
        """
        return self.prompts([context], max_gen_toks, where=[where])[0]

    def prompts(
        self,
        contexts: Sequence[str],
        max_gen_toks: int,
        *,
        where: Sequence[str] | None = None,
        shorter: Callable[[int, int], str | None] | None = None,
    ) -> list[EncodedPrompt]:
        """Encode prompts many at a time; `shorter` as in `items`. Errors as of `prompt`."""
        made = []
        for index, ids in enumerate(self._ids.encode(contexts, special=True)):
            place = where[index] if where is not None else f"prompt {index}"
            room = self._max_length - max_gen_toks
            if room < 1:
                room = self._max_length - 1
            num_shots = 0
            while len(ids) > room and shorter is not None:
                text = shorter(index, num_shots + 1)
                if text is None:
                    break
                ids, num_shots = self._ids.encode([text], special=True)[0], num_shots + 1
            prompt = self._roomy(ids or (self.prefix_id,), max_gen_toks, place, shorter is not None)
            made.append(replace(prompt, num_dropped_shots=num_shots))
        return made

    def _roomy(self, ids: Ids, max_gen_toks: int, where: str, keep_bos: bool) -> EncodedPrompt:
        room, max_tokens = self._max_length - max_gen_toks, max_gen_toks
        if room < 1:
            room, max_tokens = len(ids), self._max_length - len(ids)
        wanted = f"a prompt of {len(ids)} tokens and an answer of {max_gen_toks} ({where})"
        if max_tokens < 1:
            error = WorkloadError(f"{wanted} leave each other no room in {self._max_length}")
            error.add_note("ask for shorter answers, with fewer max_gen_toks, or for fewer shots")
            raise error
        num_dropped = max(0, len(ids) - room)
        if self._on_overflow == "error" and (num_dropped or max_tokens < max_gen_toks):
            raise _too_long(f"{wanted} do not fit in {self._max_length} tokens")
        return EncodedPrompt(
            ids=self._last(ids, room, keep_bos),
            max_tokens=max_tokens,
            num_dropped=num_dropped,
            is_cut=max_tokens < max_gen_toks,
        )

    def _fitted(
        self, index: int, pairs: list[EncodedPair], where: str, shorter: Shorter | None
    ) -> EncodedItem:
        """Return the item at a length that the model can read."""
        num_shots = 0
        while shorter is not None and any(self._excess(pair) for pair in pairs):
            fewer = shorter(index, num_shots + 1)
            if fewer is None:
                break
            pairs, num_shots = list(self._joined(fewer)), num_shots + 1
        fitted: list[EncodedPair] = []
        for pair in pairs:
            size = len(pair.continuation_ids)
            if not 1 <= size <= self._max_length:
                raise WorkloadError(
                    f"expected a continuation of 1 to {self._max_length} tokens, found {size} "
                    f"({where})"
                )
            if excess := self._excess(pair):
                if self._on_overflow == "error":
                    raise _too_long(
                        f"a context of {len(pair.context_ids)} tokens and a continuation of "
                        f"{size} ({where}) exceed {self._max_length} by {excess}"
                    )
                kept = len(pair.context_ids) - excess
                cut = self._last(pair.context_ids, kept, shorter is not None)
                pair = replace(pair, context_ids=cut, num_dropped=excess)
            fitted.append(pair)
        return EncodedItem(pairs=tuple(fitted), num_dropped_shots=num_shots)

    def _excess(self, pair: EncodedPair) -> int:
        """Return by how many ids a pair is too long; its last id is predicted, never read."""
        return max(0, len(pair.context_ids) + len(pair.continuation_ids) - self._max_length - 1)

    def _last(self, ids: Ids, size: int, keep_bos: bool) -> Ids:
        if keep_bos and 2 <= size < len(ids) and ids[0] == self.prefix_id:
            return (self.prefix_id, *ids[len(ids) - size + 1 :])
        return ids[max(0, len(ids) - size) :]

    def _windows(self, ids: Ids) -> Iterator[EncodedPair]:
        prefix = (self.prefix_id,)
        first = ids[: self._max_length]
        if first:
            yield EncodedPair(context_ids=prefix, continuation_ids=first)
        start = len(first)
        while start < len(ids):
            end = min(start + self._max_length, len(ids))
            context = ids[max(0, end - self._max_length - 1) : start]
            yield EncodedPair(context_ids=context, continuation_ids=ids[start:end])
            start = end

    def _joined(self, pairs: Pairs) -> Iterator[EncodedPair]:
        """Encode pairs without regard to length; a continuation may come out empty."""
        moved = [_with_blanks_moved(context, continuation) for context, continuation in pairs]
        contexts = {context: index for index, (context, _) in enumerate(moved)}
        of_context = dict(
            zip(contexts, self._ids.encode(list(contexts), special=True), strict=True)
        )
        bare = [not of_context[context] or not context for context, _ in moved]
        # Behind nothing, a continuation is a text that must not get a BOS of its own.
        joint = iter(
            self._ids.encode(
                [a + b for (a, b), alone in zip(moved, bare, strict=True) if not alone],
                special=True,
            )
        )
        alone = iter(
            self._ids.encode(
                [b for (_, b), alone in zip(moved, bare, strict=True) if alone], special=False
            )
        )
        for (context, continuation), is_bare in zip(moved, bare, strict=True):
            if is_bare:
                ids = next(alone)
                if ids[:1] == (self.prefix_id,):
                    ids = ids[1:]
                yield EncodedPair(context_ids=(self.prefix_id,), continuation_ids=ids)
                continue
            head, whole = of_context[context], next(joint)
            tail = whole[len(head) :]
            join: Join = "clean" if whole[: len(head)] == head else "spanned"
            if not tail:
                tail, join = self._ids.encode([continuation], special=False)[0], "separate"
            yield EncodedPair(context_ids=head, continuation_ids=tail, join=join)


def _with_blanks_moved(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _too_long(message: str) -> WorkloadError:
    error = WorkloadError(message)
    error.add_note("ask for fewer shots, or let long prompts be cut and counted (truncate)")
    return error
