"""Each family's tiny random model gives transformers' logits through the native decoder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import UnsupportedModelError
from llmbench.engine.models.families import FAMILIES, architecture_of
from llmbench.engine.models.loader import LoadedModel, load_model
from llmbench.engine.models.rope_tables import inverse_frequencies

TOLERANCE = 1e-4
PROMPT = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()


def native(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(
        EngineConfig(model=str(folder), model_backend="native", dtype="float32", **settings)
    )


def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def config_of(model_type: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **settings)


@pytest.mark.parametrize("pieces", [[24], [9, 1, 6, 1, 1, 6]], ids=["whole", "pieces"])
def test_logits_equal_transformers(
    variant: str,
    pieces: list[int],
    tiny_model: Callable[[str], tuple[Path, Any]],
    logits_in_pieces: Callable[..., torch.Tensor],
) -> None:
    folder, reference = tiny_model(variant)
    expected = logits_of(reference, PROMPT)
    found = logits_in_pieces(native(folder).model, PROMPT, pieces)
    assert expected.abs().max() > 0.5, "the model is too flat to tell a difference"
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_every_family_has_a_tiny_model(tiny_variants: dict[str, tuple[str, Any]]) -> None:
    # Of a multimodal Gemma 3 the text part is run, which has a test of its own.
    assert {model_type for model_type, _ in tiny_variants.values()} | {"gemma3"} == set(FAMILIES)


def test_parameters_are_counted_as_transformers_does(
    variant: str, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    reference = tiny_model(variant)[1]
    expected = sum(parameter.numel() for parameter in reference.parameters())
    assert architecture_of(reference.config).num_parameters == expected


def test_head_dim_is_independent_of_hidden_size_over_heads(
    tmp_path: Path,
    random_model: Callable[..., Any],
    logits_in_pieces: Callable[..., torch.Tensor],
) -> None:
    reference = random_model("qwen3", head_dim=32)
    reference.save_pretrained(tmp_path)
    loaded = native(tmp_path)
    found = logits_in_pieces(loaded.model, PROMPT, [24])
    torch.testing.assert_close(found, logits_of(reference, PROMPT), atol=TOLERANCE, rtol=0)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16")
    assert load_model(config).kv_bytes_per_token == 2 * 2 * 2 * 32 * 2
    held = sum(cache.nbytes for cache in loaded.model.make_kv_cache(16))
    assert held == 16 * loaded.kv_bytes_per_token


def test_reported_config_with_its_own_head_dim_loads(cases_dir: Path, tmp_path: Path) -> None:
    text = (cases_dir / "C12_config_qwen3_headdim.json").read_text()
    (tmp_path / "config.json").write_text(text)
    loaded = load_model(EngineConfig(model=str(tmp_path), load_format="dummy"))
    assert loaded.dtype == torch.bfloat16
    assert loaded.kv_bytes_per_token == 512


def test_longrope_takes_the_short_table_up_to_the_original_length(
    tiny_model: Callable[[str], tuple[Path, Any]],
    logits_in_pieces: Callable[..., torch.Tensor],
) -> None:
    folder, reference = tiny_model("phi3-longrope")
    loaded = native(folder, max_model_len=16)
    found = logits_in_pieces(loaded.model, PROMPT[:12], [12])
    expected = logits_of(reference, PROMPT[:12])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    long = logits_in_pieces(native(folder).model, PROMPT[:12], [12])
    assert (long - expected).abs().max() > 0.01


def test_dynamic_scaling_is_that_of_the_model_length() -> None:
    settings = {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    }
    config = config_of("llama", hidden_size=64, num_attention_heads=4, **settings)
    arch = architecture_of(config)
    (short, _), (long, _) = (
        inverse_frequencies(config, arch, length)["default"] for length in (64, 128)
    )
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(short, plain)
    # Peng et al. 2023, "NTK-aware": base * (factor * length / original - (factor - 1))^(d/(d-2))
    base = 10_000.0 * (2.0 * 128 / 64 - 1.0) ** (16 / 14)
    torch.testing.assert_close(long, 1.0 / base ** (torch.arange(0, 16, 2) / 16))


REFUSED = [
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim=32"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt2", {"activation_function": "quick_gelu"}, "activation_function='quick_gelu'"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act='relu2'"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "rope_parameters=",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}},
        "rope_parameters=",
    ),
    ("qwen3", {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "layer_types="),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (
        "smollm3",
        {"num_hidden_layers": 2, "no_rope_layers": [1], "layer_types": ["full_attention"] * 2},
        "no_rope_layers=[1]",
    ),
]


@pytest.mark.parametrize(("model_type", "settings", "words"), REFUSED, ids=lambda value: str(value))
def test_setting_that_the_decoder_cannot_run_is_refused_by_name(
    model_type: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        architecture_of(config_of(model_type, **settings))
    assert words in str(caught.value)
    assert model_type in str(caught.value)


def test_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="'gptj'") as caught:
        architecture_of(config_of("gptj"))
    assert "llama" in caught.value.__notes__[0]


def test_language_model_of_a_multimodal_gemma3_is_run(
    tmp_path: Path, random_model: Callable[..., Any], logits_in_pieces: Callable[..., torch.Tensor]
) -> None:
    from safetensors.torch import load_file, save_file

    text = random_model("gemma3_text", head_dim=16, sliding_window=5)
    text.save_pretrained(tmp_path)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text.config.to_dict(),
        "vision_config": vision | {"num_attention_heads": 2, "model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(16)
    renamed["multi_modal_projector.mm_input_projection_weight"] = torch.ones(16, 64)
    save_file(renamed, tmp_path / "model.safetensors")
    found = logits_in_pieces(native(tmp_path).model, PROMPT, [24])
    torch.testing.assert_close(found, logits_of(text, PROMPT), atol=TOLERANCE, rtol=0)
