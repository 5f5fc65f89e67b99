"""Who can load a quantized checkpoint: the rules of the engines' own loaders, case by case."""

from typing import Any, get_args

import pytest

from llmbench.quant.config import DEFAULT_SCHEMES, METHODS, Format, Scheme
from llmbench.quant.consumers import W4A8_VARIABLE, Consumer, consumers
from llmbench.quant.linear_layers import LinearLayer

WIDE = ((2048, 2048), (2048, 8192))
NARROW = ((576, 576), (1536, 576))
"""SmolLM2-135M's (out, in): no multiple of Marlin's tiles."""
W4A8: dict[str, Any] = {"activations": "int8"}
W8A8: dict[str, Any] = {"bits": 8, "group_size": -1, "activations": "int8"}


def readers(
    file_format: Format,
    shapes: tuple[tuple[int, int], ...] = WIDE,
    *,
    desc_act: bool = False,
    is_transposed: bool = False,
    **scheme: Any,
) -> dict[str, Consumer]:
    targets = [
        (
            LinearLayer(
                name=f"model.layers.0.{number}.o_proj",
                out_features=out_features,
                in_features=in_features,
                block="model.layers.0",
                is_transposed=is_transposed,
            ),
            Scheme(**scheme),
        )
        for number, (out_features, in_features) in enumerate(shapes)
    ]
    found = consumers(file_format, targets, desc_act=desc_act)
    return {consumer.name.split()[0]: consumer for consumer in found}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("file_format", get_args(Format))
def test_every_file_has_a_verdict_of_every_consumer(method: Any, file_format: Format) -> None:
    scheme = DEFAULT_SCHEMES[method]
    names = ("bits", "group_size", "sym", "activations")
    found = readers(file_format, **{name: getattr(scheme, name) for name in names})
    assert list(found) == ["llmbench", "vLLM", "SGLang", "transformers", "GPTQModel"]
    for consumer in found.values():
        assert consumer.loads in ("yes", "no", "unproven")
        assert consumer.note or consumer.loads == "yes", f"{consumer.name} gives no reason"
        assert bool(consumer.kernel) or consumer.loads != "yes"


@pytest.mark.parametrize(
    ("file_format", "scheme", "loading"),
    [
        ("gptq", {}, {"vLLM", "SGLang", "transformers", "GPTQModel"}),
        ("gptq", {"bits": 8}, {"vLLM", "SGLang", "transformers", "GPTQModel"}),
        ("gptq", {"bits": 3}, {"transformers", "GPTQModel"}),
        ("gptq_v2", {"sym": False}, {"transformers", "GPTQModel"}),
        ("awq", {"sym": False}, {"vLLM", "SGLang", "transformers", "GPTQModel"}),
        ("qqq", W4A8, {"GPTQModel"}),
        ("compressed-tensors", {"sym": False}, {"vLLM", "transformers"}),
        ("compressed-tensors", W4A8, {"transformers"}),
        ("compressed-tensors", W8A8, {"vLLM", "SGLang", "transformers"}),
        ("bitsandbytes", W8A8, {"transformers"}),
    ],
)
def test_who_loads_what(file_format: Format, scheme: dict[str, Any], loading: set[str]) -> None:
    found = readers(file_format, **scheme)
    assert {name for name, item in found.items() if item.loads == "yes"} == loading | {"llmbench"}


@pytest.mark.parametrize(
    ("file_format", "scheme", "reason"),
    [
        ("gptq", {"sym": False}, "asymmetric GPTQ files are refused"),
        ("gptq", {"bits": 2}, "only 4 and 8 bits"),
        ("gptq", {"group_size": 16}, "groups of 16"),
        ("compressed-tensors", {"bits": 3}, "only 4 and 8 bits"),
        ("compressed-tensors", {**W8A8, "group_size": 64}, "one scale a row"),
        ("qqq", W4A8, "removed in August 2025"),
        ("bitsandbytes", W8A8, "no longer read"),
    ],
)
def test_vllm_refuses_with_its_reason(
    file_format: Format, scheme: dict[str, Any], reason: str
) -> None:
    vllm = readers(file_format, **scheme)["vLLM"]
    assert vllm.loads == "no"
    assert reason in vllm.note


def test_shapes_beside_marlins_tiles_are_told() -> None:
    assert readers("gptq", WIDE, group_size=64)["vLLM"].kernel == "Marlin"
    narrow = readers("gptq", NARROW, group_size=64)["vLLM"]
    assert narrow.kernel != "Marlin"
    assert "128" in narrow.note


def test_fused_layers_are_measured_together_against_the_tiles() -> None:
    """Key and value of 96 rows are no multiple of 64, q, k and v together are."""

    def kernel(*rows: int) -> str:
        layers = [
            (
                LinearLayer(
                    name=f"model.layers.0.self_attn.{name}_proj",
                    out_features=count,
                    in_features=256,
                    block="model.layers.0",
                ),
                Scheme(),
            )
            for name, count in zip("qkv", rows, strict=True)
        ]
        return consumers("gptq", layers)[1].kernel

    assert kernel(128, 96, 96) == "Marlin"
    assert kernel(128, 96, 128) != "Marlin"


def test_symmetric_four_bit_files_come_with_the_way_to_w4a8() -> None:
    assert W4A8_VARIABLE in readers("gptq")["vLLM"].note
    assert W4A8_VARIABLE not in readers("gptq", bits=8)["vLLM"].note


@pytest.mark.parametrize(
    ("file_format", "scheme", "is_faster"),
    [
        ("gptq", {"group_size": 32}, True),
        ("gptq", {"bits": 3}, True),
        ("compressed-tensors", {"group_size": 24}, False),
        ("compressed-tensors", W8A8, True),
        ("bitsandbytes", W8A8, False),
    ],
)
def test_own_engine_is_called_faster_where_it_has_a_kernel(
    file_format: Format, scheme: dict[str, Any], is_faster: bool
) -> None:
    assert (readers(file_format, **scheme)["llmbench"].speed != "no faster") is is_faster


def test_decompressed_files_are_not_called_faster() -> None:
    assert readers("compressed-tensors")["transformers"].speed == "no faster"


def test_gpt2s_layers_are_no_linear_layers_for_transformers() -> None:
    found = readers("compressed-tensors", is_transposed=True)["transformers"]
    assert (found.loads, "Conv1D" in found.note) == ("no", True)


def test_groups_out_of_order_come_with_their_risk() -> None:
    assert "7374" in readers("gptq", desc_act=True)["vLLM"].note
