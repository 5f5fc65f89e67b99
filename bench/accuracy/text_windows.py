"""A text cut into windows for perplexity, by one of three protocols.

A model reads a bounded number of tokens, so a long text is cut, and every way of cutting gives
another perplexity. All of them come down to pairs of (context, continuation) token ids:

* `gptq`, of papers on quantization (Frantar et al. 2022, section 4, and their published evaluation
  code): the whole text is tokenized once, with the tokenizer's own special tokens, and cut into
  windows that do not overlap. Each is read without what stands before it, its first token is not
  predicted, and what is left behind the last whole window is not read.
* `llamacpp`, of llama.cpp's `perplexity`: shorter windows, whose first token gives way to BOS where
  the vocabulary adds one, and of which only the second half is scored.
* `strided`, of the transformers documentation: windows overlap, and each scores only tokens that no
  window before it has scored; so every token of the text is scored once, with much context.

A number means nothing without these choices, so `protocol` tells them all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmbench.bench.accuracy.text_source import Text, read_utf8
from llmbench.bench.errors import BenchConfigError, BenchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmbench.engine.scoring import ScoreRequest

Protocol = Literal["gptq", "llamacpp", "strided"]

WINDOWS: dict[str, int | None] = {"gptq": 2048, "llamacpp": 512, "strided": None}
"""Tokens of a window; None is all that the model reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWindow:
    """Token ids that are read, and those behind them that are scored."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWindows:
    """The windows of a text, and how they came to be.

    Attributes:
        parts: Windows that score at least one token.
        num_windows: Windows of the whole text, of which a limit may have left some out.
        num_text_tokens: Tokens of the text, without a BOS.
        num_dropped_tokens: Tokens at the end, which are in no window.
        has_bos: Whether the text, or each of its windows, begins with BOS.
        tokenizer: Its name and the size of its vocabulary.
    """

    source: Text
    kind: Protocol
    window: int
    stride: int
    parts: tuple[TextWindow, ...]
    num_windows: int
    num_text_tokens: int
    num_dropped_tokens: int
    has_bos: bool
    tokenizer: str

    @property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """All token ids of each window."""
        return tuple(part.context + part.continuation for part in self.parts)

    @property
    def protocol(self) -> str:
        """All that the perplexity depends on besides the model, in one line."""
        bos = "no BOS"
        if self.has_bos:
            each = self.kind == "llamacpp"
            bos = "a BOS in place of each window's first token" if each else "a BOS at its start"
        joined = "as it is" if self.source.joiner is None else f"joined by {self.source.joiner!r}"
        scored = {
            "gptq": "first token of each not predicted",
            "llamacpp": "second half of each scored",
            "strided": "each token scored once",
        }[self.kind]
        return (
            f"{self.source.name} ({joined}): one text of {self.num_text_tokens:,} tokens "
            f"(tokenizer {self.tokenizer}, {bos}), protocol {self.kind}, "
            f"{len(self.parts):,} of {self.num_windows:,} windows of {self.window} "
            f"at a stride of {self.stride}, {scored}, {self.num_dropped_tokens:,} tokens dropped "
            "at the end"
        )

    def requests(self) -> "list[ScoreRequest]":
        """A request for each window, in order."""
        from llmbench.engine.scoring import ScoreRequest

        return [
            ScoreRequest(context=part.context, continuations=(part.continuation,))
            for part in self.parts
        ]

    def settings(self) -> dict[str, Any]:
        """The same choices as `protocol`, for programs."""
        return {
            "text": self.source.name,
            "text_sha256": self.source.sha256,
            "joiner": self.source.joiner,
            "tokenizer": self.tokenizer,
            "protocol": self.kind,
            "window": self.window,
            "stride": self.stride,
            "has_bos": self.has_bos,
            "num_windows": self.num_windows,
            "num_text_tokens": self.num_text_tokens,
            "num_dropped_tokens": self.num_dropped_tokens,
        }


def cut_windows(
    source: Text,
    tokenizer: "PreTrainedTokenizerBase",
    kind: Protocol = "gptq",
    *,
    max_length: int,
    window: int | None = None,
    stride: int | None = None,
    add_bos: bool | None = None,
    limit: int | None = None,
) -> TextWindows:
    """Cut a text into windows for a model that reads at most `max_length` tokens at a time.

    A window's last token is predicted and never read. A text shorter than one window is a single,
    shorter one. `stride` is for `strided` alone: half a window unless given. `limit` keeps the
    first windows.

    Raises:
        BenchConfigError: a window that the model cannot read, or a stride that leaves tokens out.
    """
    size = _window_size(kind, window, max_length)
    if stride is not None and kind != "strided":
        raise BenchConfigError(f"a stride is for the protocol strided, not for {kind}")
    step = (stride or max(1, size // 2)) if kind == "strided" else size
    if step > size:
        raise BenchConfigError(
            f"a stride of {step} would leave tokens out between windows of {size}"
        )
    ids, has_bos = encode_text(source.text, tokenizer, add_bos)
    if kind == "strided":
        parts, num_dropped = list(_strided(ids, size, step)), 0
    else:
        size = step = max(1, min(size, len(ids)))
        num_dropped = len(ids) % size
        bos = tokenizer.bos_token_id if kind == "llamacpp" and has_bos else None
        parts = list(_disjoint(ids, size, bos, size // 2 + 1 if kind == "llamacpp" else 1))
    return TextWindows(
        source=source,
        kind=kind,
        window=size,
        stride=step,
        parts=tuple(parts[:limit]),
        num_windows=len(parts),
        num_text_tokens=len(ids) - has_bos,
        num_dropped_tokens=num_dropped,
        has_bos=has_bos,
        tokenizer=f"{Path(tokenizer.name_or_path).name or type(tokenizer).__name__} "
        f"of {len(tokenizer):,}",
    )


def encode_text(
    text: str, tokenizer: "PreTrainedTokenizerBase", add_bos: bool | None = None
) -> tuple[list[int], bool]:
    """Token ids, and whether they begin with BOS: once, also where text and tokenizer both add it.

    None leaves BOS to the tokenizer.
    """
    bos = tokenizer.bos_token_id
    if add_bos and bos is None:
        raise BenchConfigError("add_bos needs a BOS token, and the tokenizer has none")
    if add_bos is None:
        encoded = tokenizer(text, verbose=False)
    else:
        encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    ids = [int(token) for token in encoded["input_ids"]]
    if bos is not None and (add_bos or ids[:1] == [bos]):
        while ids[:1] == [bos]:
            ids = ids[1:]
        return [int(bos), *ids], True
    return ids, False


def cut_text(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    window: int,
    limit: int | None = None,
) -> TextWindows:
    """Cut a text file into windows of `window` tokens by the protocol `gptq`.

    Raises:
        BenchError: the file cannot be read, or holds fewer than two tokens.
    """
    source = Text(name=path.name, text=read_utf8(path))
    cut = cut_windows(source, tokenizer, max_length=window, window=window, limit=limit)
    if not cut.parts:
        found = cut.num_text_tokens + cut.has_bos
        raise BenchError(f"{path} holds {found} tokens; a perplexity needs at least 2")
    return cut


def _window_size(kind: Protocol, window: int | None, max_length: int) -> int:
    size = window or min(WINDOWS[kind] or max_length, max_length)
    if not 2 <= size <= max_length:
        error = BenchConfigError(
            f"expected a window of 2 to {max_length} tokens, which the model reads, found {size}"
        )
        error.add_note("choose another with --window")
        raise error
    return size


def _disjoint(ids: list[int], size: int, bos: int | None, num_read: int) -> Iterator[TextWindow]:
    """Whole windows; each scores what stands behind its first `num_read` tokens."""
    for start in range(0, len(ids) - size + 1, size):
        window = ids[start : start + size]
        if bos is not None:
            window[0] = bos
        if num_read < size:
            yield TextWindow(
                context=tuple(window[:num_read]), continuation=tuple(window[num_read:])
            )


def _strided(ids: list[int], size: int, step: int) -> Iterator[TextWindow]:
    """Windows that score what none before them has scored; the first reads `ids[0]` unscored."""
    scored = 1
    for start in range(0, len(ids), step):
        end = min(start + size, len(ids))
        if end > scored:
            # Without overlap a window reads one token of the last, or its first had no context.
            context = ids[min(start, scored - 1) : scored]
            yield TextWindow(context=tuple(context), continuation=tuple(ids[scored:end]))
            scored = end
        if end == len(ids):
            return
