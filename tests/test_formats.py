"""Every format gives back the bits that it was given, and refuses what it cannot hold."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Format, Method, Scheme
from llmbench.quant.errors import FormatError
from llmbench.quant.formats.format import patterns
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.formats.registry import FORMATS, Target, default_format, objection
from llmbench.quant.linear_layers import LinearLayer
from llmbench.quant.quantized_weight import QuantizedWeight

Make = Callable[..., QuantizedWeight]
Save = Callable[..., Path]

NAME = "model.layers.0.mlp.up_proj"
W8A8 = Scheme(bits=8, group_size=-1, activations="int8")
W4A8 = Scheme(bits=4, group_size=-1, activations="int8")
HELD: list[tuple[Format, Scheme]] = [
    *(
        (name, Scheme(bits=bits, group_size=size, sym=sym))
        for name in ("gptq", "gptq_v2", "compressed-tensors")
        for bits in (2, 3, 4, 8)
        for size in (32, -1)
        for sym in (True, False)
    ),
    ("awq", Scheme(group_size=32)),
    ("awq", Scheme(group_size=64, sym=False)),
    ("qqq", W4A8),
    ("qqq", replace(W4A8, group_size=128)),
    ("compressed-tensors", W8A8),
    ("compressed-tensors", replace(W8A8, group_size=64, sym=False)),
    ("compressed-tensors", W4A8),
    ("compressed-tensors", replace(W4A8, group_size=32)),
    ("bitsandbytes", W8A8),
]


def ident(value: object) -> str:
    if isinstance(value, Scheme):
        kind = "sym" if value.sym else "asym"
        return f"{value.name}-g{value.group_size}-{kind}"
    return str(value)


def made_for(file_format: Format, scheme: Scheme, make: Make, **sizes: int) -> QuantizedWeight:
    """A random weight as the format has it: QQQ's groups have a second level of scales."""
    n, c = (128, 256) if file_format == "qqq" else (96, 64)
    weight = make(scheme, sizes.get("n", n), sizes.get("c", c))
    if file_format == "qqq" and scheme.group_size != -1:
        scales = (weight.scales.float() * 200).half()
        weight = replace(weight, scales=scales, channel_scales=torch.rand(n) + 0.25)
    if file_format == "bitsandbytes":
        maxima = torch.randint(1, 1 << 11, weight.scales.shape) * 2.0**-11
        weight = replace(weight, scales=maxima / 127, outlier_threshold=6.0)
    return weight


def assert_same(found: QuantizedWeight, expected: QuantizedWeight) -> None:
    assert found.scheme.bits == expected.scheme.bits
    assert found.activations == expected.activations
    assert found.outlier_threshold == expected.outlier_threshold
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales.double(), expected.scales.double())
    assert torch.equal(found.dequantize(), expected.dequantize())


@pytest.mark.parametrize(("file_format", "scheme"), HELD, ids=ident)
def test_written_bits_read_back_and_write_again_equal(
    random_weight: Make, quantized_file: Save, file_format: Format, scheme: Scheme
) -> None:
    weight = made_for(file_format, scheme, random_weight)
    checkpoint = Checkpoint.open(quantized_file(file_format, {NAME: weight}))
    read = QuantizedCheckpoint.of(checkpoint)
    assert read is not None
    assert read.format == file_format
    assert read.shape(NAME) == tuple(weight.codes.shape)
    assert read.consumed == set(checkpoint.names)
    found = read.weight(NAME)
    assert_same(found, weight)
    assert found.scheme == read.layers[NAME]
    again = FORMATS[file_format].tensors(NAME, found)
    assert set(again) == set(checkpoint.names)
    for name, tensor in again.items():
        stored = checkpoint.get(name)
        assert tensor.dtype == stored.dtype
        assert torch.equal(tensor, stored)


@pytest.mark.parametrize(("file_format", "scheme"), HELD, ids=ident)
def test_what_is_held_is_not_refused(file_format: Format, scheme: Scheme) -> None:
    n, c = (128, 256) if file_format == "qqq" else (96, 64)
    assert FORMATS[file_format].refusal(scheme, n, c, weights_exist=True) is None


@pytest.mark.parametrize(
    ("file_format", "scheme", "shape", "reason"),
    [
        ("gptq", Scheme(group_size=32), (64, 176), "in_features to be a multiple of 32, not 176"),
        ("gptq", Scheme(group_size=32), (40, 64), "out_features to be a multiple of 32, not 40"),
        ("gptq", Scheme(group_size=128), (64, 192), "128 does not divide in_features 192"),
        ("gptq", Scheme(group_size=48), (64, 96), "groups of -1, 16, 32"),
        ("gptq", Scheme(group_size=32, sym=False), (64, 64), "zero-point of 0"),
        ("gptq", W4A8, (64, 64), "activations"),
        ("awq", Scheme(bits=3, group_size=32), (64, 64), "4 bits, not 3"),
        ("awq", Scheme(group_size=-1), (64, 64), "group_size -1"),
        ("awq", Scheme(group_size=16), (60, 64), "out_features to be a multiple of 8, not 60"),
        ("awq", Scheme(group_size=128), (64, 176), "128 does not divide in_features 176"),
        ("awq", W4A8, (64, 64), "activations"),
        ("qqq", W4A8, (192, 576), "in_features 576 and out_features 192"),
        ("qqq", W4A8, (576, 576), "in_features 576 and out_features 576"),
        ("qqq", replace(W4A8, group_size=64), (128, 128), "groups of -1 or 128, not 64"),
        ("qqq", replace(W4A8, group_size=128), (256, 576), "128 does not divide in_features 576"),
        ("qqq", Scheme(group_size=-1), (128, 128), "int8 activations"),
        ("qqq", replace(W4A8, sym=False), (128, 128), "symmetric"),
        ("compressed-tensors", Scheme(), (64, 176), "128 does not divide in_features 176"),
        ("bitsandbytes", Scheme(bits=8, group_size=-1), (64, 64), "int8 activations"),
        ("bitsandbytes", W4A8, (64, 64), "8 bits"),
    ],
    ids=ident,
)
def test_refusal_names_what_does_not_fit(
    file_format: Format, scheme: Scheme, shape: tuple[int, int], reason: str
) -> None:
    refusal = FORMATS[file_format].refusal(scheme, *shape)
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize("shape", [(1536, 576), (128, 128), (64, 128), (256, 64), (576, 1536)])
def test_layers_that_a_tile_of_qqq_divides_are_held(shape: tuple[int, int]) -> None:
    assert FORMATS["qqq"].refusal(W4A8, *shape) is None


@pytest.mark.parametrize("file_format", ["awq", "qqq", "compressed-tensors", "bitsandbytes"])
def test_groups_out_of_order_are_for_gptq_alone(random_weight: Make, file_format: Format) -> None:
    scheme = {"qqq": replace(W4A8, group_size=128), "bitsandbytes": W8A8}.get(
        file_format, Scheme(group_size=32, sym=False)
    )
    n, c = (128, 256) if file_format == "qqq" else (96, 64)
    refusal = FORMATS[file_format].refusal(scheme, n, c, desc_act=True)
    assert refusal is not None
    assert "desc_act" in refusal
    weight = made_for(file_format, scheme, random_weight)
    shuffled = replace(weight, g_idx=weight.group_of_channel().flip(0).to(torch.int32))
    with pytest.raises(FormatError, match="g_idx"):
        FORMATS[file_format].tensors(NAME, shuffled)


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize(("file_format", "scheme"), HELD[-8:], ids=ident)
def test_scales_that_are_not_positive_numbers_are_refused(
    random_weight: Make, file_format: Format, scheme: Scheme, value: float
) -> None:
    weight = made_for(file_format, scheme, random_weight)
    scales = weight.scales.clone()
    scales[3, 0] = value
    with pytest.raises(FormatError, match=f"{NAME} has a scale of .*, expected finite and above 0"):
        FORMATS[file_format].tensors(NAME, replace(weight, scales=scales))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_second_level_of_scales_is_checked_too(random_weight: Make, value: float) -> None:
    weight = made_for("qqq", replace(W4A8, group_size=128), random_weight)
    assert weight.channel_scales is not None
    weight.channel_scales[7] = value
    with pytest.raises(FormatError, match="expected finite and above 0"):
        FORMATS["qqq"].tensors(NAME, weight)


@pytest.mark.parametrize("file_format", ["gptq", "gptq_v2", "awq"])
def test_scale_that_float16_cannot_hold_is_named_and_not_rounded(
    random_weight: Make, file_format: Format
) -> None:
    weight = random_weight(Scheme(group_size=32), 96, 64, dtype="float32")
    weight.scales[0, 1] = 0.1
    with pytest.raises(FormatError, match=rf"{NAME} has a scale of 0\.1.* float16 cannot hold"):
        FORMATS[file_format].tensors(NAME, weight)


@pytest.mark.parametrize("file_format", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_two_levels_and_outliers_have_no_place_elsewhere(
    random_weight: Make, file_format: Format
) -> None:
    weight = random_weight(Scheme(group_size=32), 96, 64)
    with pytest.raises(FormatError, match="two levels"):
        FORMATS[file_format].tensors(NAME, replace(weight, channel_scales=torch.ones(96)))
    with pytest.raises(FormatError, match="integer product"):
        FORMATS[file_format].tensors(NAME, replace(weight, outlier_threshold=6.0))


@pytest.mark.parametrize("file_format", FORMATS)
def test_file_without_quantized_layers_is_refused(file_format: Format) -> None:
    with pytest.raises(FormatError, match="no layer is quantized"):
        FORMATS[file_format].quantization_config({NAME: None}, None)


@pytest.mark.parametrize("file_format", ["awq", "qqq", "bitsandbytes"])
def test_formats_of_one_scheme_refuse_two(file_format: Format) -> None:
    schemes = {"model.layers.0.a": W4A8, "model.layers.0.b": W8A8}
    with pytest.raises(FormatError, match="one scheme a file"):
        FORMATS[file_format].quantization_config(schemes, None)


def test_patterns_cover_all_blocks_only_where_all_agree() -> None:
    names = [f"model.layers.{i}.mlp.{kind}" for i in (0, 1, 10) for kind in ("up", "down")]
    chosen = [name for name in names if "up" in name or ".1." in name]
    assert patterns(chosen, names) == [
        r"model\.layers\.\d+\.mlp\.up",
        r"model\.layers\.1\.mlp\.down",
    ]


def targets(scheme: Scheme, *shapes: tuple[int, int]) -> list[Target]:
    return [
        (LinearLayer(name=f"layers.0.{i}", out_features=n, in_features=c, block="layers.0"), scheme)
        for i, (n, c) in enumerate(shapes)
    ]


SMALL, SMOLLM2 = ((128, 128),), ((1536, 576), (576, 1536), (192, 576))
ASYM = Scheme(sym=False)
MIXED = targets(ASYM, *SMALL) + targets(replace(ASYM, group_size=64), *SMALL)


@pytest.mark.parametrize(
    ("method", "chosen", "desc_act", "expected"),
    [
        ("rtn", targets(Scheme(), *SMALL), False, "gptq"),
        ("gptq", targets(Scheme(), *SMALL), True, "gptq"),
        ("gptq", targets(ASYM, *SMALL), False, "compressed-tensors"),
        ("gptq", targets(ASYM, *SMALL), True, "gptq_v2"),
        ("gptq", targets(Scheme(), *SMALL) + targets(ASYM, *SMALL), False, "compressed-tensors"),
        ("gptq", targets(Scheme(group_size=16), (64, 176)), False, "compressed-tensors"),
        ("gptq", targets(Scheme(), *SMALL) + targets(Scheme(bits=8), *SMALL), False, "gptq"),
        ("rtn", targets(W8A8, *SMALL), False, "compressed-tensors"),
        ("awq", targets(ASYM, *SMALL), False, "awq"),
        ("awq", targets(replace(ASYM, group_size=-1), *SMALL), False, "compressed-tensors"),
        ("awq", MIXED, False, "compressed-tensors"),
        ("qqq", targets(W4A8, *SMALL), False, "qqq"),
        ("qqq", targets(W4A8, *SMOLLM2), False, "compressed-tensors"),
        ("smoothquant", targets(W8A8, *SMALL), False, "compressed-tensors"),
        ("int8", targets(W8A8, *SMALL), False, "bitsandbytes"),
    ],
)
def test_default_file_of_each_method(
    method: Method, chosen: list[Target], desc_act: bool, expected: Format
) -> None:
    assert default_format(method, chosen, desc_act=desc_act)[0] == expected


def test_reason_says_why_the_method_s_own_file_is_not_taken() -> None:
    _, reason = default_format("qqq", targets(W4A8, *SMOLLM2))
    assert "in_features 576 and out_features 192 (layers.0.2)" in reason
    assert "compressed-tensors" in reason


def test_objection_names_two_layers_that_differ() -> None:
    chosen = targets(W4A8, *SMALL) + targets(replace(W4A8, group_size=128), *SMALL)
    reason = objection("qqq", chosen)
    assert reason is not None
    assert "one scheme for all layers" in reason
