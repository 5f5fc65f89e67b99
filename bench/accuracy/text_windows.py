"""A text cut into windows for perplexity, by the protocol of the quantization papers.

The whole text is tokenized once, as it is, and cut into windows that do not overlap; each is read
without what stands before it, and its first token is not predicted. What is left behind the last
whole window is not read (Frantar et al. 2022, section 4; their published evaluation code). A
perplexity depends on every one of these choices, so they are printed beside it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmbench.bench.errors import BenchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWindows:
    """Windows of equal length, and how they came to be."""

    windows: tuple[tuple[int, ...], ...]
    num_text_tokens: int
    protocol: str


def cut_text(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    window: int,
    limit: int | None = None,
) -> TextWindows:
    """Cut a text file into windows of `window` tokens, at most `limit` of them.

    A text that is shorter than one window is a single, shorter one.

    Raises:
        BenchError: the file cannot be read, or holds fewer than two tokens.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path} as UTF-8 text: {error}") from error
    ids = [int(token) for token in tokenizer(text, verbose=False)["input_ids"]]
    if len(ids) < 2:
        raise BenchError(f"{path} holds {len(ids)} tokens; a perplexity needs at least 2")
    size = min(window, len(ids))
    starts = range(0, len(ids) - size + 1, size)[:limit]
    bos = tokenizer.bos_token_id
    has_bos = bos is not None and ids[0] == bos
    return TextWindows(
        windows=tuple(tuple(ids[start : start + size]) for start in starts),
        num_text_tokens=len(ids),
        protocol=(
            f"{path.name}: one text of {len(ids):,} tokens as the model's tokenizer cuts it "
            f"({'a BOS at its start' if has_bos else 'no BOS'}), {len(starts)} windows of {size} "
            f"without overlap, first token of each not predicted"
        ),
    )
