"""LLM.int8's weights are the row's integers that bitsandbytes stores, whatever the row holds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmbench.quant.block import Block
from llmbench.quant.config import QuantConfig, Scheme
from llmbench.quant.formats.bnb import Bitsandbytes
from llmbench.quant.layer_report import LayerResult
from llmbench.quant.linear import quantize_activations, quantized_linear
from llmbench.quant.linear_layers import LinearLayer
from llmbench.quant.llm_int8 import LLMInt8

SCHEME = Scheme(bits=8, group_size=-1, activations="int8")


def quantize(weight: Tensor) -> tuple[LayerResult, Block]:
    n, c = weight.shape
    linear = nn.Linear(c, n, bias=False).to(weight.dtype).requires_grad_(False)
    linear.weight.copy_(weight)
    layer = LinearLayer(name="b.0.linear", out_features=n, in_features=c, block="b.0")
    block = Block("b.0", 0, nn.ModuleDict({"linear": linear}), [layer], None)
    method = LLMInt8(QuantConfig(method="int8", scheme=SCHEME))
    return method.quantize_block(block, None, {"b.0.linear": SCHEME})["b.0.linear"], block


def test_rows_are_rounded_by_their_largest_value() -> None:
    result, block = quantize(torch.tensor([[127.0, -3.4, 0.6], [-0.5, 0.25, 0.125]]))
    assert result.weight.centered().tolist() == [[127, -3, 1], [-127, 64, 32]]
    assert result.weight.scales.tolist() == [[1.0], [pytest.approx(0.5 / 127)]]
    assert result.weight.outlier_threshold == 6.0
    torch.testing.assert_close(block.weight("b.0.linear"), result.weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_fits_the_file(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[7] = 0
    tensors = Bitsandbytes().tensors("linear", quantize(weight)[0].weight)
    assert tensors["linear.weight"].abs().max() == 127
    expected = weight.float().abs().amax(dim=1)
    torch.testing.assert_close(tensors["linear.SCB"][:7], expected[:7], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_and_tokens_of_zeros_give_zeros(cases_dir: Path, dtype: torch.dtype) -> None:
    case = json.loads((cases_dir / "C03_zero_groups.json").read_text())
    weight = torch.tensor(case["weights"], dtype=torch.float32)
    result, _ = quantize(weight.to(dtype))
    assert torch.isfinite(result.weight.scales).all()
    assert (result.weight.scales > 0).all()
    assert result.weight.dequantize()[weight == 0].eq(0).all()
    x = torch.tensor(case["activations_for_w8a8"], dtype=torch.float32)
    out = quantized_linear(x, result.weight)
    assert out[0].tolist() == case["expect"]["w8a8_row0_output"]
    assert torch.isfinite(out).all()
    scale = float(quantize_activations(x)[1][1])
    assert scale == pytest.approx(case["expect"]["w8a8_row1_act_scale"])


def test_outlier_channels_keep_their_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, 32, generator=generator) for size in (16, 8))
    x[:, 5] *= 1000
    found = quantize(weight)[0].weight
    expected = x @ found.dequantize().t()
    error = (quantized_linear(x, found) - expected).abs().max()
    without = quantized_linear(x, replace(found, outlier_threshold=None))
    assert error < 0.01 * (without - expected).abs().max()


def test_conv1d_rows_are_output_channels(random_model: Callable[..., Any]) -> None:
    model = random_model("gpt2", n_embd=64, n_layer=1, n_head=4, n_positions=16, vocab_size=128)
    name = "h.0.mlp.c_fc"
    layer = LinearLayer(
        name=name, out_features=256, in_features=64, block="h.0", is_transposed=True
    )
    block = Block("h.0", 0, model.transformer.h[0], [layer], model.config)
    before = block.weight(name).clone()
    result = LLMInt8(QuantConfig(method="int8", scheme=SCHEME)).quantize_block(
        block, None, {name: SCHEME}
    )[name]
    assert result.weight.codes.shape == (256, 64)
    assert result.report.relative_mse < 1e-4
    torch.testing.assert_close(result.weight.scales[:, 0], before.abs().amax(dim=1) / 127)
