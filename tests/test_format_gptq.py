"""GPTQ files: golden words, the two versions and their wrong labels, overrides."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import QuantConfig, Scheme
from llmbench.quant.errors import CheckpointError, FormatError
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.quantized_weight import QuantizedWeight

Make = Callable[..., QuantizedWeight]
Save = Callable[..., Path]
NAME = "model.layers.0.mlp.up_proj"
G32 = Scheme(group_size=32)


def hexadecimal(words: Tensor) -> list[str]:
    return [f"{int(word) & 0xFFFFFFFF:08x}" for word in words.flatten()]


def opened(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


def weight_of(codes: Tensor, bits: int, **changes: Any) -> QuantizedWeight:
    n, c = codes.shape
    settings: dict[str, Any] = {"group_size": c, "scales": torch.ones(n, 1, dtype=torch.float16)}
    return QuantizedWeight(bits=bits, codes=codes.to(torch.uint8), **(settings | changes))


def golden_codes() -> Tensor:
    """[N, C] of u[k, n] = (k + 3 n) mod 16."""
    return (torch.arange(64)[None] + 3 * torch.arange(64)[:, None]) % 16


def test_golden_words_of_four_bits() -> None:
    qweight = FORMATS["gptq"].tensors("a", weight_of(golden_codes(), 4))["a.qweight"]
    assert qweight.shape == (8, 64)
    assert hexadecimal(qweight[0, :3]) == ["76543210", "a9876543", "dcba9876"]
    assert hexadecimal(qweight[-1, -1]) == ["cba98765"]


def test_golden_words_of_three_bits() -> None:
    qweight = FORMATS["gptq"].tensors("a", weight_of(golden_codes() % 8, 3))["a.qweight"]
    assert hexadecimal(qweight[:3, 0]) == ["88fac688", "c688fac6", "fac688fa"]


SYM = {
    "codes": [8, 9, 7, 15, 0, 8, 1, 14],
    "qweight": -511641704,
    "dequantized": [0, 0.5, -0.5, 3.5, -4, 0, -3.5, 3],
}
ASYM = {
    "codes": [0, 3, 15, 7, 1, 2, 14, 8],
    "qweight": -1910407376,
    "dequantized": [0, 0.75, 3.75, 1.75, 0.25, 0.5, 3.5, 2],
}


def case_tensors(case: Mapping[str, Any], zeros_word: int, scale: float) -> dict[str, Tensor]:
    """Case C06 as a layer of 32 equal outputs: qweight [1, 32], qzeros [1, 4]."""
    return {
        f"{NAME}.qweight": torch.full((1, 32), case["qweight"], dtype=torch.int32),
        f"{NAME}.qzeros": torch.full((1, 4), zeros_word, dtype=torch.int32),
        f"{NAME}.scales": torch.full((1, 32), scale, dtype=torch.float16),
        f"{NAME}.g_idx": torch.zeros(8, dtype=torch.int32),
    }


def case_weight(case: Mapping[str, Any], scale: float, zeros: int | None) -> QuantizedWeight:
    codes = torch.tensor(case["codes"]).expand(32, 8)
    return weight_of(
        codes,
        4,
        scales=torch.full((32, 1), scale, dtype=torch.float16),
        zeros=None if zeros is None else torch.full((32, 1), zeros, dtype=torch.uint8),
    )


@pytest.mark.parametrize(("file_format", "word"), [("gptq", 0x77777777), ("gptq_v2", -0x77777778)])
def test_symmetric_zero_points_of_both_versions(
    quantized_file: Save, file_format: str, word: int
) -> None:
    weight = case_weight(SYM, 0.5, None)
    folder = quantized_file(file_format, {NAME: weight})
    checkpoint = Checkpoint.open(folder)
    for name, tensor in case_tensors(SYM, word, 0.5).items():
        assert torch.equal(checkpoint.get(name), tensor)
    assert checkpoint.config["quantization_config"]["checkpoint_format"] == file_format
    assert opened(folder).weight(NAME).dequantize()[0].tolist() == SYM["dequantized"]


def test_zero_point_of_0_reads_back_from_its_wrapped_word(quantized_file: Save) -> None:
    # 0 - 1 is stored as 15 in version 1; 15 + 1 must be 0 again, and not 16.
    scheme = case_weight(ASYM, 0.25, 1)
    folder = quantized_file("gptq", {NAME: scheme}, tensors=case_tensors(ASYM, -1, 0.25))
    found = opened(folder).weight(NAME)
    assert found.zeros is not None
    assert set(found.zeros.flatten().tolist()) == {0}
    assert found.dequantize()[0].tolist() == ASYM["dequantized"]


def test_zero_point_of_0_is_written_by_version_2_alone() -> None:
    weight = case_weight(ASYM, 0.25, 0)
    assert FORMATS["gptq_v2"].tensors(NAME, weight)[f"{NAME}.qzeros"].tolist() == [[0] * 4]
    with pytest.raises(FormatError, match=f"{NAME} has a zero-point of 0") as refusal:
        FORMATS["gptq"].tensors(NAME, weight)
    assert "gptq_v2" in refusal.value.__notes__[0]


@pytest.mark.parametrize(("written", "tag"), [("gptq_v2", "gptq"), ("gptq", "gptq_v2")])
def test_symmetric_zeros_of_the_other_version_win_over_the_tag(
    random_weight: Make,
    quantized_file: Save,
    caplog: pytest.LogCaptureFixture,
    written: str,
    tag: str,
) -> None:
    # GPTQModel 5 and later: zero-points of version 2 under the tag of version 1.
    weights = {f"model.layers.{i}.mlp.up_proj": random_weight(G32, 32, 64, seed=i) for i in (0, 1)}
    read = opened(quantized_file(written, weights, settings={"checkpoint_format": tag}))
    assert read.format == tag
    with caplog.at_level(logging.WARNING):
        for name, weight in weights.items():
            assert torch.equal(read.weight(name).dequantize(), weight.dequantize())
    assert len(caplog.records) == 1
    assert f"{written}'s zero-points under the label {tag}" in caplog.text


def test_zero_points_that_contradict_sym_are_refused(
    random_weight: Make, quantized_file: Save
) -> None:
    weight = random_weight(Scheme(group_size=32, sym=False), 32, 64)
    read = opened(quantized_file("gptq", {NAME: weight}, settings={"sym": True}))
    with pytest.raises(FormatError, match=rf"says sym, but {NAME}.qzeros holds \d+ to \d+"):
        read.weight(NAME)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("file_format", ["gptq", "gptq_v2"])
def test_missing_sym_is_told_from_the_zero_points(
    random_weight: Make, quantized_file: Save, file_format: str, sym: bool
) -> None:
    weight = random_weight(Scheme(group_size=32, sym=sym), 32, 64)
    read = opened(quantized_file(file_format, {NAME: weight}, settings={"sym": None}))
    assert read.layers[NAME].sym is sym
    assert torch.equal(read.weight(NAME).dequantize(), weight.dequantize())


def test_missing_checkpoint_format_is_version_1(random_weight: Make, quantized_file: Save) -> None:
    weight = random_weight(Scheme(group_size=32, sym=False), 32, 64)
    read = opened(quantized_file("gptq", {NAME: weight}, settings={"checkpoint_format": None}))
    assert read.format == "gptq"
    assert torch.equal(read.weight(NAME).dequantize(), weight.dequantize())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scales_of_every_type_are_read_as_they_are(
    random_weight: Make, quantized_file: Save, dtype: str
) -> None:
    weight = random_weight(G32, 32, 64)
    scales = weight.scales.to(getattr(torch, dtype))
    folder = quantized_file("gptq", {NAME: weight}, tensors={f"{NAME}.scales": scales.t()})
    found = opened(folder).weight(NAME)
    assert found.scales.dtype == getattr(torch, dtype)
    assert torch.equal(found.scales, scales)


def test_groups_out_of_order_keep_their_g_idx(random_weight: Make, quantized_file: Save) -> None:
    weight = random_weight(G32, 32, 64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    shuffled = replace(weight, g_idx=weight.group_of_channel()[order].to(torch.int32))
    folder = quantized_file("gptq", {NAME: shuffled}, desc_act=True)
    assert Checkpoint.open(folder).config["quantization_config"]["desc_act"] is True
    found = opened(folder).weight(NAME)
    assert found.g_idx is not None
    assert torch.equal(found.dequantize(), shuffled.dequantize())


def test_g_idx_in_order_is_none(random_weight: Make, quantized_file: Save) -> None:
    for scheme in (G32, Scheme(group_size=-1)):
        folder = quantized_file("gptq", {NAME: random_weight(scheme, 32, 64)}, desc_act=True)
        assert opened(folder).weight(NAME).g_idx is None


def test_file_without_g_idx_has_groups_in_order(random_weight: Make, quantized_file: Save) -> None:
    weight = random_weight(G32, 32, 64)
    folder = quantized_file("gptq", {NAME: weight}, tensors={f"{NAME}.g_idx": None})
    assert torch.equal(opened(folder).weight(NAME).dequantize(), weight.dequantize())


def test_g_idx_beyond_the_groups_is_refused(random_weight: Make, quantized_file: Save) -> None:
    g_idx = torch.full((64,), 2, dtype=torch.int32)
    folder = quantized_file(
        "gptq", {NAME: random_weight(G32, 32, 64)}, tensors={f"{NAME}.g_idx": g_idx}
    )
    with pytest.raises(FormatError, match="g_idx holds 2 to 2, expected 0 to 1"):
        opened(folder).weight(NAME)


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("qzeros", None, "lacks {name}.qzeros, expected int32 [2, 4]"),
        ("scales", None, "lacks {name}.scales, expected float16 or bfloat16 or float32 [2, 32]"),
        ("scales", torch.ones(4, 32).half(), "{name}.scales is float16 [4, 32], expected"),
        ("qzeros", torch.ones(2, 4), "{name}.qzeros is float32 [2, 4], expected int32"),
        (
            "g_idx",
            torch.zeros(60).int(),
            "{name}.g_idx is int32 [60], expected int32 or int64 [64]",
        ),
        ("qweight", None, "has {name}.qzeros, but no {name}.qweight"),
        ("qweight", torch.zeros(8, 32), "{name}.qweight is float32 [8, 32], expected int32"),
    ],
)
def test_tensors_that_contradict_the_settings_are_named_when_opened(
    random_weight: Make, quantized_file: Save, part: str, tensor: Tensor | None, message: str
) -> None:
    folder = quantized_file(
        "gptq", {NAME: random_weight(G32, 32, 64)}, tensors={f"{NAME}.{part}": tensor}
    )
    with pytest.raises(CheckpointError, match=re.escape(message.format(name=NAME))):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


def test_wrong_bits_are_found_in_the_shapes(random_weight: Make, quantized_file: Save) -> None:
    folder = quantized_file("gptq", {NAME: random_weight(G32, 32, 64)}, settings={"bits": 8})
    with pytest.raises(CheckpointError, match="quantization_config: bits 8, group_size 32"):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


BLOCK = [f"model.layers.{i}.{part}" for i in (0, 1) for part in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)]  # fmt: skip
W8 = Scheme(bits=8, group_size=-1)


def two_block_schemes(
    rule: Callable[[str], Scheme | None],
) -> dict[str, Scheme | None]:
    return {name: rule(name) for name in BLOCK} | {"lm_head": None}


def test_layers_that_differ_read_back_as_they_were_written(
    random_weight: Make, quantized_file: Save
) -> None:
    schemes = two_block_schemes(lambda name: W8 if "down" in name or ".1.self" in name else G32)
    weights = {name: random_weight(scheme, 32, 64) for name, scheme in schemes.items() if scheme}
    read = opened(quantized_file("gptq", weights))
    assert read.layers == {name: scheme for name, scheme in schemes.items() if scheme}
    for name, weight in weights.items():
        assert torch.equal(read.weight(name).dequantize(), weight.dequantize())


def test_overrides_are_found_by_the_names_of_layers_and_of_fused_layers() -> None:
    schemes = two_block_schemes(lambda name: W8 if "mlp" in name else G32)
    settings = FORMATS["gptq"].quantization_config(schemes, None)
    own = {"bits": 8, "group_size": -1, "sym": True}
    assert settings["bits"] == 4
    # GPTQModel and vLLM match from the start of the name; vLLM asks for the fused one.
    found = {key.removeprefix("+:"): value for key, value in settings["dynamic"].items()}
    for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj"):
        full = f"model.layers.1.mlp.{name}"
        assert [value for key, value in found.items() if re.match(key, full)] == [own]
    for name in ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.down_proj_b"):
        assert not any(re.match(key, f"model.layers.1.{name}") for key in found)
    assert len(found) == 4


def test_skipped_layers_are_excluded_by_name() -> None:
    schemes = two_block_schemes(lambda name: None if ".0.mlp" in name else G32)
    dynamic = FORMATS["gptq"].quantization_config(schemes, None)["dynamic"]
    assert dynamic == {
        rf"-:^model\.layers\.0\.mlp\.{name}$": {}
        for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
    }


def test_uniform_file_says_nothing_of_overrides() -> None:
    settings = FORMATS["gptq"].quantization_config(two_block_schemes(lambda name: G32), None)
    assert "dynamic" not in settings
    assert settings["lm_head"] is False


def test_quantized_head_is_said() -> None:
    schemes = two_block_schemes(lambda name: G32) | {"lm_head": G32}
    assert FORMATS["gptq"].quantization_config(schemes, None)["lm_head"] is True


def test_first_matching_override_of_a_peer_wins(random_weight: Make, quantized_file: Save) -> None:
    dynamic = {
        r"-:.*\.0\..*gate_proj": {},
        r"+:.*\.up_proj": {"bits": 8},
        r".*_proj": {"bits": 2, "sym": False},
    }
    weight = random_weight(replace(G32, bits=8), 32, 64)
    read = opened(quantized_file("gptq", {NAME: weight}, settings={"dynamic": dynamic, "bits": 4}))
    assert read.layers[NAME] == replace(G32, bits=8)


def test_sidecar_has_what_autogptq_looks_for() -> None:
    schemes: dict[str, Scheme | None] = {NAME: G32, "lm_head": None}
    run = QuantConfig(method="gptq", scheme=G32, damp_percent=0.02)
    (content,) = FORMATS["gptq"].sidecars(schemes, run).values()
    assert content["damp_percent"] == 0.02
    assert content["static_groups"] is True
    assert content["true_sequential"] is True
    assert content["desc_act"] is False
    assert content["meta"]["quantizer"][0].startswith("llmbench:")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic": "x"}, "dynamic 'x', expected an object"),
        ({"dynamic": {"+:(": {"bits": 8}}}, r"'\(', no regular expression"),
        ({"dynamic": {".*": {"bits": "8"}}}, "bits '8', expected a number"),
        ({"sym": "yes"}, "sym 'yes', expected true or false"),
        ({"bits": 5}, "bits is 5"),
        ({"group_size": 0}, "group_size is 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(
    random_weight: Make, quantized_file: Save, settings: dict[str, Any], message: str
) -> None:
    folder = quantized_file("gptq", {NAME: random_weight(G32, 32, 64)}, settings=settings)
    with pytest.raises(FormatError, match=message):
        QuantizedCheckpoint.of(Checkpoint.open(folder))
