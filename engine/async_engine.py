"""AsyncEngine: the engine in a thread of its own, requests and aborts coming from any other.

The engine thread takes what has been submitted, makes a step, and hands each request's news to
its callback. `generate` wraps that for asyncio. Whatever is wrong with one request, the others
never notice: one that the engine refuses gets a single output with `finish_reason="error"`, and
one whose callback raises is ended, since nobody listens to it any more. A failure of the engine
itself ends every request with that error, also those still to come; `failure` keeps it.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from llmbench.engine.config import EngineConfig
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import EngineError, RequestError
from llmbench.engine.models.loader import LoadedModel
from llmbench.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from llmbench.engine.step_record import StepRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnOutput = Callable[[RequestOutput], None]

REFUSED = -1
"""`answer_index` of the one output of a request that was refused, whatever its `n`."""


@dataclass(slots=True)
class _Command:
    """Something to do between two steps."""

    run: Callable[[], None]
    drop: Callable[[str], None]
    """Called in its place, with the reason, where the engine has ended."""


@dataclass(slots=True)
class _Live:
    """The unfinished answers to one prompt, and who hears of them."""

    on_output: OnOutput
    requests: dict[str, Request]


class AsyncEngine:
    """An EngineCore stepped by a background thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        loaded: LoadedModel | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self.core = EngineCore(config, loaded=loaded, on_progress=on_progress)
        self.failure: BaseException | None = None
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        # Under the lock: a command is queued only while the thread is still going to take it.
        self._lock = threading.Lock()
        self._end_reason: str | None = None
        self._live: dict[str, _Live] = {}  # by the id that was submitted
        self._thread = threading.Thread(target=self._run, name="llmbench-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def shutdown(self) -> None:
        """End the thread after the current step; unfinished requests get `abort`."""
        if self._thread.ident is None:  # never started
            self._close("abort", None)
            return
        self._commands.put(None)
        self._thread.join()

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        on_output: OnOutput,
    ) -> None:
        """Queue a prompt; `on_output` is called on the engine thread, and must not block.

        The last call for each answer has a `finish_reason`. Where the engine has ended, the one
        call that says so comes from this thread.
        """

        def drop(reason: str) -> None:
            _tell(on_output, _refusal(request_id, reason))

        self._put(_Command(lambda: self._add(prompt, params, request_id, on_output), drop))

    def abort(self, request_id: str) -> None:
        """End all answers of a request; each gets a last output with `abort`."""
        self._put(_Command(lambda: self._abort(request_id), lambda reason: None))

    def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run `function` on the engine thread between two steps, and give what it returns.

        Not from a callback: the engine thread would wait for itself.
        """
        if self._thread.ident is None:
            raise EngineError("the engine thread is not started")
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function(self.core))
            except Exception as error:
                done.set_exception(error)

        self._put(_Command(run, lambda reason: done.set_exception(EngineError(reason))))
        return done.result()

    def take_step_records(self) -> list[StepRecord]:
        """The records since the last call."""

        def take(core: EngineCore) -> list[StepRecord]:
            taken = list(core.step_records)
            core.step_records.clear()
            return taken

        return self.call(take)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of all answers; leaving the loop early aborts the request."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

        def forward(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        self.submit(prompt, params, request_id, forward)
        unfinished = params.n
        try:
            while unfinished:
                output = await outputs.get()
                if output.finish_reason is not None:
                    # A refusal stands for all answers: none of them was started.
                    unfinished = 0 if output.answer_index == REFUSED else unfinished - 1
                yield output
        finally:
            if unfinished:
                self.abort(request_id)

    def _run(self) -> None:
        try:
            while self._take_commands():
                for output in self.core.step():
                    self._deliver(output)
        except BaseException as error:
            self.failure = error
            self._close("error", f"the engine failed: {type(error).__name__}: {error}")
            raise
        self._close("abort", None)

    def _put(self, command: _Command) -> None:
        with self._lock:
            reason = self._end_reason
            if reason is None:
                self._commands.put(command)
        if reason is not None:
            command.drop(reason)

    def _take_commands(self) -> bool:
        """Run what was submitted, waiting if there is nothing else to do; False means the end."""
        while True:
            try:
                command = self._commands.get(block=not self.core.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()

    def _close(self, reason: FinishReason, error: str | None) -> None:
        """End what runs, and drop what was queued and whatever is still going to be."""
        end_reason = error or "the engine was shut down"
        with self._lock:
            self._end_reason = end_reason
        for request_id in list(self._live):
            self._end(request_id, reason, error)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.drop(end_reason)

    def _add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        on_output: OnOutput,
    ) -> None:
        requests: list[Request] = []
        try:
            if request_id in self._live:
                raise RequestError(f"a request with the id {request_id!r} is already running")
            requests = self.core.make_requests(prompt, params, request_id)
            self.core.add_requests(requests)
        # Not RequestError alone: a prompt that some tokenizer chokes on must not end the others.
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.warning("request %s cannot be read", request_id, exc_info=True)
            num_prompt_tokens = requests[0].num_prompt_tokens if requests else 0
            _tell(on_output, _refusal(request_id, str(error), num_prompt_tokens))
            return
        self._live[request_id] = _Live(on_output, {r.request_id: r for r in requests})

    def _abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._end(request_id, "abort", None)

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """End the unfinished answers to a prompt, and say so to whoever hears of them."""
        live = self._live.pop(request_id)
        for request in live.requests.values():
            self.core.abort(request.request_id)
            _tell(
                live.on_output,
                RequestOutput(
                    request_id=request.request_id,
                    parent_id=request.parent_id,
                    answer_index=request.answer_index,
                    new_token_ids=[],
                    text_delta="",
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_output_tokens=request.num_output_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                    finish_reason=reason,
                    error=error,
                ),
            )

    def _deliver(self, output: RequestOutput) -> None:
        live = self._live.get(output.parent_id)
        if live is None:
            return  # its callback raised at another answer of this step
        if output.finish_reason is not None:
            del live.requests[output.request_id]
            if not live.requests:
                del self._live[output.parent_id]
        if not _tell(live.on_output, output):
            for request_id in live.requests:
                self.core.abort(request_id)
            self._live.pop(output.parent_id, None)


def _tell(on_output: OnOutput, output: RequestOutput) -> bool:
    """Hand over an output; False where the callback raised."""
    try:
        on_output(output)
    except Exception:
        logger.warning("the callback of request %s raised", output.parent_id, exc_info=True)
        return False
    return True


def _refusal(request_id: str, reason: str, num_prompt_tokens: int = 0) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        parent_id=request_id,
        answer_index=REFUSED,
        new_token_ids=[],
        text_delta="",
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=0,
        num_cached_tokens=0,
        finish_reason="error",
        error=reason,
    )
