"""The engine in a process of its own: loaded once, measured cell by cell.

Inside, three threads besides the engine's own: one reads requests off the load connection, one
writes what the engine gives out, and the main thread obeys the parent. Reading never waits for
writing, so a generator in the middle of a burst and an engine in the middle of a step cannot block
each other. Outputs that gather while a message is being written leave together in the next one,
which makes about one message a step.
"""

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from llmbench.bench.client.messages import (
    AbortMessage,
    BeginCell,
    Done,
    EndCell,
    Failed,
    LoadingProgress,
    Output,
    Ready,
    SubmitMessage,
)
from llmbench.bench.client.processes import (
    STOP_TIMEOUT_S,
    connected_pair,
    describe_exit,
    failure,
    peak_resident_bytes,
    raise_failure,
    spawn,
    stop_process,
)
from llmbench.bench.errors import TargetError
from llmbench.engine.errors import EngineError
from llmbench.engine.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from llmbench.bench.workloads.workload import RequestSpec

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 60.0
"""Longest wait, before a cell, for requests that an earlier one gave up."""

WAKE_S = 0.2
"""How soon a failure of the engine is seen."""


class ServedEngine(Protocol):
    """What the process needs of an engine."""

    info: dict[str, Any]
    """Facts for the record: model, sizes, kernels."""

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine; None while it lives."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        on_output: Callable[[RequestOutput], None],
    ) -> None:
        """Start a request; `on_output` gets every output, on whatever thread."""

    def abort(self, request_id: str) -> None:
        """Drop a request; one that is unknown or finished is fine."""

    def begin_cell(self) -> None:
        """Forget cached prefixes and the records of earlier steps; called when idle."""

    def end_cell(self, steps_path: Path) -> None:
        """Write the records of the steps since `begin_cell`, if the engine makes steps."""

    def shutdown(self) -> None:
        """End its threads."""


EngineFactory = Callable[[Callable[[str], None]], ServedEngine]
"""Makes an engine, telling what it does meanwhile; picklable."""


class EngineProcess:
    """The parent's handle on the engine process.

    `load_connection` is the engine's end of the connection to the generator; it belongs to the
    child afterwards.
    """

    def __init__(self, make_engine: EngineFactory, load_connection: Connection) -> None:
        self._control, theirs = connected_pair()
        self._process = spawn(
            _engine_main, theirs, load_connection, make_engine, name="llmbench engine"
        )
        theirs.close()
        load_connection.close()
        self._is_ready = False

    def wait_until_ready(self, on_progress: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Return the engine's facts once it serves, or raise the error that its loading raised."""
        while True:
            message = self._receive()
            if isinstance(message, Ready):
                self._is_ready = True
                return message.info
            if isinstance(message, LoadingProgress) and on_progress is not None:
                on_progress(message.text)

    def begin_cell(self) -> None:
        """Let the engine come to rest and forget its cached prefixes and step records."""
        self._command(BeginCell())

    def end_cell(self, steps_path: Path) -> dict[str, Any]:
        """Have the step records since `begin_cell` written; return facts of the process."""
        done = self._command(EndCell(steps_path))
        return {"peak_resident_bytes": done.peak_resident_bytes}

    def raise_failure(self) -> NoReturn:
        """Raise why the engine went away: its own error if it told one, else TargetError."""
        while True:
            self._receive()

    def stop(self) -> None:
        """End the process and free what it holds."""
        self._control.close()
        # One that is still loading does not read its connection.
        stop_process(self._process, STOP_TIMEOUT_S if self._is_ready else 0.0)

    def _command(self, command: BeginCell | EndCell) -> Done:
        try:
            self._control.send(command)
        except OSError as error:
            raise self._died() from error
        message = self._receive()
        if not isinstance(message, Done):
            raise TargetError(f"the engine process answered {command} with {message}")
        return message

    def _receive(self) -> object:
        try:
            message = self._control.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(message, Failed):
            raise_failure(message)
        return message

    def _died(self) -> TargetError:
        how = describe_exit(self._process)
        error = TargetError(f"the engine process ended unexpectedly ({how})")
        if how.endswith("SIGKILL"):
            error.add_note(
                "the system kills a process when memory runs out: lower --kv-cache-memory, "
                "--max-num-batched-tokens or --max-num-seqs"
            )
        return error


def _engine_main(
    control: Connection, load_connection: Connection, make_engine: EngineFactory
) -> None:
    try:
        engine = make_engine(lambda text: control.send(LoadingProgress(text)))
    except Exception as error:
        control.send(failure(error))
        return
    # The engine's failure goes to the parent; its thread need not print it as well.
    threading.excepthook = lambda args: logger.debug("%s failed", args.thread, exc_info=True)
    server = _LoadServer(engine, load_connection)
    server.start()
    control.send(Ready(engine.info))
    while (failed := engine.failure or server.failure) is None:
        if not control.poll(WAKE_S):
            continue
        try:
            command = control.recv()
        except EOFError:
            engine.shutdown()
            return
        try:
            if isinstance(command, BeginCell):
                server.wait_until_idle(IDLE_TIMEOUT_S)
                engine.begin_cell()
            elif isinstance(command, EndCell):
                engine.end_cell(command.steps_path)
            control.send(Done(peak_resident_bytes()))
        except Exception as error:
            control.send(failure(error))
    control.send(failure(failed))


class _LoadServer:
    """Moves requests from the load connection to the engine, and outputs back."""

    def __init__(self, engine: ServedEngine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        # Sets change atomically under the interpreter's lock; the reader adds, the engine removes.
        self._unfinished: set[str] = set()
        self.failure: BaseException | None = None
        """What ended one of the threads, other than the end of the connection."""

    def start(self) -> None:
        for name, run in (("load-reader", self._read), ("load-writer", self._write)):
            threading.Thread(target=self._keep_failure, args=(run,), name=name, daemon=True).start()

    def wait_until_idle(self, timeout_s: float) -> None:
        deadline_s = time.perf_counter() + timeout_s
        while self._unfinished:
            if time.perf_counter() > deadline_s:
                raise TargetError(
                    f"{len(self._unfinished)} requests still run {timeout_s:g} s after they were "
                    "given up"
                )
            time.sleep(0.005)

    def _keep_failure(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.failure = error

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, SubmitMessage):
                self._submit(message)
            elif isinstance(message, AbortMessage):
                self._engine.abort(_request_id(message))
        for request_id in list(self._unfinished):
            self._engine.abort(request_id)

    def _submit(self, message: SubmitMessage) -> None:
        request_id = _request_id(message)
        self._unfinished.add(request_id)
        try:
            self._engine.submit(
                message.spec.prompt_token_ids,
                sampling_params(message.spec),
                request_id,
                functools.partial(self._on_output, message),
            )
        except EngineError as error:  # one request that cannot run; the others can
            self._refuse(message, str(error))

    def _refuse(self, message: SubmitMessage, reason: str) -> None:
        num_prompt_tokens = len(message.spec.prompt_token_ids)
        self._unfinished.discard(_request_id(message))
        self._outputs.put(
            Output(
                message.run,
                message.request_index,
                0,
                time.perf_counter(),
                "error",
                num_prompt_tokens,
                0,
                0,
                reason,
            )
        )

    def _on_output(self, message: SubmitMessage, output: RequestOutput) -> None:
        self._outputs.put(
            Output(
                message.run,
                message.request_index,
                len(output.new_token_ids),
                time.perf_counter(),
                output.finish_reason,
                output.num_prompt_tokens,
                output.num_cached_tokens,
                output.num_output_tokens,
                output.error,
            )
        )
        if output.finish_reason is not None or output.error is not None:
            self._unfinished.discard(_request_id(message))

    def _write(self) -> None:
        while True:
            batch = [self._outputs.get()]
            while not self._outputs.empty():
                batch.append(self._outputs.get())
            try:
                self._connection.send(batch)
            except OSError:  # the generator is gone; the reader sees it too
                return


def _request_id(message: SubmitMessage | AbortMessage) -> str:
    return f"{message.run}-{message.request_index}"


def sampling_params(spec: "RequestSpec") -> SamplingParams:
    """Sampling of a request of the workload, in the engine's terms."""
    return SamplingParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        seed=spec.seed,
        max_tokens=spec.max_tokens,
        stop=spec.stop,
        ignore_eos=spec.ignore_eos,
    )
