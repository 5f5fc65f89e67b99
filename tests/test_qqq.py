"""QQQ: what it leaves in the codes, two levels of scales, and products of nothing but integers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmbench.quant.affine import affine_params, grouped, quantize
from llmbench.quant.block import Block, LinearGroup
from llmbench.quant.block_calibration import CalibrationPasses
from llmbench.quant.block_model import BlockModel, CheckpointSource
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import QuantConfig, Scheme, Transform
from llmbench.quant.errors import CalibrationError
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.gptq import gptq_quantize
from llmbench.quant.layer_report import LayerResult
from llmbench.quant.linear import quantize_activations, quantized_linear
from llmbench.quant.qqq import QQQ, code_range, two_level
from llmbench.quant.quantized_weight import QuantizedWeight
from llmbench.quant.rtn import rtn_quantize
from llmbench.quant.statistics import InputStatistics

CHANNEL = Scheme(bits=4, group_size=-1, activations="int8")
GROUPS = Scheme(bits=4, group_size=16, activations="int8")
C03_WEIGHTS = [
    [0, 0, 0, 0, 0.7, -0.7, 0.35, 0],
    [0.1, 0.2, -0.3, 0.4, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0],
]
C03_ACTIVATIONS = [[0, 0, 0, 0, 0, 0, 0, 0], [1, -2, 3, -4, 5, -6, 7, -8]]


def nearest(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    params = affine_params(
        grouped(weight, scheme.group_size),
        scheme,
        dtype=torch.float32,
        code_range=code_range(scheme),
    )
    return quantize(weight, scheme, params)


def random_weight(seed: int, n: int = 12, c: int = 64) -> Tensor:
    return torch.randn(n, c, generator=torch.Generator().manual_seed(seed))


def kind_of_weight(kind: str, seed: int = 0) -> QuantizedWeight:
    weight = nearest(random_weight(seed), CHANNEL if kind == "channel" else GROUPS)
    return two_level(weight) if kind == "two-level" else weight


def loop_of_integers(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product token by token, every sum in Python's integers."""
    codes, token_scales = quantize_activations(x)
    out = torch.empty(len(x), weight.out_features)
    groups = weight.group_of_channel().tolist()
    if weight.channel_scales is not None:
        rows, groups = weight.int8_weight().tolist(), [0] * weight.in_features
        scales = weight.channel_scales[:, None]
    else:
        rows, scales = weight.centered().tolist(), weight.scales.float()
    for t, token in enumerate(codes.tolist()):
        for n, row in enumerate(rows):
            sums = [0] * (max(groups) + 1)
            for c, value in enumerate(token):
                sums[groups[c]] += value * row[c]
            if weight.channel_scales is not None:
                out[t, n] = torch.tensor(float(sums[0])) * token_scales[t, 0] * scales[n, 0]
                continue
            total = torch.tensor(0.0)
            for group, value in enumerate(sums):
                total += torch.tensor(float(value)) * scales[n, group]
            out[t, n] = total * token_scales[t, 0]
    return out


@pytest.mark.parametrize("kind", ["channel", "groups", "two-level"])
def test_integer_product_is_the_float_reference_exactly(kind: str) -> None:
    weight = kind_of_weight(kind)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(9)) * 3
    x[2] = 0
    assert torch.equal(quantized_linear(x, weight), loop_of_integers(x, weight))


@pytest.mark.parametrize("kind", ["channel", "two-level"])
def test_dequantized_weight_is_integers_times_one_scale_a_row(kind: str) -> None:
    weight = kind_of_weight(kind)
    row_scales = weight.scales[:, 0] if kind == "channel" else weight.channel_scales
    assert row_scales is not None
    assert torch.equal(weight.dequantize(), weight.int8_weight().float() * row_scales[:, None])


def test_reported_row_has_the_levels_of_the_per_channel_variant() -> None:
    """Row and codes as users of QQQ's format reported them (case C06)."""
    row = torch.tensor([[0.7, -0.33, 0.1, 0.0]])
    for weight in (
        nearest(row, CHANNEL),
        gptq_quantize(
            row,
            torch.eye(4),
            CHANNEL,
            scale_dtype=torch.float32,
            scale_search=False,
            code_range=code_range(CHANNEL),
        ).weight,
    ):
        assert weight.centered().tolist() == [[7, -3, 1, 0]]
        assert float(weight.scales) == pytest.approx(0.1)


def test_levels_are_those_of_the_file() -> None:
    channel, groups = kind_of_weight("channel").centered(), kind_of_weight("groups")
    assert (int(channel.min()), int(channel.max())) == (-7, 7)
    assert int(groups.centered().min()) == -8
    largest = grouped(random_weight(0), 16).abs().amax(dim=-1)
    torch.testing.assert_close(groups.scales, 2 * largest / 15)
    second = two_level(groups).channel_scales
    assert second is not None
    torch.testing.assert_close(second, groups.dequantize().abs().amax(dim=1) / 127)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    spread=st.floats(0, 24),
    exponent=st.floats(-20, 8),
    zero_group=st.booleans(),
)
def test_second_level_never_leaves_8_bits(
    seed: int, spread: float, exponent: float, zero_group: bool
) -> None:
    """Rows and groups of very different sizes, also below float16's normal numbers."""
    weight = random_weight(seed, 6, 64)
    sizes = torch.rand(6, 4, generator=torch.Generator().manual_seed(seed)) * spread
    weight = (grouped(weight, 16) * torch.exp2(exponent - sizes)[..., None]).reshape(6, 64)
    if zero_group:
        weight[0] = 0
        weight[1, 16:32] = 0
    one, two = nearest(weight, GROUPS), two_level(nearest(weight, GROUPS))
    assert torch.isfinite(two.scales).all()
    assert (two.scales > 0).all()
    assert two.channel_scales is not None
    assert (two.channel_scales > 0).all()
    steps = two.centered().float() * two.scales.float()[:, two.group_of_channel()]
    assert float(steps.round().abs().max()) <= 127
    # Half a step of the 8-bit integer, and float16's rounding of the scale.
    allowed = (0.5 + 127 * 2**-11) * two.channel_scales[:, None] + one.dequantize().abs() * 2**-9
    assert ((two.dequantize() - one.dequantize()).abs() <= allowed).all()
    FORMATS["qqq"].check("layer", _in_groups_of_128(two))


def _in_groups_of_128(weight: QuantizedWeight) -> QuantizedWeight:
    """The file holds groups of 128 only; its check of scales is the same for all."""
    return QuantizedWeight(
        bits=4,
        group_size=128,
        codes=weight.codes.repeat_interleave(8, dim=1),
        scales=weight.scales,
        channel_scales=weight.channel_scales,
        activations="int8",
    )


@pytest.mark.parametrize("kind", ["channel", "groups", "two-level"])
def test_zero_groups_rows_and_tokens_stay_zero(kind: str) -> None:
    """Matrix and activations as users reported them (case C03)."""
    scheme = CHANNEL if kind == "channel" else Scheme(bits=4, group_size=4, activations="int8")
    weight = nearest(torch.tensor(C03_WEIGHTS), scheme)
    weight = two_level(weight) if kind == "two-level" else weight
    assert torch.isfinite(weight.scales).all()
    assert (weight.scales > 0).all()
    zeros = torch.tensor(C03_WEIGHTS) == 0
    assert weight.dequantize()[zeros].abs().max() == 0
    x = torch.tensor(C03_ACTIVATIONS).float()
    out = quantized_linear(x, weight)
    assert torch.isfinite(out).all()
    assert out[0].abs().max() == 0
    assert out[:, 2].abs().max() == 0
    assert float(quantize_activations(x)[1][1]) == pytest.approx(8 / 127)


# ---- blocks ----------------------------------------------------------------------------------

SAMPLES = [
    torch.randint(3, 128, (48,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in range(8)
]


def config(transform: Transform = "none", **changes: Any) -> QuantConfig:
    return QuantConfig(method="qqq", transform=transform, scheme=GROUPS, **changes)


@torch.no_grad()
def first_block(
    folder: Path, scheme: Scheme, transform: Transform = "none", *, is_two_level: bool = False
) -> tuple[Block, dict[str, Tensor], dict[str, LayerResult]]:
    """The first block after QQQ, its weights before, and the results."""
    from transformers import AutoConfig

    checkpoint = Checkpoint.open(folder)
    hf_config = AutoConfig.from_pretrained(folder)
    model = BlockModel(checkpoint, hf_config, CheckpointSource(checkpoint), dtype=torch.float32)
    passes = CalibrationPasses(model, SAMPLES)
    passes.start()
    block = model.load_block(0)
    before = {name: block.weight(name).clone() for name in block.linears}
    method = QQQ(config(transform), torch.bfloat16, model.text_config, is_two_level)
    with passes.at(block, frozenset(block.linears)) as calibration:
        schemes = dict.fromkeys(block.linears, scheme)
        results = method.quantize_block(block, calibration, schemes)
        passes.advance()
    passes.close()
    return block, before, results


@pytest.mark.parametrize(
    ("scheme", "is_two_level"), [(CHANNEL, False), (CHANNEL, True), (GROUPS, False), (GROUPS, True)]
)
def test_block_holds_what_its_codes_stand_for(
    scheme: Scheme, is_two_level: bool, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    block, _, results = first_block(tiny_model("llama")[0], scheme, is_two_level=is_two_level)
    assert results.keys() == block.linears.keys()
    for name, result in results.items():
        weight = result.weight
        assert weight.scheme == scheme
        assert torch.equal(block.weight(name), weight.dequantize())
        has_two = is_two_level and scheme is GROUPS
        assert (weight.channel_scales is not None) == has_two
        dtypes = {(True, True): "float16", (True, False): "float32"}
        expected = dtypes.get((is_two_level, has_two), "bfloat16")
        assert str(weight.scales.dtype) == f"torch.{expected}"
        if scheme is CHANNEL:
            assert int(weight.codes.min()) >= 1  # -7


@pytest.mark.parametrize("scheme", [CHANNEL, GROUPS])
def test_error_is_below_rounding_to_nearest(
    scheme: Scheme, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    _, before, results = first_block(tiny_model("llama")[0], scheme)
    for name, result in results.items():
        W = before[name]
        rounded = rtn_quantize(W, scheme, scale_dtype=torch.float32).dequantize()
        nearest_error = float((rounded - W).square().sum() / W.square().sum())
        assert result.report.relative_mse < nearest_error
        assert result.report.fallback is None


@pytest.mark.parametrize("variant_name", ["llama", "qwen2", "gemma", "gemma2", "phi3", "gpt2"])
def test_smoothing_is_in_the_report_of_every_family(
    variant_name: str, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    _, _, results = first_block(tiny_model(variant_name)[0], GROUPS, "smooth")
    for result in results.values():
        assert len(result.report.notes) == 1
        assert "smoothed" in result.report.notes[0]


class OneGroup:
    """Calibration of a block in which one group saw given statistics."""

    def __init__(self, names: tuple[str, ...], statistics: InputStatistics) -> None:
        self._group, self._statistics = LinearGroup(names), statistics

    def sequential(
        self, *, is_true_sequential: bool = True
    ) -> Iterator[tuple[LinearGroup, InputStatistics]]:
        yield self._group, self._statistics


@pytest.mark.parametrize("fault", ["no tokens", "infinite", "never ran"])
def test_layers_without_usable_statistics_are_rounded_and_say_so(
    fault: str, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    from transformers import AutoConfig

    folder, _ = tiny_model("llama")
    checkpoint, hf_config = Checkpoint.open(folder), AutoConfig.from_pretrained(folder)
    block = BlockModel(
        checkpoint, hf_config, CheckpointSource(checkpoint), dtype=torch.float32
    ).load_block(0)
    name = "model.layers.0.mlp.down_proj"
    statistics = InputStatistics(block.layers[name].in_features)
    if fault == "infinite":
        statistics.update(torch.full((2, block.layers[name].in_features), torch.inf))
    calibration: Any = OneGroup(() if fault == "never ran" else (name,), statistics)
    method = QQQ(config(), torch.bfloat16, hf_config, True)
    result = method.quantize_block(block, calibration, {name: GROUPS})[name]
    assert result.report.fallback is not None
    assert result.report.fallback.startswith("rtn: ")
    assert result.weight.channel_scales is not None
    assert torch.equal(block.weight(name), result.weight.dequantize())


def test_calibration_is_asked_for(tiny_model: Callable[[str], tuple[Path, Any]]) -> None:
    from transformers import AutoConfig

    folder, _ = tiny_model("llama")
    method = QQQ(config(), torch.bfloat16, AutoConfig.from_pretrained(folder), False)
    block: Any = None
    with pytest.raises(CalibrationError, match="calibration tokens"):
        method.quantize_block(block, None, {})
