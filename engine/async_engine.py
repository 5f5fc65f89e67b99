"""AsyncEngine: the engine in a thread of its own, requests and aborts coming from any other.

The engine thread takes what has been submitted, makes a step, and hands each request's news to
its callback. `generate` wraps that for asyncio. A request that the engine refuses gets one output
with `finish_reason="error"`; the others never notice. A failure of the engine itself ends every
request with that error, and `failure` keeps it.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from llmbench.engine.config import EngineConfig
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import EngineError, RequestError
from llmbench.engine.models.loader import LoadedModel
from llmbench.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from llmbench.engine.step_record import StepRecord

OnOutput = Callable[[RequestOutput], None]

REFUSED = -1
"""`answer_index` of the one output of a request that was refused, whatever its `n`."""


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
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[str, tuple[Request, OnOutput]] = {}
        self._thread = threading.Thread(target=self._run, name="llmbench-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def shutdown(self) -> None:
        """End the thread after the current step; unfinished requests get `abort`."""
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

        The last call for each answer has a `finish_reason`.
        """
        self._commands.put(lambda: self._add(prompt, params, request_id, on_output))

    def abort(self, request_id: str) -> None:
        """End all answers of a request; each gets a last output with `abort`."""
        self._commands.put(lambda: self._abort(request_id))

    def call(self, function: Callable[[EngineCore], None]) -> None:
        """Run `function` on the engine thread between two steps, and wait for it."""
        done = threading.Event()

        def run() -> None:
            try:
                function(self.core)
            finally:
                done.set()

        self._commands.put(run)
        while not done.wait(timeout=0.1):
            if not self._thread.is_alive():
                raise EngineError("the engine thread has ended") from self.failure

    def take_step_records(self) -> list[StepRecord]:
        """The records since the last call."""
        taken: list[StepRecord] = []

        def take(core: EngineCore) -> None:
            taken.extend(core.step_records)
            core.step_records.clear()

        self.call(take)
        return taken

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
            for request, _ in list(self._live.values()):
                self._end(request, "error", f"the engine failed: {error}")
            raise
        for request, _ in list(self._live.values()):
            self._end(request, "abort", None)

    def _take_commands(self) -> bool:
        """Run what was submitted, waiting if there is nothing else to do; False means the end."""
        while True:
            try:
                command = self._commands.get(block=not self.core.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        on_output: OnOutput,
    ) -> None:
        requests: list[Request] = []
        try:
            requests = self.core.make_requests(prompt, params, request_id)
            for request in requests:
                self.core.add_request(request)
        except RequestError as error:
            for request in requests:
                self.core.abort(request.request_id)
            on_output(
                RequestOutput(
                    request_id=request_id,
                    parent_id=request_id,
                    answer_index=REFUSED,
                    new_token_ids=[],
                    text_delta="",
                    num_prompt_tokens=len(requests[0].prompt_token_ids) if requests else 0,
                    num_output_tokens=0,
                    num_cached_tokens=0,
                    finish_reason="error",
                    error=str(error),
                )
            )
            return
        for request in requests:
            self._live[request.request_id] = (request, on_output)

    def _abort(self, parent_id: str) -> None:
        for request, _ in list(self._live.values()):
            if request.parent_id == parent_id:
                self.core.abort(request.request_id)
                self._end(request, "abort", None)

    def _end(self, request: Request, reason: FinishReason, error: str | None) -> None:
        _, on_output = self._live.pop(request.request_id)
        on_output(
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
            )
        )

    def _deliver(self, output: RequestOutput) -> None:
        _, on_output = self._live[output.request_id]
        if output.finish_reason is not None:
            del self._live[output.request_id]
        on_output(output)
