"""Rotation: a rotated model of every family that can be rotated answers as before."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.quant.errors import ConfigError, QuantError
from llmbench.quant.rotation import Rotation
from llmbench.quant.rotation_roles import refusal

TINY = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
NO_TENSORS: dict[str, Tensor] = {}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": False, "attention_bias": True},
    "smollm3": {"tie_word_embeddings": True},
    "phi3": {"tie_word_embeddings": False},
    "gemma": {"head_dim": 20, "num_key_value_heads": 1, "tie_word_embeddings": True},
}


def tiny_model(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(TINY | changes))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model = model.double().eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide faults
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def rotated(model: Any, seed: int = 0) -> Any:
    """The same class of model with every tensor transformed on its own."""
    from transformers import AutoModelForCausalLM

    tensors: dict[str, Tensor] = dict(model.state_dict())
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    turn = Rotation(model.config, seed, tensors.__getitem__)
    config = copy.deepcopy(model.config)
    for key, value in turn.config_changes.items():
        setattr(config, key, value)
    result: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    result = result.double().eval()
    result.load_state_dict({name: turn.transform(name, tensors[name]) for name in tensors})
    return result


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_rotated_model_gives_the_same_logits(family: str) -> None:
    model = tiny_model(family, **MODELS[family])
    ids = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    before, after = model(ids).logits, rotated(model)(ids).logits
    # transformers' norms and softmax are in float32, whatever the model's type.
    torch.testing.assert_close(after, before, rtol=0, atol=3e-6 * float(before.abs().max()))


@torch.no_grad()
def test_a_width_without_hadamard_rotates_as_well() -> None:
    model = tiny_model("llama", hidden_size=92, head_dim=6)
    ids = torch.arange(3, 40)[None]
    turn = Rotation(model.config, 0, dict(model.state_dict()).__getitem__)
    assert turn.description.startswith("random orthogonal")
    before, after = model(ids).logits, rotated(model)(ids).logits
    torch.testing.assert_close(after, before, rtol=0, atol=3e-6 * float(before.abs().max()))


@torch.no_grad()
def test_norms_are_neutral_and_embeddings_untied_afterwards() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    after = rotated(model)
    assert not torch.equal(after.lm_head.weight, after.model.embed_tokens.weight)
    assert after.config.tie_word_embeddings is False
    for name, parameter in after.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name


@torch.no_grad()
def test_offset_norms_become_zero() -> None:
    after = rotated(tiny_model("gemma", **MODELS["gemma"]))
    assert after.model.norm.weight.abs().max() == 0
    assert after.model.layers[1].input_layernorm.weight.abs().max() == 0


@torch.no_grad()
def test_outlier_channels_of_the_stream_are_spread() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.weight[:, 5] *= 100
    weight = model.model.embed_tokens.weight[3:]
    turned = rotated(model).model.embed_tokens.weight[3:]

    def peak(rows: Tensor) -> float:
        return float((rows.abs().amax(dim=1) / rows.norm(dim=1)).mean())

    assert peak(weight) > 0.9
    assert peak(turned) < 0.35


def test_transform_keeps_type_and_shape() -> None:
    model = tiny_model("qwen2").bfloat16()
    tensors = dict(model.state_dict())
    turn = Rotation(model.config, 0, tensors.__getitem__)
    for name, tensor in tensors.items():
        out = turn.transform(name, tensor)
        assert (out.dtype, out.shape) == (tensor.dtype, tensor.shape), name


def test_seed_decides_the_rotation() -> None:
    model = tiny_model("llama")
    weights = [rotated(model, seed).model.embed_tokens.weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "norms behind its branches"),
        ("gemma3_text", "norms behind its branches"),
        ("olmo2", "norms behind its branches"),
        ("opt", "subtract a mean"),
        ("gpt2", "subtract a mean"),
        ("mamba", "not known"),
    ],
)
def test_families_that_do_not_commute_are_refused_by_name(family: str, reason: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    message = refusal(config)
    assert message is not None
    assert family in message
    assert reason in message
    with pytest.raises(ConfigError, match=family):
        Rotation(config, 0, NO_TENSORS.__getitem__)


def test_an_unknown_tensor_is_refused_and_not_passed_through() -> None:
    turn = Rotation(tiny_model("llama").config, 0, NO_TENSORS.__getitem__)
    with pytest.raises(QuantError, match=r"layers\.0\.mlp\.gate\.weight"):
        turn.transform("model.layers.0.mlp.gate.weight", torch.ones(2, 48))
