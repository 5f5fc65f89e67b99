"""The text of one request as its tokens arrive: what may be shown, and where it stops.

A stop string ends the text in front of it, wherever token borders are: it may begin in one token
and end in another, and a token may hold text behind it. So the tail of the text that could still
become a stop string is held back until it cannot, or until the request is finished; what has been
handed out is never taken back. Characters are completed in token_text.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmbench.engine.request import SamplingParams
from llmbench.engine.token_text import make_token_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """The text of one request: add tokens, take what may be shown."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._tokens = make_token_text(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = params.stop
        self._stop_characters = frozenset("".join(stop[:-1] for stop in params.stop))
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._is_ended = False
        self._taken: list[str] = []
        self._ready: list[str] = []
        self._held = ""  # the longest tail that begins a stop string

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Add one token; return the stop string that it completes, if it does.

        A stop token adds no text. Of several stop strings the one that ends first wins, of those
        the longest. One that ends before `min_tokens` tokens is ordinary text.
        """
        self._num_tokens += 1
        if is_stop_token or self._is_ended:
            return None
        added = self._tokens.push(token_id)
        if not self._stops:
            if added:
                self._ready.append(added)
            return None
        if not added:
            return None
        text = self._held + added
        if self._num_tokens >= self._min_tokens:
            found = self._find_stop(text, len(self._held))
            if found is not None:
                start, stop = found
                self._ready.append(text[:start])
                self._held = ""
                self._is_ended = True
                return stop
        num_held = self._count_held(text)
        self._ready.append(text[: len(text) - num_held])
        self._held = text[len(text) - num_held :]
        return None

    def take_delta(self, *, finished: bool) -> str:
        """Return the text not yet handed out; with `finished` also what was held back."""
        if finished and not self._is_ended:
            self._is_ended = True
            self._ready += (self._held, self._tokens.rest())
            self._held = ""
        delta = "".join(self._ready)
        self._ready.clear()
        if delta:
            self._taken.append(delta)
        return delta

    @property
    def text(self) -> str:
        """All text so far, as it would be if it ended here."""
        rest = "" if self._is_ended else self._held + self._tokens.rest()
        return "".join((*self._taken, *self._ready, rest))

    def _find_stop(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return (start, string) of the stop string that ends first behind `num_old` characters."""
        best: tuple[int, int, str] | None = None  # (end, start, string)
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _count_held(self, text: str) -> int:
        """Return the length of the longest tail of `text` that begins a stop string."""
        longest = 0
        if text[-1] not in self._stop_characters:
            return longest
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
