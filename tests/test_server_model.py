"""A model behind HTTP answers as the engine behind it does, or says why it cannot."""

import importlib.util
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_plan import prepare
from llmbench.bench.accuracy.evaluation import evaluate, run_eval
from llmbench.bench.accuracy.model import GenerateRequest
from llmbench.bench.accuracy.server_client import server_root
from llmbench.bench.accuracy.server_model import UNSEEN_WEIGHTS, ServerModel
from llmbench.bench.errors import BenchConfigError, BenchError, TargetError
from llmbench.engine.config import EngineConfig
from llmbench.engine.scoring import ContinuationScore, ScoreRequest

SCORING = ["vllm", "sglang", "openai", "openai-1"]
ITEMS = [
    ScoreRequest(context=(0, 70, 71, 72), continuations=((80, 81), (82,), (80, 83, 84))),
    ScoreRequest(context=(90,), continuations=((91, 92, 93),)),
    ScoreRequest(context=(0, 70, 71, 72, 73, 74), continuations=((75,), (76,), (257,))),
]


@pytest.fixture(scope="module")
def server_module() -> ModuleType:
    path = Path(__file__).with_name("completions_server.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engine(byte_llama: Callable[..., Path]) -> Iterator[EngineModel]:
    settings: dict[str, Any] = {"dtype": "float32", "compile": False, "num_kv_blocks": 128}
    model = EngineModel(EngineConfig(model=str(byte_llama()), block_size=4, **settings))
    yield model
    model.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack: ExitStack, server_module: ModuleType, engine: EngineModel) -> Callable[..., Any]:
    def start(dialect: str = "vllm", *, tokenizer: Any = None, **settings: Any) -> Any:
        server = server_module.CompletionsServer(
            engine.load().loaded, tokenizer or engine.tokenizer, dialect, **settings
        )
        return stack.enter_context(server)

    return start


@pytest.fixture
def connect(stack: ExitStack, engine: EngineModel) -> Callable[..., ServerModel]:
    def open_(server: Any, **settings: Any) -> ServerModel:
        url = server if isinstance(server, str) else server.url
        if not isinstance(server, str) and server.dialect not in ("vllm", "sglang", "llama.cpp"):
            settings.setdefault("max_length", 190)
        settings = {"first_pause_s": 0.0, "timeout_s": 30.0} | settings
        model = ServerModel(url, engine.tokenizer, **settings)
        stack.callback(model.close)
        return model

    return open_


def scores_of(model: Any, requests: Sequence[ScoreRequest]) -> list[tuple[ContinuationScore, ...]]:
    found = dict(model.score(requests))
    return [found[index] for index in range(len(requests))]


def texts_of(model: Any, requests: Sequence[GenerateRequest]) -> list[str]:
    found = dict(model.generate(requests))
    return [found[index] for index in range(len(requests))]


def ask(*prompt: int, until: tuple[str, ...] = (), max_tokens: int = 12) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, until=until, max_tokens=max_tokens)


def greedy_ids(engine: EngineModel, context: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = context
    for _ in range(count):
        options = ScoreRequest(context=ids, continuations=tuple((i,) for i in range(258)))
        scores = scores_of(engine, [options])[0]
        ids = (*ids, [score.is_greedy for score in scores].index(True))
    return ids[len(context) :]


@pytest.mark.parametrize("dialect", SCORING)
def test_scores_equal_the_engine_s(
    dialect: str,
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    engine: EngineModel,
) -> None:
    likely = greedy_ids(engine, (0, 60), 3)
    wrong_end = (*likely[:2], (likely[2] + 1) % 258)
    items = [*ITEMS, ScoreRequest(context=(0, 60), continuations=(likely, wrong_end))]
    model = connect(serve(dialect))
    assert model.identity["dialect"].startswith(
        {"vllm": "prompt_logprobs", "sglang": "generate"}.get(dialect, "echo")
    )
    for found, expected in zip(scores_of(model, items), scores_of(engine, items), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-5)
            assert one.is_greedy == other.is_greedy
            assert one.hidden is None
    assert [score.is_greedy for score in scores_of(model, items)[-1]] == [True, False]


@pytest.mark.parametrize("dialect", [*SCORING, "llama.cpp", "text"])
def test_generated_text_equals_the_engine_s(
    dialect: str,
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    engine: EngineModel,
) -> None:
    requests = [ask(0, 70, 71, 72), ask(0, 75, max_tokens=3), ask(0, 90, 91)]
    plain = texts_of(engine, requests)
    stop = plain[0][4:6]
    requests.append(ask(0, 70, 71, 72, until=("never", stop, plain[0][2])))
    server = serve(dialect)
    assert texts_of(connect(server), requests) == texts_of(engine, requests)
    assert texts_of(engine, requests)[3] == plain[0][:2].partition(plain[0][2])[0]


@pytest.mark.parametrize("dialect", SCORING)
def test_whole_evaluation_equals_the_engine_s(
    dialect: str,
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    engine: EngineModel,
    small_tasks: Path,
    tmp_path: Path,
) -> None:
    prepared = prepare(
        EvalConfig(tasks=("sums", "spoken", "letters"), include=(small_tasks,), max_length=150)
    )
    found = run_eval(prepared, connect(serve(dialect)), tmp_path / "server")
    expected = run_eval(prepared, engine, tmp_path / "engine")
    for task, items in expected.items.items():
        for item, other in zip(items, found.items[task], strict=True):
            assert other.loglikelihoods == pytest.approx(item.loglikelihoods, abs=1e-4)
            assert (other.response, other.is_greedy) == (item.response, item.is_greedy)
            assert other.key != item.key


def test_generating_task_runs_on_a_server_without_log_probabilities(
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    engine: EngineModel,
    small_tasks: Path,
    tmp_path: Path,
) -> None:
    prepared = prepare(EvalConfig(tasks=("spoken",), include=(small_tasks,)))
    found = run_eval(prepared, connect(serve("llama.cpp")), tmp_path / "server")
    expected = run_eval(prepared, engine, tmp_path / "engine")
    assert [item.response for item in found.items["spoken"]] == [
        item.response for item in expected.items["spoken"]
    ]


def test_scores_that_a_server_lacks_are_refused_before_anything_is_asked(
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    engine: EngineModel,
    small_tasks: Path,
    tmp_path: Path,
) -> None:
    prepared = prepare(EvalConfig(tasks=("spoken", "sums"), include=(small_tasks,)))
    server = serve("llama.cpp")
    model = connect(server)
    num_probes = len(server.requests)
    baseline = EngineModel(engine.config)
    with pytest.raises(BenchError, match="no log-probabilities of a prompt"):
        evaluate(prepared, model, tmp_path, baseline=baseline, with_divergence=False)
    assert len(server.requests) == num_probes
    assert not baseline.is_loaded


def test_repeats_are_told_with_the_results(
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    small_tasks: Path,
    tmp_path: Path,
) -> None:
    trouble = [web.Response(status=503)]

    def before(path: str, body: dict[str, Any]) -> web.Response | None:
        return trouble.pop() if body.get("stop") and trouble else None

    prepared = prepare(EvalConfig(tasks=("spoken",), include=(small_tasks,)))
    result = run_eval(prepared, connect(serve(before=before)), tmp_path)
    assert "requests sent again: 1 (HTTP 503: 1)" in result.notices


def test_stops_are_cut_here_where_the_server_forgets_them(
    serve: Callable[..., Any], connect: Callable[..., ServerModel], engine: EngineModel
) -> None:
    whole = texts_of(engine, [ask(0, 70, 71, 72)])[0]

    def forget(path: str, body: dict[str, Any], answer: Any) -> Any:
        if body.get("stop"):
            answer["choices"][0]["text"] = whole
        return answer

    model = connect(serve("openai", after=forget))
    assert texts_of(model, [ask(0, 70, 71, 72, until=("", whole[5]))]) == [whole.split(whole[5])[0]]


def test_stop_that_is_a_special_token_is_sent_as_an_id(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    server = serve("vllm")
    texts_of(connect(server), [ask(0, 70, until=("</s>", "Q:"))])
    assert server.bodies("v1/completions")[-1]["stop_token_ids"] == [1]


def test_prompt_as_text_has_one_bos(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    server = serve("text")
    model = connect(server)
    texts_of(model, [ask(0, 70, 71)])
    assert server.bodies("v1/completions")[-1]["prompt"] == model.tokenizer.decode([70, 71])
    assert any("0 of them" in notice for notice in model.notices)


def test_server_that_counts_more_tokens_than_were_sent_is_refused(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    def one_more(path: str, body: dict[str, Any], answer: Any) -> Any:
        if path == "v1/completions" and isinstance(body["prompt"], list):
            answer["usage"]["prompt_tokens"] += 1
        return answer

    with pytest.raises(BenchError, match=r"counts \d+ tokens in a prompt of \d+ ids"):
        connect(serve("openai", after=one_more))


@pytest.mark.parametrize(("dialect", "room"), [("vllm", 199), ("sglang", 197)])
def test_longest_allowed_request_fits_the_server(
    dialect: str, room: int, serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    server = serve(dialect)
    model = connect(server)
    assert model.max_length + 1 == room
    item = ScoreRequest(context=(70,) * model.max_length, continuations=((71,),))
    assert len(scores_of(model, [item])[0][0].logprobs) == 1
    assert connect(server, max_length=50).max_length == 50


def test_llama_cpp_generates_and_is_refused_for_scores(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    model = connect(serve("llama.cpp"))
    assert model.identity["dialect"] is None
    with pytest.raises(BenchError, match="Only no echo is supported") as caught:
        model.score(ITEMS)
    assert "vLLM" in caught.value.__notes__[0]
    assert "llama.cpp" in caught.value.__notes__[0]


def zeros(logprobs: dict[str, Any]) -> None:
    logprobs["token_logprobs"] = [None] + [0.0] * (len(logprobs["token_logprobs"]) - 1)


def only_generated(logprobs: dict[str, Any]) -> None:
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        logprobs[name] = logprobs[name][-1:]


def probabilities(logprobs: dict[str, Any]) -> None:
    values = logprobs["token_logprobs"]
    logprobs["token_logprobs"] = [None] + [math.exp(value) for value in values[1:]]


def shifted(logprobs: dict[str, Any]) -> None:
    logprobs["token_logprobs"] = [*logprobs["token_logprobs"][1:], None]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (zeros, "0.0 for every token"),
        (only_generated, "has 1 entries, expected"),
        (probabilities, "not log-probabilities"),
        (shifted, "begins with"),
    ],
)
def test_numbers_that_are_no_log_probabilities_of_the_prompt_are_refused(
    spoil: Callable[[dict[str, Any]], None],
    reason: str,
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
) -> None:
    def spoiled(path: str, body: dict[str, Any], answer: Any) -> Any:
        if body.get("echo"):
            spoil(answer["choices"][0]["logprobs"])
        return answer

    with pytest.raises(BenchError, match=reason):
        connect(serve("openai", after=spoiled)).check_scores()


def path_set(answer: Any, path: Sequence[str | int], value: Any) -> Any:
    found = answer
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value
    return answer


PROMPT = ("choices", 0, "prompt_logprobs")
ECHO = ("choices", 0, "logprobs")
INPUT = ("meta_info", "input_token_logprobs")


@pytest.mark.parametrize(
    ("dialect", "path", "value", "message"),
    [
        ("vllm", ("choices",), None, "choices is None, expected a list"),
        ("vllm", ("choices",), [], "choices has 0 entries, expected 1"),
        ("vllm", PROMPT, [None, {}], r"prompt_logprobs has 2 entries, expected 6"),
        ("vllm", (*PROMPT, 4), {"7": {"logprob": -1.0}}, r"prompt_logprobs\[4\] has no '80'"),
        ("vllm", (*PROMPT, 5), {"81": {"logprob": "x"}}, r"prompt_logprobs\[5\] holds 'x'"),
        ("vllm", (*PROMPT, 5), None, r"prompt_logprobs\[5\] has no '81': it is None"),
        ("sglang", INPUT, [None], "input_token_logprobs has 1 entries, expected 3"),
        ("sglang", (*INPUT, 1), [-1.0, 9, None], r"logprobs\[1\] is of token 9, expected 80"),
        ("sglang", ("meta_info", "input_top_logprobs", 1), [], r"input_top_logprobs\[1\] is \[\]"),
        ("openai", ECHO, None, "token"),
        ("openai", (*ECHO, "token_logprobs", 4), True, r"token_logprobs\[4\] holds True"),
        ("openai", (*ECHO, "top_logprobs", 4), None, r"top_logprobs\[4\] is None"),
    ],
)
def test_malformed_answer_is_reported_with_its_request_and_field(
    dialect: str,
    path: Sequence[str | int],
    value: Any,
    message: str,
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
) -> None:
    ids = [*ITEMS[0].context, 80, 81]

    def spoiled(_: str, body: dict[str, Any], answer: Any) -> Any:
        if ids in (body.get("prompt"), body.get("input_ids")):
            return path_set(answer, path, value)
        return answer

    model = connect(serve(dialect, after=spoiled))
    with pytest.raises(TargetError, match=rf"request 0, continuation 0: .*{message}"):
        scores_of(model, ITEMS)


def test_completion_without_text_is_reported_with_its_field(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    def silent(_: str, body: dict[str, Any], answer: Any) -> Any:
        return path_set(answer, ("choices", 0, "text"), 5) if body.get("stop") else answer

    model = connect(serve(after=silent))
    with pytest.raises(TargetError, match=r"request 1: choices\[0\]\.text is 5"):
        texts_of(model, [ask(0, 70), ask(0, 71, until=("x",))])


@pytest.mark.parametrize("value", [math.nan, None])
@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_nan_passes_through_and_is_never_greedy(
    dialect: str,
    value: float | None,
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
) -> None:
    def spoiled(_: str, body: dict[str, Any], answer: Any) -> Any:
        if body.get("prompt") == [90, 91, 92, 93]:
            if dialect == "vllm":
                path_set(answer, (*PROMPT, 2, "92", "logprob"), value)
            else:
                path_set(answer, (*ECHO, "token_logprobs", 2), value)
        return answer

    (score,) = scores_of(connect(serve(dialect, after=spoiled)), ITEMS)[1]
    assert [math.isnan(logprob) for logprob in score.logprobs] == [False, True, False]
    assert math.isnan(score.loglikelihood)
    assert not score.is_greedy


def test_what_may_pass_is_tried_again_and_counted(
    serve: Callable[..., Any], connect: Callable[..., ServerModel], engine: EngineModel
) -> None:
    trouble: list[web.Response | ConnectionError] = [
        web.json_response({"error": {"message": "busy"}}, status=503),
        web.Response(status=429, headers={"Retry-After": "0"}),
        ConnectionResetError(),
    ]

    def before(path: str, body: dict[str, Any]) -> web.Response | None:
        if body.get("prompt") != [90, 91, 92, 93] or not trouble:
            return None
        one = trouble.pop()
        if isinstance(one, ConnectionError):
            raise one
        return one

    model = connect(serve(before=before))
    found = scores_of(model, ITEMS)
    assert found[1][0].logprobs == pytest.approx(scores_of(engine, ITEMS)[1][0].logprobs, abs=1e-5)
    notice = model.notices[-1]
    assert notice == "requests sent again: 3 (HTTP 429: 1, HTTP 503: 1, broken connection: 1)"


def test_trouble_that_does_not_pass_ends_the_run_with_the_server_s_words(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    def before(path: str, body: dict[str, Any]) -> web.Response | None:
        if body.get("prompt") == [90, 91, 92, 93]:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return None

    server = serve(before=before)
    model = connect(server, max_retries=2)
    with pytest.raises(TargetError, match=r"request 1, part 0: .*HTTP 500: out of memory"):
        scores_of(model, ITEMS)
    assert [body["prompt"] for body in server.bodies("v1/completions")].count([90, 91, 92, 93]) == 3


def test_request_that_the_server_refuses_is_sent_once(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    server = serve()
    model = connect(server)
    long = (70,) * 300
    with pytest.raises(TargetError, match="HTTP 400: the context is 200 tokens"):
        texts_of(model, [ask(*long)])
    assert [body["prompt"] for body in server.bodies("v1/completions")].count(list(long)) == 1


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_other_tokenizer_is_refused(
    dialect: str,
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    engine: EngineModel,
) -> None:
    class Longer:
        bos_token_id = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [*engine.tokenizer.encode(text), 70, 71]

        def decode(self, ids: list[int]) -> str:
            return str(engine.tokenizer.decode(ids))

    with pytest.raises(BenchConfigError, match="tokenizer is not the one given") as caught:
        connect(serve(dialect, tokenizer=Longer()))
    assert "--tokenizer" in caught.value.__notes__[0]


def test_tokenizer_of_other_words_is_refused_where_only_its_words_show_it(
    serve: Callable[..., Any], connect: Callable[..., ServerModel], engine: EngineModel
) -> None:
    class Shouting:
        bos_token_id = 0

        def encode(self, text: str) -> list[int]:
            return list(engine.tokenizer.encode(text))

        def decode(self, ids: list[int]) -> str:
            return str(engine.tokenizer.decode(ids)).upper()

    with pytest.raises(BenchConfigError, match=r"token \d+ is 'N' there and 'n' here"):
        connect(serve("openai", tokenizer=Shouting()))


@pytest.mark.parametrize(
    ("counts", "told"), [(True, "only by its count of tokens"), (False, "not at all")]
)
def test_how_far_the_tokenizer_was_checked_is_told(
    counts: bool, told: str, serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    def without_usage(path: str, body: dict[str, Any], answer: Any) -> Any:
        if not counts:
            answer.pop("usage", None)
        return answer

    assert told in connect(serve("openai", after=without_usage)).notices[1]
    assert connect(serve("vllm")).notices == (UNSEEN_WEIGHTS,)


def test_weights_that_cannot_be_seen_are_told_of_with_every_server(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    assert "started again with others under the same name" in connect(serve("vllm")).notices[0]


def test_server_of_texts_that_counts_no_tokens_is_refused(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    """Whether it puts a BOS in front of the text could not be told."""

    def without_usage(path: str, body: dict[str, Any], answer: Any) -> Any:
        answer.pop("usage", None)
        return answer

    with pytest.raises(BenchError, match="takes no token ids"):
        connect(serve("text", after=without_usage))


def test_context_length_of_the_tokenizer_is_taken_with_a_notice(
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    engine: EngineModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.tokenizer, "model_max_length", 150)
    model = connect(serve("openai"), max_length=None)
    assert model.max_length == 149
    assert any("does not tell its context length" in notice for notice in model.notices)


def test_requests_are_bounded_and_all_answered_once(
    serve: Callable[..., Any], connect: Callable[..., ServerModel], engine: EngineModel
) -> None:
    items = [ScoreRequest(context=(0, 60 + i), continuations=((70,), (71, 72))) for i in range(40)]
    server = serve(delay_s=0.002)
    model = connect(server, concurrency=6)
    found = list(model.score(items))
    assert sorted(index for index, _ in found) == list(range(40))
    assert 2 <= server.most_at_once <= 6
    expected = scores_of(engine, items)
    for index, scores in found:
        assert scores[1].logprobs == pytest.approx(expected[index][1].logprobs, abs=1e-5)


def test_continuations_of_an_item_follow_one_another(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    server = serve()
    model = connect(server, concurrency=1)
    before = len(server.bodies("v1/completions"))
    scores_of(model, ITEMS)
    sent = [tuple(body["prompt"]) for body in server.bodies("v1/completions")[before:]]
    assert sent == [item.context + one for item in ITEMS for one in item.continuations]


def test_answers_that_came_before_a_failure_are_handed_over(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    def before(path: str, body: dict[str, Any]) -> web.Response | None:
        return web.Response(status=400) if body.get("prompt") == [90, 91, 92, 93] else None

    model = connect(serve(before=before), concurrency=1)
    answers = model.score(ITEMS)
    assert next(answers)[0] == 0
    with pytest.raises(TargetError, match="HTTP 400"):
        next(answers)


def test_iteration_left_early_stops_asking_and_the_model_still_answers(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    server = serve(delay_s=0.002)
    model = connect(server, concurrency=2)
    answers = model.generate([ask(0, 60 + i, max_tokens=1) for i in range(100)])
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert len(server.bodies("v1/completions")) < 50
    assert len(texts_of(model, [ask(0, 70)])) == 1


def test_close_ends_the_thread_and_may_be_repeated(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    def clients() -> int:
        return sum(thread.name == "llmbench-http" for thread in threading.enumerate())

    server = serve(delay_s=0.002)
    before = clients()
    model = connect(server)
    assert clients() == before + 1
    answers = model.score(ITEMS)
    next(answers)
    model.close()
    model.close()
    assert clients() == before


def test_hidden_states_are_refused(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    model = connect(serve())
    assert model.head() is None
    with pytest.raises(BenchError, match="does not give hidden states"):
        model.score(ITEMS, with_hidden=True)


def test_identity_tells_servers_apart_and_holds_no_key(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    server = serve()
    identity = connect(server, api_key="secret").identity
    assert identity["base_url"] == server.url
    assert identity["model"] == "tiny"
    assert "test-server" in identity["software"]
    assert "0.11.0" in identity["software"]
    assert identity != connect(serve(model_id="other")).identity
    assert "secret" not in json.dumps(identity)


def test_key_of_the_environment_is_sent(
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    server = serve()
    connect(server)
    assert {headers["Authorization"] for headers in server.headers} == {
        "Bearer from-the-environment"
    }


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("https://host/llm/v1/", "https://host/llm"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_base_url_is_taken_with_and_without_v1(url: str, root: str) -> None:
    assert server_root(url) == root


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "does not begin with http"),
        ("ftp://host", "does not begin with http"),
        ("http://", "names no host"),
        ("http://::1:8000", "cannot be read"),
        ("http://[::1", "cannot be read"),
        ("http://host:99999", "cannot be read"),
        ("http://host/v1/completions", "is an endpoint"),
        ("http://host/v1?key=1", "has a query"),
    ],
)
def test_what_is_no_base_url_is_refused_with_a_way_out(url: str, message: str) -> None:
    with pytest.raises(BenchConfigError, match=message) as caught:
        server_root(url)
    assert caught.value.__notes__


def test_credentials_in_a_base_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(BenchConfigError, match="holds credentials") as caught:
        server_root("http://me:secret@host:8000/v1")
    assert "secret" not in str(caught.value)
    assert "OPENAI_API_KEY" in caught.value.__notes__[0]


def test_nobody_there_is_said_at_once(connect: Callable[..., ServerModel]) -> None:
    with pytest.raises(TargetError, match=r"cannot connect to http://127\.0\.0\.1:9/v1/models"):
        connect("http://127.0.0.1:9")


def test_silence_ends_after_the_timeout(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    with pytest.raises(TargetError, match=r"gave no answer within 0\.05 s"):
        connect(serve(delay_s=2.0), timeout_s=0.05)


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        ({"status": 401, "text": '{"error": "no"}'}, BenchConfigError, "HTTP 401: no"),
        ({"status": 404, "text": "nothing"}, TargetError, "HTTP 404: nothing"),
        ({"text": "<html>", "content_type": "text/html"}, TargetError, "text/html, not JSON"),
        ({"status": 302, "headers": {"Location": "/x"}}, BenchConfigError, r"HTTP 302.*to /x"),
        ({"text": '{"data": []}'}, BenchConfigError, "serves no model at all"),
        ({"text": "[]"}, BenchConfigError, "serves no model at all"),
    ],
)
def test_first_contact_that_is_no_openai_server_is_reported(
    response: dict[str, Any],
    error: type[BenchError],
    message: str,
    serve: Callable[..., Any],
    connect: Callable[..., ServerModel],
) -> None:
    server = serve(before=lambda path, body: web.Response(**response))
    with pytest.raises(error, match=message):
        connect(server)


def test_model_that_is_not_served_is_refused_with_those_that_are(
    serve: Callable[..., Any], connect: Callable[..., ServerModel]
) -> None:
    with pytest.raises(BenchConfigError, match="serves tiny; the evaluation wants 'huge'"):
        connect(serve(), model="huge")


def test_unknown_context_length_must_be_given(
    stack: ExitStack, serve: Callable[..., Any], engine: EngineModel
) -> None:
    with pytest.raises(BenchConfigError, match="how long a prompt may be"):
        ServerModel(serve("openai").url, engine.tokenizer)
