"""A quantized weight in the one form that every method makes, every format carries and every
kernel reads.

A weight is integer codes, a scale a group, and a zero point a group: w = (code - zero) * scale
(Jacob et al. 2018, eq. 1). Methods differ in how they choose these, file formats in how they lay
them out; both speak of this object. Scales are held in the type they are stored in, so what is
computed here is what any reader of the file computes.

QQQ's per-group weights have two levels (Zhang et al. 2024, section 3.3): code times the group's
scale is rounded to an 8-bit integer first, so that the whole product runs on integers, and a
scale a row brings that to the weight.

Shapes: `N` out features · `C` in features · `G` groups of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbench.quant.config import PER_CHANNEL, Activations, Scheme
from llmbench.quant.errors import FormatError

INT8_MAX = 127


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """The codes of a linear layer's weight, with what turns them back into numbers.

    Attributes:
        bits: 2, 3, 4 or 8.
        group_size: Input channels that share a scale; -1 where a row has one.
        codes: [N, C] uint8, each below 2 ** bits.
        scales: [N, G] float16, bfloat16 or float32, all finite and positive.
        zeros: [N, G] uint8; None where every zero is 2 ** (bits - 1).
        g_idx: [C] int32, the group of each input channel; None where groups are in order.
        channel_scales: [N] float32, QQQ's second level: the weight is then
            round((code - 8) * scale) * channel_scale.
        activations: `int8`: each token's input is rounded to 8 bits before the product.
        outlier_threshold: LLM.int8 (Dettmers et al. 2022, section 3.2): input values of at
            least this size are multiplied in full precision.
    """

    bits: int
    group_size: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    g_idx: Tensor | None = None
    channel_scales: Tensor | None = None
    activations: Activations = "none"
    outlier_threshold: float | None = None

    def __post_init__(self) -> None:
        n, c = self.codes.shape
        g = 1 if self.group_size == PER_CHANNEL else -(-c // self.group_size)
        expected = {
            "scales": (n, g),
            "zeros": (n, g),
            "g_idx": (c,),
            "channel_scales": (n,),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise FormatError(
                    f"{name} is {list(tensor.shape)}, expected {list(shape)} for codes [{n}, {c}] "
                    f"in groups of {self.group_size}"
                )
        if self.codes.dtype is not torch.uint8:
            raise FormatError(f"codes are {self.codes.dtype}, expected torch.uint8")

    @property
    def out_features(self) -> int:
        """Rows, N."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns, C."""
        return self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        """Scales of a row, G."""
        return self.scales.shape[1]

    @property
    def sym(self) -> bool:
        """Whether all zeros are the middle code."""
        return self.zeros is None

    @property
    def scheme(self) -> Scheme:
        """What a run asks for to get such a weight."""
        return Scheme(
            bits=self.bits, group_size=self.group_size, sym=self.sym, activations=self.activations
        )

    @property
    def middle(self) -> int:
        """The code of 0 in a symmetric weight."""
        return 1 << (self.bits - 1)

    def group_of_channel(self) -> Tensor:
        """[C] int64, the group of each input channel."""
        if self.g_idx is not None:
            return self.g_idx.long()
        if self.group_size == PER_CHANNEL:
            return torch.zeros(self.in_features, dtype=torch.int64, device=self.codes.device)
        return torch.arange(self.in_features, device=self.codes.device) // self.group_size

    def centered(self) -> Tensor:
        """[N, C] int16, code minus zero."""
        codes = self.codes.to(torch.int16)
        if self.zeros is None:
            return codes - self.middle
        return codes - self.zeros.to(torch.int16)[:, self.group_of_channel()]

    def int8_weight(self) -> Tensor:
        """[N, C] int8, the integers of an 8-bit product whose scale is one a row.

        Raises:
            FormatError: the weight has a scale a group and no second level.
        """
        if self.channel_scales is not None:
            # Rounded once: QQQ's kernel adds the exact product to a number whose last place is 1
            # (dequant_per_group), and float32 holds the product of a code and a float16 scale.
            scales = self.scales.float()[:, self.group_of_channel()]
            wide = (self.centered().float() * scales).round()
            return wide.clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8)
        if self.num_groups != 1:
            raise FormatError("a weight with a scale a group has no single 8-bit integer form")
        return self.centered().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, C], the numbers that the codes stand for; exact in float32 for 16-bit scales."""
        if self.channel_scales is not None:
            weight = self.int8_weight().float() * self.channel_scales[:, None]
        else:
            weight = self.centered().float() * self.scales.float()[:, self.group_of_channel()]
        return weight.to(dtype)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same weight on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def rows(self, start: int, stop: int) -> "QuantizedWeight":
        """Output rows `start` to `stop` as a weight of their own."""
        return QuantizedWeight(
            bits=self.bits,
            group_size=self.group_size,
            codes=self.codes[start:stop],
            scales=self.scales[start:stop],
            zeros=None if self.zeros is None else self.zeros[start:stop],
            g_idx=self.g_idx,
            channel_scales=(
                None if self.channel_scales is None else self.channel_scales[start:stop]
            ),
            activations=self.activations,
            outlier_threshold=self.outlier_threshold,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the codes at their true width, and of scales and zeros."""
        codes = -(-self.codes.numel() * self.bits // 8)
        zeros = 0 if self.zeros is None else -(-self.zeros.numel() * self.bits // 8)
        others = (self.scales, self.g_idx, self.channel_scales)
        return codes + zeros + sum(tensor.nbytes for tensor in others if tensor is not None)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        return QuantizedWeight(
            bits=self.bits,
            group_size=self.group_size,
            codes=change(self.codes),
            scales=change(self.scales),
            zeros=None if self.zeros is None else change(self.zeros),
            g_idx=None if self.g_idx is None else change(self.g_idx),
            channel_scales=None if self.channel_scales is None else change(self.channel_scales),
            activations=self.activations,
            outlier_threshold=self.outlier_threshold,
        )


def can_concatenate(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether weights over the same input can become one with all their rows."""
    first = weights[0]
    return all(
        (other.bits, other.group_size, other.sym, other.activations, other.outlier_threshold)
        == (first.bits, first.group_size, first.sym, first.activations, first.outlier_threshold)
        and other.in_features == first.in_features
        and other.scales.dtype == first.scales.dtype
        and (other.channel_scales is None) == (first.channel_scales is None)
        and _same(other.g_idx, first.g_idx)
        for other in weights[1:]
    )


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights over the same input, stacked along N (`can_concatenate` has said yes)."""
    first = weights[0]

    def stack(name: str) -> Tensor | None:
        parts = [getattr(weight, name) for weight in weights]
        return None if parts[0] is None else torch.cat(parts)

    return QuantizedWeight(
        bits=first.bits,
        group_size=first.group_size,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=stack("zeros"),
        g_idx=first.g_idx,
        channel_scales=stack("channel_scales"),
        activations=first.activations,
        outlier_threshold=first.outlier_threshold,
    )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
