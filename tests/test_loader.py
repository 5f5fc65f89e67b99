"""A model loads as its files say, or the first thing that is wrong with them is named."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbench.engine import device as device_module
from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import (
    CheckpointError,
    ConfigError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from llmbench.engine.models.loader import LoadedModel, load_model
from llmbench.quant.checkpoint import Checkpoint

PROMPT = torch.randint(3, 128, (12,), generator=torch.Generator().manual_seed(1)).tolist()


def load(model: Path | str, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(model), **({"dtype": "float32"} | settings)))


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.fixture
def folder(tmp_path: Path, random_model: Callable[..., Any]) -> Path:
    """A tiny Llama in single-file form, in float32."""
    random_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def edit_tensors(folder: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], None]:
    def edit(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


# What is loaded


def test_shards_load_as_one_file(
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    random_model: Callable[..., Any],
    logits_in_pieces: Callable[..., torch.Tensor],
) -> None:
    shards = tmp_path_factory.mktemp("shards")
    random_model("llama").save_pretrained(shards, max_shard_size="100KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 1
    one, many = (logits_in_pieces(load(path).model, PROMPT, [12]) for path in (folder, shards))
    assert torch.equal(one, many)


def test_base_model_saved_without_its_head_loads_where_embeddings_are_tied(
    tmp_path: Path,
    random_model: Callable[..., Any],
    logits_in_pieces: Callable[..., torch.Tensor],
) -> None:
    whole = random_model("llama", tie_word_embeddings=True)
    whole.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in Checkpoint.open(tmp_path)
    with torch.inference_mode():
        expected = whole(torch.tensor([PROMPT])).logits[0]
    found = logits_in_pieces(load(tmp_path).model, PROMPT, [12])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_head_that_differs_from_tied_embeddings_is_used_with_a_warning(
    folder: Path,
    edit_tensors: Callable[..., None],
    random_model: Callable[..., Any],
    logits_in_pieces: Callable[..., torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        found = logits_in_pieces(load(folder).model, PROMPT, [12])
    assert "a head of its own" in caplog.text
    with torch.inference_mode():
        expected = random_model("llama")(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_tensors_that_follow_from_the_config_are_left_out(
    folder: Path, edit_tensors: Callable[..., None]
) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit_tensors(lambda tensors: tensors.update(extra))
    assert load(folder).architecture is not None


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_dtype_is_the_asked_one_or_the_checkpoints(
    tmp_path: Path, random_model: Callable[..., Any], stored: str, asked: str, expected: torch.dtype
) -> None:
    random_model("llama").to(getattr(torch, stored)).save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=asked)
    assert loaded.dtype == expected
    assert loaded.model.make_kv_cache(4)[0].dtype == expected


def test_dtype_left_out_of_the_config_is_that_of_the_tensors(
    tmp_path: Path, random_model: Callable[..., Any]
) -> None:
    random_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", dtype=None, torch_dtype=None)
    assert load(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_float16_checkpoint_says_that_it_runs_in_bfloat16(
    tmp_path: Path, random_model: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    random_model("llama").half().save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        load(tmp_path, dtype="auto")
    assert "running in bfloat16" in caplog.text


def test_weight_and_cache_sizes_are_those_of_the_architecture(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert loaded.weight_bytes >= loaded.architecture.num_parameters * 4 * 0.99  # type: ignore[union-attr]
    assert (loaded.vocab_size, loaded.hidden_size, loaded.intermediate_size) == (128, 64, 96)


# What ends an answer, and how long it may be


def test_end_of_text_is_the_union_of_all_sources(
    folder: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    byte_tokenizer().save_pretrained(folder)  # its </s> is 1
    edit_json(folder / "config.json", eos_token_id=[2, 5])
    edit_json(folder / "generation_config.json", eos_token_id=7)
    assert load(folder).eos_token_ids == {1, 2, 5, 7}


def test_end_of_text_outside_the_vocabulary_is_left_out(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=32_000)
    edit_json(folder / "generation_config.json", eos_token_id=[2, None, -1])
    assert load(folder).eos_token_ids == {2}


@pytest.mark.parametrize(("asked", "expected"), [(None, 128), (50, 50), (128, 128)])
def test_model_length_is_the_configs_or_a_shorter_one(
    folder: Path, asked: int | None, expected: int
) -> None:
    assert load(folder, max_model_len=asked).max_model_len == expected


def test_model_length_beyond_the_models_own_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 129.* 128 tokens"):
        load(folder, max_model_len=129)


def test_rotary_scaling_lengthens_what_may_be_asked_for(folder: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    edit_json(
        folder / "config.json",
        rope_parameters=rope | {"original_max_position_embeddings": 128},
    )
    assert load(folder).max_model_len == 128
    assert load(folder, max_model_len=512).max_model_len == 512
    with pytest.raises(ConfigError, match="513"):
        load(folder, max_model_len=513)


# Tokenizer


def test_model_without_a_tokenizer_loads_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(folder).tokenizer is None
    assert "no tokenizer" in caplog.text


def test_tokenizer_may_come_from_another_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[..., Any]
) -> None:
    other = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(other)
    tokenizer = load(folder, tokenizer=str(other)).tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("aé")) == "aé"


@pytest.mark.parametrize("text", ["{", '{"version": "1.0"}', ""])
def test_broken_tokenizer_is_refused(
    folder: Path, byte_tokenizer: Callable[..., Any], text: str
) -> None:
    byte_tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer"):
        load(folder)


def test_asked_for_tokenizer_must_be_there(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load(folder, tokenizer=str(empty))


# What is refused, before a tensor is read


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: Checkpoint, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "get", get)


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "absent": (
        lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
        r"lacks model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "two absent": (
        lambda tensors: [
            tensors.pop(f"model.layers.{i}.self_attn.k_proj.weight") for i in range(2)
        ],
        r"k_proj\.weight and 1 more",
    ),
    "head absent": (lambda tensors: tensors.pop("lm_head.weight"), r"lacks lm_head\.weight"),
    "unexpected": (
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}),
        r"holds model\.layers\.2\.mlp\.up_proj\.weight.*no place",
    ),
    "unexpected bias": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        r"q_proj\.bias",
    ),
    "wrong rows": (
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)}
        ),
        r"k_proj\.weight should have shape \[32, 64\].*\[64, 64\]",
    ),
    "wrong columns": (
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 32)}),
        r"up_proj\.weight should have shape \[96, 64\].*\[96, 32\]",
    ),
    "wrong vocabulary": (
        lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(120, 64)}),
        r"embed_tokens\.weight should have shape \[128, 64\]",
    ),
}


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensor_that_does_not_fit_the_config_is_named(
    folder: Path, edit_tensors: Callable[..., None], fault: str
) -> None:
    change, words = TENSOR_FAULTS[fault]
    edit_tensors(change)
    with pytest.raises(CheckpointError, match=words):
        load(folder, model_backend="native")


@pytest.mark.usefixtures("no_reading")
def test_broken_file_is_the_engines_error_with_its_hint(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut short") as caught:
        load(folder)
    assert caught.value.__notes__


@pytest.mark.parametrize("model_backend", ["native", "transformers"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.usefixtures("no_reading")
def test_weights_larger_than_memory_are_refused_with_the_sum(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model_backend: str, load_format: str
) -> None:
    monkeypatch.setattr(device_module, "free_memory_bytes", lambda device: 100_000)
    with pytest.raises(OutOfMemoryError, match="78,144 parameters x 4 bytes") as caught:
        load(folder, model_backend=model_backend, load_format=load_format)
    assert "--dtype bfloat16" in caught.value.__notes__[0]


def test_float16_on_cpu_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="float16 is not for CPUs"):
        load(folder, dtype="float16", device="cpu")


CONFIG_FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no type": ({"model_type": None}, CheckpointError, "no model_type"),
    "unknown type": ({"model_type": "nope"}, UnsupportedModelError, "'nope'"),
    "wrong kind of value": ({"hidden_size": "64"}, CheckpointError, "no valid llama config"),
    "heads do not divide": ({"num_attention_heads": 7}, CheckpointError, "no valid llama config"),
    "quantized": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        CheckpointError,
        "none of its tensors is a layer of that format",
    ),
    "quantized in an unknown way": (
        {"quantization_config": {"quant_method": "nope"}},
        CheckpointError,
        "'nope' are not read",
    ),
    "own code": (
        {"model_type": "nope", "auto_map": {"AutoConfig": "x.Y"}},
        UnsupportedModelError,
        "'nope'",
    ),
}


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_broken_config_is_refused(folder: Path, fault: str) -> None:
    changes, error, words = CONFIG_FAULTS[fault]
    edit_json(folder / "config.json", **changes)
    with pytest.raises(error, match=words) as caught:
        load(folder)
    assert fault != "own code" or "--trust-remote-code" in caught.value.__notes__[0]


def test_broken_generation_config_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="generation_config"):
        load(folder)


# Random weights


def test_dummy_weights_need_only_a_config(
    folder: Path, logits_in_pieces: Callable[..., torch.Tensor]
) -> None:
    (folder / "model.safetensors").unlink()
    loaded = load(folder, load_format="dummy")
    assert loaded.checkpoint is None
    logits = logits_in_pieces(loaded.model, PROMPT, [12])
    assert torch.isfinite(logits).all()
    assert 0.1 < float(logits.std()) < 10.0


def test_dummy_weights_follow_the_seed_alone(
    folder: Path, logits_in_pieces: Callable[..., torch.Tensor]
) -> None:
    first, again, other = (
        logits_in_pieces(load(folder, load_format="dummy", seed=seed).model, PROMPT, [12])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rows_of_dummy_embeddings_all_differ(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=20_000)
    loaded = load(folder, load_format="dummy")
    rows = loaded.model.embed_tokens  # type: ignore[attr-defined]
    assert len(torch.unique(rows, dim=0)) == 20_000
