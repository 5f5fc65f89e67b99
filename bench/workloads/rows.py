"""Rows of a data file, and what is wrong with a row or with the file as a whole.

A row that gives no request is counted by its reason and passed over: real files hold empty talks,
null texts and half rows (aiperf#798), and one of them must neither stop a run nor vanish. A file
that cannot be read at all is an error, with the place where it broke.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from llmbench.bench.errors import WorkloadError


class RowError(Exception):
    """One row gives no request; the message is the reason under which it is counted."""


def read_text(path: str) -> str:
    """Return the whole file, which must be UTF-8 and hold more than white space."""
    try:
        # A byte order mark, as Windows editors write it, is not part of the text.
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as cause:
        error = WorkloadError(f"no dataset file {path}")
        error.add_note("--dataset-path is relative to the folder the command runs in")
        raise error from cause
    except UnicodeDecodeError as cause:
        raise WorkloadError(
            f"expected UTF-8 text, found byte {cause.object[cause.start]:#04x} at offset "
            f"{cause.start} of {path}"
        ) from cause
    except OSError as cause:
        raise WorkloadError(f"cannot read {path}: {cause.strerror}") from cause
    if not text.strip():
        raise WorkloadError(f"dataset file {path} is empty")
    return text


SHAREGPT_FORM = 'the form is [{"conversations": [{"from": "human", "value": …}, …]}, …]'


def read_json_list(path: str) -> list[Any]:
    """Return the rows of a file that is one JSON list."""
    text = read_text(path)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as cause:
        error = WorkloadError(
            f"expected a JSON list of conversations, found {cause.msg.lower()} at line "
            f"{cause.lineno}, column {cause.colno} of {path}"
        )
        if text.lstrip().startswith("{"):
            error.add_note("a file of one JSON object a line is --dataset-name custom")
        else:
            error.add_note(SHAREGPT_FORM)
        raise error from cause
    except RecursionError as cause:
        raise WorkloadError(f"expected a JSON list, found nesting too deep in {path}") from cause
    if not isinstance(data, list):
        found = f"an object with {', '.join(list(data)[:5])}" if isinstance(data, dict) else data
        error = WorkloadError(
            f"expected a JSON list of conversations, found {found!s:.80} in {path}"
        )
        error.add_note(SHAREGPT_FORM)
        raise error
    if not data:
        raise WorkloadError(f"the JSON list in {path} has no rows")
    return data


def read_json_lines(path: str, skipped: Counter[str]) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line; blank lines are not rows.

    Lines that hold something else are counted in `skipped`.
    """
    text = read_text(path)
    rows = []
    # Not splitlines(): that also cuts at U+2028 and U+0085, which JSON texts may hold as they are.
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            skipped["not JSON"] += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            skipped["not a JSON object"] += 1
    if not rows:
        error = WorkloadError(f"expected one JSON object a line, found none in {path}")
        if text.lstrip().startswith("["):
            error.add_note("a JSON list of conversations is --dataset-name sharegpt")
        raise error
    return rows


def no_usable_row(path: str, skipped: Counter[str]) -> WorkloadError:
    """Return the error of a file all of whose rows were skipped."""
    return WorkloadError(f"no usable row in {path}: {count_reasons(skipped)}")


def count_reasons(skipped: Counter[str]) -> str:
    """Return the reasons, most frequent first, each with its number of rows."""
    return ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common())
