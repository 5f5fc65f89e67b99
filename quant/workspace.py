"""The unfinished state of a quantization run on disk, from which a repeated command goes on.

Beside the output folder lies `<output>.partial`: a file of tensors and a record for each finished
block, and the hidden states that enter the next one. A block counts once its record is there,
and the record is written last, so a run that is killed at any moment repeats at most one block.
All of it belongs to one set of settings, model and calibration tokens (the fingerprint); a
command that differs in any of them is refused, not mixed in.
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.quant.errors import QuantError
from llmbench.quant.json_files import write_json
from llmbench.quant.safetensors_header import read_header
from llmbench.quant.safetensors_writer import TensorSpec, spec_of, write_checkpoint, write_file

if TYPE_CHECKING:
    import torch

FINGERPRINT = "run.json"
OUTSIDE = "outside"
"""The part that holds the tensors outside blocks."""


class Workspace:
    """The folder of one unfinished run; only one process may work in it at a time."""

    def __init__(self, output: Path, fingerprint: Mapping[str, Any]) -> None:
        """Open or make the folder beside `output`.

        Raises:
            QuantError: it belongs to a different run, or another process is working in it.
        """
        self.folder = output.with_name(f"{output.name}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise QuantError(f"cannot write beside {output}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise QuantError(f"another process is quantizing into {output}") from None
        try:
            self._check(dict(fingerprint))
        except QuantError:
            self.close()
            raise

    def _check(self, fingerprint: dict[str, Any]) -> None:
        path = self.folder / FINGERPRINT
        plain = json.loads(json.dumps(fingerprint))
        if not path.exists():
            write_json(path, plain)
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if before == plain:
            return
        differing = sorted(key for key in {*before, *plain} if before.get(key) != plain.get(key))
        error = QuantError(
            f"{self.folder} holds an unfinished run with another {', '.join(differing)}"
        )
        error.add_note("repeat that run's command to finish it, or delete the folder to start anew")
        raise error

    def num_finished(self) -> int:
        """Blocks that are finished, counted from the first."""
        count = 0
        while self._record(_block(count)).exists():
            count += 1
        return count

    def has_part(self, part: str) -> bool:
        """Whether a part is finished."""
        return self._record(part).exists()

    def save_part(
        self, part: str, tensors: Mapping[str, "torch.Tensor"], record: Mapping[str, Any]
    ) -> None:
        """Keep a finished part's tensors, then its record."""
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        write_file(self._tensors(part), specs, tensors.__getitem__)
        write_json(self._record(part), record)

    def save_block(
        self,
        index: int,
        tensors: Mapping[str, "torch.Tensor"],
        record: Mapping[str, Any],
        hidden: Sequence["torch.Tensor"],
    ) -> None:
        """Keep a finished block, and the hidden states [B, S, H] of each batch behind it."""
        if hidden:
            named = {f"{number:05d}": batch for number, batch in enumerate(hidden)}
            specs = [spec_of(name, batch) for name, batch in named.items()]
            write_file(self._hidden(index), specs, named.__getitem__)
        self.save_part(_block(index), tensors, record)
        self._hidden(index - 1).unlink(missing_ok=True)

    def hidden_states(self, index: int) -> list["torch.Tensor"]:
        """The hidden states behind a finished block."""
        from safetensors.torch import load_file

        found = load_file(str(self._hidden(index)))
        return [found[name] for name in sorted(found)]

    def record(self, part: str) -> dict[str, Any]:
        """The record of a finished part."""
        found: dict[str, Any] = json.loads(self._record(part).read_text(encoding="utf-8"))
        return found

    def block_record(self, index: int) -> dict[str, Any]:
        """The record of a finished block."""
        return self.record(_block(index))

    def assemble(self, folder: Path, num_blocks: int) -> int:
        """Write all parts' tensors as a checkpoint's weights; the bytes of all tensors."""
        specs: list[TensorSpec] = []
        part_of: dict[str, Path] = {}
        for part in (OUTSIDE, *map(_block, range(num_blocks))):
            path = self._tensors(part)
            for name, entry in read_header(path).tensors.items():
                specs.append(TensorSpec(name, entry.dtype, entry.shape))
                part_of[name] = path
        write_checkpoint(folder, specs, _reader(part_of))
        return sum(spec.num_bytes for spec in specs)

    def close(self) -> None:
        """Let another process work here."""
        self._lock.close()

    def delete(self) -> None:
        """Remove the folder: the output is complete."""
        self.close()
        shutil.rmtree(self.folder)

    def _record(self, part: str) -> Path:
        return self.folder / f"{part}.json"

    def _tensors(self, part: str) -> Path:
        return self.folder / f"{part}.safetensors"

    def _hidden(self, index: int) -> Path:
        return self.folder / f"hidden-{index:04d}.safetensors"


def _block(index: int) -> str:
    return f"block-{index:04d}"


def _reader(part_of: Mapping[str, Path]) -> Callable[[str], "torch.Tensor"]:
    def read(name: str) -> "torch.Tensor":
        from safetensors import safe_open

        with safe_open(str(part_of[name]), framework="pt") as part:
            tensor: torch.Tensor = part.get_tensor(name)
        return tensor

    return read
