"""compressed-tensors files: both containers, config groups, what peers write in them."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Format, QuantConfig, Scheme
from llmbench.quant.errors import CheckpointError, FormatError
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.quantized_weight import QuantizedWeight

Make = Callable[..., QuantizedWeight]
Save = Callable[..., Path]
CT: Format = "compressed-tensors"
NAME = "model.layers.0.mlp.up_proj"
OTHER = "model.layers.0.self_attn.q_proj"
G32 = Scheme(group_size=32)
W8A8 = Scheme(bits=8, group_size=-1, activations="int8")
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def hexadecimal(words: Tensor) -> list[str]:
    return [f"{int(word) & 0xFFFFFFFF:08x}" for word in words.flatten()]


def opened(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


def group(targets: list[str], activations: Any = None, **weights: Any) -> dict[str, Any]:
    """A config group as llm-compressor writes it, with its keys that say nothing."""
    own = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "actorder": "static",
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
    }
    return {
        "targets": targets,
        "weights": own | weights,
        "input_activations": activations,
        "output_activations": None,
    }


def test_golden_words() -> None:
    codes = (torch.arange(64)[None] + 3 * torch.arange(64)[:, None]) % 16  # [N, C]
    weight = QuantizedWeight(
        bits=4, group_size=64, codes=codes.to(torch.uint8), scales=torch.ones(64, 1)
    )
    packed = FORMATS[CT].tensors("a", weight)["a.weight_packed"]
    assert packed.shape == (64, 8)
    assert hexadecimal(packed[0, :2]) == ["76543210", "fedcba98"]
    assert hexadecimal(packed[1, 0]) == ["a9876543"]
    assert hexadecimal(packed[-1, -1]) == ["cba98765"]


def test_zero_points_are_packed_along_the_output(random_weight: Make) -> None:
    zeros = torch.arange(40, dtype=torch.uint8)[:, None].expand(40, 2) % 16
    weight = replace(random_weight(replace(G32, sym=False), 40, 64), zeros=zeros)
    packed = FORMATS[CT].tensors(NAME, weight)[f"{NAME}.weight_zero_point"]
    assert packed.shape == (5, 2)
    assert hexadecimal(packed[:, 1]) == ["76543210", "fedcba98"] * 2 + ["76543210"]


@pytest.mark.parametrize(
    ("scheme", "container"),
    [
        (G32, "pack-quantized"),
        (Scheme(bits=8, group_size=-1), "pack-quantized"),
        # Readers would take int-quantized, a byte a weight, if the group did not say otherwise.
        (Scheme(group_size=32, activations="int8"), "pack-quantized"),
        (W8A8, "int-quantized"),
    ],
)
def test_container_is_said_in_the_file_and_in_the_group(
    random_weight: Make, quantized_file: Save, scheme: Scheme, container: str
) -> None:
    checkpoint = Checkpoint.open(quantized_file(CT, {NAME: random_weight(scheme, 32, 64)}))
    settings = checkpoint.config["quantization_config"]
    assert settings["format"] == container
    assert settings["config_groups"]["group_0"]["format"] == container
    assert settings["quantization_status"] == "compressed"
    is_packed = f"{NAME}.weight_packed" in checkpoint
    assert is_packed is (container == "pack-quantized")
    assert (f"{NAME}.weight" in checkpoint) is not is_packed


def test_one_scheme_is_for_linears_and_skipped_layers_are_ignored() -> None:
    schemes: dict[str, Scheme | None] = {NAME: G32, OTHER: None, "lm_head": None}
    settings = FORMATS[CT].quantization_config(schemes, None)
    (only,) = settings["config_groups"].values()
    assert only["targets"] == ["Linear"]
    assert settings["ignore"] == [OTHER, "lm_head"]


def test_two_schemes_have_targets_that_do_not_meet(
    random_weight: Make, quantized_file: Save
) -> None:
    schemes = {NAME: G32, OTHER: W8A8, NAME.replace(".0.", ".1."): G32}
    weights = {name: random_weight(scheme, 32, 64) for name, scheme in schemes.items()}
    checkpoint = Checkpoint.open(quantized_file(CT, weights))
    settings = checkpoint.config["quantization_config"]
    assert settings["format"] == "mixed-precision"
    for name, scheme in schemes.items():
        matching = [
            item["weights"]["num_bits"]
            for item in settings["config_groups"].values()
            if any(re.match(target.removeprefix("re:"), name) for target in item["targets"])
        ]
        assert matching == [scheme.bits]
    read = opened(checkpoint.folder)
    assert read.layers == schemes
    for name, weight in weights.items():
        assert torch.equal(read.weight(name).dequantize(), weight.dequantize())


def test_act_order_of_the_run_is_said() -> None:
    run = QuantConfig(method="gptq", scheme=G32, act_order=True)
    (only,) = FORMATS[CT].quantization_config({NAME: G32}, run)["config_groups"].values()
    assert only["weights"]["actorder"] == "static"
    (only,) = FORMATS[CT].quantization_config({NAME: G32}, None)["config_groups"].values()
    assert only["weights"]["actorder"] is None


@pytest.mark.parametrize(
    ("targets_of_small", "targets_of_large", "expected"),
    [
        (["Linear"], ["re:.*up_proj"], 8),
        (["re:.*up_proj"], ["Linear"], 4),
        (["re:.*up_proj"], [NAME], 8),
        ([NAME], ["re:.*up_proj", "Linear"], 4),
        (["re:.*mlp.*"], ["re:.*up_proj"], 4),
        (["re:up_proj"], ["Linear"], 8),
    ],
)
def test_name_wins_over_expression_and_that_over_class(
    random_weight: Make,
    quantized_file: Save,
    targets_of_small: list[str],
    targets_of_large: list[str],
    expected: int,
) -> None:
    groups = {
        "group_0": group(targets_of_small),
        "group_1": group(targets_of_large, num_bits=8),
    }
    weight = random_weight(replace(G32, bits=expected), 32, 64)
    folder = quantized_file(CT, {NAME: weight}, settings={"config_groups": groups})
    assert opened(folder).layers[NAME].bits == expected


def test_layer_that_no_target_matches_is_named(random_weight: Make, quantized_file: Save) -> None:
    settings = {"config_groups": {"group_0": group([OTHER])}}
    folder = quantized_file(CT, {NAME: random_weight(G32, 32, 64)}, settings=settings)
    with pytest.raises(FormatError, match=f"{NAME} is quantized, but no target of group_0"):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


def test_four_bits_in_bytes_are_read(random_weight: Make, quantized_file: Save) -> None:
    # What llm-compressor writes for W4A8 unless it is told otherwise.
    scheme = Scheme(group_size=32, activations="int8")
    weight = random_weight(scheme, 32, 64)
    settings = {"format": "int-quantized", "config_groups": {"g": group(["Linear"], TOKEN)}}
    tensors = {
        f"{NAME}.weight": weight.centered().to(torch.int8),
        f"{NAME}.weight_packed": None,
        f"{NAME}.weight_shape": None,
    }
    read = opened(quantized_file(CT, {NAME: weight}, settings=settings, tensors=tensors))
    assert read.layers == {NAME: scheme}
    assert torch.equal(read.weight(NAME).codes, weight.codes)


def test_bytes_beyond_the_bits_are_refused(random_weight: Make, quantized_file: Save) -> None:
    weight = random_weight(W8A8, 32, 64)
    groups = {"g": group(["Linear"], TOKEN, strategy="channel", group_size=None)}
    folder = quantized_file(CT, {NAME: weight}, settings={"config_groups": groups})
    with pytest.raises(FormatError, match=r"up_proj.weight holds -\d+ to \d+, beyond 4 bits"):
        opened(folder).weight(NAME)


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)], ids=str)
def test_scale_of_a_whole_tensor_is_one_of_every_row(
    random_weight: Make, quantized_file: Save, shape: tuple[int, ...]
) -> None:
    weight = random_weight(W8A8, 32, 64)
    groups = {"g": group(["Linear"], TOKEN, num_bits=8, strategy="tensor", group_size=None)}
    scale = torch.full(shape, 0.5)
    folder = quantized_file(
        CT,
        {NAME: weight},
        settings={"config_groups": groups},
        tensors={f"{NAME}.weight_scale": scale},
    )
    found = opened(folder).weight(NAME)
    assert found.scales.shape == (32, 1)
    assert torch.equal(found.dequantize(), weight.centered() * 0.5)


def test_unpacked_zero_points_of_early_files_are_read(
    random_weight: Make, quantized_file: Save
) -> None:
    weight = random_weight(replace(G32, sym=False), 32, 64)
    assert weight.zeros is not None
    signed = (weight.zeros.to(torch.int16) - 8).to(torch.int8)
    folder = quantized_file(CT, {NAME: weight}, tensors={f"{NAME}.weight_zero_point": signed})
    assert torch.equal(opened(folder).weight(NAME).dequantize(), weight.dequantize())


def test_zero_points_of_symmetric_weights_must_be_zero(
    random_weight: Make, quantized_file: Save
) -> None:
    weight = random_weight(W8A8, 32, 64)
    zeros = torch.zeros(32, 1, dtype=torch.int8)
    name = f"{NAME}.weight_zero_point"
    folder = quantized_file(CT, {NAME: weight}, tensors={name: zeros})
    assert torch.equal(opened(folder).weight(NAME).dequantize(), weight.dequantize())
    folder = quantized_file(CT, {NAME: weight}, tensors={name: zeros + 1})
    with pytest.raises(FormatError, match="says symmetric"):
        opened(folder).weight(NAME)


def test_groups_out_of_order_of_early_files_are_read(
    random_weight: Make, quantized_file: Save
) -> None:
    weight = random_weight(G32, 32, 64)
    order = weight.group_of_channel().flip(0).to(torch.int32)
    expected = replace(weight, g_idx=order)
    name = f"{NAME}.weight_g_idx"
    found = opened(quantized_file(CT, {NAME: weight}, tensors={name: order})).weight(NAME)
    assert torch.equal(found.dequantize(), expected.dequantize())
    never_set = quantized_file(CT, {NAME: weight}, tensors={name: torch.full_like(order, -1)})
    assert opened(never_set).weight(NAME).g_idx is None


def test_width_that_fills_no_word_comes_from_the_stored_shape(
    random_weight: Make, quantized_file: Save
) -> None:
    weight = random_weight(Scheme(bits=3, group_size=-1), 5, 21)
    read = opened(quantized_file(CT, {NAME: weight}))
    assert read.shape(NAME) == (5, 21)
    assert torch.equal(read.weight(NAME).codes, weight.codes)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"format": "float-quantized"}, "format 'float-quantized'"),
    ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    ({"format": "marlin-24"}, "format 'marlin-24'"),
    ({"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
    ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ({"transform_config": {"config_groups": {}}}, "transform_config"),
    ({"sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
    ({"config_groups": {}}, "lacks config_groups"),
    ({"config_groups": {"W4A16": ["Linear"]}}, "no settings of weights"),
    ({"config_groups": {"g": group(["Linear"], type="float")}}, "type 'float'"),
    ({"config_groups": {"g": group(["Linear"], num_bits=5)}}, "bits is 5"),
    ({"config_groups": {"g": group(["Linear"], strategy="block")}}, "strategy 'block'"),
    (
        {"config_groups": {"g": group(["Linear"], TOKEN | {"dynamic": False})}},
        "input activations of .*dynamic False",
    ),
    (
        {"config_groups": {"g": group(["Linear"], TOKEN | {"type": "float"})}},
        "input activations of .*type float",
    ),
    (
        {"config_groups": {"g": group(["Linear"]) | {"output_activations": TOKEN}}},
        "quantizes outputs",
    ),
    ({"config_groups": {"g": group(["Linear"]) | {"format": "mxfp4"}}}, "format 'mxfp4'"),
    ({"config_groups": {"g": group(["Linear"]) | {"targets": "Linear"}}}, "targets 'Linear'"),
]


@pytest.mark.parametrize(("settings", "message"), UNSUPPORTED, ids=[m for _, m in UNSUPPORTED])
def test_what_is_not_read_is_refused_by_name(
    random_weight: Make, quantized_file: Save, settings: dict[str, Any], message: str
) -> None:
    folder = quantized_file(CT, {NAME: random_weight(G32, 32, 64)}, settings=settings)
    with pytest.raises(FormatError, match=message):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("weight_scale", torch.ones(32, 4), r"weight_packed is int32 \[32, 8\], expected .* 16\]"),
        ("weight_scale", torch.ones(16, 2), r"weight_scale is float32 \[16, 2\]"),
        ("weight_scale", None, "has no tensor .*weight_scale"),
        ("weight_packed", None, "has .*weight_scale, but no .*weight_packed"),
        ("weight_packed", torch.zeros(32, 8), "expected int32"),
        ("weight_shape", None, "lacks .*weight_shape"),
    ],
)
def test_tensors_that_contradict_the_group_are_named_when_opened(
    random_weight: Make, quantized_file: Save, part: str, tensor: Tensor | None, message: str
) -> None:
    folder = quantized_file(
        CT, {NAME: random_weight(G32, 32, 64)}, tensors={f"{NAME}.{part}": tensor}
    )
    with pytest.raises(CheckpointError, match=message):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


@pytest.mark.parametrize("scheme", [G32, Scheme(group_size=-1)])
def test_stored_shape_that_contradicts_the_words_is_refused(
    random_weight: Make, quantized_file: Save, scheme: Scheme
) -> None:
    folder = quantized_file(
        CT,
        {NAME: random_weight(scheme, 32, 64)},
        tensors={f"{NAME}.weight_shape": torch.tensor([32, 80])},
    )
    with pytest.raises(FormatError, match="weight_shape"):
        opened(folder).weight(NAME)
