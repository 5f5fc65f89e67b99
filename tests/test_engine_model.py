"""A checkpoint on the engine, as an evaluation sees it: who it is, and what it answers."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.bench.accuracy.engine_model import EngineModel, tokenizer_digest
from llmbench.bench.accuracy.model import EvaluatedModel, GenerateRequest
from llmbench.engine.config import EngineConfig
from llmbench.engine.scoring import ScoreRequest

CONTEXT = tuple(range(40, 60))
CONTINUATIONS = ((70, 71, 72), (70, 71, 90), (33,))


def engine_model(folder: Path, **settings: Any) -> EngineModel:
    values: dict[str, Any] = {"dtype": "float32", "compile": False}
    values["kv_cache_memory_bytes"] = 1 << 20
    return EngineModel(EngineConfig(model=str(folder), **(values | settings)))


def reference_model(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    classes: Any = LlamaForCausalLM
    return classes.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(model: Any, ids: tuple[int, ...], num_last: int) -> list[float]:
    """Log-probabilities of the last tokens, by transformers."""
    logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    picked = logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return [float(value) for value in picked[-num_last:]]


def test_an_engine_model_is_an_evaluated_model(byte_llama: Callable[..., Path]) -> None:
    model: EvaluatedModel = engine_model(byte_llama())
    assert model.max_length == 512
    assert model.tokenizer("ab")["input_ids"]


def test_nothing_is_loaded_before_the_first_question(byte_llama: Callable[..., Path]) -> None:
    model = engine_model(byte_llama())
    assert model.identity["dtype"] == "float32"
    assert list(model.score([])) == []
    assert list(model.generate([])) == []
    assert not model.is_loaded
    list(model.score([ScoreRequest(context=(5,), continuations=((6,),))]))
    assert model.is_loaded
    model.close()
    assert not model.is_loaded


def test_identity_follows_what_decides_about_a_score(
    byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = byte_llama()
    copy = tmp_path / "another-name"
    shutil.copytree(folder, copy)
    identity = engine_model(folder).identity
    assert engine_model(copy).identity == identity
    speeds: list[dict[str, Any]] = [
        {"max_num_seqs": 2},
        {"num_threads": 1},
        {"prefix_cache": "none"},
        {"max_num_batched_tokens": 64},
    ]
    for settings in speeds:
        assert engine_model(folder, **settings).identity == identity
    others: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"max_model_len": 128},
        {"model_backend": "transformers"},
    ]
    for settings in others:
        assert engine_model(folder, **settings).identity != identity
    assert engine_model(byte_llama(1)).identity != identity


def test_identity_is_json(byte_llama: Callable[..., Path]) -> None:
    identity = engine_model(byte_llama()).identity
    assert json.loads(json.dumps(identity)) == identity


def test_scores_are_those_of_transformers(byte_llama: Callable[..., Path]) -> None:
    folder = byte_llama()
    ((index, scores),) = engine_model(folder).score(
        [ScoreRequest(context=CONTEXT, continuations=CONTINUATIONS)], with_hidden=True
    )
    assert index == 0
    reference = reference_model(folder)
    for continuation, score in zip(CONTINUATIONS, scores, strict=True):
        expected = reference_logprobs(reference, CONTEXT + continuation, len(continuation))
        assert score.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_head_gives_back_what_the_model_said(
    byte_llama: Callable[..., Path], is_loaded: bool
) -> None:
    model = engine_model(byte_llama())
    ((_, scores),) = model.score(
        [ScoreRequest(context=CONTEXT, continuations=CONTINUATIONS)], with_hidden=True
    )
    if not is_loaded:
        model.close()
    head = model.head()
    for continuation, score in zip(CONTINUATIONS, scores, strict=True):
        assert score.hidden is not None
        logprobs = head.logits(score.hidden).float().log_softmax(-1)
        found = [float(row[token]) for row, token in zip(logprobs, continuation, strict=True)]
        assert found == pytest.approx(score.logprobs, abs=1e-6)


def test_a_question_may_fill_the_model(byte_llama: Callable[..., Path]) -> None:
    """`max_length` tokens are read, and one more is predicted, as the harness counts."""
    folder = byte_llama(max_positions=64)
    model = engine_model(folder)
    ids = tuple(40 + index % 7 for index in range(65))
    request = ScoreRequest(context=ids[:60], continuations=(ids[60:],))
    ((_, (score,)),) = model.score([request])
    # transformers predicts the last token from the first 64, too
    expected = reference_logprobs(reference_model(folder), ids, 5)
    assert model.max_length == 64
    assert score.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "settings", [{"kv_manager": "contiguous"}, {"kv_manager": "uncached"}, {"policy": "static"}]
)
def test_every_kv_manager_and_policy_lets_a_question_fill_the_model(
    byte_llama: Callable[..., Path], settings: dict[str, Any]
) -> None:
    folder = byte_llama(max_positions=64)
    ids = tuple(40 + index % 7 for index in range(65))
    request = ScoreRequest(context=ids[:60], continuations=(ids[60:],))
    ((_, (paged,)),) = engine_model(folder).score([request])
    ((_, (score,)),) = engine_model(folder, **settings).score([request])
    assert score.logprobs == pytest.approx(paged.logprobs, abs=1e-5)


def test_answers_are_greedy(byte_llama: Callable[..., Path]) -> None:
    folder = byte_llama()
    model = engine_model(folder)
    request = GenerateRequest(prompt=CONTEXT, until=(), max_tokens=8)
    ((_, text),) = model.generate([request])
    ids = reference_model(folder).generate(
        torch.tensor([CONTEXT]), max_new_tokens=8, do_sample=False, pad_token_id=1
    )[0, len(CONTEXT) :]
    assert text == model.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_stop_is_cut_off_wherever_tokens_end(
    scripted_llama: Callable[..., Path], byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("xabcdef")["input_ids"]
    folder = scripted_llama(dict(itertools.pairwise(ids)), vocab_size=258, tokenizer=tokenizer)
    request = GenerateRequest(prompt=(ids[0],), until=("de", "zz"), max_tokens=6)
    model = engine_model(folder)
    answers = dict(model.generate([request, replace(request, until=("f", "c"))]))
    assert answers == {0: "abc", 1: "ab"}


def test_a_stop_that_is_a_special_token_ends_the_answer(
    scripted_llama: Callable[..., Path], byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer()
    first, second, *_ = tokenizer("ab")["input_ids"]
    bos = tokenizer.bos_token_id
    folder = scripted_llama(
        {first: second, second: bos, bos: first}, vocab_size=258, tokenizer=tokenizer
    )
    request = GenerateRequest(prompt=(first,), until=("<s>",), max_tokens=6)
    ((_, text),) = engine_model(folder).generate([request])
    assert text == "b"


def test_seeded_draws_do_not_depend_on_their_neighbours(byte_llama: Callable[..., Path]) -> None:
    request = GenerateRequest(prompt=CONTEXT, until=(), max_tokens=8, temperature=1.0, seed=3)
    others = [replace(request, seed=seed) for seed in range(4)]
    model = engine_model(byte_llama())
    assert dict(model.generate([request]))[0] == dict(model.generate(others))[3]


def test_tokenizers_are_equal_by_their_rules(byte_tokenizer: Callable[..., Any]) -> None:
    one, other = byte_tokenizer(), byte_tokenizer()
    other.backend_tokenizer.enable_truncation(5)
    assert tokenizer_digest(one) == tokenizer_digest(other)
    other.add_tokens(["<new>"])
    assert tokenizer_digest(one) != tokenizer_digest(other)
    assert tokenizer_digest(one) != tokenizer_digest(byte_tokenizer(adds_bos=True))
