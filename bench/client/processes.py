"""Child processes that obey one parent, and whose errors arrive there as what they were.

Children are spawned, not forked: torch and CUDA do not survive a fork, and a spawned interpreter
shares nothing with its parent that could disturb a measurement. Ctrl-C in a terminal reaches every
process of the group at once, so children ignore it and wait for the parent's word; should the
parent die without one, they end themselves.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from llmbench.bench.client.messages import Failed

_SPAWN = multiprocessing.get_context("spawn")

STOP_TIMEOUT_S = 5.0
"""A child that was told to stop and has not is killed after this."""


def spawn(target: Callable[..., None], *args: object, name: str) -> BaseProcess:
    """Start `target(*args)` in a new interpreter; connections among the arguments go with it."""
    log_level = logging.getLogger("llmbench").getEffectiveLevel()
    process = _SPAWN.Process(target=_child, args=(target, args, log_level), name=name, daemon=True)
    with _interrupts_held_back():
        process.start()
    return process


def connected_pair() -> tuple[Connection, Connection]:
    """Both ends of a two-way connection.

    Whoever hands an end to a child closes its own copy: only then does the other end learn of the
    child's death.
    """
    return _SPAWN.Pipe(duplex=True)


def stop_process(process: BaseProcess, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Wait for a process that was told to stop; terminate, then kill, one that does not."""
    process.join(timeout_s)
    if process.is_alive():
        process.terminate()
        process.join(1.0)
    if process.is_alive():
        process.kill()
        process.join()


def describe_exit(process: BaseProcess) -> str:
    """Say how a process ended: `exit code 1`, or the signal that killed it."""
    process.join(1.0)
    code = process.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def failure(error: BaseException) -> Failed:
    """Pack an error for the parent; one that cannot be pickled becomes its text."""
    text = "".join(traceback.format_exception(error))
    carried = error.with_traceback(None)
    carried.__cause__ = carried.__context__ = None
    try:
        pickle.loads(pickle.dumps(carried))
    except Exception:
        carried = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            carried.add_note(note)
    return Failed(carried, text)


def raise_failure(failed: Failed) -> NoReturn:
    """Raise a child's error here: same type, message and notes, its traceback as the cause."""
    raise failed.error from ChildTracebackError(failed.traceback)


class ChildTracebackError(Exception):
    """Shows the traceback of another process under an error's own; never raised by itself."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def call_in_process(function: Callable[..., Any], *args: object, name: str) -> Any:
    """Return `function(*args)`, computed in a process of its own, or raise its error.

    For work that needs a library which this process shall not load.
    """
    ours, theirs = connected_pair()
    process = spawn(_answer, theirs, function, args, name=name)
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        raise RuntimeError(f"{name} ended without an answer ({describe_exit(process)})") from None
    finally:
        ours.close()
        stop_process(process, timeout_s=1.0)
    if isinstance(answer, Failed):
        raise_failure(answer)
    return answer


def _answer(connection: Connection, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    try:
        answer = function(*args)
    except Exception as error:
        answer = failure(error)
    connection.send(answer)
    connection.close()


def _child(target: Callable[..., None], args: tuple[object, ...], log_level: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A process has no command line of its own: it says on stderr what its parent would.
    logging.basicConfig(format="%(levelname)s: %(message)s")
    for level in (logging.WARNING, logging.ERROR):
        logging.addLevelName(level, logging.getLevelName(level).lower())
    logging.getLogger("llmbench").setLevel(log_level)
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    target(*args)
    # The work is done: leave without tearing torch down, which takes seconds.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # not sys.exit: other threads may be deep in a forward pass


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Start a child with SIGINT blocked, so that none reaches it before it can ignore it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where a child has its own group
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def peak_resident_bytes() -> int:
    """Most memory that this process has held.

    Linux keeps it with the program (VmHWM). What getrusage says there begins with the parent's,
    because it survives the start of a new program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
