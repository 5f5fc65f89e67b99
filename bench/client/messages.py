"""What the processes of a benchmark say to each other.

Three processes, three connections, all pickled and all on one machine:

    MAIN ── control ── ENGINE       load the model, begin and end a cell, stop
    MAIN ── control ── GENERATOR    run a load, cancel it; progress and summary come back
    GENERATOR ── load ── ENGINE     requests and aborts one way, batches of outputs the other
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from llmbench.bench.workloads.workload import RequestSpec


# Load connection. `run` numbers the runs of a generator, so that a late answer to a request of an
# earlier run is told from one of this run.


class SubmitMessage(NamedTuple):
    """Generator to engine: one request."""

    run: int
    request_index: int
    spec: "RequestSpec"


class AbortMessage(NamedTuple):
    """Generator to engine: drop one request."""

    run: int
    request_index: int


class Output(NamedTuple):
    """Engine to generator: what one step added to one request."""

    run: int
    request_index: int
    num_new_tokens: int
    emit_s: float
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error: str | None


OutputBatch = list[Output]


# Control connections.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoad:
    """Main to generator: run this load and write its events."""

    requests: "tuple[RequestSpec, ...]"
    arrival_offsets: list[float]
    max_concurrency: int | None
    time_limit_s: float | None
    events_path: Path


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Main to generator: give up the running load, if one is running."""


@dataclass(frozen=True, slots=True)
class LoadingProgress:
    """Engine to main: what it does before it is ready, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Engine to main: it serves from now on."""

    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BeginCell:
    """Main to engine: wait until idle, forget cached prefixes, start counting steps."""


@dataclass(frozen=True, slots=True)
class EndCell:
    """Main to engine: write the records of all steps since `BeginCell`."""

    steps_path: Path


@dataclass(frozen=True, slots=True)
class Done:
    """Engine to main: the last command is carried out."""

    peak_resident_bytes: int
    """Most memory that the engine's process has held since it began."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Any process to main: it failed; the error keeps its type, message and notes."""

    error: BaseException
    traceback: str
