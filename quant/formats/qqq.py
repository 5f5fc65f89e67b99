"""QQQ's file: 4-bit weights in the tiles of its Marlin kernel, with int8 activations.

`B` int32 [C / 16, 2 N] holds the codes tile by tile in the order in which the threads of the
kernel want them; `s_channel` float32 [1, N] and, for per-group weights, `s_group` float16 [G, N]
hold the scales with their columns permuted likewise. The run-time buffers of the kernel
(`workspace`, `reduce_buffer`) are no part of the file.

Per channel, codes are -7 to 7 in two's complement, and `s_channel` is the scale / 16, since the
kernel puts each code into the high half of a byte. Per group (128), code + 8 is stored; the
kernel rounds (code * s_group) to an 8-bit integer, to which `s_channel` is the scale.

Sources: Zhang et al. 2024, section 3.3; QQQ, QQQ/gptq/qlinear/qlinear_marlin.py and
csrc/qqq_gemm.cu; GPTQModel, gptqmodel/nn_modules/qlinear/qqq.py.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import PER_CHANNEL, Format, QuantConfig, Scheme
from llmbench.quant.errors import FormatError
from llmbench.quant.formats import format as shared
from llmbench.quant.formats.format import Schemes, StoredLayer

if TYPE_CHECKING:
    import torch

    from llmbench.quant.quantized_weight import QuantizedWeight

BITS = 4
MIDDLE = 8
GROUP_SIZE = 128
TILES = ((64, 256), (128, 128), (128, 64), (64, 128))
"""(in, out) of the kernel's thread tiles: one pair must divide the layer."""
TILE = 16
CHUNK = 4 * TILE * TILE
"""Codes of four neighbouring tiles, permuted together."""
NIBBLE_SCALE = 16
"""A code in the high half of a byte counts 16 times."""
RUN_TIME_BUFFERS = ("workspace", "reduce_buffer")


class QQQ:
    """QQQ's Marlin layout."""

    name: Format = "qqq"

    def refusal(
        self,
        scheme: Scheme,
        out_features: int,
        in_features: int,
        *,
        desc_act: bool = False,
        weights_exist: bool = False,
    ) -> str | None:
        """Why the format cannot hold such a layer; None if it can."""
        if scheme.activations != "int8":
            return "qqq files are for int8 activations"
        if scheme.bits != BITS or not scheme.sym:
            return "qqq files hold symmetric weights of 4 bits"
        if scheme.group_size not in (PER_CHANNEL, GROUP_SIZE):
            return f"qqq files hold groups of -1 or 128, not {scheme.group_size}"
        if desc_act:
            return "qqq files have no place for groups out of order (desc_act)"
        if not any(in_features % k == 0 and out_features % n == 0 for k, n in TILES):
            tiles = ", ".join(f"{k} x {n}" for k, n in TILES)
            return (
                f"no tile of qqq's kernel ({tiles}) divides in_features {in_features} and "
                f"out_features {out_features}"
            )
        return shared.group_refusal(scheme, in_features)

    def scale_dtype(self, model_dtype: "torch.dtype") -> "torch.dtype":
        """float16, of the scales a group; those a channel are float32."""
        import torch

        return torch.float16

    def check(self, name: str, weight: "QuantizedWeight") -> None:
        """Refuse scales of other levels than the file has, and what is not exact in them."""
        import torch

        shared.refuse_outliers(name, weight, self.name)
        shared.refuse_order(name, weight, self.name)
        shared.check_scales(name, weight)
        if weight.channel_scales is not None:
            shared.exact(name, weight.scales, torch.float16)
        elif weight.group_size == PER_CHANNEL:
            shared.exact(name, weight.scales, torch.float32)
            shared.exact(name, weight.scales.double() / NIBBLE_SCALE, torch.float32)
        else:
            raise FormatError(
                f"{name} has one level of scales, and qqq's weights in groups have two"
            )

    def tensors(self, name: str, weight: "QuantizedWeight") -> dict[str, "torch.Tensor"]:
        """`B`, `s_channel` and, in groups, `s_group`."""
        import torch

        self.check(name, weight)
        if weight.bits != BITS or not weight.sym or weight.activations != "int8":
            raise FormatError(f"{name}: qqq files hold symmetric W4A8, not {weight.scheme}")
        if weight.channel_scales is None:
            channel = weight.scales[:, 0].float() / NIBBLE_SCALE
            return {
                f"{name}.B": _pack(weight.codes ^ MIDDLE, is_grouped=False),
                f"{name}.s_channel": channel[None, _columns(channel, _single_order())],
            }
        steps = weight.centered().float() * weight.scales.float()[:, weight.group_of_channel()]
        steps = steps.round()
        if float(steps.abs().max()) > 127:
            raise FormatError(
                f"{name} has a code times group scale of {float(steps.abs().max()):g}, which is "
                "beyond an 8-bit integer"
            )
        groups = weight.scales.to(torch.float16).t()
        return {
            f"{name}.B": _pack(weight.codes, is_grouped=True),
            f"{name}.s_channel": weight.channel_scales.float()[
                None, _columns(weight.channel_scales, _single_order())
            ],
            f"{name}.s_group": groups[:, _columns(weight.channel_scales, _group_order())],
        }

    def quantization_config(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, Any]:
        """QQQ and vLLM read `wbits`, GPTQModel `bits`: both are written."""
        scheme = shared.only_scheme(schemes, self.name)
        settings: dict[str, Any] = {
            "quant_method": "qqq",
            "checkpoint_format": "qqq",
            "wbits": BITS,
            "bits": BITS,
            "group_size": scheme.group_size,
            "sym": True,
            "desc_act": False,
            "lm_head": schemes.get("lm_head") is not None,
        }
        skipped = [name for name, other in schemes.items() if other is None and "." in name]
        if skipped:
            inner = [name for name in schemes if "." in name]
            settings["dynamic"] = {
                f"-:^{pattern}$": {} for pattern in shared.patterns(skipped, inner)
            }
        return settings | {"meta": {"quantizer": [shared.tool_version()]}}

    def sidecars(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, dict[str, Any]]:
        """`quantize_config.json`, which GPTQModel reads first."""
        return {"quantize_config.json": self.quantization_config(schemes, run)}

    def stored_layers(
        self, checkpoint: Checkpoint, settings: Mapping[str, Any]
    ) -> dict[str, StoredLayer]:
        """Layers with a `B`."""
        bits = shared.integer(settings, "wbits", "bits")
        if bits != BITS:
            raise FormatError(f"quantization_config has {bits} bits, qqq files hold 4")
        size = shared.integer(settings, "group_size")
        if size not in (PER_CHANNEL, GROUP_SIZE):
            raise FormatError(f"quantization_config has group_size {size}, qqq files -1 or 128")
        scheme = Scheme(bits=BITS, group_size=size, sym=True, activations="int8")
        modules = shared.modules_with(checkpoint, "B")
        shared.refuse_orphans(checkpoint, modules, "B", ("s_channel", "s_group"))
        return {module: _layer(checkpoint, module, scheme) for module in modules}


def _layer(checkpoint: Checkpoint, module: str, scheme: Scheme) -> StoredLayer:
    because = f"qqq, group_size {scheme.group_size}"
    shape = checkpoint.shape(f"{module}.B")
    rows, words = shape if len(shape) == 2 else (0, 0)
    c, n = rows * TILE, words // 2
    shared.require(checkpoint, f"{module}.B", ("int32",), (c // TILE, 2 * n), because=because)
    if n % 64 or not any(c % k == 0 and n % m == 0 for k, m in TILES):
        raise FormatError(f"{module}.B is {list(shape)}, which no tile of qqq's kernel divides")
    shared.require(checkpoint, f"{module}.s_channel", ("float32",), (1, n), because=because)
    names = [f"{module}.B", f"{module}.s_channel"]
    group_scales = f"{module}.s_group"
    if scheme.group_size == GROUP_SIZE:
        g = c // GROUP_SIZE
        shared.require(checkpoint, group_scales, ("float16",), (g, n), because=because)
    elif group_scales in checkpoint:
        shared.require(checkpoint, group_scales, ("float16",), (0,), (0, n), because=because)
    names += [f"{module}.{part}" for part in ("s_group", *RUN_TIME_BUFFERS)]
    return StoredLayer(
        scheme=scheme,
        shape=(n, c),
        tensors=tuple(name for name in names if name in checkpoint),
        read=partial(_read, checkpoint, module, scheme, (n, c)),
    )


def _read(
    checkpoint: Checkpoint, module: str, scheme: Scheme, shape: tuple[int, int], codes: bool
) -> "QuantizedWeight":
    import torch

    from llmbench.quant.quantized_weight import QuantizedWeight

    is_grouped = scheme.group_size == GROUP_SIZE
    stored = checkpoint.get(f"{module}.s_channel")[0]
    channel = torch.empty_like(stored)
    channel[_columns(stored, _single_order())] = stored
    values = shared.no_codes(shape)
    if codes:
        values = _unpack(checkpoint.get(f"{module}.B"), is_grouped=is_grouped)
        values = values if is_grouped else values ^ MIDDLE
    if is_grouped:
        permuted = checkpoint.get(f"{module}.s_group")
        scales = torch.empty_like(permuted)
        scales[:, _columns(stored, _group_order())] = permuted
        scales = scales.t().contiguous()
    else:
        scales = channel[:, None] * NIBBLE_SCALE
    weight = QuantizedWeight(
        bits=BITS,
        group_size=scheme.group_size,
        codes=values,
        scales=scales,
        channel_scales=channel if is_grouped else None,
        activations="int8",
    )
    shared.check_scales(module, weight)
    return weight


def _pack(nibbles: "torch.Tensor", *, is_grouped: bool) -> "torch.Tensor":
    """Nibbles [N, C] to words [C / 16, 2 N]."""
    from llmbench.quant.packing import pack

    n, c = nibbles.shape
    tiles = nibbles.t().reshape(c // TILE, TILE, n // TILE, TILE).transpose(1, 2)
    chunks = tiles.reshape(-1, CHUNK)[:, _order(is_grouped)]
    return pack(chunks.reshape(c // TILE, n * TILE), BITS)


def _unpack(words: "torch.Tensor", *, is_grouped: bool) -> "torch.Tensor":
    """Words [C / 16, 2 N] to nibbles [N, C] uint8."""
    import torch

    from llmbench.quant.packing import unpack

    rows, n = words.shape[0], words.shape[1] // 2
    permuted = unpack(words, BITS, n * TILE).reshape(-1, CHUNK)
    chunks = torch.empty_like(permuted)
    chunks[:, _order(is_grouped)] = permuted
    tiles = chunks.reshape(rows, n // TILE, TILE, TILE).transpose(1, 2)
    return tiles.reshape(rows * TILE, n).t().contiguous()


@cache
def _order(is_grouped: bool) -> list[int]:
    """Which of the 1024 codes of four tiles comes where in the stream."""
    interleave = (0, 2, 4, 6, 1, 3, 5, 7) if is_grouped else (4, 0, 5, 1, 6, 2, 7, 3)
    order = []
    for thread in range(32):
        column = thread // 4
        rows = [4 * (thread % 4) + i for i in range(4)]
        eight = [TILE * row + column + shift for shift in (0, 8) for row in rows]
        order += [eight[i] + 256 * tile for tile in range(4) for i in interleave]
    return order


def _group_order() -> list[int]:
    return [i + 8 * j for i in range(8) for j in range(8)]


def _single_order() -> list[int]:
    return [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _columns(like: "torch.Tensor", block: list[int]) -> "torch.Tensor":
    """[N] the column of a matrix that each stored column is, for an order a block."""
    import torch

    n = like.shape[-1]
    starts = torch.arange(0, n, len(block))
    return (starts[:, None] + torch.tensor(block)).flatten()
