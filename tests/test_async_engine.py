"""The engine on its own thread: streams, aborts, refusals, failures and the end of it."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from llmbench.engine.async_engine import REFUSED, AsyncEngine
from llmbench.engine.batch import ForwardBatch
from llmbench.engine.config import EngineConfig
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import EngineError
from llmbench.engine.llm import LLM
from llmbench.engine.models.null_model import NullModel
from llmbench.engine.request import RequestOutput, SamplingParams

TIMEOUT_S = 30.0
"""Nothing waits this long unless it hangs."""
PROMPTS = [[5, 9, 11], [40, 41, 42, 43, 90, 91, 92, 93, 94], [7], [5, 9, 12]]
SETTINGS: dict[str, Any] = {
    "num_kv_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 4,
    "check_integrity": True,
}


def greedy(max_tokens: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


class SteppedModel(NullModel):
    """The null model, which computes a step only when it is let."""

    def __init__(self) -> None:
        super().__init__(vocab_size=64, token_id=7)
        self._allowed = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        self.failure: Exception | None = None

    def forward(self, batch: ForwardBatch, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        self._entered.release()
        assert self._allowed.acquire(timeout=TIMEOUT_S)
        if self.failure is not None:
            raise self.failure
        return super().forward(batch, kv_caches)

    def wait_for_step(self) -> None:
        """Until the engine thread is inside a step."""
        assert self._entered.acquire(timeout=TIMEOUT_S)

    def allow(self, num_steps: int = 1) -> None:
        self._allowed.release(num_steps)


class Heard:
    """What the callbacks of some requests were told."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self._changed = threading.Condition()

    def __call__(self, output: RequestOutput) -> None:
        with self._changed:
            self.outputs.append(output)
            self._changed.notify_all()

    def wait_for_ends(self, num_answers: int = 1) -> list[RequestOutput]:
        """The last outputs of so many answers."""

        def ends() -> list[RequestOutput]:
            return [output for output in self.outputs if output.finish_reason is not None]

        with self._changed:
            assert self._changed.wait_for(lambda: len(ends()) >= num_answers, timeout=TIMEOUT_S)
            assert len(ends()) == num_answers
            return ends()

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.new_token_ids]


@pytest.fixture
def make_engine(loaded_llama: Any) -> Iterator[Callable[..., AsyncEngine]]:
    made: list[AsyncEngine] = []

    def make(*, loaded: Any = None, **config: Any) -> AsyncEngine:
        settings = EngineConfig(model="tiny", **(SETTINGS | config))
        engine = AsyncEngine(settings, loaded=loaded or loaded_llama)
        made.append(engine)
        engine.start()
        return engine

    yield make
    for engine in made:
        engine.shutdown()


@pytest.fixture
def stepped(
    make_engine: Callable[..., AsyncEngine], as_loaded: Callable[..., Any]
) -> Iterator[tuple[AsyncEngine, SteppedModel]]:
    model = SteppedModel()
    yield make_engine(loaded=as_loaded(model), max_num_batched_tokens=4), model
    model.allow(1000)


@pytest.fixture
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keeps the failure of a thread from failing the test."""
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    return failures


def is_idle(engine: AsyncEngine) -> bool:
    """Whether nothing is left once all commands so far were taken."""
    return engine.call(
        lambda core: not core.has_unfinished and core.kv.usage().num_reserved_slots == 0
    )


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def expected(loaded: Any, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    llm = LLM("tiny", loaded=loaded, **SETTINGS)
    return [
        [answer.token_ids for answer in result.answers] for result in llm.generate(prompts, params)
    ]


class TestStreams:
    def test_streams_run_side_by_side_and_each_hears_its_own(
        self, make_engine: Callable[..., AsyncEngine], loaded_llama: Any
    ) -> None:
        engine = make_engine()
        params = [
            greedy(9),
            greedy(3, logprobs=1),
            SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=5, ignore_eos=True),
            greedy(1, prompt_logprobs=0),
        ]

        async def run() -> list[list[RequestOutput]]:
            streams = [
                engine.generate(prompt, one, f"stream-{index}")
                for index, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True))
            ]
            return await asyncio.gather(*(collect(stream) for stream in streams))

        heard = asyncio.run(run())
        want = expected(loaded_llama, PROMPTS, params)
        for index, (outputs, answers) in enumerate(zip(heard, want, strict=True)):
            assert {output.parent_id for output in outputs} == {f"stream-{index}"}
            for answer_index, token_ids in enumerate(answers):
                mine = [o for o in outputs if o.answer_index == answer_index]
                assert [t for output in mine for t in output.new_token_ids] == token_ids
                assert [o.num_output_tokens for o in mine] == list(range(1, len(token_ids) + 1))
                assert [o.finish_reason for o in mine] == [None] * (len(mine) - 1) + ["length"]
        assert [len(output.new_logprobs) for output in heard[1]] == [1, 1, 1]
        assert len(heard[3][0].prompt_logprobs) == len(PROMPTS[3]) - 1
        assert is_idle(engine)

    def test_leaving_the_loop_early_aborts(
        self, make_engine: Callable[..., AsyncEngine], loaded_llama: Any
    ) -> None:
        engine = make_engine()

        async def leave() -> None:
            stream = engine.generate(PROMPTS[0], greedy(200, n=2), "left")
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]

        asyncio.run(leave())
        assert is_idle(engine)
        (want,) = expected(loaded_llama, PROMPTS[1:2], [greedy()])
        heard = Heard()
        engine.submit(PROMPTS[1], greedy(), "left", heard)  # its id is free again
        heard.wait_for_ends()
        assert [heard.token_ids] == want

    def test_cancelling_the_consumer_aborts(self, make_engine: Callable[..., AsyncEngine]) -> None:
        engine = make_engine()

        async def run() -> None:
            started = asyncio.Event()

            async def consume() -> None:
                async for _ in engine.generate(PROMPTS[0], greedy(200), "cancelled"):
                    started.set()

            task = asyncio.create_task(consume())
            await asyncio.wait_for(started.wait(), TIMEOUT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
        assert is_idle(engine)

    def test_stream_that_was_aborted_elsewhere_ends(
        self, make_engine: Callable[..., AsyncEngine]
    ) -> None:
        engine = make_engine()

        async def run() -> list[RequestOutput]:
            outputs: list[RequestOutput] = []
            async for output in engine.generate(PROMPTS[0], greedy(200, n=2), "aborted"):
                if not outputs:
                    engine.abort("aborted")
                outputs.append(output)
            return outputs

        outputs = asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
        assert [o.finish_reason for o in outputs if o.finish_reason] == ["abort", "abort"]


class TestRefusal:
    @pytest.mark.parametrize(
        ("prompt", "params", "error"),
        [
            ([], {}, "at least 1 token"),
            ([5] * 300, {}, "prompt of 300 tokens"),
            ([5, 128], {}, "prompt token id 128"),
            ([5], {"stop_token_ids": (500,)}, "stop token id 500"),
            (None, {}, "text or token ids"),
            ([5], {"stop": ("end",)}, "stop strings need a tokenizer"),
        ],
    )
    def test_refused_request_gets_one_output_and_the_others_run_on(
        self,
        prompt: Any,
        params: dict[str, Any],
        error: str,
        make_engine: Callable[..., AsyncEngine],
        loaded_llama: Any,
    ) -> None:
        engine = make_engine()
        other, refused = Heard(), Heard()
        engine.submit(PROMPTS[1], greedy(30), "other", other)
        engine.submit(prompt, greedy(n=3, **params), "refused", refused)
        other.wait_for_ends()
        assert [other.token_ids] == expected(loaded_llama, PROMPTS[1:2], [greedy(30)])[0]
        (output,) = refused.outputs
        assert (output.finish_reason, output.answer_index) == ("error", REFUSED)
        assert (output.request_id, output.parent_id) == ("refused", "refused")
        assert error in (output.error or "")
        assert is_idle(engine)

    def test_request_that_cannot_even_be_read_harms_nobody(
        self, make_engine: Callable[..., AsyncEngine]
    ) -> None:
        engine = make_engine()
        fine, unreadable = Heard(), Heard()
        engine.submit(PROMPTS[0], greedy(), "fine", fine)
        engine.submit(PROMPTS[0], None, "unreadable", unreadable)  # type: ignore[arg-type]
        assert "NoneType" in (unreadable.wait_for_ends()[0].error or "")
        assert fine.wait_for_ends()[0].finish_reason == "length"
        assert is_idle(engine)

    def test_stream_of_a_refused_request_ends_after_its_one_output(
        self, make_engine: Callable[..., AsyncEngine]
    ) -> None:
        engine = make_engine()
        stream = engine.generate([5] * 300, greedy(n=3), "refused")
        outputs = asyncio.run(asyncio.wait_for(collect(stream), TIMEOUT_S))
        assert [output.finish_reason for output in outputs] == ["error"]
        assert outputs[0].num_prompt_tokens == 300

    @pytest.mark.parametrize("n", [1, 2])
    def test_id_in_use_is_refused_and_its_owner_runs_on(
        self, n: int, stepped: tuple[AsyncEngine, SteppedModel]
    ) -> None:
        engine, model = stepped
        owner, second = Heard(), Heard()
        engine.submit([5], greedy(4, n=2), "same", owner)
        engine.submit([5], greedy(4, n=n), "same", second)
        model.allow(100)
        assert "'same' is already running" in (second.wait_for_ends()[0].error or "")
        assert [o.finish_reason for o in owner.wait_for_ends(2)] == ["length"] * 2
        assert owner.token_ids == [7] * 8
        assert is_idle(engine)


class TestAbort:
    @pytest.mark.parametrize(
        ("num_steps", "num_tokens"),
        [
            (0, 0),  # in its first prompt chunk
            (1, 1),  # 4 of 6 prompt tokens are computed
            (3, 3),  # running
        ],
    )
    def test_abort_ends_a_request_wherever_it_is(
        self, num_steps: int, num_tokens: int, stepped: tuple[AsyncEngine, SteppedModel]
    ) -> None:
        engine, model = stepped
        heard = Heard()
        engine.submit([1, 2, 3, 4, 5, 6], greedy(20), "doomed", heard)
        for _ in range(num_steps):
            model.wait_for_step()
            model.allow()
        model.wait_for_step()
        engine.abort("doomed")
        model.allow()
        (last,) = heard.wait_for_ends()
        assert last.finish_reason == "abort"
        # The step that was under way when the abort came is finished first.
        assert len(heard.token_ids) == num_tokens
        assert last.num_output_tokens == len(heard.token_ids)
        assert is_idle(engine)

    def test_abort_of_a_waiting_request_leaves_the_running_ones(
        self, stepped: tuple[AsyncEngine, SteppedModel]
    ) -> None:
        engine, model = stepped
        running, waiting = Heard(), Heard()
        for index in range(4):
            engine.submit([index], greedy(5), f"running-{index}", running)
        engine.submit([9], greedy(5), "waiting", waiting)
        engine.abort("waiting")
        engine.abort("nobody")
        model.allow(100)
        running.wait_for_ends(4)
        assert running.token_ids == [7] * 20
        assert [o.finish_reason for o in waiting.outputs] == ["abort"]
        assert is_idle(engine)

    def test_abort_of_a_finished_request_says_nothing_more(
        self, make_engine: Callable[..., AsyncEngine]
    ) -> None:
        engine = make_engine()
        heard = Heard()
        engine.submit(PROMPTS[0], greedy(), "finished", heard)
        heard.wait_for_ends()
        engine.abort("finished")
        assert is_idle(engine)
        assert len(heard.outputs) == 6

    def test_abort_ends_those_answers_that_are_unfinished(
        self, stepped: tuple[AsyncEngine, SteppedModel]
    ) -> None:
        engine, model = stepped
        heard = Heard()
        engine.submit([1, 2], greedy(5, n=3), "three", heard)
        model.wait_for_step()
        model.allow(2)
        engine.abort("three")
        model.allow(100)
        ends = heard.wait_for_ends(3)
        assert {output.answer_index for output in ends} == {0, 1, 2}
        assert is_idle(engine)


class TestCallbacks:
    def test_callback_that_raises_ends_its_request_alone(
        self, make_engine: Callable[..., AsyncEngine], loaded_llama: Any
    ) -> None:
        engine = make_engine()
        heard, calls = Heard(), Heard()

        def fails(output: RequestOutput) -> None:
            calls(output)
            raise RuntimeError("nobody listens")

        engine.submit(PROMPTS[0], greedy(50, n=2), "deaf", fails)
        engine.submit(PROMPTS[1], greedy(12), "fine", heard)
        heard.wait_for_ends()
        assert [heard.token_ids] == expected(loaded_llama, PROMPTS[1:2], [greedy(12)])[0]
        assert len(calls.outputs) == 1
        assert is_idle(engine)
        assert engine.failure is None

    def test_closed_loop_of_a_consumer_harms_nobody(
        self, make_engine: Callable[..., AsyncEngine]
    ) -> None:
        engine = make_engine()
        loop = asyncio.new_event_loop()
        stream = engine.generate(PROMPTS[0], greedy(200), "orphan")
        loop.run_until_complete(stream.__anext__())
        loop.close()
        heard = Heard()
        engine.submit(PROMPTS[1], greedy(12), "fine", heard)
        heard.wait_for_ends()
        assert engine.failure is None

    def test_call_gives_what_its_function_returns_or_raises(
        self, make_engine: Callable[..., AsyncEngine]
    ) -> None:
        engine = make_engine()
        assert engine.call(lambda core: threading.current_thread().name) == "llmbench-engine"

        def fails(core: EngineCore) -> None:
            raise LookupError("not here")

        with pytest.raises(LookupError, match="not here"):
            engine.call(fails)
        assert is_idle(engine)

    def test_step_records_are_taken_once(self, make_engine: Callable[..., AsyncEngine]) -> None:
        engine = make_engine()
        for request_id in ("first", "second"):
            heard = Heard()
            engine.submit(PROMPTS[0], greedy(), request_id, heard)
            heard.wait_for_ends()
            assert len(engine.take_step_records()) == 6
        assert engine.take_step_records() == []


def test_every_answer_has_one_end_whoever_submits_and_aborts(
    make_engine: Callable[..., AsyncEngine], as_loaded: Callable[..., Any]
) -> None:
    engine = make_engine(loaded=as_loaded(NullModel(64, token_id=7)), num_kv_blocks=12)
    num_threads, num_requests, num_answers = 6, 12, 2
    heard = {(t, i): Heard() for t in range(num_threads) for i in range(num_requests)}

    def use(thread: int) -> None:
        draw = random.Random(thread)
        for index in range(num_requests):
            prompt = [draw.randrange(64) for _ in range(draw.randint(1, 12))]
            # Some ids are in use by another thread, and some of these are aborted by it.
            request_id = f"{draw.choice([thread, 0])}-{index}"
            params = greedy(draw.randint(1, 12), n=num_answers)
            engine.submit(prompt, params, request_id, heard[thread, index])
            if draw.random() < 0.4:
                engine.abort(request_id)

    threads = [threading.Thread(target=use, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    while engine.call(lambda core: core.has_unfinished):
        pass  # each call lets a step pass
    num_refused = 0
    for one in heard.values():
        ends = [output for output in one.outputs if output.finish_reason is not None]
        if ends[0].answer_index == REFUSED:
            assert one.outputs == ends[:1]
            assert "already running" in (ends[0].error or "")
            num_refused += 1
            continue
        assert sorted(output.answer_index for output in ends) == list(range(num_answers))
        for end in ends:
            mine = [o for o in one.outputs if o.answer_index == end.answer_index]
            assert mine[-1] is end
            assert sum(len(output.new_token_ids) for output in mine) == end.num_output_tokens
    assert num_refused < len(heard)
    assert is_idle(engine)
    assert engine.failure is None


class TestFailure:
    def test_failure_of_a_step_ends_every_stream_and_those_to_come(
        self, stepped: tuple[AsyncEngine, SteppedModel], quiet_threads: list[Any]
    ) -> None:
        engine, model = stepped
        running, queued, later = Heard(), Heard(), Heard()
        engine.submit([1], greedy(5, n=2), "running", running)
        model.wait_for_step()
        engine.submit([2], greedy(5), "queued", queued)
        model.failure = RuntimeError("the device is gone")
        model.allow()
        ends = [*running.wait_for_ends(2), *queued.wait_for_ends()]
        engine.submit([3], greedy(5, n=2), "later", later)
        ends += later.wait_for_ends()
        assert {output.finish_reason for output in ends} == {"error"}
        assert {o.error for o in ends} == {"the engine failed: RuntimeError: the device is gone"}
        assert engine.failure is model.failure
        with pytest.raises(EngineError, match="the device is gone"):
            engine.take_step_records()
        engine.abort("running")
        engine.shutdown()
        assert [failure.exc_value for failure in quiet_threads] == [model.failure]

    def test_stream_ends_where_the_engine_has_failed(
        self, stepped: tuple[AsyncEngine, SteppedModel], quiet_threads: list[Any]
    ) -> None:
        engine, model = stepped
        model.failure = RuntimeError("the device is gone")
        model.allow()

        async def run() -> list[list[RequestOutput]]:
            streams = [engine.generate([i], greedy(5), f"stream-{i}") for i in range(3)]
            gathered = asyncio.gather(*(collect(stream) for stream in streams))
            return await asyncio.wait_for(gathered, TIMEOUT_S)

        for outputs in asyncio.run(run()):
            assert [output.finish_reason for output in outputs] == ["error"]


class TestShutdown:
    def test_unfinished_requests_are_aborted(
        self, stepped: tuple[AsyncEngine, SteppedModel]
    ) -> None:
        engine, model = stepped
        heard = Heard()
        engine.submit([1, 2], greedy(50, n=2), "running", heard)
        model.wait_for_step()
        ended = threading.Thread(target=engine.shutdown)
        ended.start()
        model.allow(100)
        ended.join(TIMEOUT_S)
        assert not ended.is_alive()
        assert {output.finish_reason for output in heard.wait_for_ends(2)} == {"abort"}
        assert not engine.core.has_unfinished
        assert engine.failure is None

    def test_requests_behind_the_end_are_refused(
        self, make_engine: Callable[..., AsyncEngine]
    ) -> None:
        engine = make_engine()
        engine.shutdown()
        engine.shutdown()
        heard = Heard()
        engine.submit(PROMPTS[0], greedy(n=2), "late", heard)
        (output,) = heard.outputs
        assert (output.finish_reason, output.error) == ("error", "the engine was shut down")
        stream = engine.generate(PROMPTS[0], greedy(n=2), "later")
        outputs = asyncio.run(asyncio.wait_for(collect(stream), TIMEOUT_S))
        assert [output.finish_reason for output in outputs] == ["error"]
        with pytest.raises(EngineError, match="shut down"):
            engine.call(lambda core: None)

    def test_engine_that_was_never_started_can_be_shut_down(self, loaded_llama: Any) -> None:
        engine = AsyncEngine(EngineConfig(model="tiny", **SETTINGS), loaded=loaded_llama)
        heard = Heard()
        engine.submit(PROMPTS[0], greedy(), "early", heard)
        with pytest.raises(EngineError, match="not started"):
            engine.take_step_records()
        engine.shutdown()
        assert [output.error for output in heard.outputs] == ["the engine was shut down"]

    def test_requests_submitted_before_the_start_run(self, loaded_llama: Any) -> None:
        engine = AsyncEngine(EngineConfig(model="tiny", **SETTINGS), loaded=loaded_llama)
        heard = Heard()
        engine.submit(PROMPTS[0], greedy(), "early", heard)
        engine.start()
        assert heard.wait_for_ends()[0].finish_reason == "length"
        engine.shutdown()
