"""QQQ files: golden words of both modes, scale permutations, the range of the second level."""

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
CHANNEL = Scheme(group_size=-1, activations="int8")
GROUPS = Scheme(group_size=128, activations="int8")


def hexadecimal(words: Tensor) -> list[str]:
    return [f"{int(word) & 0xFFFFFFFF:08x}" for word in words.flatten()]


def checksum(words: Tensor) -> str:
    return f"{int(words.long().sum()) & 0xFFFFFFFF:08x}"


def golden_nibbles() -> Tensor:
    """[N, C] of u[k, n] = (7 k^2 + 3 n + k n + n div 5) mod 16."""
    k, n = torch.arange(128)[None], torch.arange(128)[:, None]
    return ((7 * k * k + 3 * n + k * n + n // 5) % 16).to(torch.uint8)


def two_level(make: Make, **changes: Any) -> QuantizedWeight:
    weight = make(GROUPS, 128, 256)
    settings: dict[str, Any] = {
        "scales": (weight.scales.float() * 200).half(),
        "channel_scales": torch.rand(128) + 0.25,
    }
    return replace(weight, **(settings | changes))


def opened(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


def test_golden_words_per_channel() -> None:
    # The file has two's complement: nibble u is the number u, or u - 16 from 8 on.
    weight = QuantizedWeight(
        bits=4,
        group_size=-1,
        codes=golden_nibbles() ^ 8,
        scales=torch.ones(128, 1),
        activations="int8",
    )
    packed = FORMATS["qqq"].tensors("a", weight)["a.B"]
    assert packed.shape == (8, 256)
    assert hexadecimal(packed[0, :4]) == ["f0c57809", "23f8ab3c", "572cdf60", "8a5f0293"]
    assert hexadecimal(packed[-1, -1]) == ["cea4680a"]
    assert checksum(packed) == "4f5c6fe0"


def test_golden_words_per_group() -> None:
    weight = QuantizedWeight(
        bits=4,
        group_size=128,
        codes=golden_nibbles(),
        scales=torch.ones(128, 1, dtype=torch.float16),
        channel_scales=torch.ones(128),
        activations="int8",
    )
    packed = FORMATS["qqq"].tensors("a", weight)["a.B"]
    assert hexadecimal(packed[0, :4]) == ["08f759c0", "3b2a8cf3", "7f5dc026", "a280f359"]
    assert hexadecimal(packed[-1, -1]) == ["e8c64aa0"]
    assert checksum(packed) == "e7f1c580"


def test_channel_scales_are_a_sixteenth_and_permuted_in_blocks_of_32(random_weight: Make) -> None:
    weight = replace(random_weight(CHANNEL, 128, 64), scales=torch.arange(1.0, 129.0)[:, None] * 16)
    stored = FORMATS["qqq"].tensors(NAME, weight)[f"{NAME}.s_channel"]
    assert stored.shape == (1, 128)
    assert stored.dtype == torch.float32
    assert stored[0, :10].tolist() == [1, 2, 9, 10, 17, 18, 25, 26, 3, 4]
    assert stored[0, 32:34].tolist() == [33, 34]


def test_group_scales_are_permuted_in_blocks_of_64(random_weight: Make) -> None:
    scales = (torch.arange(1.0, 129.0) / 16)[:, None].expand(128, 2).half()
    weight = two_level(random_weight, scales=scales, channel_scales=torch.arange(1.0, 129.0))
    weight.codes.clamp_(7, 9)
    stored = FORMATS["qqq"].tensors(NAME, weight)
    assert stored[f"{NAME}.s_group"].shape == (2, 128)
    assert (stored[f"{NAME}.s_group"][0, :9] * 16).tolist() == [1, 9, 17, 25, 33, 41, 49, 57, 2]
    assert stored[f"{NAME}.s_channel"][0, :4].tolist() == [1, 2, 9, 10]


def test_run_time_buffers_and_empty_group_scales_are_no_weights(
    random_weight: Make, quantized_file: Save
) -> None:
    weight = random_weight(CHANNEL, 128, 64, dtype="float32")
    more = {
        f"{NAME}.s_group": torch.empty(0, dtype=torch.float16),
        f"{NAME}.workspace": torch.zeros(16, dtype=torch.int32),
        f"{NAME}.reduce_buffer": torch.zeros(1024, 128, dtype=torch.int32),
    }
    folder = quantized_file("qqq", {NAME: weight}, tensors=more)
    read = opened(folder)
    assert read.consumed == set(Checkpoint.open(folder).names)
    assert torch.equal(read.weight(NAME).dequantize(), weight.dequantize())


@pytest.mark.parametrize("settings", [{"wbits": None}, {"bits": None}], ids=str)
def test_either_name_of_the_bits_is_read(
    random_weight: Make, quantized_file: Save, settings: dict[str, Any]
) -> None:
    weight = random_weight(CHANNEL, 128, 64)
    assert opened(quantized_file("qqq", {NAME: weight}, settings=settings)).layers == {
        NAME: CHANNEL
    }


def test_both_names_of_the_bits_are_written() -> None:
    settings = FORMATS["qqq"].quantization_config({NAME: CHANNEL}, None)
    assert (settings["bits"], settings["wbits"]) == (4, 4)
    assert FORMATS["qqq"].sidecars({NAME: CHANNEL}, None) == {"quantize_config.json": settings}


def test_wide_integers_beyond_8_bits_are_refused(random_weight: Make) -> None:
    weight = two_level(random_weight, scales=torch.full((128, 2), 16.0).half())
    weight.codes[0, 0] = 0
    with pytest.raises(FormatError, match=f"{NAME} has a code times group scale of 128"):
        FORMATS["qqq"].tensors(NAME, weight)


def test_groups_with_one_level_of_scales_are_refused(random_weight: Make) -> None:
    with pytest.raises(FormatError, match="one level of scales"):
        FORMATS["qqq"].tensors(NAME, random_weight(GROUPS, 128, 256))


def test_scale_whose_sixteenth_is_lost_is_refused(random_weight: Make) -> None:
    smallest = torch.full((128, 1), 2.0**-149)
    with pytest.raises(FormatError, match="float32 cannot hold"):
        FORMATS["qqq"].tensors(NAME, replace(random_weight(CHANNEL, 128, 64), scales=smallest))


def test_saturated_integers_of_gptqmodel_read_as_its_kernel_reads_them(
    random_weight: Make, quantized_file: Save
) -> None:
    # Its scale a channel comes from the weights before rounding, so that codes can pass 127.
    weight = two_level(random_weight, scales=torch.ones(128, 2).half())
    wide = torch.full((2, 128), 20.0, dtype=torch.float16)
    folder = quantized_file("qqq", {NAME: weight}, tensors={f"{NAME}.s_group": wide})
    found = opened(folder).weight(NAME).int8_weight()
    assert torch.equal(found, (weight.centered() * 20).clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize(
    ("part", "tensor", "error", "message"),
    [
        ("s_group", None, CheckpointError, "lacks .*s_group, expected float16"),
        ("s_channel", torch.ones(128), CheckpointError, r"s_channel is float32 \[128\]"),
        ("s_channel", torch.ones(1, 128).half(), CheckpointError, "expected float32"),
        ("B", torch.zeros(16, 192).int(), FormatError, "no tile"),
        ("B", None, CheckpointError, "has .*s_channel, but no .*B"),
    ],
)
def test_tensors_that_contradict_the_layout_are_named_when_opened(
    random_weight: Make,
    quantized_file: Save,
    part: str,
    tensor: Tensor | None,
    error: type[Exception],
    message: str,
) -> None:
    folder = quantized_file(
        "qqq", {NAME: two_level(random_weight)}, tensors={f"{NAME}.{part}": tensor}
    )
    with pytest.raises(error, match=message):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wbits": 8}, "8 bits, qqq files hold 4"),
        ({"group_size": 64}, "group_size 64, qqq files -1 or 128"),
        ({"group_size": None}, "lacks group_size"),
        ({"group_size": "128"}, "group_size '128', expected a number"),
    ],
)
def test_settings_that_the_layout_has_not_are_refused(
    random_weight: Make, quantized_file: Save, settings: dict[str, Any], message: str
) -> None:
    folder = quantized_file("qqq", {NAME: random_weight(CHANNEL, 128, 64)}, settings=settings)
    with pytest.raises(FormatError, match=message):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


def test_skipped_layers_are_excluded_by_name() -> None:
    schemes: dict[str, Scheme | None] = {NAME: CHANNEL, "model.layers.0.mlp.down_proj": None}
    settings = FORMATS["qqq"].quantization_config(schemes, None)
    assert settings["dynamic"] == {r"-:^model\.layers\.\d+\.mlp\.down_proj$": {}}
