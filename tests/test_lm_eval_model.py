"""The engine as a model of the reference harness, which a few stand-ins play here.

The harness itself runs it in tests/peers.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from llmbench.bench.accuracy.model import GenerateRequest
from llmbench.bench.errors import BenchConfigError, BenchError
from llmbench.engine.scoring import ContinuationScore, ScoreRequest

MODULE = "llmbench.bench.accuracy.lm_eval_model"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + TEMPLATE
)


class TemplateLM:
    """What the harness's class of this name gives its heirs."""

    def __init__(self) -> None:
        self.partial: list[tuple[str, Any, Any]] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *args: self.partial.append(args))


class KnownTasks:
    """The harness's list of tasks."""

    all_tasks = ("piqa", "mine")
    latest: ClassVar[dict[str, Any]] = {}

    def __init__(self, **settings: Any) -> None:
        KnownTasks.latest = settings


def evaluate_nothing(**settings: Any) -> dict[str, Any]:
    return {"settings": settings, "score": np.float64(0.5), "scores": np.arange(2)}


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, imported beside a stand-in for lm_eval."""
    contents: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": evaluate_nothing},
        "lm_eval.tasks": {"TaskManager": KnownTasks, "__file__": "tasks/__init__.py"},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda registered: registered},
        "evaluate": {},
        "evaluate.config": {"HF_EVALUATE_OFFLINE": False},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    loaded = importlib.import_module(MODULE)
    yield loaded
    sys.modules.pop(MODULE, None)


class CountingModel:
    """Gives each token -1, answers with a stop inside, and remembers what it was asked."""

    name = "counting"
    max_length = 8

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.identity: dict[str, Any] = {}
        self.scored: list[ScoreRequest] = []
        self.generated: list[GenerateRequest] = []

    def score(
        self, requests: Sequence[ScoreRequest], *, with_hidden: bool = False
    ) -> Iterator[tuple[int, tuple[ContinuationScore, ...]]]:
        self.scored += requests
        for index in reversed(range(len(requests))):
            yield (
                index,
                tuple(
                    ContinuationScore(logprobs=(-1.0,) * len(ids), is_greedy=True, hidden=None)
                    for ids in requests[index].continuations
                ),
            )

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, str]]:
        self.generated += requests
        for index in reversed(range(len(requests))):
            yield index, f"answer {index}. Stop here"


@pytest.fixture
def model(byte_tokenizer: Callable[..., Any]) -> CountingModel:
    return CountingModel(byte_tokenizer(chat_template=TEMPLATE))


def asked(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def test_missing_harness_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(BenchError, match="not installed") as refused:
        importlib.import_module(MODULE)
    assert refused.value.__notes__ == ["pip install 'llmbench[lm-eval]'"]


def test_answers_come_back_in_the_order_of_the_questions(
    adapter: Any, model: CountingModel
) -> None:
    lm = adapter.LlmbenchLM(model=model)
    found = lm._loglikelihood_tokens(
        [(("a", "b"), [1], [5, 6]), (("c", "d"), [2], [7]), (("a", "e"), [1], [8, 9, 10])]
    )
    assert found == [(-2.0, True), (-1.0, True), (-3.0, True)]
    assert [request.context for request in model.scored] == [(1,), (2,)]  # one a context
    assert [entry[1] for entry in lm.partial] == [("a", "b"), ("c", "d"), ("a", "e")]


def test_long_contexts_lose_their_beginning(adapter: Any, model: CountingModel) -> None:
    lm = adapter.LlmbenchLM(model=model)
    lm._loglikelihood_tokens([(None, list(range(20)), [30, 31])])
    assert model.scored[0].context == tuple(range(13, 20))  # 8 ids are read, the 9th predicted
    with pytest.raises(BenchError, match="at most 8 tokens, found 9"):
        lm._loglikelihood_tokens([(None, [1], list(range(9)))])


def test_whole_texts_are_scored_window_by_window(adapter: Any, model: CountingModel) -> None:
    lm = adapter.LlmbenchLM(model=model)
    assert lm.loglikelihood_rolling(asked(("a" * 20,), ("b",))) == [-20.0, -1.0]
    assert model.scored[0].context == (0,)


def test_answers_are_cut_at_their_stops(adapter: Any, model: CountingModel) -> None:
    lm = adapter.LlmbenchLM(model=model)
    settings = {"until": ["."], "max_gen_toks": 3, "do_sample": False, "temperature": 0.0}
    found = lm.generate_until(asked(("ab", settings), ("c", settings)))
    assert found == ["answer 0", "answer 1"]
    assert model.generated[0].until == (".", "</s>")
    assert model.generated[0].max_tokens == 3
    assert model.generated[0].temperature == 0.0


def test_settings_that_change_an_answer_are_refused(adapter: Any, model: CountingModel) -> None:
    lm = adapter.LlmbenchLM(model=model)
    with pytest.raises(BenchError, match="not supported: top_k"):
        lm.generate_until(asked(("ab", {"until": "x", "top_k": 3})))


@pytest.mark.parametrize("template", [TEMPLATE, NO_SYSTEM])
def test_template_that_takes_no_system_message_goes_without(
    adapter: Any, byte_tokenizer: Callable[..., Any], template: str
) -> None:
    lm = adapter.LlmbenchLM(model=CountingModel(byte_tokenizer(chat_template=template)))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    expected = "<user>u" if template == NO_SYSTEM else "<system>s<user>u"
    assert lm.apply_chat_template(messages) == expected


def test_text_that_brings_its_bos_gets_no_other(
    adapter: Any, byte_tokenizer: Callable[..., Any]
) -> None:
    lm = adapter.LlmbenchLM(model=CountingModel(byte_tokenizer(adds_bos=True)))
    assert lm.tok_encode("a").count(0) == 1
    assert lm.tok_encode("<s>a").count(0) == 1
    assert lm.tok_encode("a", add_special_tokens=False).count(0) == 0
    assert lm.prefix_token_id == 0
    assert lm.eot_token_id == 1


def test_either_a_name_or_a_model_is_needed(adapter: Any, model: CountingModel) -> None:
    for choices in ({}, {"pretrained": "x", "model": model}):
        with pytest.raises(BenchConfigError, match="either"):
            adapter.LlmbenchLM(**choices)


def test_result_of_the_harness_is_made_of_json_types(adapter: Any, model: CountingModel) -> None:
    found = adapter.evaluate_with_lm_eval(
        model, ["piqa"], limit=3, apply_chat_template=True, include=[Path("more")]
    )
    assert found["score"] == 0.5
    assert found["scores"] == [0, 1]
    assert found["settings"]["limit"] == 3
    assert found["settings"]["fewshot_as_multiturn"] is True
    assert found["settings"]["fewshot_random_seed"] == 1234
    assert isinstance(found["settings"]["model"], str)


def test_task_that_the_harness_lacks_is_refused(adapter: Any, model: CountingModel) -> None:
    with pytest.raises(BenchError, match="no task named nothing"):
        adapter.evaluate_with_lm_eval(model, ["piqa", "nothing"])


def test_task_without_local_files_is_refused(
    adapter: Any, model: CountingModel, tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match="expected a task with local files, found `glue`"):
        adapter.evaluate_with_lm_eval(model, ["glue"], data_dir=tmp_path)
    assert sys.modules["evaluate.config"].HF_EVALUATE_OFFLINE is False


def test_task_file_of_ones_own_may_be_named_by_itself(
    adapter: Any, model: CountingModel, tmp_path: Path
) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("task: mine\ndoc_to_text: !function utils.text\n")
    for include in (file, tmp_path):
        found = adapter.evaluate_with_lm_eval(model, ["mine"], data_dir=tmp_path, include=[include])
        assert found["settings"]["tasks"] == ["mine"]
        assert adapter.lm_eval.tasks.TaskManager.latest["include_path"][0] == str(tmp_path)


def test_named_template_is_the_one_that_is_applied(
    adapter: Any, byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "short": "{{ messages[0].content }}!"}
    lm = adapter.LlmbenchLM(model=CountingModel(tokenizer), template="short")
    assert lm.apply_chat_template([{"role": "user", "content": "u"}]) == "u!"
    assert lm.chat_template(True) == "{{ messages[0].content }}!"
    with pytest.raises(BenchConfigError, match="no chat template named long"):
        adapter.evaluate_with_lm_eval(
            lm.model, ["piqa"], apply_chat_template=True, chat_template="long"
        )


def test_local_tasks_are_sent_to_their_files(
    adapter: Any, model: CountingModel, tmp_path: Path
) -> None:
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text("{}\n")
    found = adapter.evaluate_with_lm_eval(model, ["piqa"], data_dir=tmp_path)
    assert found["settings"]["tasks"] == ["piqa"]
