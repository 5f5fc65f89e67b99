"""Checkpoints that llmbench writes: peers load them and compute the same numbers.

Each is quantized by the whole pipeline from a tiny random model, and then read by every library
that knows its format.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.quant.calibration import calibration_from_ids
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import DEFAULT_SCHEMES, Format, QuantConfig, Scheme
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.pipeline import quantize
from llmbench.quant.plan import plan_run

pytestmark = [pytest.mark.peers, pytest.mark.slow]

W4A16 = Scheme(group_size=64)
W4A16_ASYM = Scheme(group_size=64, sym=False)
W4A8 = Scheme(group_size=64, activations="int8")
CASES: dict[str, tuple[str, str, QuantConfig, Format]] = {
    "gptq": ("llama", "bfloat16", QuantConfig(method="gptq", scheme=W4A16), "gptq"),
    "gptq with groups out of order": (
        "qwen2",
        "bfloat16",
        QuantConfig(method="gptq", scheme=W4A16, desc_act=True),
        "gptq",
    ),
    "gptq of 3 bits, a group a row": (
        "llama",
        "bfloat16",
        QuantConfig(method="gptq", scheme=Scheme(bits=3, group_size=-1)),
        "gptq",
    ),
    "gptq of 8 bits": (
        "qwen2",
        "bfloat16",
        QuantConfig(method="rtn", scheme=Scheme(bits=8, group_size=32)),
        "gptq",
    ),
    "gptq_v2 with zeros": (
        "llama",
        "bfloat16",
        QuantConfig(method="rtn", scheme=W4A16_ASYM),
        "gptq_v2",
    ),
    "awq": ("qwen2", "bfloat16", QuantConfig(method="awq", scheme=W4A16_ASYM), "awq"),
    "qqq of two levels": (
        "llama",
        "bfloat16",
        QuantConfig(method="qqq", scheme=DEFAULT_SCHEMES["qqq"]),
        "qqq",
    ),
    "qqq, a group a row": (
        "llama",
        "bfloat16",
        QuantConfig(method="qqq", scheme=Scheme(group_size=-1, activations="int8")),
        "qqq",
    ),
    "W4A16": (
        "llama",
        "float32",
        QuantConfig(method="gptq", scheme=W4A16),
        "compressed-tensors",
    ),
    "W4A16 in bfloat16": (
        "qwen2",
        "bfloat16",
        QuantConfig(method="rtn", scheme=W4A16),
        "compressed-tensors",
    ),
    "W4A16 with zeros": (
        "llama",
        "float32",
        QuantConfig(method="awq", scheme=W4A16_ASYM),
        "compressed-tensors",
    ),
    "W8A8": (
        "qwen2",
        "float32",
        QuantConfig(method="smoothquant", scheme=DEFAULT_SCHEMES["smoothquant"]),
        "compressed-tensors",
    ),
    "W4A8": ("llama", "float32", QuantConfig(method="qqq", scheme=W4A8), "compressed-tensors"),
    "LLM.int8": (
        "llama",
        "bfloat16",
        QuantConfig(method="int8", scheme=DEFAULT_SCHEMES["int8"]),
        "bitsandbytes",
    ),
}
READERS: dict[Format, tuple[str, ...]] = {
    "gptq": ("gptqmodel", "transformers"),
    "gptq_v2": ("gptqmodel",),
    "awq": ("gptqmodel", "autoawq"),
    "qqq": ("gptqmodel",),
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
}
EVERY_READING = [(case, library) for case, (*_, file) in CASES.items() for library in READERS[file]]


@pytest.fixture(scope="session")
def written(
    base: Callable[[str, str], Path],
    samples: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """llmbench's checkpoint of a case."""
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            family, dtype, config, _ = CASES[case]
            file_format = CASES[case][3]
            output = tmp_path_factory.mktemp("written") / "out"
            folder = base(family, dtype)
            changed = QuantConfig.from_json({**config.to_json(), "format": file_format})
            quantize(
                folder,
                output,
                plan=plan_run(Checkpoint.open(folder), changed),
                calibration=calibration_from_ids(samples, max_seq_length=64),
            )
            made[case] = output
        return made[case]

    return get


@pytest.fixture(scope="session")
def reading_of(
    written: Callable[[str], Path],
    read_by: Callable[[str, Sequence[Path]], list[Any]],
) -> Callable[[str, str], Any]:
    """A library's reading of a case; the first one asked for reads all of the library's cases."""
    found: dict[str, dict[str, Any]] = {}
    asked: set[str] = set()

    def get(case: str, library: str) -> Any:
        if library not in found:
            assert library not in asked, f"{library} has failed before, see the first failure"
            asked.add(library)
            cases = [case for case, known in EVERY_READING if known == library]
            readings = read_by(library, [written(case) for case in cases])
            found[library] = dict(zip(cases, readings, strict=True))
        return found[library][case]

    return get


@pytest.mark.parametrize(("case", "library"), EVERY_READING)
def test_peer_finds_the_same_weights(
    case: str,
    library: str,
    reading_of: Callable[[str, str], Any],
    written: Callable[[str], Path],
) -> None:
    reading = reading_of(case, library)
    quantized = QuantizedCheckpoint.of(Checkpoint.open(written(case)))
    assert quantized is not None
    assert set(reading.weights) == set(quantized.layers)
    for module, theirs in reading.weights.items():
        weight = quantized.weight(module)
        if library == "bitsandbytes":
            # It multiplies by SCB and then by 1 / 127 where a scale is SCB / 127, rounded once.
            torch.testing.assert_close(weight.dequantize(), theirs, rtol=3e-7, atol=0)
        else:
            assert reading.holds(module, weight), module


@pytest.mark.parametrize(("case", "library"), EVERY_READING)
def test_peer_computes_the_engines_logits(
    case: str,
    library: str,
    reading_of: Callable[[str, str], Any],
    written: Callable[[str], Path],
    engine_logits: Callable[[Path], torch.Tensor],
    round_inputs_as: Callable[[str], None],
) -> None:
    reading = reading_of(case, library)
    _, dtype, config, _ = CASES[case]
    is_compressed = library == "compressed-tensors"
    if config.scheme.activations == "int8" and library != "bitsandbytes":
        round_inputs_as(library)
    # The peers run in float16 or the file's type, the engine in float32.
    tolerance = 1e-4 if is_compressed and dtype == "float32" else 0.02
    if library == "bitsandbytes":
        tolerance = 0.05  # inputs that differ by bfloat16's rounding move to neighbouring codes
    difference = engine_logits(written(case)) - reading.logits
    assert (difference.norm() / reading.logits.norm()).item() < tolerance
