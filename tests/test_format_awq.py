"""AWQ files: golden words, zero-points as they are, other layouts refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Scheme
from llmbench.quant.errors import CheckpointError, FormatError
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.quantized_weight import QuantizedWeight

Make = Callable[..., QuantizedWeight]
Save = Callable[..., Path]
NAME = "model.layers.0.mlp.up_proj"
ASYM = Scheme(group_size=32, sym=False)


def hexadecimal(words: Tensor) -> list[str]:
    return [f"{int(word) & 0xFFFFFFFF:08x}" for word in words.flatten()]


def opened(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


def test_golden_words() -> None:
    codes = (torch.arange(64)[None] + 3 * torch.arange(64)[:, None]) % 16  # [N, C]
    weight = QuantizedWeight(
        bits=4,
        group_size=64,
        codes=codes.to(torch.uint8),
        scales=torch.ones(64, 1, dtype=torch.float16),
    )
    qweight = FORMATS["awq"].tensors("a", weight)["a.qweight"]
    assert qweight.shape == (64, 8)
    assert hexadecimal(qweight[0, :2]) == ["5f932c60", "d71ba4e8"]
    assert hexadecimal(qweight[1, 0]) == ["60a43d71"]
    assert hexadecimal(qweight[-1, -1]) == ["c60a93d7"]


def test_zero_points_are_stored_as_they_are_in_the_same_order(random_weight: Make) -> None:
    zeros = torch.arange(32, dtype=torch.uint8)[:, None].expand(32, 2) % 16
    weight = replace(random_weight(ASYM, 32, 64), zeros=zeros)
    qzeros = FORMATS["awq"].tensors(NAME, weight)[f"{NAME}.qzeros"]
    # Outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up.
    assert hexadecimal(qzeros[0, :2]) == ["75316420", "fdb9eca8"]


def test_symmetric_weight_has_zero_points_of_8(random_weight: Make) -> None:
    weight = random_weight(Scheme(group_size=32), 32, 64)
    qzeros = FORMATS["awq"].tensors(NAME, weight)[f"{NAME}.qzeros"]
    assert set(hexadecimal(qzeros)) == {"88888888"}
    settings = FORMATS["awq"].quantization_config({NAME: weight.scheme}, None)
    assert settings["zero_point"] is True


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "GEMV_FAST", "marlin"])
def test_other_layouts_are_refused_by_name(
    random_weight: Make, quantized_file: Save, version: str
) -> None:
    weight = random_weight(ASYM, 32, 64)
    folder = quantized_file("awq", {NAME: weight}, settings={"version": version})
    with pytest.raises(FormatError, match=f"layout '{version}'") as refusal:
        QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert "GEMM" in refusal.value.__notes__[0]


def test_llm_awq_s_own_layout_is_refused(random_weight: Make, quantized_file: Save) -> None:
    weight = random_weight(ASYM, 32, 64)
    folder = quantized_file("awq", {NAME: weight}, settings={"backend": "llm-awq"})
    with pytest.raises(FormatError, match="llm-awq"):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


@pytest.mark.parametrize(
    "settings",
    [
        {"version": "GEMM"},
        {"version": None},
        {"version": None, "format": "gemm", "checkpoint_format": "gemm"},
        {"bits": None, "group_size": None, "w_bit": 4, "q_group_size": 32},
    ],
    ids=str,
)
def test_spellings_of_peers_are_read(
    random_weight: Make, quantized_file: Save, settings: dict[str, Any]
) -> None:
    weight = random_weight(ASYM, 32, 64)
    read = opened(quantized_file("awq", {NAME: weight}, settings=settings))
    assert read.layers == {NAME: ASYM}
    assert torch.equal(read.weight(NAME).dequantize(), weight.dequantize())


def test_bfloat16_scales_of_gptqmodel_are_read(random_weight: Make, quantized_file: Save) -> None:
    weight = random_weight(ASYM, 32, 64)
    scales = weight.scales.to(torch.bfloat16)
    folder = quantized_file("awq", {NAME: weight}, tensors={f"{NAME}.scales": scales.t()})
    assert torch.equal(opened(folder).weight(NAME).scales, scales)


def test_wrong_group_size_is_found_in_the_shapes(random_weight: Make, quantized_file: Save) -> None:
    weight = random_weight(ASYM, 32, 64)
    folder = quantized_file("awq", {NAME: weight}, settings={"group_size": 64})
    with pytest.raises(CheckpointError, match=r"qzeros is int32 \[2, 4\], expected int32 \[1, 4\]"):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


def test_skipped_layers_are_listed_and_the_head_is_left_to_readers() -> None:
    schemes: dict[str, Scheme | None] = {NAME: ASYM, "lm_head": None}
    assert FORMATS["awq"].quantization_config(schemes, None)["modules_to_not_convert"] is None
    schemes["model.layers.1.mlp.up_proj"] = None
    assert FORMATS["awq"].quantization_config(schemes, None)["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.1.mlp.up_proj",
    ]
