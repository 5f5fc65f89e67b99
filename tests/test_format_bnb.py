"""bitsandbytes files: row maxima that survive the way through scales, threshold, 4 bits refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Scheme
from llmbench.quant.errors import CheckpointError, FormatError
from llmbench.quant.formats.bnb import Bitsandbytes, row_maxima
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.quantized_weight import QuantizedWeight

Make = Callable[..., QuantizedWeight]
Save = Callable[..., Path]
NAME = "model.layers.0.mlp.up_proj"
SCHEME = Scheme(bits=8, group_size=-1, activations="int8")


@pytest.fixture
def weight(random_weight: Make) -> QuantizedWeight:
    maxima = torch.randint(1, 1 << 11, (32, 1), generator=torch.Generator().manual_seed(0)) / 1024
    return replace(
        random_weight(SCHEME, 32, 64, dtype="float32"), scales=maxima / 127, outlier_threshold=6.0
    )


def opened(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-14, 2.0**10, width=16))
def test_row_maximum_of_half_precision_weights_survives(value: float) -> None:
    maxima = torch.tensor([value])
    assert torch.equal(row_maxima(maxima / 127), maxima)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-20, 2.0**20, width=32))
def test_row_maximum_gives_its_scale_back(value: float) -> None:
    scales = torch.tensor([value]) / 127
    assert torch.equal(row_maxima(scales) / 127, scales)


def test_tensors_are_those_of_bitsandbytes(weight: QuantizedWeight) -> None:
    tensors = FORMATS["bitsandbytes"].tensors(NAME, weight)
    assert tensors[f"{NAME}.weight"].dtype == torch.int8
    assert torch.equal(tensors[f"{NAME}.weight"].to(torch.int16), weight.centered())
    assert tensors[f"{NAME}.SCB"].dtype == torch.float32
    assert torch.equal(tensors[f"{NAME}.SCB"], (weight.scales[:, 0] * 127 * 1024).round() / 1024)
    assert tensors[f"{NAME}.weight_format"].shape == ()
    assert tensors[f"{NAME}.weight_format"].dtype == torch.uint8
    assert int(tensors[f"{NAME}.weight_format"]) == 0


def test_scale_that_is_no_row_maximum_is_refused(weight: QuantizedWeight) -> None:
    # Between 1/127 of two neighbouring float32 lie numbers that no division gives.
    candidates = torch.arange(1 << 12, dtype=torch.int32) + torch.tensor([1.9]).view(torch.int32)
    scales = candidates.view(torch.float32)
    lost = scales[row_maxima(scales) / 127 != scales]
    assert len(lost) > 0
    weight.scales[5, 0] = lost[0]
    with pytest.raises(FormatError, match="no row maximum / 127"):
        FORMATS["bitsandbytes"].tensors(NAME, weight)


def test_threshold_of_the_file_is_the_weights(
    weight: QuantizedWeight, quantized_file: Save
) -> None:
    read = opened(quantized_file("bitsandbytes", {NAME: weight}))
    assert read.weight(NAME).outlier_threshold == 6.0
    other = replace(weight, outlier_threshold=4.5)
    with pytest.raises(FormatError, match=r"threshold of 4\.5, the file one of 6\.0"):
        FORMATS["bitsandbytes"].tensors(NAME, other)
    read = opened(quantized_file(Bitsandbytes(4.5), {NAME: other}))
    assert read.weight(NAME).outlier_threshold == 4.5


def test_threshold_of_0_takes_nothing_out(weight: QuantizedWeight, quantized_file: Save) -> None:
    plain = replace(weight, outlier_threshold=None)
    read = opened(quantized_file(Bitsandbytes(0.0), {NAME: plain}))
    assert read.weight(NAME).outlier_threshold is None


def test_file_of_a_writer_without_layout_tag_is_read(
    weight: QuantizedWeight, quantized_file: Save
) -> None:
    tensors = {f"{NAME}.weight_format": None}
    read = opened(quantized_file("bitsandbytes", {NAME: weight}, tensors=tensors))
    assert torch.equal(read.weight(NAME).dequantize(), weight.dequantize())


def test_other_layouts_are_refused(weight: QuantizedWeight, quantized_file: Save) -> None:
    tensors = {f"{NAME}.weight_format": torch.tensor(2, dtype=torch.uint8)}
    read = opened(quantized_file("bitsandbytes", {NAME: weight}, tensors=tensors))
    with pytest.raises(FormatError, match="weight_format is 2, expected 0"):
        read.weight(NAME)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_in_4bit": True}, "4 bits"),
        ({"llm_int8_threshold": "6"}, "llm_int8_threshold is '6'"),
        ({"llm_int8_threshold": -1.0}, "llm_int8_threshold is -1.0"),
    ],
    ids=str,
)
def test_settings_that_are_not_read_are_refused_by_name(
    weight: QuantizedWeight, quantized_file: Save, changes: dict[str, Any], message: str
) -> None:
    folder = quantized_file("bitsandbytes", {NAME: weight}, settings=changes)
    with pytest.raises(FormatError, match=message):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("weight", None, "lacks .*weight, expected int8"),
        ("weight", torch.zeros(32, 64), "expected int8"),
        ("SCB", torch.ones(31), r"SCB is float32 \[31\], expected float32 \[32\]"),
        ("SCB", None, "has .*weight_format, but no .*SCB"),
    ],
)
def test_tensors_that_contradict_the_layout_are_named_when_opened(
    weight: QuantizedWeight,
    quantized_file: Save,
    part: str,
    tensor: torch.Tensor | None,
    message: str,
) -> None:
    folder = quantized_file("bitsandbytes", {NAME: weight}, tensors={f"{NAME}.{part}": tensor})
    with pytest.raises(CheckpointError, match=message):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


def test_skipped_modules_are_listed() -> None:
    schemes: dict[str, Scheme | None] = {NAME: SCHEME, "lm_head": None}
    assert FORMATS["bitsandbytes"].quantization_config(schemes, None) == {
        "quant_method": "bitsandbytes",
        "load_in_8bit": True,
        "load_in_4bit": False,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }
