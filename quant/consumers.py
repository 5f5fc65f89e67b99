"""Who can load a quantized checkpoint, with which kernel, and why not: told before it is made.

A file can be perfect and still be useless to the engine that it was made for. The rules here are
what the engines' own loaders check, as read on 2026-11-29:

vLLM          `layers/quantization/auto_gptq.py` (PR 38288: 4 and 8 bits, symmetric, or a
              ValueError), `utils/marlin_utils.py` (groups -1, 32, 64, 128; tiles of in 128 x out
              64, odd shapes padded from 0.25 on), `kernels/linear/mixed_precision/exllama.py`
              (float16 only) and `cpu.py` (4 bits, multiples of 32), `compressed_tensors.py`
              (int4 with int8 activations only through Humming); QQQ removed in PR 23204
              (August 2025), bitsandbytes no longer in its tree
SGLang        `layers/quantization/__init__.py` and `compressed_tensors/compressed_tensors.py`;
              llm-compressor's documentation calls the latter's support minimal
transformers  5 and later: PR 41567 (GPTQ and AWQ through gptqmodel); compressed-tensors is
              decompressed at load (llm-compressor's FAQ)
GPTQModel     7: `quantization/config.py` (group sizes), `nn_modules/qlinear/qqq.py`

No torch: the table is part of `--dry-run`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llmbench.quant.config import PER_CHANNEL, Format, Scheme
from llmbench.quant.linear_layers import LinearLayer, fused_with

Loads = Literal["yes", "no", "unproven"]
Target = tuple[LinearLayer, Scheme]

MARLIN_GROUP_SIZES = (PER_CHANNEL, 32, 64, 128)
GPTQMODEL_GROUP_SIZES = (PER_CHANNEL, 16, 32, 64, 128, 256, 512, 1024)
CPU_GROUP_STEP = 16
"""The engine's compiled kernels take groups of whole vectors (cpu_quantized_linear.py)."""
W4A8_VARIABLE = "VLLM_MARLIN_INPUT_DTYPE=int8"
"""vLLM PR 24722: Marlin rounds each token's input to 8 bits, with ordinary 4-bit files."""
FULL_SPEED, NO_GAIN, UNKNOWN = "faster", "no faster", "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """One program that may load the checkpoint.

    Attributes:
        loads: `unproven`: its code suggests it, and nobody has shown it.
        kernel: What computes the quantized layers there.
        speed: Against the unquantized model in the same program.
        note: What is needed, or why it does not load.
    """

    name: str
    loads: Loads
    kernel: str = ""
    speed: str = ""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _File:
    """What consumers look at."""

    format: Format
    targets: tuple[Target, ...]
    desc_act: bool

    def any(self, test: Callable[[LinearLayer, Scheme], bool]) -> bool:
        return any(test(layer, scheme) for layer, scheme in self.targets)

    @property
    def bits(self) -> tuple[int, ...]:
        return tuple(sorted({scheme.bits for _, scheme in self.targets}))

    @property
    def is_asymmetric(self) -> bool:
        return self.any(lambda layer, scheme: not scheme.sym)

    @property
    def has_int8_activations(self) -> bool:
        return self.any(lambda layer, scheme: scheme.activations == "int8")

    @property
    def is_transposed(self) -> bool:
        return self.any(lambda layer, scheme: layer.is_transposed)

    @property
    def group_sizes(self) -> set[int]:
        return {scheme.group_size for _, scheme in self.targets}

    def odd_groups(self, known: Sequence[int]) -> list[int]:
        return sorted(self.group_sizes - set(known))

    @property
    def fits_marlin(self) -> bool:
        """Every layer, fused as engines fuse them, is a whole number of Marlin's tiles."""
        rows: dict[tuple[str, ...], int] = {}
        for layer, _ in self.targets:
            members = fused_with(layer.name)
            rows[members] = rows.get(members, 0) + layer.out_features
        return all(count % 64 == 0 for count in rows.values()) and not self.any(
            lambda layer, scheme: layer.in_features % 128 != 0
        )

    @property
    def is_w8a8(self) -> bool:
        return self.has_int8_activations and self.bits == (8,)


def consumers(
    file_format: Format, targets: Sequence[Target], *, desc_act: bool = False
) -> tuple[Consumer, ...]:
    """The consumers of a file with these quantized layers, this engine first."""
    file = _File(file_format, tuple(targets), desc_act)
    return (_llmbench(file), _vllm(file), _sglang(file), _transformers(file), _gptqmodel(file))


def _llmbench(file: _File) -> Consumer:
    kernel, speed = "packed weights", f"{FULL_SPEED} on a CPU"
    if file.has_int8_activations:
        kernel = "int8 product"
    # What cpu_quantized_linear.py leaves to the reference.
    if file.format == "bitsandbytes":
        kernel, speed = "int8 and outliers", NO_GAIN
    elif any(size > 0 and size % CPU_GROUP_STEP for size in file.group_sizes):
        kernel, speed = "dequantized", NO_GAIN
    return Consumer(
        name="llmbench",
        loads="yes",
        kernel=kernel,
        speed=speed,
        note="on a GPU it runs as fast as unquantized at best",
    )


def _vllm(file: _File) -> Consumer:
    refused = _vllm_refusal(file)
    if refused:
        return Consumer(name="vLLM", loads="no", note=refused)
    if file.format == "compressed-tensors" and file.has_int8_activations:
        if file.is_w8a8:
            return Consumer(
                name="vLLM", loads="yes", kernel="int8 Cutlass / oneDNN", speed=FULL_SPEED
            )
        return Consumer(
            name="vLLM",
            loads="unproven",
            kernel="Humming",
            speed=UNKNOWN,
            note="W4A8 needs the newest vLLM and its Humming kernels on an NVIDIA GPU, older ones "
            "fail or leave the activations in 16 bits (llm-compressor 2693); converted to gptq "
            f"with --weights-only it runs as W4A8 under {W4A8_VARIABLE}",
        )
    notes = []
    if file.fits_marlin:
        kernel = "Marlin"
    else:
        kernel = "Marlin, padded"
        notes.append(
            "some shapes are no multiple of in 128 x out 64: before 0.25 vLLM takes Exllama for "
            "them, which needs --dtype float16"
        )
    is_w4 = file.bits == (4,) and file.format != "compressed-tensors"
    if is_w4 and not file.is_asymmetric:
        notes.append(f"{W4A8_VARIABLE} runs it as W4A8")
    if file.desc_act:
        notes.append("desc_act with tensor parallelism has given garbage (vllm 7374)")
    return Consumer(
        name="vLLM", loads="yes", kernel=kernel, speed=FULL_SPEED, note="; ".join(notes)
    )


def _vllm_refusal(file: _File) -> str:
    if file.format == "qqq":
        return "QQQ was removed in August 2025 (PR 23204); write compressed-tensors for it"
    if file.format == "bitsandbytes":
        return "8-bit bitsandbytes is no longer read"
    is_gptq = file.format in ("gptq", "gptq_v2")
    if is_gptq and file.is_asymmetric:
        return "asymmetric GPTQ files are refused (PR 38288); compressed-tensors is read"
    if not set(file.bits) <= {4, 8}:
        return "only 4 and 8 bits are read"
    if file.is_w8a8:
        if file.any(lambda layer, scheme: scheme.group_size != PER_CHANNEL):
            return "W8A8 needs one scale a row (group size -1)"
        return ""
    if odd := file.odd_groups(MARLIN_GROUP_SIZES):
        return f"groups of {odd[0]} are not read: -1, 32, 64 or 128"
    return ""


def _sglang(file: _File) -> Consumer:
    if file.format == "qqq":
        return Consumer(name="SGLang", loads="no", note="QQQ is not read")
    if file.format == "bitsandbytes":
        return Consumer(name="SGLang", loads="unproven", note="8-bit files are not documented")
    if file.format == "compressed-tensors":
        if file.is_w8a8:
            return Consumer(name="SGLang", loads="yes", kernel="int8", speed=FULL_SPEED)
        if file.has_int8_activations:
            return Consumer(name="SGLang", loads="no", note="it has no scheme for W4A8 with int8")
        return Consumer(
            name="SGLang",
            loads="unproven",
            kernel="Marlin",
            speed=UNKNOWN,
            note="llm-compressor calls the support minimal",
        )
    is_known = set(file.bits) <= {4, 8} and not file.odd_groups(MARLIN_GROUP_SIZES)
    if file.format == "gptq_v2" or not is_known or (file.format == "gptq" and file.is_asymmetric):
        return Consumer(
            name="SGLang",
            loads="unproven",
            speed=UNKNOWN,
            note="symmetric 4 and 8 bits in groups of -1, 32, 64 or 128 are the trodden path",
        )
    return Consumer(
        name="SGLang",
        loads="yes",
        kernel="Marlin" if file.fits_marlin else "Marlin or Exllama",
        speed=FULL_SPEED,
        note="without --quantization",
    )


def _transformers(file: _File) -> Consumer:
    name = "transformers 5"
    if file.format == "qqq":
        return Consumer(name=name, loads="no", note="load it with GPTQModel")
    if file.format == "bitsandbytes":
        return Consumer(
            name=name,
            loads="yes",
            kernel="LLM.int8",
            speed="slower",
            note="needs bitsandbytes; saves memory, not time",
        )
    if file.format == "compressed-tensors":
        if file.is_transposed:
            return Consumer(name=name, loads="no", note="it quantizes Linear, not GPT-2's Conv1D")
        return Consumer(
            name=name,
            loads="yes",
            kernel="decompressed",
            speed=NO_GAIN,
            note="needs compressed-tensors",
        )
    inner = _gptqmodel(file)
    return Consumer(
        name=name,
        loads=inner.loads,
        kernel="GPTQModel's" if inner.loads == "yes" else "",
        speed=inner.speed,
        note="needs gptqmodel and optimum" if inner.loads == "yes" else inner.note,
    )


def _gptqmodel(file: _File) -> Consumer:
    name = "GPTQModel 7"
    if file.format in ("compressed-tensors", "bitsandbytes"):
        return Consumer(name=name, loads="no", note=f"it does not read {file.format}")
    if file.any(lambda layer, scheme: layer.in_features % 32 != 0 or layer.out_features % 32 != 0):
        return Consumer(name=name, loads="no", note="its kernels need multiples of 32")
    if odd := file.odd_groups(GPTQMODEL_GROUP_SIZES):
        return Consumer(name=name, loads="no", note=f"groups of {odd[0]} are not read")
    kernel = {"qqq": "QQQ", "awq": "Marlin / AWQ"}.get(file.format, "Marlin / Triton / CPU")
    note = "compute capability 8.0 and float16" if file.format == "qqq" else ""
    if file.format == "gptq" and file.is_asymmetric:
        note = "asymmetric files are safer as gptq_v2"
    return Consumer(name=name, loads="yes", kernel=kernel, speed=FULL_SPEED, note=note)
