"""A quantized checkpoint is known by its config, its tensors are checked, others are refused."""

import contextlib
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Format, Scheme
from llmbench.quant.errors import CheckpointError, FormatError
from llmbench.quant.formats.bnb import Bitsandbytes
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.quantized_weight import QuantizedWeight

Make = Callable[..., QuantizedWeight]
Save = Callable[..., Path]
NAME = "model.layers.0.mlp.up_proj"
G32 = Scheme(group_size=32)
W8A8 = Scheme(bits=8, group_size=-1, activations="int8")


def opened(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.fixture
def folder(random_weight: Make, quantized_file: Save) -> Path:
    plain = {
        "model.norm.weight": torch.ones(64),
        f"{NAME}.bias": torch.zeros(32),
        "model.layers.0.mlp.down_proj.weight": torch.ones(64, 32),
    }
    return quantized_file("gptq", {NAME: random_weight(G32, 32, 64)}, plain=plain)


def test_plain_checkpoint_has_no_quantized_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({f"{NAME}.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert QuantizedCheckpoint.of(Checkpoint.open(tmp_path)) is None


def test_biases_norms_and_skipped_layers_stay_ordinary(folder: Path) -> None:
    read = opened(folder)
    assert list(read.layers) == [NAME]
    assert set(Checkpoint.open(folder).names) - read.consumed == {
        "model.norm.weight",
        f"{NAME}.bias",
        "model.layers.0.mlp.down_proj.weight",
    }
    assert set(read.tensors(NAME)) == read.consumed


def test_layers_come_in_the_order_of_the_files(random_weight: Make, quantized_file: Save) -> None:
    names = [f"model.layers.{i}.mlp.up_proj" for i in (2, 0, 1)]
    for file_format in ("gptq", "compressed-tensors"):
        written = quantized_file(file_format, {name: random_weight(G32, 32, 64) for name in names})
        stored = [name.rpartition(".")[0] for name in Checkpoint.open(written).names]
        assert list(opened(written).layers) == list(dict.fromkeys(stored))


def test_parameters_are_read_without_codes(folder: Path) -> None:
    read = opened(folder)
    parameters, weight = read.parameters(NAME), read.weight(NAME)
    assert torch.equal(parameters.scales, weight.scales)
    assert parameters.codes.is_meta
    assert parameters.codes.shape == weight.codes.shape
    assert parameters.scheme == weight.scheme


def test_layer_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no quantized layer lm_head"):
        opened(folder).weight("lm_head")


@pytest.mark.parametrize(
    "method", ["hqq", "eetq", "fp8", "mxfp4", "auto-round", "torchao", "quanto", 7]
)
def test_unknown_method_is_refused_by_name_with_what_is_read(folder: Path, method: object) -> None:
    rewrite(folder, lambda config: config["quantization_config"].update(quant_method=method))
    with pytest.raises(FormatError, match=re.escape(f"quant_method {method!r}")) as refusal:
        opened(folder)
    for name in ("gptq", "awq", "qqq", "compressed-tensors", "bitsandbytes"):
        assert name in refusal.value.__notes__[0]


@pytest.mark.parametrize("version", ["marlin", "gptq_p", "bitblas", "exllama"])
def test_unknown_gptq_layout_is_refused_by_name(folder: Path, version: str) -> None:
    rewrite(folder, lambda config: config["quantization_config"].update(checkpoint_format=version))
    with pytest.raises(FormatError, match=f"checkpoint_format '{version}'"):
        opened(folder)


def test_old_marlin_files_are_refused(folder: Path) -> None:
    rewrite(folder, lambda config: config["quantization_config"].update(is_marlin_format=True))
    with pytest.raises(FormatError, match="marlin"):
        opened(folder)


@pytest.mark.parametrize("file_name", ["quantize_config.json", "quant_config.json"])
def test_settings_of_old_files_are_found_beside_the_config(folder: Path, file_name: str) -> None:
    settings: dict[str, Any] = {}

    def move(config: dict[str, Any]) -> None:
        settings.update(config.pop("quantization_config"))
        settings.pop("quant_method")
        settings.pop("checkpoint_format")

    rewrite(folder, move)
    (folder / file_name).write_text(json.dumps(settings))
    assert opened(folder).format == "gptq"


def test_settings_of_old_awq_files_are_told_by_their_names(
    random_weight: Make, quantized_file: Save
) -> None:
    weight = random_weight(Scheme(group_size=32, sym=False), 32, 64)
    folder = quantized_file("awq", {NAME: weight})
    rewrite(folder, lambda config: config.pop("quantization_config"))
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(settings))
    assert torch.equal(opened(folder).weight(NAME).dequantize(), weight.dequantize())


def test_settings_of_the_text_model_are_found(folder: Path) -> None:
    def nest(config: dict[str, Any]) -> None:
        config["text_config"] = {"quantization_config": config.pop("quantization_config")}

    rewrite(folder, nest)
    assert list(opened(folder).layers) == [NAME]


def test_quantized_tensors_without_settings_are_refused(folder: Path) -> None:
    rewrite(folder, lambda config: config.pop("quantization_config"))
    with pytest.raises(FormatError, match=f"quantized tensor {NAME}.qweight, but neither"):
        opened(folder)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_broken_settings_file_is_named(folder: Path, text: str) -> None:
    rewrite(folder, lambda config: config.pop("quantization_config"))
    (folder / "quantize_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"quantize_config\.json is not JSON"):
        opened(folder)


def test_settings_that_are_no_object_are_refused(folder: Path) -> None:
    rewrite(folder, lambda config: config.update(quantization_config="gptq"))
    with pytest.raises(CheckpointError, match=r"of config\.json is a JSON str"):
        opened(folder)


def test_settings_without_any_quantized_layer_are_refused(tmp_path: Path) -> None:
    settings = FORMATS["gptq"].quantization_config({NAME: G32}, None)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    save_file({f"{NAME}.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="gptq by its quantization_config, but none"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("file_format", "scales"), [("compressed-tensors", "weight_scale"), ("bitsandbytes", "SCB")]
)
def test_integers_whose_scales_are_lost_are_no_weights(
    random_weight: Make, quantized_file: Save, file_format: str, scales: str
) -> None:
    other = "model.layers.1.mlp.up_proj"
    weight = random_weight(W8A8, 32, 64, dtype="float32")
    weight.scales[:] = 1 / 127
    chosen = Bitsandbytes(0.0) if file_format == "bitsandbytes" else file_format
    lost = {f"{other}.{scales}": None, f"{other}.weight_format": None}
    folder = quantized_file(chosen, {NAME: weight, other: weight}, tensors=lost)
    with pytest.raises(CheckpointError, match=f"{other}.weight is int8 and has no scales"):
        opened(folder)


@pytest.mark.parametrize("value", [None, "x", [], ["x"], {"a": 1}, -7, 1e300, True], ids=str)
@pytest.mark.parametrize("file_format", FORMATS)
def test_settings_of_any_kind_are_read_or_refused(
    random_weight: Make, quantized_file: Save, file_format: Format, value: object
) -> None:
    schemes = {
        "awq": Scheme(group_size=32, sym=False),
        "qqq": Scheme(group_size=-1, activations="int8"),
        "bitsandbytes": W8A8,
    }
    weight = random_weight(schemes.get(file_format, G32), 128, 64, dtype="float32")
    weight.scales[:] = 0.5
    chosen = Bitsandbytes(0.0) if file_format == "bitsandbytes" else file_format
    folder = quantized_file(chosen, {NAME: weight})
    original = json.loads((folder / "config.json").read_text())["quantization_config"]

    def places(settings: Any) -> Iterator[tuple[Any, str]]:
        for key in list(settings):
            yield settings, key
            if isinstance(settings[key], dict):
                yield from places(settings[key])

    for number in range(len(list(places(original)))):
        settings = json.loads(json.dumps(original))
        holder, key = list(places(settings))[number]
        holder[key] = value
        rewrite(folder, lambda config, new=settings: config.update(quantization_config=new))  # type: ignore[misc]
        # No other error than ours, whatever a file claims.
        with contextlib.suppress(FormatError, CheckpointError):
            read = QuantizedCheckpoint.of(Checkpoint.open(folder))
            assert read is None or read.weight(NAME).codes.shape == (128, 64)


@pytest.mark.parametrize("scheme", [G32, Scheme(group_size=-1), W8A8], ids=str)
def test_opening_needs_no_torch(random_weight: Make, quantized_file: Save, scheme: Scheme) -> None:
    folder = quantized_file("compressed-tensors", {NAME: random_weight(scheme, 32, 64)})
    code = f"""
        import sys
        for module in ("torch", "numpy", "transformers"):
            sys.modules[module] = None
        from llmbench.quant.checkpoint import Checkpoint
        from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
        read = QuantizedCheckpoint.of(Checkpoint.open({str(folder)!r}))
        print(read.shape({NAME!r}), read.format)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert run.stderr == ""
    assert run.stdout == "(32, 64) compressed-tensors\n"
