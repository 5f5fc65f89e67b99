"""What a quantization run will take: bytes on disk, memory, time; from headers alone.

Bytes of the result are exact, since every format's tensors follow from the shapes. Memory and
time are estimates and are called so. Memory counts what lies outside the blocks, one block in
float32 with what its method solves, and the calibration activations that wait in front of the
block. Time counts operations and divides them by a stated rate of a processor core; the
weights of its terms come from runs on SmolLM2-135M. A rate measured on the spot would be worse:
on a machine that does other work as well it swings by a factor of ten within seconds.
"""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmbench.quant.config import Format, Method, QuantConfig, Scheme
from llmbench.quant.errors import ConfigError
from llmbench.quant.linear_layers import LinearLayer

FLOAT32_BYTES = 4
HALF_BYTES = 2
LIBRARY_BYTES = 700_000_000
"""Resident size of Python with torch and transformers before a model is loaded."""
DISK_MARGIN_BYTES = 50_000_000
"""Configs, tokenizer and the records of a run that can be resumed, on top of the tensors."""
HESSIAN_COPIES = 6
"""The Hessian, in the order of solving too, its factors and what they are made with."""
BATCH_TOKENS = 4096
"""Tokens that run through a block at once."""

CORE_RATE = 120e9
"""Operations a second of one core in 16 and 32-bit products with AVX-512, a third below its
best."""
STARTUP_S = 5.0
"""Python with its libraries, and the model's first block."""
FORWARD_PASSES = 1.2
"""Runs of the calibration tokens through every block: one, and what attention adds to it."""
ROUNDING_OPERATIONS = 20_000
"""What rounding a weight, the search for its group's range, writing it and reading it back cost,
in operations of a matrix product."""
SOLVES: dict[Method, float] = {
    "rtn": 0.0,
    "int8": 0.0,
    "smoothquant": 0.0,
    "gptq": 8.0,
    "qqq": 8.0,
    "awq": 24.0,
}
"""Products of a layer's weight with its input's Hessian that a method's solution is worth: a walk
over the columns with two sweeps after it, or a search over twenty scalings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """Estimates of a run.

    Attributes:
        bytes_before: Of the checkpoint's tensors.
        bytes_after: Of the tensors that will be written.
        disk_bytes: Most while the run lasts: finished blocks, their copy in the new checkpoint,
            and the hidden states from which a repeated command goes on.
        memory_parts: Most resident memory, by what it is for.
        operations: Floating-point operations.
        rate: Operations a second that are assumed of this machine.
        free_disk_bytes: Where the output goes; None if no output was named.
    """

    bytes_before: int
    bytes_after: int
    disk_bytes: int
    memory_parts: dict[str, int]
    operations: float
    rate: float
    free_disk_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Most resident memory, an estimate."""
        return sum(self.memory_parts.values())

    @property
    def seconds(self) -> float:
        """Duration, an estimate."""
        return STARTUP_S + self.operations / self.rate

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            **asdict(self),
            "memory_bytes": self.memory_bytes,
            "seconds": self.seconds,
        }


def stored_bytes(format: Format, scheme: Scheme, layer: LinearLayer, model_bytes: int) -> int:
    """Bytes of the tensors that replace a layer's weight in a file of this format.

    `model_bytes` are those of an element of the model's own type.
    """
    n, c, g = layer.out_features, layer.in_features, scheme.num_groups(layer.in_features)

    def words(codes: int) -> int:
        return 4 * math.ceil(codes * scheme.bits / 32)

    if format in ("gptq", "gptq_v2"):
        return words(c) * n + g * words(n) + g * n * HALF_BYTES + 4 * c
    if format == "awq":
        return c * words(n) + g * words(n) + g * n * HALF_BYTES
    if format == "qqq":
        return n * c // 2 + 4 * n + (g * n * HALF_BYTES if scheme.group_size > 0 else 0)
    if format == "bitsandbytes":
        return n * c + 4 * n + 1
    if scheme.bits == 8 and scheme.activations == "int8":  # int-quantized
        return n * c + n * g * (model_bytes if scheme.sym else model_bytes + 1)
    zeros = 0 if scheme.sym else words(n) * g
    return n * words(c) + n * g * model_bytes + zeros + 2 * 8


def memory_parts(
    config: QuantConfig, layers: Sequence[LinearLayer], outside_bytes: int, model_bytes: int
) -> dict[str, int]:
    """The run's resident memory by what it is for; `outside_bytes` are those outside blocks."""
    blocks: dict[str, int] = {}
    for layer in layers:
        blocks[layer.block] = blocks.get(layer.block, 0) + layer.num_weights
    # A layer's weight as it is stored and in float32, and its codes, a byte each.
    block = max(blocks.values(), default=0) * (FLOAT32_BYTES + model_bytes + 1)
    parts = {"libraries": LIBRARY_BYTES, "outside_blocks": outside_bytes, "block": block}
    if config.needs_calibration:
        width = FLOAT32_BYTES if config.compute_dtype == "float32" else model_bytes
        hidden, widest = _widths(layers)
        # A token's residual, what waits in front of the next layers, and their output.
        parts["activations"] = num_tokens(config) * 2 * (hidden + widest) * width
        rows = max(_rows_by_block(layers).values(), default=0)
        parts["batch"] = min(BATCH_TOKENS, num_tokens(config)) * rows * FLOAT32_BYTES
        parts["statistics"] = HESSIAN_COPIES * FLOAT32_BYTES * widest**2
    return parts


def hidden_bytes(config: QuantConfig, layers: Sequence[LinearLayer], model_bytes: int) -> int:
    """Bytes of the hidden states of all calibration tokens in front of a block."""
    width = FLOAT32_BYTES if config.compute_dtype == "float32" else model_bytes
    return num_tokens(config) * _widths(layers)[0] * width


def _widths(layers: Sequence[LinearLayer]) -> tuple[int, int]:
    """The narrowest and the widest input: the residual stream's, and the MLP's inner one."""
    widths = [layer.in_features for layer in layers]
    return min(widths, default=0), max(widths, default=0)


def _rows_by_block(layers: Sequence[LinearLayer]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for layer in layers:
        rows[layer.block] = rows.get(layer.block, 0) + layer.out_features
    return rows


def num_tokens(config: QuantConfig) -> int:
    """Most calibration tokens of a run; none where the method looks at no activations."""
    if not config.needs_calibration:
        return 0
    return config.num_calibration_samples * config.max_seq_length


def operations(config: QuantConfig, layers: Sequence[LinearLayer]) -> float:
    """Floating-point operations of a run over the layers that it quantizes."""
    tokens = num_tokens(config)
    weights = sum(layer.num_weights for layer in layers)
    total = FORWARD_PASSES * 2.0 * weights * tokens + ROUNDING_OPERATIONS * weights
    if solves := SOLVES[config.method]:
        # Frantar et al. 2022, section 3.3: the Hessian, its inverse, and a pass over the columns.
        for layer in layers:
            n, c = layer.out_features, layer.in_features
            # Half of the layers share their input, and so their Hessian, with another.
            total += tokens * c**2 + solves * (2.0 * c**3 + 2.0 * n * c**2)
    return total


def machine_rate() -> float:
    """Operations a second of the cores that this process may use."""
    is_linux = hasattr(os, "sched_getaffinity")
    return CORE_RATE * (len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1)


def free_disk_bytes(output: Path) -> int:
    """Free bytes where `output` will be made; what a broken-off run of it holds counts as free."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    partial = output.with_name(f"{output.name}.partial")
    held = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    return shutil.disk_usage(place).free + held


def check_disk(output: Path, costs: RunCosts) -> None:
    """Refuse an output that will not fit, before hours are spent on it."""
    free = costs.free_disk_bytes
    if free is None or costs.disk_bytes + DISK_MARGIN_BYTES <= free:
        return
    error = ConfigError(
        f"the run takes {costs.disk_bytes / 1e9:.2f} GB of disk and {output.absolute().parent} "
        f"has {free / 1e9:.2f} GB free"
    )
    error.add_note("name an output on a larger disk, or free some space")
    raise error
