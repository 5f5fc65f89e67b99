"""The one bit layout: codes as a dense stream in 32-bit words, first code in the lowest bits.

Code i of a line occupies bits b*i to b*i + b - 1 of the words taken together, so a 3-bit code may
lie across two words. GPTQ's 2, 3, 4 and 8-bit tensors, compressed-tensors' and, after a
permutation of columns or tiles, AWQ's and QQQ's are all this stream; a format says only along
which dimension the lines run.
"""

import math

import torch
from torch import Tensor

WORD_BITS = 32


def num_words(num_codes: int, bits: int) -> int:
    """Words that a line of codes takes; the last one is filled up with zero bits."""
    return -(-num_codes * bits // WORD_BITS)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack lines [..., n] of codes below 2 ** bits into int32 words [..., num_words(n, bits)]."""
    *lines, n = codes.shape
    out = torch.zeros(*lines, num_words(n, bits), dtype=torch.int32, device=codes.device)
    lanes, stride = _period(bits)
    for lane in range(min(lanes, n)):
        word, shift = divmod(lane * bits, WORD_BITS)
        part = codes[..., lane::lanes].to(torch.int32)
        count = part.shape[-1]
        out[..., word::stride][..., :count] |= part << shift
        if shift + bits > WORD_BITS:
            out[..., word + 1 :: stride][..., :count] |= part >> (WORD_BITS - shift)
    return out


def unpack(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """The codes [..., num_codes] uint8 of packed int32 lines [..., W]."""
    *lines, _ = words.shape
    out = torch.empty(*lines, num_codes, dtype=torch.uint8, device=words.device)
    lanes, stride = _period(bits)
    for lane in range(min(lanes, num_codes)):
        word, shift = divmod(lane * bits, WORD_BITS)
        count = len(range(lane, num_codes, lanes))
        # The shift of a negative word brings in ones from the left: the mask takes them off.
        low_bits = min(bits, WORD_BITS - shift)
        part = (words[..., word::stride][..., :count] >> shift) & ((1 << low_bits) - 1)
        if low_bits < bits:
            high = words[..., word + 1 :: stride][..., :count] << low_bits
            part |= high & ((1 << bits) - 1)
        out[..., lane::lanes] = part
    return out


def _period(bits: int) -> tuple[int, int]:
    """Codes after which the layout repeats, and the words that these take."""
    shared = math.gcd(WORD_BITS, bits)
    return WORD_BITS // shared, bits // shared
