"""The folder that a quantization run leaves: weights, config and everything else of the base.

A checkpoint is more than its weights: the generation config, the tokenizer, the chat template
and, for models with code of their own, that code. All of it is copied; config.json gets its
`quantization_config`; a manifest says what the checkpoint was made from and proves each tensor.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmbench.quant.calibration import CalibrationSet
from llmbench.quant.checkpoint import CONFIG, Checkpoint
from llmbench.quant.errors import QuantError
from llmbench.quant.json_files import write_json
from llmbench.quant.plan import QuantPlan
from llmbench.quant.workspace import Workspace

MANIFEST = "llmbench_quantization.json"
SCHEMA_VERSION = 1
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
)
NOT_COPIED = (CONFIG, "quantize_config.json", "quant_config.json", MANIFEST)
FINGERPRINT_KEYS = (
    "schema_version",
    "base_digest",
    "calibration_digest",
    "config",
    "format",
    "versions",
)
PACKAGES = ("llmbench", "torch", "transformers", "tokenizers")


class OutputFolder:
    """The output of one run."""

    def __init__(self, folder: Path, base: Checkpoint) -> None:
        self.folder = folder
        self._base = base

    def check_is_free(self) -> None:
        """Refuse to write over anything.

        Raises:
            QuantError: the folder exists and is not empty, or is the base itself.
        """
        if self.folder.resolve() == self._base.folder.resolve():
            raise QuantError(f"the output {self.folder} is the checkpoint that is to be quantized")
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise QuantError(f"the output {self.folder} exists and is a file")
        if any(self.folder.iterdir()):
            error = QuantError(f"the output {self.folder} exists and is not empty")
            error.add_note("name a new folder, or delete this one first")
            raise error
        self.folder.rmdir()

    def fingerprint(self, plan: QuantPlan, calibration_digest: str | None) -> dict[str, Any]:
        """All that decides about the output's bytes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "base_digest": self._base.digest,
            "calibration_digest": calibration_digest,
            "config": plan.config.to_json(),
            "format": plan.format,
            "versions": {package: version(package) for package in PACKAGES},
        }

    def write(
        self,
        staged: Path,
        workspace: Workspace,
        num_blocks: int,
        *,
        plan: QuantPlan,
        quantization_config: Mapping[str, Any],
        sidecars: Mapping[str, Mapping[str, Any]],
        config_changes: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        calibration: CalibrationSet | None,
        records: Sequence[Mapping[str, Any]],
    ) -> int:
        """Write the whole checkpoint into a new folder `staged`; the bytes of its tensors."""
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        copy_other_files(self._base.folder, staged)
        config = self._base.config | dict(config_changes)
        write_json(staged / CONFIG, config | {"quantization_config": quantization_config})
        for name, content in sidecars.items():
            write_json(staged / name, content)
        num_bytes = workspace.assemble(staged, num_blocks)
        schemes = {
            item.name: None if item.scheme is None else asdict(item.scheme) for item in plan.layers
        }
        merged: dict[str, dict[str, Any]] = {"layers": {}, "dequantized": {}, "tensors": {}}
        for record in records:
            for key, found in merged.items():
                found.update(record[key])
        write_json(
            staged / MANIFEST,
            {
                **fingerprint,
                "calibration": None if calibration is None else calibration.to_json(),
                "bytes_before": self._base.num_bytes,
                "bytes_after": num_bytes,
                "schemes": schemes,
                **merged,
            },
        )
        return num_bytes


def read_fingerprint(folder: Path) -> dict[str, Any] | None:
    """What a finished output was made from; None where `folder` is none."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    manifest = json.loads(path.read_text(encoding="utf-8"))
    return {key: manifest.get(key) for key in FINGERPRINT_KEYS}


def copy_other_files(source: Path, target: Path) -> None:
    """Copy what is neither weights nor the config: tokenizer, templates, licence, own code."""
    for path in sorted(source.iterdir()):
        name = path.name
        if name.startswith(".") or name in NOT_COPIED or name.endswith(WEIGHT_SUFFIXES):
            continue
        if path.is_file():
            shutil.copyfile(path, target / name)
        elif path.is_dir() and _holds_no_weights(path):
            shutil.copytree(path, target / name)


def _holds_no_weights(folder: Path) -> bool:
    return not any(path.name.endswith(WEIGHT_SUFFIXES) for path in folder.rglob("*"))
