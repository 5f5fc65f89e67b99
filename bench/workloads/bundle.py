"""A workload in a file: the very requests of a run, to be read, checked and sent again.

One JSON object a line. The first names the kind, the schema version, the digest and the notes;
each other is a request in the order of arrival: its ids, its lengths, its sampling, and when it
is due. A file sent to somebody else asks their engine the same questions at the same times,
whatever tokenizer, numpy or dataset file they have; reading it recomputes the digest.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.workload import RequestSpec, Workload, workload_digest

KIND = "llmbench-workload"
SCHEMA_VERSION = 1

# Kept apart from the dataclass on purpose: the names in the file outlive those in the code.
REQUEST_FIELDS = (
    "index",
    "prompt_token_ids",
    "max_tokens",
    "text",
    "temperature",
    "top_p",
    "top_k",
    "ignore_eos",
    "seed",
    "stop",
)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A workload and when its requests are due, seconds from the start."""

    workload: Workload
    arrival_offsets_s: list[float]


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Write a bundle; the file appears whole or not at all."""
    workload, offsets = bundle.workload, bundle.arrival_offsets_s
    if len(workload.requests) != len(offsets):
        raise WorkloadError(
            f"expected a time for each of {len(workload.requests)} requests, found {len(offsets)}"
        )
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for record in _records(workload, offsets):
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as cause:
        raise WorkloadError(f"cannot write {path}: {cause.strerror}") from cause


def _records(workload: Workload, offsets: Sequence[float]) -> Iterator[dict[str, Any]]:
    yield {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "num_requests": len(workload.requests),
        "digest": workload.digest,
        "notes": workload.notes,
    }
    for request, offset in zip(workload.requests, offsets, strict=True):
        record = {name: getattr(request, name) for name in REQUEST_FIELDS}
        yield record | {"arrival_s": offset}


def read_bundle(path: Path) -> Bundle:
    """Read a bundle; refuse one that is cut short, altered or of another version."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        head, *records = [json.loads(line) for line in lines if line] or [None]
    except FileNotFoundError as cause:
        raise WorkloadError(f"no workload file {path}") from cause
    except OSError as cause:
        raise WorkloadError(f"cannot read {path}: {cause.strerror}") from cause
    except ValueError as cause:
        raise WorkloadError(f"expected one JSON object a line, found {cause} in {path}") from cause
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise WorkloadError(f"expected the header of a workload in the first line of {path}")
    if head.get("schema_version") != SCHEMA_VERSION:
        raise WorkloadError(
            f"expected workload schema version {SCHEMA_VERSION}, found "
            f"{head.get('schema_version')} in {path}"
        )
    if len(records) != head.get("num_requests"):
        raise WorkloadError(
            f"expected {head.get('num_requests')} requests, found {len(records)} in {path}"
        )
    requests, offsets = [], []
    for number, record in enumerate(records, start=2):
        try:
            requests.append(_request(record))
            offsets.append(_offset(record["arrival_s"]))
        except (TypeError, ValueError, LookupError) as cause:
            raise WorkloadError(
                f"expected a request in line {number} of {path}: {cause}"
            ) from cause
    digest = workload_digest(requests)
    if digest != head.get("digest"):
        error = WorkloadError(
            f"expected digest {head.get('digest')!s:.12}…, found {digest:.12}… in {path}"
        )
        error.add_note("the file was altered after it was written; build the workload anew")
        raise error
    workload = Workload(requests=tuple(requests), digest=digest, notes=head.get("notes", {}))
    return Bundle(workload, offsets)


def _request(record: dict[str, Any]) -> RequestSpec:
    fields = {name: record[name] for name in REQUEST_FIELDS}
    ids = tuple(fields["prompt_token_ids"])
    if not ids or not all(type(token_id) is int and 0 <= token_id < 2**32 for token_id in ids):
        raise ValueError("prompt_token_ids is no list of token ids")
    fields["prompt_token_ids"] = ids
    fields["stop"] = tuple(fields["stop"])
    return RequestSpec(**fields)


def _offset(value: Any) -> float:
    offset = float(value)
    if not 0 <= offset < math.inf:
        raise ValueError(f"arrival_s is {value}")
    return offset
