"""The one bit layout: codes as a dense stream in 32-bit words, first code in the lowest bits.

Code i of a line occupies bits b*i to b*i + b - 1 of the words taken together, so a 3-bit code may
lie across two words. GPTQ's 2, 3, 4 and 8-bit tensors, compressed-tensors' and, after a
permutation of columns or tiles, AWQ's and QQQ's are all this stream; a format says only along
which dimension the lines run.
"""

import torch
from torch import Tensor

WORD_BITS = 32


def num_words(num_codes: int, bits: int) -> int:
    """Words that a line of codes takes; the last one is filled up with zero bits."""
    return -(-num_codes * bits // WORD_BITS)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack lines [..., n] of codes below 2 ** bits into int32 words [..., num_words(n, bits)]."""
    *lines, n = codes.shape
    words = num_words(n, bits)
    # Eight lanes of 4 bits are one word: the common widths need no bit-by-bit work.
    if WORD_BITS % bits == 0:
        lanes = WORD_BITS // bits
        padded = _pad(codes, words * lanes).reshape(*lines, words, lanes).to(torch.int64)
        shifts = torch.arange(lanes, device=codes.device) * bits
        return _as_int32((padded << shifts).sum(dim=-1))
    wide = codes.to(torch.int64)
    planes = (wide[..., None] >> torch.arange(bits, device=codes.device)) & 1
    stream = _pad(planes.reshape(*lines, n * bits), words * WORD_BITS)
    stream = stream.reshape(*lines, words, WORD_BITS)
    return _as_int32((stream << torch.arange(WORD_BITS, device=codes.device)).sum(dim=-1))


def unpack(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """The codes [..., num_codes] uint8 of packed int32 lines [..., W]."""
    *lines, count = words.shape
    wide = words.to(torch.int64)
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, device=words.device)
        codes = (wide[..., None] >> shifts) & ((1 << bits) - 1)
        return codes.reshape(*lines, count * (WORD_BITS // bits))[..., :num_codes].to(torch.uint8)
    stream = (wide[..., None] >> torch.arange(WORD_BITS, device=words.device)) & 1
    planes = stream.reshape(*lines, count * WORD_BITS)[..., : num_codes * bits]
    planes = planes.reshape(*lines, num_codes, bits)
    return (planes << torch.arange(bits, device=words.device)).sum(dim=-1).to(torch.uint8)


def _pad(lines: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(lines, (0, length - lines.shape[-1]))


def _as_int32(words: Tensor) -> Tensor:
    """64-bit sums below 2 ** 32 as the int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
