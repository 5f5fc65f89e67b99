"""The tokens that a quantization is calibrated with, and an account of every one of them.

A text file is one long text: it is tokenized as it is, once, and cut into consecutive pieces of
the longest length, from its beginning. Rows (JSON Lines, a hub dataset) are a sample each: plain
text, or chat messages through the model's own chat template; a row that is too long is cut at
its end. Nothing is padded. What was cut or could not be used is counted, never only dropped: one
toolkit threw away every text above 512 tokens without a word (AutoAWQ#297).
"""

import hashlib
import json
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.quant.errors import CalibrationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROW_SUFFIXES = (".jsonl", ".json", ".ndjson")
MESSAGE_KEYS = ("messages", "conversations", "conversation")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""ShareGPT's words for the roles of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCoverage:
    """What became of every sample and token that was read.

    Attributes:
        num_samples, num_tokens: Used.
        num_truncated_samples, num_truncated_tokens: Samples that were cut, tokens cut off them.
        num_dropped_samples: Rows that held no tokens.
        num_unused_tokens: Of a text file, behind the last piece that was asked for.
    """

    num_samples: int
    num_tokens: int
    num_truncated_samples: int = 0
    num_truncated_tokens: int = 0
    num_dropped_samples: int = 0
    num_unused_tokens: int = 0

    def to_json(self) -> dict[str, int]:
        """As a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSet:
    """Samples of token ids, where they came from, and how they were cut."""

    samples: tuple[tuple[int, ...], ...]
    source: str
    protocol: str
    coverage: CalibrationCoverage

    @property
    def description(self) -> str:
        """Where the samples come from and how they were cut, in a line."""
        return f"{Path(self.source).name}: {self.protocol}"

    def to_json(self) -> dict[str, Any]:
        """All but the samples themselves."""
        return {
            "source": Path(self.source).name,
            "protocol": self.protocol,
            **self.coverage.to_json(),
        }

    @property
    def digest(self) -> str:
        """A sha256 of the samples; their order has no part in it, as it has none in a result."""
        sha = hashlib.sha256()
        for sample in sorted(self.samples):
            sha.update(json.dumps(sample).encode())
        return sha.hexdigest()


def load_calibration(
    source: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    num_samples: int,
    max_seq_length: int,
    seed: int = 0,
) -> CalibrationSet:
    """Read samples from a text file, a JSON Lines file or a hub dataset (`id` or `id:config`).

    Raises:
        CalibrationError: the source is missing or unreadable, or holds no usable sample.
    """
    path = Path(source)
    if path.is_dir():
        raise CalibrationError(
            f"expected a file or a hub dataset for calibration, {path} is a folder"
        )
    if path.is_file() and path.suffix not in ROW_SUFFIXES:
        return _from_text(path, tokenizer, num_samples, max_seq_length)
    rows = _read_rows(path) if path.is_file() else _hub_rows(source)
    return _from_rows(source, rows, tokenizer, num_samples, max_seq_length, seed)


def calibration_from_ids(
    samples: Iterable[Sequence[int]],
    *,
    source: str = "token ids",
    protocol: str | None = None,
    max_seq_length: int,
) -> CalibrationSet:
    """Samples that are token ids already; too long ones are cut at their end, empty ones dropped.

    Raises:
        CalibrationError: nothing is left.
    """
    kept: list[tuple[int, ...]] = []
    truncated = cut = dropped = 0
    for sample in samples:
        if not sample:
            dropped += 1
            continue
        excess = max(0, len(sample) - max_seq_length)
        truncated += excess > 0
        cut += excess
        kept.append(tuple(sample[:max_seq_length]))
    if not kept:
        raise CalibrationError(f"{source} holds no sample with tokens ({dropped} empty ones)")
    return CalibrationSet(
        samples=tuple(kept),
        source=source,
        protocol=protocol or f"rows, each cut at {max_seq_length} tokens",
        coverage=CalibrationCoverage(
            num_samples=len(kept),
            num_tokens=sum(map(len, kept)),
            num_truncated_samples=truncated,
            num_truncated_tokens=cut,
            num_dropped_samples=dropped,
        ),
    )


def _from_text(
    path: Path, tokenizer: "PreTrainedTokenizerBase", num_samples: int, max_seq_length: int
) -> CalibrationSet:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read {path} as UTF-8 text: {error}") from error
    ids = _encode(tokenizer, text, add_special_tokens=True)
    if not ids:
        raise CalibrationError(f"{path} holds no text")
    if getattr(tokenizer, "chat_template", None):
        logger.warning(
            "%s is plain text, and the model has a chat template that it does not go through; "
            "JSON Lines with messages would",
            path,
        )
    wanted = ids[: num_samples * max_seq_length]
    samples = tuple(
        tuple(wanted[start : start + max_seq_length])
        for start in range(0, len(wanted), max_seq_length)
    )
    if len(samples) < num_samples:
        logger.warning(
            "%s has %d tokens: %d samples of %d, %d were asked for",
            path,
            len(ids),
            len(samples),
            max_seq_length,
            num_samples,
        )
    return CalibrationSet(
        samples=samples,
        source=str(path),
        protocol=f"one text, cut into consecutive pieces of {max_seq_length} tokens",
        coverage=CalibrationCoverage(
            num_samples=len(samples),
            num_tokens=len(wanted),
            num_unused_tokens=len(ids) - len(wanted),
        ),
    )


def _from_rows(
    source: str,
    rows: list[Any],
    tokenizer: "PreTrainedTokenizerBase",
    num_samples: int,
    max_seq_length: int,
    seed: int,
) -> CalibrationSet:
    """Rows in an order drawn from the seed, until enough of them held tokens."""
    order = list(range(len(rows)))
    if len(rows) > num_samples:
        random.Random(seed).shuffle(order)
    samples: list[list[int]] = []
    num_empty = 0
    for position in order:
        if len(samples) == num_samples:
            break
        ids = _row_ids(rows[position], f"{source}, row {position + 1}", tokenizer)
        if ids:
            samples.append(ids)
        else:
            num_empty += 1
    found = calibration_from_ids(
        [*samples, *([[]] * num_empty)], source=source, max_seq_length=max_seq_length
    )
    if len(samples) < num_samples:
        logger.warning(
            "%s has %d usable rows, %d samples were asked for", source, len(samples), num_samples
        )
    return found


def _row_ids(row: Any, where: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    if isinstance(row, str):
        return _encode(tokenizer, row, add_special_tokens=True)
    if isinstance(row, dict):
        key = next((key for key in MESSAGE_KEYS if isinstance(row.get(key), list)), None)
        if key is not None:
            return _chat_ids(row[key], where, tokenizer)
        text = next(
            (row[key] for key in ("text", "content") if isinstance(row.get(key), str)), None
        )
        if text is not None:
            return _encode(tokenizer, text, add_special_tokens=True)
    error = CalibrationError(f"{where} has neither text nor messages")
    error.add_note('a row is {"text": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}')
    raise error


def _chat_ids(messages: list[Any], where: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        error = CalibrationError(f"{where} is a chat, and the tokenizer has no chat template")
        error.add_note('give rows of plain text: {"text": "…"}')
        raise error
    try:
        chat = [
            {
                "role": ROLES.get(role := str(turn.get("role", turn.get("from"))), role),
                "content": turn.get("content", turn.get("value")),
            }
            for turn in messages
        ]
        # The template writes the special tokens itself; none may be added to its text.
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    # A template may raise anything, and its own words say best what it refuses.
    except Exception as error:
        raise CalibrationError(f"the chat template refuses {where}: {error}") from error
    return _encode(tokenizer, str(text), add_special_tokens=False)


def _encode(
    tokenizer: "PreTrainedTokenizerBase", text: str, *, add_special_tokens: bool
) -> list[int]:
    # verbose: a text longer than the model's context is cut below, which needs no warning.
    ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return [int(token) for token in ids]


def _read_rows(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read {path} as UTF-8 text: {error}") from error
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise CalibrationError(f"{path} is not JSON: {error}") from error
        if not isinstance(rows, list):
            raise CalibrationError(f"{path} holds a JSON {type(rows).__name__}, expected a list")
        return rows
    rows = []
    # Not splitlines(): that also cuts at U+2028 and U+0085, which JSON texts may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise CalibrationError(f"{path}, line {number} is not JSON: {error}") from error
    if not rows:
        raise CalibrationError(f"{path} holds no rows")
    return rows


def _hub_rows(source: str) -> list[Any]:
    name, _, subset = source.partition(":")
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or " " in name:
        raise CalibrationError(f"calibration file {source} does not exist")
    from datasets import load_dataset

    try:
        rows = load_dataset(name, subset or None, split="train")
    # The hub client raises a dozen kinds for "not there" and "not reachable".
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raised = CalibrationError(
            f"calibration {source} is no file here, and cannot be had from the hub: {reason}"
        )
        raised.add_note("give a text or JSON Lines file: --calibration FILE")
        raise raised from error
    return list(rows)
