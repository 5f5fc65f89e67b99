"""A quantized weight gives back its numbers, whole, in rows and in company."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from llmbench.quant.config import BITS, Scheme
from llmbench.quant.errors import FormatError
from llmbench.quant.quantized_weight import QuantizedWeight, can_concatenate, concatenate

Make = Callable[..., QuantizedWeight]


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    return Scheme(
        bits=draw(st.sampled_from(BITS)),
        group_size=draw(st.sampled_from((-1, 4, 8))),
        sym=draw(st.booleans()),
        activations=draw(st.sampled_from(("none", "int8"))),
    )


def two_level(weight: QuantizedWeight) -> QuantizedWeight:
    scales = torch.full_like(weight.scales, 9.5)
    return replace(weight, scales=scales, channel_scales=torch.rand(weight.out_features) + 0.1)


def out_of_order(weight: QuantizedWeight) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(weight.in_features, generator=generator)
    return replace(weight, g_idx=weight.group_of_channel()[order].to(torch.int32))


KINDS: dict[str, Callable[[QuantizedWeight], QuantizedWeight]] = {
    "as it is": lambda weight: weight,
    "two levels": two_level,
    "out of order": out_of_order,
}


@settings(max_examples=25, deadline=None)
@given(schemes(), st.integers(0, 9))
def test_each_number_is_code_minus_zero_times_scale(
    random_weight: Make, scheme: Scheme, seed: int
) -> None:
    weight = random_weight(scheme, 3, 16, seed=seed)
    size = 16 if scheme.group_size == -1 else scheme.group_size
    dense = weight.dequantize()
    for row in range(3):
        for column in range(16):
            zero = weight.middle if weight.zeros is None else int(weight.zeros[row, column // size])
            scale = float(weight.scales[row, column // size])
            assert float(dense[row, column]) == (int(weight.codes[row, column]) - zero) * scale


def test_g_idx_gives_each_channel_its_group() -> None:
    weight = QuantizedWeight(
        bits=4,
        group_size=2,
        codes=torch.tensor([[9, 9, 9, 9]], dtype=torch.uint8),
        scales=torch.tensor([[1.0, 10.0]]),
        g_idx=torch.tensor([1, 0, 0, 1], dtype=torch.int32),
    )
    assert weight.dequantize().tolist() == [[10.0, 1.0, 1.0, 10.0]]


def test_two_levels_round_in_between() -> None:
    weight = QuantizedWeight(
        bits=4,
        group_size=2,
        codes=torch.tensor([[9, 15, 6, 0]], dtype=torch.uint8),
        scales=torch.tensor([[1.3, 2.6]], dtype=torch.float16),
        channel_scales=torch.tensor([0.5]),
        activations="int8",
    )
    # 1.3, 9.1, -5.2 and -20.8 become 1, 9, -5 and -21.
    assert weight.int8_weight().tolist() == [[1, 9, -5, -21]]
    assert weight.dequantize().tolist() == [[0.5, 4.5, -2.5, -10.5]]


@pytest.mark.parametrize(
    ("code", "scale", "expected"),
    [(11, 1.8330078125, 5), (11, 2.833984375, 9), (14, 1.9160156, 11)],
)
def test_two_levels_round_the_exact_product(code: int, scale: float, expected: int) -> None:
    # 3 * 1.833 is 5.499 and nearer to 5; rounded to float16 first, it is 5.5 and becomes 6.
    weight = QuantizedWeight(
        bits=4,
        group_size=2,
        codes=torch.tensor([[code, code]], dtype=torch.uint8),
        scales=torch.tensor([[scale]], dtype=torch.float16),
        channel_scales=torch.ones(1),
        activations="int8",
    )
    assert weight.int8_weight().tolist() == [[expected, expected]]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(scheme=schemes(), cut=st.integers(0, 6))
def test_rows_are_rows_of_the_whole(
    random_weight: Make, kind: str, scheme: Scheme, cut: int
) -> None:
    weight = KINDS[kind](random_weight(scheme, 6, 16))
    dense = weight.dequantize()
    assert torch.equal(weight.rows(0, cut).dequantize(), dense[:cut])
    assert torch.equal(weight.rows(cut, 6).dequantize(), dense[cut:])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(scheme=schemes(), cut=st.integers(1, 5))
def test_parts_stacked_are_the_whole(
    random_weight: Make, kind: str, scheme: Scheme, cut: int
) -> None:
    weight = KINDS[kind](random_weight(scheme, 6, 16))
    parts = [weight.rows(0, cut), weight.rows(cut, 6)]
    assert can_concatenate(parts)
    whole = concatenate(parts)
    assert torch.equal(whole.dequantize(), weight.dequantize())
    assert whole.scheme == weight.scheme


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 8, "scales": torch.ones(2, 2, dtype=torch.float16)},
        {"zeros": torch.ones(2, 4, dtype=torch.uint8)},
        {"activations": "int8"},
        {"outlier_threshold": 6.0},
        {"scales": torch.ones(2, 4)},
        {"channel_scales": torch.ones(2)},
        {"g_idx": torch.zeros(16, dtype=torch.int32)},
        {"codes": torch.zeros(2, 13, dtype=torch.uint8)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_differs_is_not_stacked(random_weight: Make, change: dict[str, Any]) -> None:
    weight = random_weight(Scheme(group_size=4), 2, 16)
    assert not can_concatenate([weight, replace(weight, **change)])


def test_scheme_says_how_to_ask_for_such_a_weight(random_weight: Make) -> None:
    scheme = Scheme(bits=3, group_size=8, sym=False, activations="int8")
    assert random_weight(scheme, 4, 16).scheme == scheme


def test_int8_weight_of_groups_is_refused(random_weight: Make) -> None:
    with pytest.raises(FormatError, match="scale a group"):
        random_weight(Scheme(group_size=8), 2, 16).int8_weight()


def test_bytes_count_codes_at_their_true_width(random_weight: Make) -> None:
    weight = random_weight(Scheme(bits=3, group_size=8, sym=False), 4, 16)
    # 64 codes and 8 zeros of 3 bits, 8 scales of 2 bytes.
    assert weight.nbytes == 24 + 3 + 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(2, 3)}, r"scales is \[2, 3\], expected \[2, 4\]"),
        ({"zeros": torch.ones(1, 4, dtype=torch.uint8)}, r"zeros is \[1, 4\]"),
        ({"g_idx": torch.zeros(3, dtype=torch.int32)}, r"g_idx is \[3\], expected \[16\]"),
        ({"codes": torch.zeros(2, 16)}, "torch.float32, expected torch.uint8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_shapes_that_contradict_one_another_are_refused(
    random_weight: Make, change: dict[str, Any], message: str
) -> None:
    weight = random_weight(Scheme(group_size=4), 2, 16)
    with pytest.raises(FormatError, match=message):
        replace(weight, **change)


def test_dequantized_type_is_a_rounding_of_float32(random_weight: Make) -> None:
    weight = random_weight(Scheme(group_size=4), 2, 16)
    assert_close(weight.dequantize(torch.bfloat16), weight.dequantize().bfloat16(), rtol=0, atol=0)
