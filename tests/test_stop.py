"""When a request ends: what counts first, what is kept, and which reason is given."""

from typing import TYPE_CHECKING, Any, cast

import pytest

from llmbench.engine.config import EngineConfig
from llmbench.engine.kv.factory import make_kv_manager
from llmbench.engine.request import Request, SamplingParams, TokenLogprobs
from llmbench.engine.scheduler import SampledTokens, Scheduler
from llmbench.engine.stop import append_until_stop

if TYPE_CHECKING:
    from llmbench.engine.detokenizer import Detokenizer

EOS, OTHER_EOS, STOP = 100, 101, 102


class Letters:
    """Detokenizer in which token 0 is a, 1 is b, …; a stop string may span tokens."""

    def __init__(self, stop: str | None = None) -> None:
        self.text = ""
        self._stop = stop

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        if not is_stop_token:
            self.text += chr(ord("a") + token_id)
        if self._stop is not None and self._stop in self.text:
            self.text = self.text[: self.text.index(self._stop)]
            return self._stop
        return None

    def take_delta(self, *, finished: bool) -> str:
        return self.text if finished else ""


def make_request(
    *, max_tokens: int = 5, detokenizer: Letters | None = None, **params: Any
) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=[7],
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        eos_token_ids=frozenset({EOS, OTHER_EOS}),
        detokenizer=cast("Detokenizer | None", detokenizer),
    )


# C34: accepted run, finish reason, ids that are kept; at most 5 output tokens.
ACCEPTED_RUNS = [
    ([10, 11, STOP, 20, 21, 22], "stop", [10, 11, STOP]),
    ([10, 11, 20, 21, 22, STOP], "length", [10, 11, 20, 21, 22]),
    ([10, 11, 20, 21, STOP, 22], "stop", [10, 11, 20, 21, STOP]),
    ([EOS, 20, 21], "stop", [EOS]),
]


@pytest.mark.parametrize(("run", "reason", "kept"), ACCEPTED_RUNS)
def test_stop_inside_an_accepted_run_comes_before_the_cap(
    run: list[int], reason: str, kept: list[int]
) -> None:
    request = make_request(stop_token_ids=(STOP,), detokenizer=Letters())
    assert append_until_stop(request, run) == len(kept)
    assert request.output_token_ids == kept
    assert request.finish_reason == reason
    assert request.stop_reason == (STOP if STOP in kept else None)


@pytest.mark.parametrize(("run", "reason", "kept"), ACCEPTED_RUNS)
def test_accepted_run_ends_alike_in_the_scheduler(
    run: list[int], reason: str, kept: list[int]
) -> None:
    config = EngineConfig(model="m", block_size=2)
    scheduler = Scheduler(config, make_kv_manager(config, 8, 16), 16)
    request = make_request(stop_token_ids=(STOP,), detokenizer=Letters())
    scheduler.add(request)
    first = scheduler.update(scheduler.schedule(), {"r": sampled(run[:1])})
    outputs = [*first]
    if not request.is_finished:
        request.spec_token_ids = run[1:]
        step = scheduler.schedule()
        num_sampled = step.scheduled[0][1]
        outputs += scheduler.update(step, {"r": sampled(run[1 : 1 + num_sampled])})
    assert [t for output in outputs for t in output.new_token_ids] == kept
    assert [p.token_id for p in request.logprobs] == kept
    assert [p.token_id for output in outputs for p in output.new_logprobs] == kept
    assert (outputs[-1].finish_reason, outputs[-1].num_output_tokens) == (reason, len(kept))
    assert request.num_computed_tokens <= len(request.token_ids)
    assert not scheduler.has_unfinished
    scheduler.check_integrity()


def sampled(token_ids: list[int]) -> SampledTokens:
    return SampledTokens(token_ids, [TokenLogprobs(t, -1.0, 1, ()) for t in token_ids], [])


def test_end_of_text_first_leaves_no_text_and_one_token() -> None:
    detokenizer = Letters()
    request = make_request(detokenizer=detokenizer)
    append_until_stop(request, [EOS, 20, 21])
    assert (detokenizer.text, request.num_output_tokens) == ("", 1)


@pytest.mark.parametrize("token_id", [EOS, OTHER_EOS])
def test_each_end_of_text_token_ends_without_a_stop_reason(token_id: int) -> None:
    request = make_request(stop_token_ids=(EOS,))
    append_until_stop(request, [token_id])
    assert (request.finish_reason, request.stop_reason) == ("stop", None)


@pytest.mark.parametrize("token_id", [EOS, OTHER_EOS])
def test_ignore_eos_ignores_all_end_of_text_tokens(token_id: int) -> None:
    request = make_request(ignore_eos=True)
    append_until_stop(request, [token_id])
    assert request.finish_reason is None


def test_ignore_eos_keeps_asked_stop_tokens() -> None:
    request = make_request(ignore_eos=True, stop_token_ids=(EOS,))
    append_until_stop(request, [EOS])
    assert (request.finish_reason, request.stop_reason) == ("stop", EOS)


def test_ignored_end_of_text_counts_as_text() -> None:
    detokenizer = Letters()
    append_until_stop(make_request(ignore_eos=True, detokenizer=detokenizer), [EOS])
    assert detokenizer.text == chr(ord("a") + EOS)


@pytest.mark.parametrize(
    ("position", "reason"), [(1, None), (2, None), (3, "stop"), (4, "stop"), (5, "stop")]
)
@pytest.mark.parametrize("token_id", [EOS, STOP])
def test_no_stop_token_before_min_tokens(token_id: int, position: int, reason: str | None) -> None:
    request = make_request(min_tokens=3, stop_token_ids=(STOP,))
    append_until_stop(request, [1] * (position - 1) + [token_id])
    assert request.finish_reason == reason


def test_cap_counts_before_min_tokens() -> None:
    # The pool or the model may cap the output below min_tokens.
    request = make_request(min_tokens=5)
    request.max_tokens = 2
    append_until_stop(request, [1, 2, 3])
    assert (request.finish_reason, request.num_output_tokens) == ("length", 2)


def test_stop_string_gives_itself_as_the_reason() -> None:
    request = make_request(stop=("bc",), detokenizer=Letters("bc"))
    assert append_until_stop(request, [0, 1, 2, 3]) == 3
    assert (request.finish_reason, request.stop_reason) == ("stop", "bc")


def test_stop_string_on_the_last_allowed_token_is_a_stop() -> None:
    request = make_request(max_tokens=3, stop=("bc",), detokenizer=Letters("bc"))
    append_until_stop(request, [0, 1, 2, 3])
    assert (request.finish_reason, request.stop_reason) == ("stop", "bc")


def test_stop_string_counts_from_min_tokens_on() -> None:
    early = make_request(min_tokens=3, stop=("b",), detokenizer=Letters("b"))
    append_until_stop(early, [0, 1])
    assert early.finish_reason is None
    late = make_request(min_tokens=2, stop=("b",), detokenizer=Letters("b"))
    append_until_stop(late, [0, 1])
    assert late.finish_reason == "stop"
