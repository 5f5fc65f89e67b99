"""Where the text of a perplexity comes from: one long string, and how it was put together.

A text file is read as it is, byte for byte; JSON Lines are rows that a joiner puts together; a hub
dataset likewise. Papers on quantization join the rows of WikiText-2 with two line feeds, which
gives another text, of 5,780 more bytes, than the file that llama.cpp reads. So the joiner is part
of a result, and the digest tells whether two results read the same text.
"""

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmbench.bench.errors import BenchError

logger = logging.getLogger(__name__)

JOINER = "\n\n"
"""Between rows, as in GPTQ's published evaluation code."""

FIELDS = ("text", "page")
"""Names under which JSON Lines hold a text."""

WIKITEXT2 = ("Salesforce/wikitext", "wikitext-2-raw-v1")
WIKITEXT2_NAMES = ("wikitext2", *WIKITEXT2)
WIKITEXT2_FILE = Path("wikitext2") / "wiki.test.raw"
"""Where a folder of local data holds the test split."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text to read.

    Attributes:
        name: As a reader would name it.
        joiner: What stands between its rows; None for a file read as it is.
    """

    name: str
    text: str
    joiner: str | None = None

    @cached_property
    def num_words(self) -> int:
        """Words between white space."""
        return len(self.text.split())

    @cached_property
    def num_bytes(self) -> int:
        """Bytes in UTF-8."""
        return len(self.text.encode())

    @cached_property
    def sha256(self) -> str:
        """Of its UTF-8 bytes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_text(source: str, *, data_dir: Path | None = None, joiner: str = JOINER) -> Text:
    """Read a file, or the test split of `wikitext2`: from `data_dir` if given, else from the hub.

    Raises:
        BenchError: the source is neither, or cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".jsonl":
            return Text(name=path.name, text=joiner.join(_json_rows(path)), joiner=joiner)
        return Text(name=path.name, text=read_utf8(path))
    if source not in WIKITEXT2_NAMES:
        error = BenchError(f"expected a text file or `{WIKITEXT2_NAMES[0]}`, found `{source}`")
        error.add_note("name a UTF-8 file, or JSON Lines with a `text` or `page` in each row")
        raise error
    rows = _hub_rows() if data_dir is None else _raw_rows(data_dir / WIKITEXT2_FILE)
    return Text(name="WikiText-2 test", text=joiner.join(rows), joiner=joiner)


def read_utf8(path: Path) -> str:
    """Read a file without touching its line ends."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path} as UTF-8 text: {error}") from error


def _json_rows(path: Path) -> list[str]:
    rows = []
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BenchError(f"expected JSON in line {number} of {path}: {error}") from error
        found = [row[field] for field in FIELDS if isinstance(row, dict) and field in row]
        if not found or not isinstance(found[0], str):
            raise BenchError(
                f"expected a text under {' or '.join(f'`{field}`' for field in FIELDS)} "
                f"in line {number} of {path}"
            )
        rows.append(found[0])
    return rows


def _raw_rows(path: Path) -> list[str]:
    """Rows of the hub's dataset from its raw file, in which an empty row is a space and a feed."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", read_utf8(path))
    return ["" if line == " \n" else line for line in lines]


def _hub_rows() -> list[str]:
    from datasets import load_dataset

    logger.info("reading %s from the hub", WIKITEXT2[0])
    try:
        return [str(row) for row in load_dataset(*WIKITEXT2, split="test")["text"]]
    except (OSError, ValueError) as error:
        unreachable = BenchError(f"cannot read {WIKITEXT2[0]} from the hub: {error}")
        unreachable.add_note("give a folder that holds wikitext2/wiki.test.raw with --data-dir")
        raise unreachable from error
