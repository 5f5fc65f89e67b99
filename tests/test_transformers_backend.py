"""Transformers' own modelling code over the paged cache gives transformers' logits, or refuses."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import CheckpointError, UnsupportedModelError
from llmbench.engine.models.hf_attention import ATTENTION
from llmbench.engine.models.loader import LoadedModel, load_model
from llmbench.engine.models.transformers_backend import load_transformers_model

PROMPT = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()
PIECES = [9, 1, 6, 1, 1, 6]
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# Layers of one key/value width and values of another (Multi-head Latent Attention, expanded).
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
GRANITE = {
    "logits_scaling": 4.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
}
GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", MOE),
    "qwen3_moe": ("qwen3_moe", MOE | {"head_dim": 16}),
    "cohere: scaled logits": ("cohere", {"logit_scale": 0.25}),
    "cohere2: windows, layers without positions": (
        "cohere2",
        {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
    ),
    "granite: scales everywhere": ("granite", GRANITE),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "gptj": ("gptj", GPT | {"rotary_dim": 8}),
    "phi": ("phi", {}),
    "olmo3": ("olmo3", {"sliding_window": 5}),
    "glm4": ("glm4", {"head_dim": 16}),
    "stablelm: drops keyword arguments": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "deepseek_v3: keys wider than values": ("deepseek_v3", MLA),
    "opt as 350m": (
        "opt",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
    ),
    "gpt2: scores scaled by layer": ("gpt2", GPT | {"scale_attn_by_inverse_layer_idx": True}),
}


def load(folder: Path, **settings: Any) -> LoadedModel:
    settings = {"dtype": "float32", "model_backend": "transformers"} | settings
    return load_model(EngineConfig(model=str(folder), **settings))


def draw(model_type: str, **settings: Any) -> Any:
    """A model of random weights, drawn from its config alone."""
    from transformers import AutoConfig

    return load_transformers_model(
        Path(),
        AutoConfig.for_model(model_type, **settings),
        None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
    )


def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def test_native_families_equal_transformers_here_too(
    variant: str,
    tiny_model: Callable[[str], tuple[Path, Any]],
    logits_in_pieces: Callable[..., torch.Tensor],
) -> None:
    folder, reference = tiny_model(variant)
    found = logits_in_pieces(load(folder).model, PROMPT, PIECES)
    torch.testing.assert_close(found, logits_of(reference, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_other_families_equal_transformers(
    name: str,
    tmp_path: Path,
    random_model: Callable[..., Any],
    logits_in_pieces: Callable[..., torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model_type, settings = OTHER_FAMILIES[name]
    reference = random_model(model_type, **settings)
    reference.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, model_backend="auto")
    assert "running transformers' own code, which is slower" in caplog.text
    assert loaded.model.kernel.startswith("transformers")
    expected = logits_of(reference, PROMPT)
    found = logits_in_pieces(loaded.model, PROMPT, PIECES)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({}, "ALiBi"),
    "mpt": ({}, "ALiBi"),
    "xglm": ({}, "attention interface"),
    "qwen3_next": ({}, "state"),
    "bamba": ({}, "state"),
    "minimax": ({}, "state"),
    "mamba": ({}, "state"),
    "t5": ({}, "encoder-decoder"),
    "whisper": ({}, "encoder-decoder"),
    "clip": ({}, "no causal language model"),
    "gpt_neo": ({}, "cannot replace"),
    "bert": (SMALL, "not causal"),
    "gpt_oss": (SMALL | MOE, "attention sinks"),
    "llama4_text": (SMALL | {"attention_chunk_size": 32}, "chunks of 32 tokens"),
    "lfm2": (SMALL | {"layer_types": ["conv", "full_attention"]}, "1 of 2 layers"),
    "diffllama": (SMALL, "state outside attention"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_family_that_cannot_be_driven_is_refused_by_name(model_type: str) -> None:
    settings, words = REFUSED[model_type]
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        draw(model_type, **settings)
    assert model_type in str(caught.value)


def test_native_names_the_way_out(tmp_path: Path, random_model: Callable[..., Any]) -> None:
    random_model("phi").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'phi'") as caught:
        load(tmp_path, model_backend="native")
    assert any("--model-backend transformers" in note for note in caught.value.__notes__)


def test_rotary_table_follows_the_model_length_and_not_the_batch(
    tiny_model: Callable[[str], tuple[Path, Any]],
    logits_in_pieces: Callable[..., torch.Tensor],
) -> None:
    folder, reference = tiny_model("phi3-longrope")
    short = PROMPT[:12]
    native = load(folder, model_backend="native").model
    found = logits_in_pieces(load(folder).model, short, [12])
    torch.testing.assert_close(found, logits_in_pieces(native, short, [12]), atol=1e-4, rtol=0)
    assert (found - logits_of(reference, short)).abs().max() > 0.01
    limited = logits_in_pieces(load(folder, max_model_len=16).model, short, [12])
    torch.testing.assert_close(limited, logits_of(reference, short), atol=1e-4, rtol=0)


def test_missing_tensor_is_named(tmp_path: Path, random_model: Callable[..., Any]) -> None:
    from safetensors.torch import load_file, save_file

    random_model("phi").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.fc1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing.*layers\.1\.mlp\.fc1\.weight"):
        load(tmp_path)


def test_tensor_of_a_wrong_shape_is_named(tmp_path: Path, random_model: Callable[..., Any]) -> None:
    from safetensors.torch import load_file, save_file

    random_model("phi").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.fc1.weight"] = torch.ones(5, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mismatched.*layers\.1\.mlp\.fc1\.weight"):
        load(tmp_path)


def test_drawn_weights_follow_the_seed(
    tmp_path: Path,
    random_model: Callable[..., Any],
    logits_in_pieces: Callable[..., torch.Tensor],
) -> None:
    random_model("phi").config.save_pretrained(tmp_path)
    first, again, other = (
        logits_in_pieces(load(tmp_path, load_format="dummy", seed=seed).model, PROMPT, [24])
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_cache_is_sized_by_the_layers_own_heads(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    loaded = load(tiny_model("qwen3")[0])
    assert [cache.shape for cache in loaded.model.make_kv_cache(8)] == [(8, 4, 32)] * 2
    assert loaded.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4
    # Tied weights count once, and the head shares the decoder's.
    tied = load(tiny_model("qwen3-tied-bias")[0])
    elements = sum(p.numel() for p in tiny_model("qwen3-tied-bias")[1].parameters())
    assert tied.weight_bytes == 4 * elements


def test_transformers_builds_no_mask_for_our_attention() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    draw("llama", **SMALL)
    assert ATTENTION in ALL_ATTENTION_FUNCTIONS
    assert ATTENTION not in ALL_MASK_ATTENTION_FUNCTIONS
