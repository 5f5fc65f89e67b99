"""A conversion keeps every number or is refused, and leaves a whole folder or none."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.cli.main import main
from llmbench.quant import convert as module
from llmbench.quant.checkpoint import INDEX, Checkpoint
from llmbench.quant.config import Format, Scheme
from llmbench.quant.convert import convert
from llmbench.quant.errors import ConfigError, FormatError, QuantError, VerificationError
from llmbench.quant.formats.bnb import Bitsandbytes
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.output_folder import MANIFEST
from llmbench.quant.quantized_weight import QuantizedWeight
from llmbench.quant.verify import verify_checkpoint

Make = Callable[..., QuantizedWeight]
Save = Callable[..., Path]

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
G32 = Scheme(group_size=32)
ASYM = Scheme(group_size=32, sym=False)
W8A8 = Scheme(bits=8, group_size=-1, activations="int8")
W4A8 = Scheme(bits=4, group_size=-1, activations="int8")
PLAIN = {
    "model.norm.weight": torch.arange(64.0).bfloat16(),
    f"{UP}.bias": torch.arange(128.0).bfloat16(),
    "model.layers.1.mlp.up_proj.weight": torch.ones(128, 64).bfloat16(),
}


@pytest.fixture
def source(random_weight: Make, quantized_file: Save) -> Callable[..., Path]:
    """Save two layers of a scheme beside ordinary tensors, in a bfloat16 model."""

    def save(file_format: Any, scheme: Scheme, dtype: str = "float16", **more: Any) -> Path:
        weights = {
            UP: random_weight(scheme, 128, 64, dtype=dtype),
            DOWN: random_weight(scheme, 64, 128, seed=1, dtype=dtype),
        }
        return quantized_file(
            file_format, weights, plain=PLAIN, config={"dtype": "bfloat16"}, **more
        )

    return save


def opened(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


def tensors(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.get(name) for name in checkpoint.names}


LOSSLESS: list[tuple[Format, Scheme, Format]] = [
    ("gptq", G32, "gptq_v2"),
    ("gptq_v2", G32, "gptq"),
    ("gptq_v2", ASYM, "gptq"),
    ("gptq", G32, "awq"),
    ("gptq", Scheme(bits=3, group_size=32), "compressed-tensors"),
    ("gptq", Scheme(bits=8, group_size=-1), "compressed-tensors"),
    ("awq", ASYM, "gptq_v2"),
    ("awq", ASYM, "compressed-tensors"),
    ("compressed-tensors", G32, "gptq"),
    ("compressed-tensors", ASYM, "awq"),
    ("compressed-tensors", W4A8, "qqq"),
    ("qqq", W4A8, "compressed-tensors"),
    ("compressed-tensors", W8A8, "bitsandbytes"),
]


@pytest.mark.parametrize(
    ("start", "scheme", "target"), LOSSLESS, ids=[f"{a}-{b.name}-{c}" for a, b, c in LOSSLESS]
)
def test_there_and_back_is_the_same_file(
    source: Callable[..., Path], tmp_path: Path, start: Format, scheme: Scheme, target: Format
) -> None:
    # Scales of few bits: both float16 and bfloat16 hold them.
    dtype = {"compressed-tensors": "bfloat16", "qqq": "float32"}.get(start, "float16")
    folder = source(start, scheme, dtype)
    there, back = tmp_path / "there", tmp_path / "back"
    done = convert(folder, target, there)
    assert (done.source_format, done.target_format) == (start, target)
    assert (done.num_layers, done.num_tensors) == (2, 3)
    first, second = opened(folder), opened(there)
    assert second.format == target
    for name in (UP, DOWN):
        assert torch.equal(first.weight(name).dequantize(), second.weight(name).dequantize())
        assert first.layers[name].activations == second.layers[name].activations
    convert(there, start, back)
    before, after = tensors(folder), tensors(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name])


def test_symmetric_weights_of_awq_become_symmetric_ones(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    # AWQ files spell them with zero-points of 8, which GPTQ readers would call asymmetric.
    convert(source("awq", G32), "gptq", tmp_path / "out")
    assert opened(tmp_path / "out").layers == {UP: G32, DOWN: G32}


def test_other_tensors_are_carried_byte_for_byte(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    convert(source("gptq", G32), "awq", tmp_path / "out")
    found = tensors(tmp_path / "out")
    for name, tensor in PLAIN.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_skipped_layers_are_said_to_be_skipped(source: Callable[..., Path], tmp_path: Path) -> None:
    convert(source("gptq", G32), "compressed-tensors", tmp_path / "out")
    settings = Checkpoint.open(tmp_path / "out").config["quantization_config"]
    assert "model.layers.1.mlp.up_proj" in settings["ignore"]


def test_config_keeps_all_but_the_quantization(source: Callable[..., Path], tmp_path: Path) -> None:
    folder = source("gptq", G32)
    convert(folder, "awq", tmp_path / "out")
    before, after = Checkpoint.open(folder).config, Checkpoint.open(tmp_path / "out").config
    assert after.pop("quantization_config")["quant_method"] == "awq"
    before.pop("quantization_config")
    assert before == after


def test_every_other_file_is_copied_and_stale_ones_are_not(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = source("gptq", G32)
    kept = ("tokenizer.json", "generation_config.json", "chat_template.jinja", "modeling_own.py")
    for name in kept:
        (folder / name).write_text(f"the {name}")
    for name in ("quantize_config.json", "quant_config.json"):
        (folder / name).write_text("{}")
    (folder / "pytorch_model.bin").write_text("the same weights once more")
    (folder / ".cache").mkdir()
    convert(folder, "compressed-tensors", tmp_path / "out")
    expected = {"config.json", "model.safetensors", MANIFEST, *kept}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected
    for name in kept:
        assert (tmp_path / "out" / name).read_text() == f"the {name}"


def test_gptq_files_get_their_sidecar(source: Callable[..., Path], tmp_path: Path) -> None:
    convert(source("awq", G32), "gptq", tmp_path / "out")
    settings = Checkpoint.open(tmp_path / "out").config["quantization_config"]
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text()) == settings


def test_shards_have_an_index_and_one_file_has_none(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = source("gptq", G32)
    convert(folder, "awq", tmp_path / "many", max_shard_bytes=8192)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "many" / INDEX).exists()
    convert(tmp_path / "many", "gptq", tmp_path / "one")
    assert not (tmp_path / "one" / INDEX).exists()
    assert torch.equal(
        opened(tmp_path / "one").weight(UP).dequantize(), opened(folder).weight(UP).dequantize()
    )


def test_groups_out_of_order_go_between_the_versions_of_gptq(
    random_weight: Make, quantized_file: Save, tmp_path: Path
) -> None:
    weight = random_weight(G32, 128, 64)
    shuffled = replace(weight, g_idx=weight.group_of_channel().flip(0).to(torch.int32))
    folder = quantized_file("gptq", {UP: shuffled}, desc_act=True)
    convert(folder, "gptq_v2", tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").config["quantization_config"]["desc_act"] is True
    assert torch.equal(opened(tmp_path / "out").weight(UP).dequantize(), shuffled.dequantize())
    with pytest.raises(FormatError, match="desc_act"):
        convert(folder, "awq", tmp_path / "awq")


def test_scales_beyond_the_model_s_type_stay_what_they_are(
    random_weight: Make, quantized_file: Save, tmp_path: Path
) -> None:
    weight = random_weight(G32, 128, 64)
    weight.scales[0, 0] = 1 + 2.0**-10  # In float16, not in bfloat16.
    folder = quantized_file("gptq", {UP: weight}, plain=PLAIN, config={"dtype": "bfloat16"})
    done = convert(folder, "compressed-tensors", tmp_path / "out")
    assert opened(tmp_path / "out").weight(UP).scales.dtype == torch.float16
    assert "scales stay float16: bfloat16, the model's type" in done.notes[0]


def test_scales_that_the_model_s_type_holds_take_it(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    done = convert(source("gptq", G32), "compressed-tensors", tmp_path / "out")
    assert opened(tmp_path / "out").weight(UP).scales.dtype == torch.bfloat16
    assert done.notes == ()


def test_scale_that_the_target_cannot_hold_is_named(
    random_weight: Make, quantized_file: Save, tmp_path: Path
) -> None:
    weight = random_weight(G32, 128, 64, dtype="bfloat16")
    weight.scales[3, 1] = 2.0**17
    folder = quantized_file("compressed-tensors", {UP: weight}, plain=PLAIN)
    with pytest.raises(FormatError, match=rf"{UP} has a scale of 131072\.0 in bfloat16"):
        convert(folder, "gptq", tmp_path / "out")


@pytest.mark.parametrize(
    ("start", "scheme", "target", "reason"),
    [
        ("gptq", Scheme(bits=8, group_size=32), "awq", "hold 4 bits, not 8"),
        ("gptq", Scheme(group_size=-1), "awq", "group_size -1"),
        ("gptq", G32, "qqq", "int8 activations"),
        ("gptq", G32, "bitsandbytes", "8 bits"),
        ("compressed-tensors", W8A8, "gptq", "activations are rounded"),
        ("compressed-tensors", W4A8, "awq", "activations are rounded"),
        ("compressed-tensors", replace(W4A8, group_size=32), "qqq", "groups of -1 or 128"),
        ("qqq", W4A8, "gptq", "activations are rounded"),
    ],
)
def test_what_the_target_cannot_hold_is_refused_with_layer_and_reason(
    source: Callable[..., Path],
    tmp_path: Path,
    start: Format,
    scheme: Scheme,
    target: Format,
    reason: str,
) -> None:
    folder = source(start, scheme)
    with pytest.raises(FormatError, match=rf"{reason}.* \(model\.layers\.0\.mlp\.\w+\)"):
        convert(folder, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_zero_point_of_0_is_refused_where_it_cannot_be(
    random_weight: Make, quantized_file: Save, tmp_path: Path
) -> None:
    weight = random_weight(ASYM, 128, 64)
    assert weight.zeros is not None
    weight.zeros[5, 1] = 0
    folder = quantized_file("awq", {UP: weight}, plain=PLAIN)
    with pytest.raises(FormatError, match=f"{UP} has a zero-point of 0"):
        convert(folder, "gptq", tmp_path / "out")
    convert(folder, "gptq_v2", tmp_path / "out")


def test_two_levels_of_scales_stay_in_qqq(
    random_weight: Make, quantized_file: Save, tmp_path: Path
) -> None:
    scheme = replace(W4A8, group_size=128)
    weight = random_weight(scheme, 128, 128)
    weight = replace(weight, scales=weight.scales * 100, channel_scales=torch.ones(128))
    folder = quantized_file("qqq", {UP: weight}, plain=PLAIN)
    with pytest.raises(FormatError, match="two levels of scales"):
        convert(folder, "compressed-tensors", tmp_path / "out")


def test_outlier_columns_stay_in_bitsandbytes(
    random_weight: Make, quantized_file: Save, tmp_path: Path
) -> None:
    weight = random_weight(W8A8, 128, 64, dtype="float32")
    weight = replace(weight, scales=torch.ones(128, 1) / 127, outlier_threshold=6.0)
    folder = quantized_file("bitsandbytes", {UP: weight}, plain=PLAIN)
    with pytest.raises(FormatError, match=r"channels of 6\.0 and above"):
        convert(folder, "compressed-tensors", tmp_path / "out")
    plain = quantized_file(Bitsandbytes(0.0), {UP: replace(weight, outlier_threshold=None)})
    convert(plain, "compressed-tensors", tmp_path / "out")


def test_weights_alone_go_where_activations_cannot(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = source("compressed-tensors", replace(W4A8, group_size=32))
    convert(folder, "gptq", tmp_path / "out", weights_only=True)
    read = opened(tmp_path / "out")
    assert read.layers[UP] == G32
    assert torch.equal(read.weight(UP).dequantize(), opened(folder).weight(UP).dequantize())


def test_layers_that_differ_keep_their_schemes(
    random_weight: Make, quantized_file: Save, tmp_path: Path
) -> None:
    wide = Scheme(bits=8, group_size=-1)
    weights = {UP: random_weight(G32, 128, 64), DOWN: random_weight(wide, 64, 128)}
    folder = quantized_file("gptq", weights, plain=PLAIN)
    convert(folder, "compressed-tensors", tmp_path / "out")
    assert opened(tmp_path / "out").layers == {UP: G32, DOWN: wide}
    with pytest.raises(FormatError):
        convert(folder, "awq", tmp_path / "awq")


def test_same_format_and_plain_checkpoints_are_nothing_to_convert(
    source: Callable[..., Path], tmp_path: Path, zero_checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match="in the format gptq already"):
        convert(source("gptq", G32), "gptq", tmp_path / "out")
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 8,
    }
    with pytest.raises(ConfigError, match="is not quantized") as refusal:
        convert(zero_checkpoint(config), "gptq", tmp_path / "out")
    assert "llmbench quantize" in refusal.value.__notes__[0]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_output_that_exists_is_left_alone(
    source: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "out"
    if kind == "folder":
        output.mkdir()
    elif kind == "file":
        output.write_text("mine")
    else:
        output.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists"):
        convert(source("gptq", G32), "awq", output)
    assert not list(tmp_path.glob(".out*"))
    assert kind != "file" or output.read_text() == "mine"


@pytest.mark.parametrize("place", ["write_checkpoint", "_write_other_files", "_prove"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_nothing_is_left_of_a_conversion_that_ends_early(
    source: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: BaseException | type[BaseException],
) -> None:
    folder = source("gptq", G32)
    real = getattr(module, place)

    def interrupted(*arguments: Any, **more: Any) -> None:
        real(*arguments, **more)
        raise error

    monkeypatch.setattr(module, place, interrupted)
    with pytest.raises((KeyboardInterrupt, QuantError)):
        convert(folder, "awq", tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_rest_of_a_killed_conversion_is_replaced(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model-00001-of-00009.safetensors").write_text("half")
    convert(source("gptq", G32), "awq", tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


def test_output_is_as_readable_as_any_new_folder(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    convert(source("gptq", G32), "awq", tmp_path / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~mask


def test_file_that_reads_back_otherwise_is_no_result(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmbench.quant.formats.awq import AWQ

    honest = AWQ.tensors

    def shifted(self: AWQ, name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        made = honest(self, name, weight)
        if name == DOWN and not weight.codes.is_meta:
            made[f"{name}.qzeros"] += 0x11111111
        return made

    monkeypatch.setattr(AWQ, "tensors", shifted)
    with pytest.raises(VerificationError, match=f"{DOWN} reads back as other numbers"):
        convert(source("gptq", G32), "awq", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_manifest_proves_the_new_file(source: Callable[..., Path], tmp_path: Path) -> None:
    folder = source("gptq", G32)
    (folder / MANIFEST).write_text(json.dumps({"base_digest": "of the base", "format": "gptq"}))
    convert(folder, "awq", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["base_digest"] == "of the base"
    assert manifest["format"] == "awq"
    assert manifest["converted_from"] == {
        "format": "gptq",
        "digest": Checkpoint.open(folder).digest,
    }
    assert verify_checkpoint(tmp_path / "out").num_layers == 2


def test_progress_counts_every_tensor_once(source: Callable[..., Path], tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    folder = source("gptq", G32)
    convert(folder, "awq", tmp_path / "out", on_progress=lambda *call: calls.append(call))
    num_written = len(Checkpoint.open(tmp_path / "out").names)
    assert calls == [
        *(("write", i, num_written) for i in range(1, num_written + 1)),
        *(("prove", i, 5) for i in range(1, 6)),
    ]


# The command


def test_command_prints_the_folder_and_what_was_proved(
    source: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, output = source("gptq", G32), tmp_path / "out"
    assert main(["convert", str(folder), "--format", "awq", "-o", str(output)]) == 0
    out, err = capfd.readouterr()
    assert out == f"{output}\n"
    assert "2 quantized layers dequantized equal, 3 other tensors equal byte for byte" in err


def test_command_gives_one_json_document(
    source: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    command = ["convert", str(source("gptq", G32)), "--format", "awq", "-o", str(output)]
    assert main([*command, "--json", "--max-shard-size", "8kB"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["output"] == str(output)
    assert (document["source_format"], document["target_format"]) == ("gptq", "awq")
    assert len(list(output.glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--format", "gptq"], 2, "already"),
        (["--format", "bitsandbytes"], 3, "8 bits"),
        (["--format", "gguf"], 2, "gguf"),
        ([], 2, "--format"),
    ],
)
def test_command_says_by_its_exit_code_who_is_to_change(
    source: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    command = ["convert", str(source("gptq", G32)), "-o", str(tmp_path / "out"), *arguments]
    assert main(command) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_command_names_the_flag_that_leaves_activations_out(
    source: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = source("compressed-tensors", replace(W4A8, group_size=32))
    command = ["convert", str(folder), "--format", "gptq", "-o", str(tmp_path / "out")]
    assert main(command) == 3
    assert "hint: --weights-only" in capfd.readouterr().err
    assert main([*command, "--weights-only"]) == 0
