"""The built-in engine as a target: the generator's end of the socket to the engine's process.

Requests go out as token ids, so that the prompt has the asked length whatever the tokenizer does.
They are encoded before the clock starts. Answers come in batches, one message for what a step of
the engine gave out; each is stamped when it is read.
"""

import pickle
import select
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from llmbench.bench.client.generator import TargetEvent
from llmbench.bench.client.messages import AbortMessage, OutputBatch, SubmitMessage
from llmbench.bench.errors import TargetError

if TYPE_CHECKING:
    from llmbench.bench.workloads.workload import RequestSpec


class InProcessTarget:
    """The engine at the other end of a connection; one object for all runs over it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._run = 0
        self._encoded: list[bytes] = []

    def begin(self, requests: Sequence["RequestSpec"]) -> None:
        """Encode the requests and start a new run; answers to earlier runs are dropped."""
        self._run += 1
        self._encoded = [
            pickle.dumps(SubmitMessage(self._run, index, spec))
            for index, spec in enumerate(requests)
        ]

    def send(self, request_index: int, spec: "RequestSpec") -> None:
        """Write one request; may wait where the engine's reader is behind by a full socket."""
        try:
            self._connection.send_bytes(self._encoded[request_index])
        except OSError as error:
            raise TargetError(_GONE) from error

    def poll(self, timeout_s: float) -> Sequence[TargetEvent]:
        """Read one message if one is there within the time (microseconds count)."""
        # Connection.poll rounds up to whole milliseconds, which would delay the next send.
        ready, _, _ = select.select([self._connection], [], [], timeout_s)
        if not ready:
            return ()
        try:
            batch: OutputBatch = self._connection.recv()
        except (EOFError, OSError) as error:
            raise TargetError(_GONE) from error
        now = time.perf_counter()
        return [
            TargetEvent(output.request_index, now, *output[2:])
            for output in batch
            if output.run == self._run
        ]

    def abort(self, request_index: int) -> None:
        """Tell the engine to drop one request."""
        try:
            self._connection.send(AbortMessage(self._run, request_index))
        except OSError as error:
            raise TargetError(_GONE) from error


_GONE = "the engine process closed its connection"
