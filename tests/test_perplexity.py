"""Perplexity through the engine: against transformers, against what is known, and its weights."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.bench.accuracy.eval_plan import prepare
from llmbench.bench.accuracy.evaluation import evaluate
from llmbench.bench.accuracy.perplexity import Perplexity, WindowLoss, perplexity_of
from llmbench.bench.accuracy.text_source import Text, read_text
from llmbench.bench.accuracy.text_windows import TextWindows, cut_windows
from llmbench.engine.config import EngineConfig

LENGTHS = (1, 7, 16, 17, 63, 64, 65, 200)
CONTEXT = 16
TEXT = "The tower is 324 metres tall, about the height of a building of 81 storeys.\n" * 6


def engine_model(folder: Path) -> EngineModel:
    return EngineModel(
        EngineConfig(model=str(folder), dtype="float32", compile=False, num_kv_blocks=64)
    )


Measure = Callable[..., Perplexity]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Evaluate a text on a model, as `llmbench eval --tasks perplexity` does."""

    def run(model: EngineModel, text: str, kind: Any = "gptq", **choices: Any) -> Perplexity:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        file = folder.with_suffix(".txt")
        file.write_text(text, encoding="utf-8")
        config = EvalConfig(tasks=("perplexity",), text=str(file), protocol=kind, **choices)
        found = evaluate(prepare(config), model, folder).perplexity
        assert found is not None
        return found

    return run


@pytest.fixture(scope="module")
def saved_llama(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[..., Any]
) -> Callable[..., Path]:
    """Save a tiny Llama over bytes, with a BOS of its own or without."""

    def save(*, adds_bos: bool = False, has_zero_head: bool = False, vocab_size: int = 258) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=0.3,
        )
        model = LlamaForCausalLM(config)
        if has_zero_head:
            torch.nn.init.zeros_(model.lm_head.weight)
        folder = tmp_path_factory.mktemp("llama")
        model.save_pretrained(folder)
        byte_tokenizer(adds_bos=adds_bos).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def models(saved_llama: Callable[..., Path]) -> Iterator[dict[bool, EngineModel]]:
    """Random models on the engine: with a tokenizer that adds BOS, and without."""
    made = {adds_bos: engine_model(saved_llama(adds_bos=adds_bos)) for adds_bos in (False, True)}
    yield made
    for model in made.values():
        model.close()


def transformers_perplexity(folder: Path, ids: list[int], window: int) -> float:
    """The protocol of the papers, written down once more with transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    with torch.inference_mode():
        for start in range(0, len(ids) - window + 1, window):
            tokens = torch.tensor([ids[start : start + window]])
            logits = model(tokens).logits[:, :-1].double()
            loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])
            losses.append(float(loss))
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_perplexity_equals_a_transformers_script(
    models: dict[bool, EngineModel], measure: Measure, adds_bos: bool
) -> None:
    model = models[adds_bos]
    found = measure(model, TEXT, window=64)
    ids = list(model.tokenizer(TEXT)["input_ids"])
    assert found.token == pytest.approx(transformers_perplexity(model.folder, ids, 64), rel=1e-5)
    assert found.num_tokens == 63 * (len(ids) // 64)


def test_llamacpp_protocol_equals_a_transformers_script(
    models: dict[bool, EngineModel], measure: Measure
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = models[True]
    ids = list(model.tokenizer(TEXT)["input_ids"])
    loaded: Any = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    n_ctx, nll, count = 32, 0.0, 0
    for start in range(0, len(ids) - n_ctx + 1, n_ctx):
        tokens = [model.tokenizer.bos_token_id, *ids[start + 1 : start + n_ctx]]
        logits = loaded(torch.tensor([tokens])).logits[0].detach().double()
        logprobs = torch.log_softmax(logits, dim=-1)
        for position in range(n_ctx // 2, n_ctx - 1):
            nll -= float(logprobs[position, tokens[position + 1]])
            count += 1
    found = measure(model, TEXT, "llamacpp", window=n_ctx)
    assert found.token == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert found.num_tokens == count


@pytest.fixture(scope="module")
def uniform_models(saved_llama: Callable[..., Path]) -> dict[bool, EngineModel]:
    """All tokens equally likely: the head is zero."""
    return {
        adds_bos: engine_model(saved_llama(adds_bos=adds_bos, has_zero_head=True, vocab_size=64))
        for adds_bos in (False, True)
    }


@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_uniform_model_has_the_vocabulary_as_perplexity(
    uniform_models: dict[bool, EngineModel], measure: Measure, adds_bos: bool, stride: int
) -> None:
    model = uniform_models[adds_bos]
    for length in LENGTHS:  # "!" is the first byte of the vocabulary
        found = measure(model, "!" * length, "strided", window=CONTEXT, stride=stride)
        scored = length if adds_bos else length - 1
        assert found.num_tokens == scored
        if scored:
            assert found.token == pytest.approx(64.0, rel=1e-6)
        else:
            assert found.token is None
            assert "without BOS" in str(found.reason)


@pytest.mark.parametrize("kind", ["gptq", "llamacpp"])
def test_uniform_model_is_uniform_by_every_protocol(
    uniform_models: dict[bool, EngineModel], measure: Measure, kind: Any
) -> None:
    for model in uniform_models.values():
        for length in (16, 17, 63, 200):
            found = measure(model, "!" * length, kind, window=CONTEXT)
            assert found.token == pytest.approx(64.0, rel=1e-6)


def test_windows_weigh_by_their_tokens(byte_tokenizer: Callable[..., Any]) -> None:
    losses = [WindowLoss(nll=4 * 1.0, num_tokens=4), WindowLoss(nll=3.0, num_tokens=1)]
    found = perplexity_of(losses, text_of(byte_tokenizer, "!" * 7))
    assert found.token == pytest.approx(4.0551999668446745)  # the mean of means would be 7.389
    assert found.nll == 7.0


def test_cases_of_users_hold(cases_dir: Path, byte_tokenizer: Callable[..., Any]) -> None:
    case = json.loads((cases_dir / "C23_perplexity.json").read_text())["token_weighting"]
    losses = [
        WindowLoss(nll=window["tokens"] * window["mean_nll"], num_tokens=window["tokens"])
        for window in case["windows"]
    ]
    found = perplexity_of(losses, text_of(byte_tokenizer, "!" * 7))
    assert found.token == pytest.approx(case["expect_ppl"], rel=1e-12)


def test_words_and_bytes_are_those_of_the_raw_text(byte_tokenizer: Callable[..., Any]) -> None:
    text = text_of(byte_tokenizer, "두 낱말 \n", add_bos=True)  # 11 bytes, hence 11 tokens
    found = perplexity_of([WindowLoss(nll=11 * math.log(3), num_tokens=11)], text)
    assert (found.num_words, found.num_bytes) == (2, 12)
    assert found.byte == pytest.approx(3.0)
    assert found.word == pytest.approx(3.0**6)
    assert found.bits_per_byte == pytest.approx(math.log2(3))


def test_interval_covers_the_value_and_needs_two_windows(
    byte_tokenizer: Callable[..., Any],
) -> None:
    text = text_of(byte_tokenizer, "!" * 40)
    one = perplexity_of([WindowLoss(nll=8.0, num_tokens=9)], text)
    assert (one.low, one.high) == (None, None)
    losses = [WindowLoss(nll=float(nll), num_tokens=9) for nll in (8, 9, 11, 8)]
    many = perplexity_of(losses, text)
    assert many.token is not None
    assert many.low is not None
    assert many.high is not None
    assert many.low < many.token < many.high


def test_loss_that_is_no_number_is_told(byte_tokenizer: Callable[..., Any]) -> None:
    losses = [WindowLoss(nll=math.nan, num_tokens=9), WindowLoss(nll=8.0, num_tokens=9)]
    found = perplexity_of(losses, text_of(byte_tokenizer, "!" * 40))
    assert found.token is None
    assert found.reason == "1 of 2 windows have a loss that is no number"


def test_interrupted_text_goes_on_where_it_was(
    doubles: ModuleType, saved_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved_llama()
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    prepared = prepare(EvalConfig(tasks=("perplexity",), text=str(file), window=64))
    model = doubles.CountingModel(folder)
    whole = evaluate(prepared, model, tmp_path / "whole").perplexity
    assert whole is not None

    def stop(task: str, done: int, *_: Any) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(prepared, model, tmp_path / "run", on_progress=stop)
    again = doubles.CountingModel(folder)
    found = evaluate(prepared, again, tmp_path / "run").perplexity
    assert len(again.asked) == whole.num_windows - 2
    assert found is not None
    assert found.token == pytest.approx(whole.token, rel=1e-6)


def text_of(build: Callable[..., Any], text: str, **choices: Any) -> TextWindows:
    return cut_windows(Text(name="text", text=text), build(), max_length=64, **choices)


@pytest.mark.real
@pytest.mark.slow
def test_demo_model_reads_wikitext_as_transformers_does(
    demo_model: Path, data_dir: Path, tmp_path: Path
) -> None:
    model = EngineModel(EngineConfig(model=str(demo_model), dtype="float32"))
    config = EvalConfig(tasks=("perplexity",), text="wikitext2", data_dir=data_dir, limits=2)
    found = evaluate(prepare(config), model, tmp_path).perplexity
    model.close()
    source = read_text("wikitext2", data_dir=data_dir)
    text = cut_windows(source, model.tokenizer, max_length=model.max_length, limit=2)
    assert text.num_windows == 148
    ids = [token for window in text.windows for token in window]
    assert found is not None
    assert found.token == pytest.approx(transformers_perplexity(demo_model, ids, 2048), rel=1e-5)
