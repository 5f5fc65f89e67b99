"""Checkpoints that peers write: our reader finds the numbers that the peer itself computes.

Each peer quantizes tiny random models in its own environment, through the worker behind
`--backend`, and then dumps what its own code makes of its file.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Format, QuantConfig, Scheme
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.peer_backends import WORKER, PeerResult, run_peer

pytestmark = [pytest.mark.peers, pytest.mark.slow]

G64, G128 = Scheme(group_size=64), Scheme(group_size=128)
QQQ = {"method": "qqq", "activations": "int8"}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "gptqmodel": {
        "gptq of 4 bits": {"method": "gptq", "group_size": 128},
        "gptq of 3 bits": {"method": "gptq", "bits": 3, "group_size": 64},
        "gptq of 8 bits, a group a row": {"method": "gptq", "bits": 8, "group_size": -1},
        "gptq with groups out of order": {"method": "gptq", "desc_act": True, "family": "qwen2"},
        "gptq with zeros, first version": {"method": "gptq", "sym": False},
        "gptq with zeros, second version": {"method": "gptq", "sym": False, "format": "gptq_v2"},
        "awq": {"method": "awq", "sym": False, "family": "qwen2"},
        "qqq, a group a row": {**QQQ, "group_size": -1},
        "qqq of two levels": {**QQQ, "group_size": 128},
    },
    "llmcompressor": {
        "W4A16": {"method": "rtn", "dtype": "float32"},
        "W4A16 in bfloat16": {"method": "rtn", "family": "qwen2"},
        "W4A16 with zeros": {"method": "rtn", "sym": False, "dtype": "float32"},
        "W3A16, a group a row": {"method": "rtn", "bits": 3, "group_size": -1},
        "W8A16": {"method": "rtn", "bits": 8, "group_size": 32, "dtype": "float32"},
        "W4A16 by gptq": {"method": "gptq", "dtype": "float32"},
        "W8A8": {
            "method": "smoothquant",
            "bits": 8,
            "group_size": -1,
            "activations": "int8",
            "dtype": "float32",
        },
        "W4A8": {"method": "rtn", "activations": "int8", "dtype": "float32"},
    },
    "autoawq": {"awq": {"method": "awq", "sym": False, "dtype": "float16"}},
}
LIBRARY = {
    "gptqmodel": "gptqmodel",
    "llmcompressor": "compressed-tensors",
    "autoawq": "autoawq",
}
DEFAULTS = {
    "format": None,
    "bits": 4,
    "group_size": 64,
    "sym": True,
    "activations": "none",
    "desc_act": False,
    "act_order": True,
    "true_sequential": True,
    "damp_percent": None,
    "smooth_alpha": 0.5,
    "seed": 0,
    "threads": 1,
}


@pytest.fixture(scope="session")
def peer_made(
    peer: Callable[[str], Any],
    base: Callable[[str, str], Path],
    samples: list[list[int]],
    read_by: Callable[[str, Sequence[Path]], list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[Path, Any]]:
    """A peer's checkpoint by case, and the peer's own reading of it: all of a peer's at once."""
    made: dict[str, dict[str, tuple[Path, Any]]] = {}
    asked: set[str] = set()

    def get(name: str, case: str) -> tuple[Path, Any]:
        if name not in made:
            found = peer(name)
            assert name not in asked, f"{name} has failed before, see the first failure"
            asked.add(name)
            root = tmp_path_factory.mktemp(name)
            jobs, folders = [], []
            for number, settings in enumerate(CASES[name].values()):
                settings = dict(settings)
                family, dtype = settings.pop("family", "llama"), settings.pop("dtype", "bfloat16")
                folder = root / f"case-{number}"
                folder.mkdir()
                paths = {
                    "base": str(base(family, dtype)),
                    "output": str(folder),
                    "result": str(root / f"result-{number}.json"),
                }
                job = {**DEFAULTS, **settings, **paths, "backend": name, "samples": samples}
                jobs.append(root / f"job-{number}.json")
                jobs[-1].write_text(json.dumps(job))
                folders.append(folder)
            found.run("make_checkpoints.py", WORKER, *jobs)
            readings = read_by(LIBRARY[name], folders)
            made[name] = dict(zip(CASES[name], zip(folders, readings, strict=True), strict=True))
        return made[name][case]

    return get


EVERY_CASE = [(name, case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), EVERY_CASE)
def test_dequantized_weights_are_bit_for_bit_the_peers(
    name: str, case: str, peer_made: Callable[[str, str], tuple[Path, Any]]
) -> None:
    folder, reading = peer_made(name, case)
    quantized = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert quantized is not None
    assert set(quantized.layers) == set(reading.weights)
    wrong = [name for name in quantized.layers if not reading.holds(name, quantized.weight(name))]
    assert not wrong


@pytest.mark.parametrize(("name", "case"), EVERY_CASE)
def test_scheme_is_read_from_the_peers_config(
    name: str, case: str, peer_made: Callable[[str, str], tuple[Path, Any]]
) -> None:
    folder, _ = peer_made(name, case)
    quantized = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert quantized is not None
    asked = {**DEFAULTS, **CASES[name][case]}
    found = {
        (scheme.bits, scheme.group_size, scheme.activations) for scheme in quantized.layers.values()
    }
    assert found == {(asked["bits"], asked["group_size"], asked["activations"])}
    assert len(quantized.layers) == 7


@pytest.mark.parametrize(("name", "case"), EVERY_CASE)
def test_engine_computes_the_peers_logits(
    name: str,
    case: str,
    peer_made: Callable[[str, str], tuple[Path, Any]],
    engine_logits: Callable[[Path], torch.Tensor],
    round_inputs_as: Callable[[str], None],
) -> None:
    """In float32 against the peer's float16 or bfloat16: near, and no more than that."""
    folder, reading = peer_made(name, case)
    asked = {**DEFAULTS, "dtype": "bfloat16", **CASES[name][case]}
    is_compressed = name == "llmcompressor"
    if asked["activations"] == "int8":
        round_inputs_as("compressed-tensors" if is_compressed else name)
    tolerance = 1e-4 if is_compressed and asked["dtype"] == "float32" else 0.02
    difference = engine_logits(folder) - reading.logits
    assert (difference.norm() / reading.logits.norm()).item() < tolerance


BACKENDS: dict[str, tuple[QuantConfig, Format]] = {
    "gptqmodel": (QuantConfig(method="gptq", scheme=G128), "gptq"),
    "llmcompressor": (QuantConfig(method="gptq", scheme=G64), "compressed-tensors"),
    "autoawq": (QuantConfig(method="awq", scheme=Scheme(group_size=64, sym=False)), "awq"),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_leaves_a_checkpoint_that_runs(
    name: str,
    peer: Callable[[str], Any],
    base: Callable[[str, str], Path],
    samples: list[list[int]],
    engine_logits: Callable[[Path], torch.Tensor],
    tmp_path: Path,
) -> None:
    config, file_format = BACKENDS[name]
    output = tmp_path / "out"
    result: PeerResult = run_peer(
        name,
        base=base("llama", "bfloat16"),
        output=output,
        config=config,
        samples=samples,
        python=peer(name).python,
    )
    quantized = QuantizedCheckpoint.of(Checkpoint.open(output))
    assert quantized is not None
    assert quantized.format == file_format
    assert (output / "tokenizer.json").is_file()
    assert torch.isfinite(engine_logits(output)).all()
    assert result.seconds > 0
    assert result.peak_rss_bytes > 10**8
    assert result.versions.keys() >= {"torch", "transformers", name}
