"""SmoothQuant shares outliers between inputs and weights without changing what a block computes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration, CalibrationPasses
from llmbench.quant.block_model import BlockModel, CheckpointSource
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import QuantConfig, Scheme
from llmbench.quant.errors import CalibrationError, ConfigError
from llmbench.quant.linear import quantized_linear
from llmbench.quant.rtn import rtn_quantize
from llmbench.quant.smoothquant import SmoothQuant, smoothing_scales

W8A8 = Scheme(bits=8, group_size=-1, activations="int8")
SAMPLES = [
    torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (40, 6, 23, 1)
]


@contextmanager
def first_block(
    folder: Path, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Block, BlockCalibration, CalibrationPasses]]:
    from transformers import AutoConfig

    checkpoint = Checkpoint.open(folder)
    config = AutoConfig.from_pretrained(folder)
    model = BlockModel(checkpoint, config, CheckpointSource(checkpoint), dtype=dtype)
    passes = CalibrationPasses(model, SAMPLES)
    passes.start()
    block = model.load_block(0)
    try:
        with passes.at(block) as calibration:
            yield block, calibration, passes
    finally:
        passes.close()


def run(block: Block, calibration: BlockCalibration | None, alpha: float = 0.5) -> Any:
    config = QuantConfig(method="smoothquant", scheme=W8A8, smooth_alpha=alpha)
    method = SmoothQuant(config, torch.float32, block.config)
    return method.quantize_block(block, calibration, dict.fromkeys(block.linears, W8A8))


def test_scales_are_equation_4() -> None:
    weights = [torch.tensor([[1.0, -4.0, 0.0]]), torch.tensor([[0.5, 1.0, 0.0]])]
    scales = smoothing_scales(torch.tensor([16.0, 1.0, 3.0]), weights, 0.5)
    assert scales.tolist() == [4.0, 0.5, 1.0]
    scales = smoothing_scales(torch.tensor([16.0, 0.0, 3.0]), weights, 1.0)
    assert scales.tolist() == [16.0, 1.0, 1.0]


def test_the_block_computes_what_it_did_but_for_the_rounding(
    variant: str, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = tiny_model(variant)
    with first_block(folder) as (_, _, passes):
        passes.advance()
        expected = passes.hidden_states()
    with first_block(folder) as (block, calibration, passes):
        results = run(block, calibration)
        assert set(results) == set(block.linears)
        assert {one.report.num_tokens for one in results.values()} == {70}
        passes.advance()
        for found, wanted in zip(passes.hidden_states(), expected, strict=True):
            # Unscaled attention scores are large, and a softmax of them feels every rounding.
            share = 0.1 if "unscaled" in variant else 0.05
            assert (found - wanted).norm() < share * wanted.norm()


def test_an_outlier_channel_costs_less_when_it_is_shared(
    random_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = random_model("llama")
    layer = model.model.layers[0]
    layer.input_layernorm.weight[5] = 100.0
    layer.self_attn.q_proj.weight[:, 5] *= 0.01
    model.save_pretrained(tmp_path)
    with first_block(tmp_path) as (block, calibration, _):
        name = f"{block.name}.self_attn.q_proj"
        group = next(group for group in calibration.groups if name in group.names)
        wide = block.weight(name).clone()
        x = calibration.observe(sample_rows=64)[group].sample
        plain = rtn_quantize(
            wide, W8A8, scale_dtype=torch.float32, scale_search=False, code_range="restricted"
        )
        result = run(block, calibration)[name]
        smooth_x = calibration.observe(sample_rows=64)[group].sample
    expected = x @ wide.t()
    before = (quantized_linear(x, plain) - expected).norm()
    after = (quantized_linear(smooth_x, result.weight) - expected).norm()
    assert smooth_x.abs().max() < 0.2 * x.abs().max()
    assert after < 0.5 * before
    assert "smoothed to" in result.report.notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dead_channels_and_rows_of_zeros_stay_finite(
    dtype: torch.dtype, random_model: Callable[..., Any], tmp_path: Path, cases_dir: Path
) -> None:
    case = torch.tensor(json.loads((cases_dir / "C03_zero_groups.json").read_text())["weights"])
    model = random_model("llama")
    layer = model.model.layers[0]
    layer.self_attn.q_proj.weight[:3] = 0
    layer.self_attn.q_proj.weight[:3, :8] = case
    layer.input_layernorm.weight[:3] = 0
    layer.mlp.gate_proj.weight[:, 5] = 0
    layer.mlp.up_proj.weight[:, 5] = 0
    model.to(dtype).save_pretrained(tmp_path)
    with first_block(tmp_path, dtype) as (block, calibration, passes):
        results = run(block, calibration)
        for result in results.values():
            assert torch.isfinite(result.weight.scales).all()
            assert (result.weight.scales > 0).all()
        rows = results[f"{block.name}.self_attn.q_proj"].weight.dequantize()[:3]
        assert rows[:, 8:].eq(0).all()
        assert rows[:, :8][case == 0].eq(0).all()
        for tensor in block.module.state_dict().values():
            assert torch.isfinite(tensor).all()
        passes.advance()
        assert all(torch.isfinite(hidden).all() for hidden in passes.hidden_states())


def test_why_an_input_is_not_smoothed_is_reported(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    with first_block(tiny_model("olmo2")[0]) as (block, calibration, _):
        results = run(block, calibration)
    notes = {block.relative(name): one.report.notes[0] for name, one in results.items()}
    assert notes["self_attn.q_proj"].startswith("not smoothed: the residual stream")
    assert notes["mlp.down_proj"] == "not smoothed: no norm is in front of it"


def test_calibration_is_required(tiny_model: Callable[[str], tuple[Path, Any]]) -> None:
    with (
        first_block(tiny_model("llama")[0]) as (block, _, _),
        pytest.raises(CalibrationError, match="SmoothQuant needs calibration tokens"),
    ):
        run(block, None)


def test_unknown_families_are_refused_by_name() -> None:
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match="the family 'mamba'"):
        SmoothQuant(QuantConfig(method="smoothquant"), torch.float16, AutoConfig.for_model("mamba"))
