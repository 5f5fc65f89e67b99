"""Scales move between a block's modules without changing what it computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmbench.engine.models.families import FAMILIES
from llmbench.quant.adapters import ADAPTERS, ScalingPair, adapter_for, refusal
from llmbench.quant.errors import QuantError
from llmbench.quant.folding import fold, gather, num_channels, spread

TOKENS = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))


class ModuleBlock:
    """A transformers decoder layer as folding sees it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.name = "block"

    def get(self, relative_name: str) -> nn.Module:
        return self.module.get_submodule(relative_name)

    def weight(self, name: str) -> Tensor:
        weight = self._weight(name)
        return weight.float()

    def set_weight(self, name: str, weight: Tensor) -> None:
        self._weight(name).copy_(weight)

    def _weight(self, name: str) -> Tensor:
        linear = self.get(name.removeprefix("block."))
        assert isinstance(linear.weight, Tensor)
        return linear.weight if isinstance(linear, nn.Linear) else linear.weight.t()


def blocks_of(model: Any) -> list[ModuleBlock]:
    base = model.base_model
    decoder = getattr(base, "decoder", base)
    layers = decoder.h if hasattr(decoder, "h") else decoder.layers
    return [ModuleBlock(layer) for layer in layers]


def hidden_states(model: Any) -> list[Tensor]:
    """The input of each block, and what the last norm makes of the last one's output."""
    states: tuple[Tensor, ...] = model(TOKENS, output_hidden_states=True).hidden_states
    return list(states)


def random_scales(size: int, seed: int) -> Tensor:
    """Between 1/8 and 8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.rand(size, generator=generator) * 6 - 3)


def fold_everything(model: Any) -> int:
    adapter = adapter_for(model.config)
    assert adapter is not None
    count = 0
    for block in blocks_of(model):
        for pair in adapter.pairs(model.config):
            fold(block, pair, random_scales(num_channels(block, pair), count))
            count += 1
    return count


def test_folding_leaves_every_block_as_it_was(
    variant: str, tiny_variants: dict[str, tuple[str, Any]], random_model: Callable[..., Any]
) -> None:
    model_type, settings = tiny_variants[variant]
    model = random_model(model_type, **settings)
    before = hidden_states(model)
    assert fold_everything(model) >= 4
    for old, new in zip(before, hidden_states(model), strict=True):
        torch.testing.assert_close(new, old, atol=1e-5 * float(old.abs().max()), rtol=0)


def test_relu_lets_a_scale_through_an_mlp_without_a_gate(random_model: Callable[..., Any]) -> None:
    settings = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 128}
    model = random_model("gpt2", activation_function="relu", **settings)
    before = hidden_states(model)
    assert fold_everything(model) == 8
    for old, new in zip(before, hidden_states(model), strict=True):
        torch.testing.assert_close(new, old, atol=1e-5 * float(old.abs().max()), rtol=0)


def test_norms_behind_the_branches_are_left_alone(random_model: Callable[..., Any]) -> None:
    settings = {"vocab_size": 128, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2}
    model = random_model(
        "opt", num_attention_heads=4, max_position_embeddings=128, do_layer_norm_before=False,
        **settings,
    )  # fmt: skip
    before = hidden_states(model)
    assert fold_everything(model) == 4
    for old, new in zip(before, hidden_states(model), strict=True):
        torch.testing.assert_close(new, old, atol=1e-5 * float(old.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["norm", "offset_norm"])
def test_a_norm_in_16_bits_and_its_linears_agree_on_the_scale(
    kind: Any, dtype: torch.dtype
) -> None:
    # Gains down to 0.02 after folding: a Gemma weight of -0.98 has two digits in bfloat16.
    offset = 1.0 if kind == "offset_norm" else 0.0
    norm = nn.LayerNorm(32).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.linspace(0.2, 4, 32) - offset)
    norm.bias.copy_(torch.linspace(-1, 1, 32))
    linear = nn.Linear(32, 8, bias=False).requires_grad_(False)
    module = nn.ModuleDict({"norm": norm, "linear": linear})
    gain, bias = norm.weight.float() + offset, norm.bias.float()
    expected = linear.weight * gain, linear.weight * bias
    applied = fold(
        ModuleBlock(module), ScalingPair("norm", ("linear",), kind), torch.full((32,), 10.0)
    )
    torch.testing.assert_close(linear.weight * (norm.weight.float() + offset), expected[0])
    # A bias is rounded by itself: half a unit in the last place of its type.
    found = linear.weight * norm.bias.float()
    torch.testing.assert_close(found, expected[1], rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(applied, torch.full((32,), 10.0), rtol=0.2, atol=0)


def test_dead_channels_of_a_norm_stay_finite() -> None:
    norm = nn.LayerNorm(4).requires_grad_(False)
    norm.weight.copy_(torch.tensor([0.0, 1.0, -1.0, 1e-38]))
    linear = nn.Linear(4, 3).requires_grad_(False)
    module = nn.ModuleDict({"norm": norm, "linear": linear})
    expected = linear.weight * norm.weight
    fold(ModuleBlock(module), ScalingPair("norm", ("linear",), "norm"), torch.full((4,), 1e9))
    torch.testing.assert_close(linear.weight * norm.weight, expected)
    assert torch.isfinite(linear.weight).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_undone_are_refused(bad: float) -> None:
    module = nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 3)})
    scales = torch.tensor([1.0, 1.0, bad, 1.0])
    with pytest.raises(QuantError, match=r"scales of block\.norm"):
        fold(ModuleBlock(module), ScalingPair("norm", ("linear",), "norm"), scales)


def test_scales_of_another_width_are_refused() -> None:
    module = nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 3)})
    with pytest.raises(QuantError, match=r"\[5\] scales, expected \[4\]"):
        fold(ModuleBlock(module), ScalingPair("norm", ("linear",), "norm"), torch.ones(5))


def test_heads_that_read_one_value_head_share_its_scales() -> None:
    pair = ScalingPair("v", ("o",), "linear", repeats=3, head_dim=2)
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0])
    wide = spread(pair, scales)
    assert wide.tolist() == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]
    assert gather(pair, wide).tolist() == [[1, 2, 3, 4]] * 3


def test_every_family_of_the_engine_has_an_adapter() -> None:
    # A Gemma 3 that also sees images is quantized through its text config.
    assert set(ADAPTERS) == set(FAMILIES) - {"gemma3"}


def test_every_linear_is_scaled_or_has_a_reason(
    variant: str, tiny_variants: dict[str, tuple[str, Any]], random_model: Callable[..., Any]
) -> None:
    model_type, settings = tiny_variants[variant]
    model = random_model(model_type, **settings)
    adapter = adapter_for(model.config)
    assert adapter is not None
    named = [name for pair in adapter.pairs(model.config) for name in pair.next]
    named += [name for part in adapter.unscaled(model.config) for name in part.linears]
    weights = [
        name.removesuffix(".weight")
        for name, parameter in blocks_of(model)[0].module.named_parameters()
        if parameter.dim() == 2
    ]
    assert sorted(named) == sorted(weights)


def test_other_families_are_refused_by_name() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("mamba")
    assert adapter_for(config) is None
    message = refusal(config, "awq")
    assert message is not None
    assert message.startswith("awq")
    assert "'mamba'" in message
    assert refusal(AutoConfig.for_model("llama"), "awq") is None


def test_cross_attention_is_refused() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gpt2", add_cross_attention=True)
    assert adapter_for(config) is None
    assert "add_cross_attention" in (refusal(config, "qqq") or "")
