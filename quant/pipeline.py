"""A quantization run: block after block through a method, into a checkpoint on disk.

One block is in memory at a time. Its layers are quantized by the method, the calibration batches
go on through the quantized block to the next, and its tensors are written, so that a run that
ends early loses at most one block (workspace.py). When all are done the parts become one
checkpoint, which is reopened and proved tensor by tensor (verify.py) before it gets its name.

Everything that enters the output is a function of the checkpoint, the calibration tokens and the
settings: no times, no paths. So a run that was killed and repeated writes the same bytes as one
that was not.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmbench.quant.block import Block
from llmbench.quant.block_calibration import CalibrationPasses
from llmbench.quant.block_model import (
    BlockModel,
    CheckpointSource,
    TensorSource,
    TransformedSource,
)
from llmbench.quant.calibration import CalibrationCoverage, CalibrationSet
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Format, QuantConfig, Scheme
from llmbench.quant.digests import tensor_digest, weight_digest
from llmbench.quant.errors import CalibrationError, QuantError
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.head import HeadCalibration, head_block
from llmbench.quant.layer_report import LayerReport, LayerResult
from llmbench.quant.method import make_head_method, make_method
from llmbench.quant.output_folder import OutputFolder
from llmbench.quant.plan import QuantPlan, chosen_transform
from llmbench.quant.verify import Verification, verify_checkpoint
from llmbench.quant.workspace import OUTSIDE, Workspace

KIBIBYTE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is.

    Attributes:
        num_done: Blocks that are finished.
        phase: What is being done now.
        relative_mse: Mean over the layers so far.
        eta_s: None before the first block of this run is done.
    """

    num_done: int
    num_blocks: int
    phase: str
    relative_mse: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantResult:
    """A finished run.

    Attributes:
        calibration: Where the calibration text comes from and how it was cut.
        num_resumed_blocks: Blocks that an earlier run of the same command had finished.
        seconds: By phase, of this run alone.
    """

    output: Path
    format: Format
    layers: dict[str, LayerReport]
    coverage: CalibrationCoverage | None
    calibration: str | None
    bytes_before: int
    bytes_after: int
    num_resumed_blocks: int
    seconds: dict[str, float]
    peak_rss_bytes: int
    verification: Verification


@dataclass(slots=True)
class _Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens in the context, less what inner phases count."""
        started, inner_before = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - inner_before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started - inner


def quantize(
    folder: Path,
    output: Path,
    *,
    plan: QuantPlan,
    calibration: CalibrationSet | None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    check: Callable[[Path], None] = lambda staged: None,
    trust_remote_code: bool = False,
) -> QuantResult:
    """Quantize the checkpoint in `folder` as planned, into the new folder `output`.

    A run that was ended early goes on where it was when the same call is repeated. `check` sees
    the finished checkpoint before it gets its name, and refuses it by raising.

    Raises:
        QuantError: the output exists, the checkpoint holds numbers that are not finite, or an
            unfinished run of other settings lies beside the output.
        VerificationError: what was written is not what was quantized.
    """
    run = _Run(folder, output, plan, calibration, on_progress, check, trust_remote_code)
    return run.finish()


class _Run:
    def __init__(
        self,
        folder: Path,
        output: Path,
        plan: QuantPlan,
        calibration: CalibrationSet | None,
        on_progress: Callable[[Progress], None],
        check: Callable[[Path], None],
        trust_remote_code: bool,
    ) -> None:
        from transformers import AutoConfig

        self._plan = plan
        self._config: QuantConfig = plan.config
        self._calibration = calibration if plan.config.needs_calibration else None
        self._on_progress = on_progress
        self._check = check
        self._clock = _Clock()
        if self._config.needs_calibration and self._calibration is None:
            raise CalibrationError(f"{self._config.method} needs calibration data, none was given")
        self._checkpoint = Checkpoint.open(folder)
        self._output = OutputFolder(output, self._checkpoint)
        self._output.check_is_free()
        self._hf_config: Any = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
        self._text_config = self._hf_config.get_text_config()
        self._format = FORMATS[plan.format]
        model_dtype: torch.dtype = getattr(torch, _stored_dtype(self._checkpoint))
        self._scale_dtype = self._format.scale_dtype(model_dtype)
        self._dtype = _compute_dtype(self._config, model_dtype)
        self._source, self._config_changes = self._tensor_source()
        with self._clock.phase("load"):
            self._model = BlockModel(
                self._checkpoint,
                self._hf_config,
                self._source,
                dtype=self._dtype,
                trust_remote_code=trust_remote_code,
            )
        fingerprint = self._output.fingerprint(
            plan, None if self._calibration is None else self._calibration.digest
        )
        self._workspace = Workspace(output, fingerprint | {"compute_dtype": str(self._dtype)})
        self._fingerprint = fingerprint
        self._reports: dict[str, LayerReport] = {}

    def finish(self) -> QuantResult:
        """All blocks, the rest, the checkpoint, the proof."""
        try:
            return self._finish()
        finally:
            self._workspace.close()

    def _finish(self) -> QuantResult:
        num_blocks = self._model.num_blocks
        num_resumed = min(self._workspace.num_finished(), num_blocks)
        for index in range(num_resumed):
            self._remember(self._workspace.block_record(index))
        with torch.no_grad():
            self._quantize_blocks(num_resumed)
        self._remember(self._workspace.record(OUTSIDE))
        self._tell(num_blocks, "save")
        with self._clock.phase("save"):
            records = [self._workspace.record(OUTSIDE)]
            records += [self._workspace.block_record(index) for index in range(num_blocks)]
            staged = self._workspace.folder / "checkpoint"
            bytes_after = self._output.write(
                staged,
                self._workspace,
                num_blocks,
                plan=self._plan,
                quantization_config=self._format.quantization_config(
                    self._all_schemes(), self._config
                ),
                sidecars=self._format.sidecars(self._all_schemes(), self._config),
                config_changes=self._config_changes,
                fingerprint=self._fingerprint,
                calibration=self._calibration,
                records=records,
            )
        self._tell(num_blocks, "verify")
        with self._clock.phase("verify"):
            verification = verify_checkpoint(staged)
        self._tell(num_blocks, "check")
        with self._clock.phase("check"):
            self._check(staged)
        staged.rename(self._output.folder)
        self._workspace.delete()
        return QuantResult(
            output=self._output.folder,
            format=self._plan.format,
            layers=self._reports,
            coverage=None if self._calibration is None else self._calibration.coverage,
            calibration=None if self._calibration is None else self._calibration.description,
            bytes_before=self._checkpoint.num_bytes,
            bytes_after=bytes_after,
            num_resumed_blocks=num_resumed,
            seconds=dict(self._clock.seconds),
            peak_rss_bytes=peak_rss_bytes(),
            verification=verification,
        )

    def _tensor_source(self) -> tuple[TensorSource, dict[str, Any]]:
        """The checkpoint's tensors, rotated where the run asks for it, and config changes."""
        plain = CheckpointSource(self._checkpoint)
        if chosen_transform(self._config, self._text_config) != "rotate":
            return plain, {}
        from llmbench.quant.rotation import Rotation

        rotation = Rotation(self._text_config, self._config.seed, self._checkpoint.get)
        unties = None
        if rotation.unties_embeddings and "lm_head.weight" not in self._checkpoint:
            unties = ("lm_head.weight", "model.embed_tokens.weight")
        source = TransformedSource(self._checkpoint, rotation.transform, unties=unties)
        return source, rotation.config_changes

    def _quantize_blocks(self, first: int) -> None:
        method = make_method(
            self._config,
            self._scale_dtype,
            self._text_config,
            is_two_level=self._plan.format == "qqq",
        )
        passes = self._make_passes(first)
        started = time.perf_counter()
        try:
            for index in range(first, self._model.num_blocks):
                self._tell(index, "quantize", first, started)
                self._quantize_block(index, method, passes)
            if not self._workspace.has_part(OUTSIDE):
                self._save_outside([] if passes is None else passes.hidden_states())
        finally:
            if passes is not None:
                passes.close()

    def _make_passes(self, first: int) -> CalibrationPasses | None:
        """The calibration batches in front of the first block that is to be quantized."""
        is_over = first == self._model.num_blocks
        if self._calibration is None or is_over:
            return None
        with self._clock.phase("calibrate"):
            passes = CalibrationPasses(self._model, self._calibration.samples)
            if first == 0:
                passes.start()
            else:
                passes.start(self._workspace.hidden_states(first - 1), at_block=first)
        return passes

    def _quantize_block(self, index: int, method: Any, passes: CalibrationPasses | None) -> None:
        with self._clock.phase("load"):
            block = self._model.load_block(index)
        planned = self._plan.schemes
        schemes = {name: planned[name] for name in block.linears if name in planned}
        if passes is None:
            with self._clock.phase("quantize"):
                results = method.quantize_block(block, None, schemes)
        else:
            rounded = frozenset(
                name for name, scheme in schemes.items() if scheme.activations == "int8"
            )
            with self._clock.phase("quantize"), passes.at(block, rounded) as calibration:
                calibration.timer = lambda: self._clock.phase("calibrate")
                results = method.quantize_block(block, calibration, schemes)
                with self._clock.phase("calibrate"):
                    passes.advance()
        with self._clock.phase("save"):
            tensors, record = self._block_part(block, results)
            hidden = [] if passes is None else passes.hidden_states()
            self._workspace.save_block(index, tensors, record, hidden)
        self._model.drop_block(index)
        self._remember(record)

    def _save_outside(self, hidden: list[Tensor]) -> None:
        """Embeddings, last norm and head; the head quantized where the run asks for it."""
        results: dict[str, LayerResult] = {}
        head = next((item for item in self._plan.quantized if not item.layer.block), None)
        if head is not None and head.scheme is not None:
            with self._clock.phase("quantize"):
                block = head_block(head.layer, self._source, self._text_config)
                if self._config.needs_calibration and not hidden:  # the blocks are an earlier run's
                    hidden = self._workspace.hidden_states(self._model.num_blocks - 1)
                calibration: Any = HeadCalibration(block, hidden) if hidden else None
                method = make_head_method(self._config, self._scale_dtype)
                results = method.quantize_block(block, calibration, {head.name: head.scheme})
        with self._clock.phase("save"):
            tensors, record = self._part(
                {name: self._source.get(name) for name in self._model.outside_tensors()}, results
            )
            self._workspace.save_part(OUTSIDE, tensors, record)

    def _block_part(
        self, block: Block, results: Mapping[str, LayerResult]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        names = self._model.block_tensors(block.index)
        quantized = {f"{name}.weight" for name in results}
        return self._part(
            {
                name: self._source.get(name) if name in quantized else self._current(block, name)
                for name in names
            },
            results,
        )

    def _current(self, block: Block, name: str) -> Tensor:
        """A tensor as the block holds it now; the stored one where nothing changed it."""
        stored = self._source.get(name)
        layer = name.removesuffix(".weight")
        changed = block.changed_weight(layer) if layer in block.linears else None
        if changed is not None:
            wide = changed.t() if block.layers[layer].is_transposed else changed
            return wide.to(stored.dtype).contiguous()
        owner, _, kind = block.relative(name).rpartition(".")
        held = getattr(block.get(owner), kind, None)
        if not isinstance(held, Tensor) or torch.equal(held, stored.to(held.dtype)):
            return stored
        return held.detach().to(stored.dtype)

    def _part(
        self, tensors: Mapping[str, Tensor], results: Mapping[str, LayerResult]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A part's tensors as they are stored, and its record with their digests."""
        saved: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layer = name.removesuffix(".weight")
            if layer in results and name.endswith(".weight"):
                saved |= self._format.tensors(layer, results[layer].weight)
            else:
                saved[name] = tensor
        for name, tensor in saved.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                error = QuantError(f"{name} holds numbers that are not finite; nothing is saved")
                error.add_note("look for them in the base checkpoint: its own weights or norms")
                raise error
        record = {
            "layers": {name: result.report.to_json() for name, result in results.items()},
            "dequantized": {name: weight_digest(result.weight) for name, result in results.items()},
            "tensors": {name: tensor_digest(tensor) for name, tensor in saved.items()},
        }
        return saved, record

    def _all_schemes(self) -> dict[str, Scheme | None]:
        schemes: dict[str, Scheme | None] = {item.name: item.scheme for item in self._plan.layers}
        return {"lm_head": None} | schemes

    def _remember(self, record: Mapping[str, Any]) -> None:
        for name, report in record["layers"].items():
            self._reports[name] = LayerReport.from_json(report)

    def _tell(
        self, num_done: int, phase: str, first: int = 0, started: float | None = None
    ) -> None:
        errors = [report.relative_mse for report in self._reports.values()]
        eta_s = None
        if started is not None and num_done > first:
            rate = (time.perf_counter() - started) / (num_done - first)
            eta_s = rate * (self._model.num_blocks - num_done)
        self._on_progress(
            Progress(
                num_done=num_done,
                num_blocks=self._model.num_blocks,
                phase=phase,
                relative_mse=sum(errors) / len(errors) if errors else None,
                eta_s=eta_s,
            )
        )


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The type of most of the weights."""
    return checkpoint.dtype(max(checkpoint.names, key=checkpoint.numel))


def _compute_dtype(config: QuantConfig, stored: torch.dtype) -> torch.dtype:
    if config.compute_dtype != "auto":
        asked: torch.dtype = getattr(torch, config.compute_dtype)
        return asked
    return torch.float32 if stored is torch.float32 else torch.bfloat16


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE
