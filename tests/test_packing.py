"""Packed words hold every code at its place and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbench.quant.config import BITS
from llmbench.quant.packing import WORD_BITS, num_words, pack, unpack

Lines = tuple[int, list[list[int]]]


@st.composite
def lines(draw: st.DrawFn) -> Lines:
    """Bits, and lines of one length of codes that fit them."""
    bits = draw(st.sampled_from(BITS))
    length = draw(st.integers(1, 70))
    line = st.lists(st.integers(0, (1 << bits) - 1), min_size=length, max_size=length)
    return bits, draw(st.lists(line, min_size=1, max_size=3))


def stream(words: torch.Tensor) -> int:
    """A line of words as one number, the first word lowest."""
    return sum((int(word) & 0xFFFFFFFF) << (WORD_BITS * i) for i, word in enumerate(words))


@settings(max_examples=50, deadline=None)
@given(lines())
def test_unpack_reverses_pack(example: Lines) -> None:
    bits, values = example
    codes = torch.tensor(values, dtype=torch.uint8)
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (len(values), num_words(codes.shape[1], bits))
    assert torch.equal(unpack(words, bits, codes.shape[1]), codes)


@settings(max_examples=50, deadline=None)
@given(lines())
def test_each_code_lies_at_its_bits_of_the_stream(example: Lines) -> None:
    bits, values = example
    words = pack(torch.tensor(values, dtype=torch.uint8), bits)
    for line, packed in zip(values, words, strict=True):
        assert stream(packed) == sum(code << (bits * i) for i, code in enumerate(line))


@pytest.mark.parametrize("bits", BITS)
def test_words_do_not_depend_on_the_type_of_codes(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 37), generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(codes, bits), pack(codes.to(torch.uint8), bits))


@pytest.mark.parametrize("bits", BITS)
def test_highest_codes_fill_the_words(bits: int) -> None:
    assert torch.equal(pack(torch.full((1, 32), (1 << bits) - 1), bits), torch.full((1, bits), -1))


@pytest.mark.parametrize(("count", "bits", "words"), [(8, 4, 1), (9, 4, 2), (11, 3, 2), (32, 3, 3)])
def test_last_word_is_filled_up(count: int, bits: int, words: int) -> None:
    assert num_words(count, bits) == words


def test_three_bit_codes_lie_across_words() -> None:
    # Code 10 is bits 30 to 32: two in the first word, one in the second.
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 10] = 7
    assert pack(codes, 3)[0].tolist() == [-(1 << 30), 1, 0]
