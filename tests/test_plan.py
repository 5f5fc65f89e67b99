"""The plan of a quantization: what it decides, and what it refuses before anything is computed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from llmbench.quant import run_costs
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import (
    DEFAULT_SCHEMES,
    METHODS,
    Format,
    Method,
    Override,
    QuantConfig,
    Scheme,
)
from llmbench.quant.errors import ConfigError
from llmbench.quant.plan import QuantPlan, chosen_transform, plan_run

Save = Callable[..., Path]
Plans = Callable[..., QuantPlan]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
IN_176 = {**LLAMA, "hidden_size": 64, "intermediate_size": 176, "num_key_value_heads": 4}
"""Case C04: the input of down_proj is 176 wide."""
BLOCK = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config_of(
    method: Method, *, overrides: tuple[Override, ...] = (), **changes: Any
) -> QuantConfig:
    own = DEFAULT_SCHEMES[method]
    names = ("bits", "group_size", "sym", "activations")
    scheme = {name: changes.pop(name, getattr(own, name)) for name in names}
    return QuantConfig(method=method, scheme=Scheme(**scheme), overrides=overrides, **changes)


@pytest.fixture
def plan(zero_checkpoint: Save) -> Plans:
    """Plan a run over a checkpoint of zeros with these settings and tensors."""

    def make(
        config: QuantConfig, settings: dict[str, Any] = LLAMA, tensors: Any = None, **more: Any
    ) -> QuantPlan:
        return plan_run(Checkpoint.open(zero_checkpoint(settings, tensors)), config, **more)

    return make


def notes(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return "\n".join(getattr(error.value, "__notes__", ()))


# What it decides


def test_every_linear_layer_has_a_scheme_or_a_reason(plan: Plans) -> None:
    planned = plan(config_of("gptq", overrides=(Override(pattern=r"layers\.0\.", skip=True),)))
    assert len(planned.layers) == 2 * len(BLOCK) + 1
    assert set(planned.schemes) == {item.name for item in planned.layers if ".1." in item.name}
    assert planned.kept["lm_head"] == "output head"
    assert planned.kept["model.layers.0.mlp.up_proj"] == r"skipped by 'layers\\.0\\.'"
    assert all(item.bytes_after == item.bytes_before for item in planned.layers if not item.scheme)


def test_first_rule_that_matches_decides(plan: Plans) -> None:
    rules = (
        Override(pattern=r"layers\.1\.mlp\.down_proj", bits=8),
        Override(pattern="down_proj", bits=3, group_size=32),
    )
    schemes = plan(config_of("gptq", overrides=rules)).schemes
    assert schemes["model.layers.1.mlp.down_proj"] == Scheme(bits=8)
    assert schemes["model.layers.0.mlp.down_proj"] == Scheme(bits=3, group_size=32)
    assert schemes["model.layers.0.mlp.up_proj"] == Scheme()


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("rtn", {}, "gptq"),
        ("gptq", {}, "gptq"),
        ("gptq", {"sym": False}, "compressed-tensors"),
        ("awq", {}, "awq"),
        ("qqq", {}, "qqq"),
        ("qqq", {"group_size": 64}, "compressed-tensors"),
        ("smoothquant", {}, "compressed-tensors"),
        ("int8", {}, "bitsandbytes"),
    ],
)
def test_methods_write_the_file_that_most_can_load(
    plan: Plans, method: Method, changes: dict[str, Any], expected: Format
) -> None:
    planned = plan(config_of(method, **changes))
    assert planned.format == expected
    assert planned.format_reason


def test_w4a8_of_shapes_without_tiles_says_why_it_goes_elsewhere(plan: Plans) -> None:
    narrow = {**LLAMA, "hidden_size": 64, "intermediate_size": 192}
    planned = plan(config_of("qqq", group_size=-1), narrow)
    assert planned.format == "compressed-tensors"
    assert "no tile of qqq's kernel" in planned.format_reason


def test_head_dim_that_is_not_hidden_over_heads_is_taken_from_the_tensors(plan: Plans) -> None:
    """Case C12."""
    settings = {**LLAMA, "model_type": "qwen3", "hidden_size": 64, "head_dim": 32}
    planned = plan(config_of("gptq", group_size=32), settings)
    shapes = {
        item.name: (item.layer.out_features, item.layer.in_features) for item in planned.layers
    }
    assert shapes["model.layers.0.self_attn.q_proj"] == (128, 64)
    assert shapes["model.layers.0.self_attn.k_proj"] == (64, 64)
    assert shapes["model.layers.0.self_attn.o_proj"] == (64, 128)


@pytest.mark.parametrize("file_format", get_args(Format))
def test_bytes_are_those_of_the_tensors_that_the_format_makes(file_format: Format) -> None:
    import torch

    from llmbench.quant.formats.registry import FORMATS
    from llmbench.quant.linear_layers import LinearLayer
    from llmbench.quant.quantized_weight import QuantizedWeight

    written = FORMATS[file_format]
    n, c = 128, 256
    layer = LinearLayer(name="layer", out_features=n, in_features=c, block="b.0")
    tried = 0
    for bits in (2, 3, 4, 8):
        for group_size in (-1, 32, 128):
            for sym in (True, False):
                for activations in ("none", "int8"):
                    scheme = Scheme(
                        bits=bits, group_size=group_size, sym=sym, activations=activations
                    )
                    if written.refusal(scheme, n, c) is not None:
                        continue
                    groups = scheme.num_groups(c)
                    is_two_level = file_format == "qqq" and group_size > 0
                    scales = torch.full((n, groups), 2.0**-8)
                    if file_format == "bitsandbytes":
                        scales = torch.full((n, groups), 1.0) / 127
                    weight = QuantizedWeight(
                        bits=bits,
                        group_size=group_size,
                        codes=torch.full((n, c), 1 << (bits - 1), dtype=torch.uint8),
                        scales=scales.to(written.scale_dtype(torch.bfloat16)),
                        zeros=None if sym else torch.ones(n, groups, dtype=torch.uint8),
                        channel_scales=torch.ones(n) if is_two_level else None,
                        activations=scheme.activations,
                        outlier_threshold=6.0 if file_format == "bitsandbytes" else None,
                    )
                    made = written.tensors("layer", weight)
                    size = sum(tensor.nbytes for tensor in made.values())
                    assert run_costs.stored_bytes(file_format, scheme, layer, 2) == size, scheme
                    tried += 1
    assert tried


def test_sizes_add_up(plan: Plans) -> None:
    planned = plan(config_of("rtn"))
    saved = sum(item.bytes_before - item.bytes_after for item in planned.layers)
    assert planned.costs.bytes_after == planned.costs.bytes_before - saved
    assert 0 < planned.costs.bytes_after < planned.costs.bytes_before


def test_more_calibration_tokens_cost_more_time_and_memory(plan: Plans) -> None:
    few, many = (plan(config_of("gptq", num_calibration_samples=count)).costs for count in (8, 128))
    assert few.seconds < many.seconds
    assert few.memory_bytes < many.memory_bytes
    assert few.disk_bytes < many.disk_bytes


def test_rotation_of_tied_embeddings_is_counted_and_told(plan: Plans) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    smooth, rotated = (
        plan(config_of("qqq", transform=transform), tied) for transform in ("smooth", "rotate")
    )
    head_bytes = LLAMA["vocab_size"] * LLAMA["hidden_size"] * 2  # type: ignore[operator]
    assert rotated.costs.bytes_after == smooth.costs.bytes_after + head_bytes
    assert any("come apart" in note for note in rotated.notes)


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", "rotate"), ("gemma2", "smooth"), ("opt", "smooth")]
)
def test_qqq_rotates_where_the_family_allows_it(family: str, expected: str) -> None:
    assert (
        chosen_transform(QuantConfig(method="qqq"), SimpleNamespace(model_type=family)) == expected
    )


def test_plan_is_plain_json(plan: Plans) -> None:
    record = json.loads(json.dumps(plan(config_of("awq")).to_json(), allow_nan=False))
    assert record["format"] == "awq"
    assert QuantConfig.from_json(record["config"]) == config_of("awq")
    assert len(record["layers"]) == 2 * len(BLOCK) + 1


# What it refuses


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "qqq"])
@pytest.mark.parametrize("group_size", [128, 32])
def test_group_size_that_divides_no_input_is_refused_by_module_and_both_numbers(
    plan: Plans, method: Method, group_size: int
) -> None:
    """Case C04."""
    with pytest.raises(ConfigError) as error:
        plan(config_of(method, group_size=group_size), IN_176)
    for part in (str(group_size), "in_features", "model.layers.0."):
        assert part in str(error.value)
    assert "16" in notes(error)


def test_group_size_that_misses_one_kind_of_layer_comes_with_a_rule_for_it(plan: Plans) -> None:
    with pytest.raises(ConfigError, match=r"group_size 32 .* 176 .*down_proj and 1 more") as error:
        plan(config_of("gptq", group_size=32), IN_176)
    assert r"override '(mlp\.down_proj)$:group_size=16'" in notes(error)
    rule = Override(pattern=r"(mlp\.down_proj)$", group_size=16)
    planned = plan(config_of("gptq", group_size=32, overrides=(rule,)), IN_176)
    assert planned.schemes["model.layers.0.mlp.down_proj"].num_groups(176) == 11


@pytest.mark.parametrize("method", ["smoothquant", "int8"])
def test_methods_with_a_scale_a_row_take_any_width(plan: Plans, method: Method) -> None:
    assert plan(config_of(method), IN_176).schemes["model.layers.0.mlp.down_proj"].group_size == -1


@pytest.mark.parametrize("members", ["q_proj", "gate_proj", "(q|k)_proj"])
@pytest.mark.parametrize("change", [{"skip": True}, {"bits": 8}])
def test_layers_that_engines_fuse_stay_alike(
    plan: Plans, members: str, change: dict[str, Any]
) -> None:
    rule = Override(pattern=members, **change)
    with pytest.raises(ConfigError, match="one layer") as error:
        plan(config_of("gptq", overrides=(rule,)))
    assert "match all of them" in notes(error)


def test_whole_fused_groups_may_differ_from_the_rest(plan: Plans) -> None:
    rule = Override(pattern="(q|k|v)_proj$", bits=8)
    schemes = plan(config_of("gptq", overrides=(rule,))).schemes
    assert {schemes[f"model.layers.0.self_attn.{name}"].bits for name in BLOCK[:3]} == {8}


@pytest.mark.parametrize("kind", ["skip", "override"])
def test_pattern_that_matches_nothing_is_refused_with_names_that_exist(
    plan: Plans, kind: str
) -> None:
    rule = Override(pattern="qproj", skip=kind == "skip", bits=None if kind == "skip" else 8)
    with pytest.raises(ConfigError, match=f"{kind} 'qproj' matches no linear layer") as error:
        plan(config_of("gptq", overrides=(rule,)))
    assert "q_proj" in notes(error)


def test_rule_behind_one_that_takes_all_its_layers_is_refused(plan: Plans) -> None:
    rules = (Override(pattern="mlp", bits=8), Override(pattern="up_proj|gate_proj", bits=3))
    with pytest.raises(
        ConfigError, match=r"'up_proj\|gate_proj' has no effect: 'mlp' comes before"
    ):
        plan(config_of("gptq", overrides=rules))


def test_rule_for_a_head_that_stays_is_refused(plan: Plans) -> None:
    with pytest.raises(ConfigError, match="the head stays in full precision") as error:
        plan(config_of("gptq", overrides=(Override(pattern="lm_head", bits=8),)))
    assert "quantize_lm_head" in notes(error)


@pytest.mark.parametrize("is_tied", [True, False])
def test_skipping_the_head_is_what_happens_anyway(plan: Plans, is_tied: bool) -> None:
    rule = Override(pattern="lm_head", skip=True)
    settings = {**LLAMA, "tie_word_embeddings": is_tied}
    assert "lm_head" not in plan(config_of("gptq", overrides=(rule,)), settings).schemes


def test_skipping_everything_is_refused(plan: Plans) -> None:
    with pytest.raises(ConfigError, match="nothing is left to quantize"):
        plan(config_of("rtn", overrides=(Override(pattern=".", skip=True),)))


@pytest.mark.parametrize("settings", [{"tie_word_embeddings": True}, {}])
def test_tied_head_is_not_quantized(plan: Plans, settings: dict[str, Any]) -> None:
    """Case C07: also where the config does not say it, and no head is stored."""
    base = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    with pytest.raises(ConfigError, match="tied to its embeddings"):
        plan(
            config_of("rtn", quantize_lm_head=True),
            {**base, **settings},
            {"lm_head.weight": None},
        )


def test_head_of_its_own_is_quantized_when_asked(plan: Plans) -> None:
    assert "lm_head" in plan(config_of("rtn", quantize_lm_head=True)).schemes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"model_type": "mixtral", "num_local_experts": 4}, None),
        ({"model_type": "qwen2_moe", "num_experts": 8}, None),
        ({}, {"model.layers.0.mlp.experts.0.up_proj.weight": (64, 128)}),
    ],
    ids=["mixtral", "qwen2_moe", "by its tensors"],
)
def test_mixtures_of_experts_are_refused(
    plan: Plans, method: Method, settings: dict[str, Any], tensors: Any
) -> None:
    """Case C01."""
    with pytest.raises(ConfigError, match="mixtures of experts") as error:
        plan(config_of(method), {**LLAMA, **settings}, tensors)
    assert "gptqmodel" in notes(error)


@pytest.mark.parametrize("method", ["awq", "qqq", "smoothquant"])
def test_unknown_families_are_refused_by_name_where_scales_move(
    plan: Plans, method: Method
) -> None:
    with pytest.raises(ConfigError, match="'stablelm'"):
        plan(config_of(method), {**LLAMA, "model_type": "stablelm"})


@pytest.mark.parametrize("method", ["rtn", "gptq", "int8"])
def test_unknown_families_are_planned_where_they_do_not(plan: Plans, method: Method) -> None:
    assert plan(config_of(method), {**LLAMA, "model_type": "stablelm"}).schemes


def test_rotation_of_a_family_that_has_none_is_refused(plan: Plans) -> None:
    with pytest.raises(ConfigError, match="'gemma2' cannot be rotated"):
        plan(config_of("qqq", transform="rotate"), {**LLAMA, "model_type": "gemma2"})


@pytest.mark.parametrize(
    ("method", "changes"),
    [("qqq", {"bits": 8}), ("smoothquant", {"bits": 4}), ("int8", {"bits": 4})],
)
def test_bits_that_a_method_cannot_do_are_refused(
    plan: Plans, method: Method, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"{method} works with . bits, not {changes['bits']}"):
        plan(config_of(method, **changes))


@pytest.mark.parametrize("method", ["qqq", "smoothquant", "int8"])
def test_zero_points_are_refused_where_products_are_integers(plan: Plans, method: Method) -> None:
    with pytest.raises(ConfigError, match=f"{method} has no zero points"):
        plan(config_of(method, sym=False))


@pytest.mark.parametrize(
    ("method", "changes", "file_format", "other"),
    [
        ("gptq", {"sym": False}, "gptq", "compressed-tensors"),
        ("awq", {"bits": 3}, "awq", "compressed-tensors"),
        ("awq", {"group_size": -1}, "awq", "compressed-tensors"),
        ("qqq", {"group_size": 64}, "qqq", "compressed-tensors"),
        ("gptq", {"desc_act": True}, "compressed-tensors", "gptq"),
        ("smoothquant", {}, "gptq", "compressed-tensors"),
    ],
)
def test_format_that_cannot_hold_the_layers_is_refused_and_others_named(
    plan: Plans, method: Method, changes: dict[str, Any], file_format: Format, other: str
) -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.") as error:
        plan(config_of(method, format=file_format, **changes))
    assert other in notes(error)


def test_formats_of_one_scheme_refuse_two(plan: Plans) -> None:
    rule = Override(pattern="down_proj", group_size=32)
    with pytest.raises(ConfigError, match="one scheme for all layers"):
        plan(config_of("awq", format="awq", overrides=(rule,)))
    assert plan(config_of("awq", overrides=(rule,))).format == "compressed-tensors"


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None),
        ({}, {"model.layers.0.mlp.up_proj.qweight": (16, 256)}),
    ],
    ids=["by its config", "by its tensors"],
)
def test_quantized_checkpoints_are_refused(
    plan: Plans, settings: dict[str, Any], tensors: Any
) -> None:
    with pytest.raises(ConfigError, match="quantized already") as error:
        plan(config_of("rtn"), {**LLAMA, **settings}, tensors)
    assert "convert" in notes(error)


def test_models_with_a_second_stack_of_blocks_are_refused(plan: Plans) -> None:
    vision = {"vision_tower.encoder.layers.0.mlp.fc1.weight": (64, 128)}
    with pytest.raises(ConfigError, match=r"found 2: model\.layers, vision_tower"):
        plan(config_of("rtn"), tensors=vision)


def test_weights_that_are_no_floating_point_numbers_are_refused(zero_checkpoint: Save) -> None:
    folder = zero_checkpoint(LLAMA, dtype="I8")
    with pytest.raises(
        ConfigError, match=r"q_proj\.weight holds int8|down_proj\.weight holds int8"
    ):
        plan_run(Checkpoint.open(folder), config_of("rtn"))


def test_disk_that_is_too_small_is_refused(
    plan: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbench.quant.plan.free_disk_bytes", lambda output: 1000)
    with pytest.raises(ConfigError, match=r"0\.00 GB free"):
        plan(config_of("rtn"), output=tmp_path / "out")


def test_what_a_broken_off_run_holds_counts_as_free_disk(tmp_path: Path) -> None:
    output = tmp_path / "new" / "out"
    before = run_costs.free_disk_bytes(output)
    partial = tmp_path / "new" / "out.partial"
    partial.mkdir(parents=True)
    with (partial / "block-0000.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room
    assert run_costs.free_disk_bytes(output) > before + (1 << 39)


def test_planning_needs_no_torch(zero_checkpoint: Save) -> None:
    folder = zero_checkpoint(LLAMA)
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'numpy']))\n"
        "from llmbench.quant.checkpoint import Checkpoint\n"
        "from llmbench.quant.config import DEFAULT_SCHEMES, METHODS, QuantConfig\n"
        "from llmbench.quant.consumers import consumers\n"
        "from llmbench.quant.plan import plan_run\n"
        "for method in METHODS:\n"
        "    config = QuantConfig(method=method, scheme=DEFAULT_SCHEMES[method])\n"
        f"    plan = plan_run(Checkpoint.open({str(folder)!r}), config)\n"
        "    print(plan.format, len(consumers(plan.format, plan.targets)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(METHODS)
