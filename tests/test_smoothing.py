"""Smoothing: outliers move into the weights only as far as it lowers the error of the output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.quant.adapters import ScalingPair
from llmbench.quant.block_calibration import CalibrationPasses, batches_of_equal_length
from llmbench.quant.block_model import BlockModel, CheckpointSource
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Scheme
from llmbench.quant.linear import quantized_linear
from llmbench.quant.rtn import rtn_quantize
from llmbench.quant.smoothing import Smoothing, round_weight, search_scales, smooth_block

PAIR = ScalingPair("input_layernorm", ("mlp.gate_proj",), "norm")
W4A8 = Scheme(bits=4, group_size=16, activations="int8")
PER_CHANNEL = Scheme(bits=4, group_size=-1, activations="int8")
SAMPLES = [torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(2)).tolist()] * 3


def inputs(outlier: float, rows: int = 64, channels: int = 32) -> Tensor:
    x = torch.randn(rows, channels, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= outlier
    return x


def weight(rows: int = 24, channels: int = 32) -> Tensor:
    return torch.randn(rows, channels, generator=torch.Generator().manual_seed(1))


def search(x: Tensor, w: Tensor, scheme: Scheme, pair: ScalingPair = PAIR) -> Smoothing:
    return search_scales(pair, [(w, scheme)], x, x.abs().amax(dim=0))


@pytest.mark.parametrize("scheme", [W4A8, PER_CHANNEL])
def test_an_outlier_channel_is_brought_down(scheme: Scheme) -> None:
    w = weight()
    w[:, 5] /= 200  # what a trained model does with a channel that is always large
    found = search(inputs(200.0), w, scheme)
    assert found.error < found.error_before / 4
    assert found.scales.argmax() == 5
    assert found.scales.min() == 1


@pytest.mark.parametrize("outlier", [1.0, 10.0, 1000.0])
def test_smoothing_is_never_worse_than_none_on_its_sample(outlier: float) -> None:
    found = search(inputs(outlier), weight(), W4A8)
    assert found.error <= found.error_before
    assert found.threshold <= 1


def test_the_error_is_that_of_the_layer_as_it_will_run() -> None:
    x, w = inputs(1.0), weight()
    found = search(x, w, PER_CHANNEL)
    columns = found.scales
    rounded = rtn_quantize(
        w * columns,
        PER_CHANNEL,
        scale_dtype=torch.float32,
        scale_search=False,
        code_range="restricted",
    )
    wanted = x @ w.t()
    error = (quantized_linear(x / columns, rounded) - wanted).square().sum()
    assert found.error == pytest.approx(float(error / wanted.square().sum()), rel=1e-4)


def test_a_level_input_keeps_its_scales() -> None:
    x = torch.randint(0, 2, (64, 32), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    found = search(x, weight(), W4A8)
    assert found.threshold == 1
    assert torch.equal(found.scales, torch.ones(32))


def test_inputs_that_are_all_zero_keep_their_scales() -> None:
    found = search(torch.zeros(8, 32), weight(), W4A8)
    assert torch.equal(found.scales, torch.ones(32))
    assert found.error == 0


def test_heads_that_share_a_value_head_share_its_scales() -> None:
    pair = ScalingPair("self_attn.v_proj", ("self_attn.o_proj",), "linear", repeats=2, head_dim=8)
    found = search(inputs(500.0), weight(), W4A8, pair)
    assert found.scales.shape == (16,)
    assert found.scales.argmax() == 5


def test_weights_are_rounded_to_the_schemes_levels() -> None:
    w = weight()
    assert torch.equal(
        round_weight(w, W4A8),
        rtn_quantize(w, W4A8, scale_dtype=torch.float32, scale_search=False).dequantize(),
    )
    levels = (round_weight(w, PER_CHANNEL) / (w.abs().amax(dim=1, keepdim=True) / 7)).round()
    assert (int(levels.min()), int(levels.max())) == (-7, 7)


@torch.no_grad()
def smoothed_states(folder: Path, notes: list[dict[str, str]]) -> list[Tensor]:
    """Final hidden states of a model whose blocks are all smoothed and not quantized."""
    from transformers import AutoConfig

    checkpoint = Checkpoint.open(folder)
    model = BlockModel(
        checkpoint,
        AutoConfig.from_pretrained(folder),
        CheckpointSource(checkpoint),
        dtype=torch.float32,
    )
    passes = CalibrationPasses(model, SAMPLES)
    passes.start()
    for index in range(model.num_blocks):
        block = model.load_block(index)
        with passes.at(block) as calibration:
            notes.append(smooth_block(block, calibration, dict.fromkeys(block.linears, W4A8)))
            passes.advance()
    return passes.hidden_states()


@torch.no_grad()
def test_smoothed_model_computes_what_it_computed(
    variant: str, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = tiny_model(variant)
    notes: list[dict[str, str]] = []
    found = smoothed_states(folder, notes)
    assert all("smoothed" in note for block in notes for note in block.values())
    for hidden, batch in zip(found, batches_of_equal_length(SAMPLES), strict=True):
        expected = model.get_decoder()(torch.tensor(batch), use_cache=False).last_hidden_state
        atol = 2e-5 * float(expected.abs().max())
        torch.testing.assert_close(hidden, expected, rtol=0, atol=atol)


def test_every_linear_of_a_block_has_a_note(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    notes: list[dict[str, str]] = []
    smoothed_states(tiny_model("gemma3")[0], notes)
    assert len(notes[0]) == 7
    reason = notes[0]["model.layers.0.self_attn.q_proj"]
    assert reason.startswith("not smoothed: ")
