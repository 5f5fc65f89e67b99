"""The load generator in a process of its own, so that neither the engine nor reports delay a send.

One process serves all cells of a sweep: it starts once, then runs a load at a time on command and
writes each load's events itself, so that only progress and a summary travel back.
"""

import logging
from collections.abc import Callable
from multiprocessing.connection import Connection

from llmbench.bench.client.events import EventLog
from llmbench.bench.client.generator import LoadProgress, LoadSummary, run_load
from llmbench.bench.client.in_process import InProcessTarget
from llmbench.bench.client.messages import CancelLoad, Failed, RunLoad
from llmbench.bench.client.processes import (
    connected_pair,
    describe_exit,
    failure,
    raise_failure,
    spawn,
    stop_process,
)
from llmbench.bench.errors import LoadGeneratorError

logger = logging.getLogger(__name__)

WAKE_S = 0.2
"""How soon a wish to cancel is seen."""


class LoadGenerator:
    """The parent's handle on the generator process.

    `load_connection` is the generator's end of the connection to the engine; it belongs to the
    child afterwards.
    """

    def __init__(self, load_connection: Connection) -> None:
        self._control, theirs = connected_pair()
        self._process = spawn(
            _generator_main, theirs, load_connection, name="llmbench load generator"
        )
        theirs.close()
        load_connection.close()

    def run(
        self,
        load: RunLoad,
        *,
        on_progress: Callable[[LoadProgress], None] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> LoadSummary:
        """Run one load to its end; its events are in `load.events_path` on return."""
        self._send(load)
        asked_to_cancel = False
        while True:
            try:
                message = self._control.recv() if self._control.poll(WAKE_S) else None
            except (EOFError, OSError) as error:
                raise self._died() from error
            if isinstance(message, LoadSummary):
                return message
            if isinstance(message, Failed):
                raise_failure(message)
            if isinstance(message, LoadProgress) and on_progress is not None:
                on_progress(message)
            if not asked_to_cancel and is_cancelled is not None and is_cancelled():
                asked_to_cancel = True
                self._send(CancelLoad())

    def stop(self) -> None:
        """End the process."""
        self._control.close()
        stop_process(self._process)

    def _send(self, message: RunLoad | CancelLoad) -> None:
        try:
            self._control.send(message)
        except OSError as error:
            raise self._died() from error

    def _died(self) -> LoadGeneratorError:
        return LoadGeneratorError(
            f"the load generator's process ended ({describe_exit(self._process)})"
        )


def _generator_main(control: Connection, load_connection: Connection) -> None:
    target = InProcessTarget(load_connection)

    def is_cancelled() -> bool:
        return control.poll(0) and isinstance(control.recv(), CancelLoad)

    while True:
        try:
            command = control.recv()
        except EOFError:
            return
        if not isinstance(command, RunLoad):  # a cancel that crossed the summary
            continue
        events = EventLog()
        answer: LoadSummary | Failed
        try:
            try:
                answer = run_load(
                    target,
                    command.requests,
                    command.arrival_offsets,
                    events,
                    max_concurrency=command.max_concurrency,
                    time_limit_s=command.time_limit_s,
                    on_progress=control.send,
                    is_cancelled=is_cancelled,
                )
            finally:
                events.write_parquet(command.events_path)
        except (EOFError, BrokenPipeError):  # the parent has closed the connection
            return
        except Exception as error:
            answer = failure(error)
        control.send(answer)
