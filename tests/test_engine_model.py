"""A checkpoint on the engine, as an evaluation sees it: who it is, and what it answers."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.bench.accuracy import model_digest
from llmbench.bench.accuracy.engine_model import EngineModel, tokenizer_digest
from llmbench.bench.accuracy.model import EvaluatedModel, GenerateRequest
from llmbench.bench.accuracy.model_digest import weights_digest
from llmbench.engine.config import EngineConfig
from llmbench.engine.scoring import ScoreRequest
from llmbench.quant.checkpoint import DIGEST_PAGE, Checkpoint
from llmbench.quant.safetensors_header import read_header

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


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_identity_follows_the_tokens_that_end_an_answer(
    file: str, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder, other = byte_llama(), tmp_path / "other"
    shutil.copytree(folder, other)
    settings = json.loads((other / file).read_bytes())
    (other / file).write_text(json.dumps(settings | {"eos_token_id": [1, 77]}))
    before, after = engine_model(folder).identity, engine_model(other).identity
    assert set(after["end_of_text_ids"]) - set(before["end_of_text_ids"]) == {77}


def test_identity_follows_the_tokenizer(
    byte_llama: Callable[..., Path], byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    folder, other = byte_llama(), tmp_path / "tokenizer"
    byte_tokenizer(adds_bos=True).save_pretrained(other)
    model = engine_model(folder)
    assert model.identity["tokenizer"] == tokenizer_digest(model.tokenizer)
    assert engine_model(folder, tokenizer=str(other)).identity != model.identity


def test_identity_follows_the_seed_of_drawn_weights(byte_llama: Callable[..., Path]) -> None:
    def identity(seed: int) -> dict[str, Any]:
        return engine_model(byte_llama(), load_format="dummy", seed=seed).identity

    assert identity(0) == identity(0)
    assert identity(0) != identity(1)
    assert identity(0) != engine_model(byte_llama()).identity


def flip_byte(path: Path, place: int) -> None:
    """Change one byte of a file where it lies: path, size and inode stay."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def middle_of(folder: Path, name: str) -> tuple[Path, int]:
    """The file of a tensor, and where in it the tensor's middle is."""
    header = read_header(Checkpoint.open(folder).file(name))
    entry = header.tensors[name]
    assert entry.num_bytes > 3 * DIGEST_PAGE
    return header.path, entry.start + entry.num_bytes // 2


@pytest.mark.parametrize("is_remembered", [False, True])
def test_identity_follows_the_middle_of_a_tensor(
    is_remembered: bool,
    byte_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLMBENCH_CACHE", str(tmp_path / "cache"))
    if is_remembered:
        monkeypatch.setattr(model_digest, "REMEMBERED_BYTES", 0)
    folder = tmp_path / "model"
    shutil.copytree(byte_llama(), folder)
    before = engine_model(folder).identity
    path, place = middle_of(folder, "lm_head.weight")
    times = path.stat()
    flip_byte(path, place)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had been written
    after = engine_model(folder).identity
    assert after["model_digest"] != before["model_digest"]
    flip_byte(path, place)
    assert engine_model(folder).identity == before
    assert (tmp_path / "cache" / "eval" / "digests.json").exists() == is_remembered


def test_large_file_is_hashed_once_and_announced(
    byte_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBENCH_CACHE", str(tmp_path / "cache"))
    for name in ("REMEMBERED_BYTES", "TOLD_BYTES"):
        monkeypatch.setattr(model_digest, name, 0)
    heard: list[str] = []
    folders = [byte_llama(), byte_llama(1)]
    first = [weights_digest(folder, on_progress=heard.append) for folder in folders]
    assert len(heard) == 2
    assert all(line.startswith("hashing model.safetensors") for line in heard)
    assert [weights_digest(folder, on_progress=heard.append) for folder in folders] == first
    assert len(heard) == 2


def test_broken_memory_of_digests_is_made_anew(
    byte_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(model_digest, "REMEMBERED_BYTES", 0)
    memory = tmp_path / "eval" / "digests.json"
    memory.parent.mkdir()
    memory.write_text("{")
    found = weights_digest(byte_llama())
    assert list(json.loads(memory.read_bytes())) == [str(byte_llama() / "model.safetensors")]
    memory.unlink()
    assert weights_digest(byte_llama()) == found


def test_every_shard_enters_the_digest(byte_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    reference_model(byte_llama()).save_pretrained(folder, max_shard_size="20KB")
    files = Checkpoint.open(folder).files
    assert len(files) > 1
    digests = {weights_digest(folder)}
    for path in files:
        flip_byte(path, path.stat().st_size - 2)
        digests.add(weights_digest(folder))
    assert len(digests) == len(files) + 1


def test_code_that_runs_a_model_enters_its_digest(
    byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(byte_llama(), folder)
    before = weights_digest(folder, with_code=True)
    (folder / "modeling_own.py").write_text("SCALE = 2\n")
    assert weights_digest(folder, with_code=True) != before
    assert weights_digest(folder) == before


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
