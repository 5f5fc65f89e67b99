"""Quantizing with another project's tool: `--backend gptqmodel` and its like.

The peer runs in a process of its own, under the interpreter of the environment that it is
installed in: `peer_worker.py` is copied beside a job file and started there, so the peer needs
nothing of llmbench and llmbench nothing of the peer. Both see the same calibration tokens, which
makes their results comparable. What the peer writes goes to a folder beside the output and gets
its name only when it is whole.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbench.quant.config import QuantConfig
from llmbench.quant.errors import ConfigError, QuantError
from llmbench.quant.peers import PEERS, Peer

WORKER = Path(__file__).with_name("peer_worker.py")
NUM_LOG_LINES = 20
"""Enough for the end of a Python traceback."""
PROBE = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
PROBE_TIMEOUT_S = 60
MISSING = "PackageNotFoundError"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """What a peer's run cost, and with which versions.

    Attributes:
        seconds: From reading the base to the last file written, without the interpreter's start.
        peak_rss_bytes: Largest resident memory of the peer's process.
        log_tail: The last lines that the peer printed.
    """

    seconds: float
    peak_rss_bytes: int
    versions: Mapping[str, str]
    log_tail: str


def find_peer(backend: str, config: QuantConfig, python: Path | None = None) -> Path:
    """The interpreter that has the peer, before any time is spent on the run.

    Raises:
        ConfigError: the peer cannot do what the settings ask for.
        QuantError: it is not installed there; the notes say how to install it.
    """
    peer = _peer(backend)
    if refusal := peer.refusal(config):
        error = ConfigError(refusal)
        error.add_note("leave out --backend: llmbench's own methods know no such limit")
        raise error
    return _find(peer, python)


def run_peer(
    backend: str,
    *,
    base: Path,
    output: Path,
    config: QuantConfig,
    samples: Sequence[Sequence[int]],
    python: Path | None = None,
) -> PeerResult:
    """Quantize `base` into `output` by a peer, with these calibration tokens.

    `python` is the interpreter of the peer's environment, by default this one. The peer keeps
    its own defaults where `config` holds llmbench's: damping and the search for ranges differ.

    Raises:
        ConfigError: the peer cannot do what the settings ask for.
        QuantError: it is not installed, or it failed; the notes hold the end of what it printed.
    """
    interpreter = find_peer(backend, config, python)
    peer = _peer(backend)
    if config.needs_calibration and not any(samples):
        raise QuantError(f"{config.method} looks at calibration tokens and there are none")
    staged = output.with_name(f".{output.name}.{backend}")
    if output.exists() and any(output.iterdir()):
        raise QuantError(f"the output {output} exists and is not empty")
    try:
        with tempfile.TemporaryDirectory(prefix="llmbench-peer-") as folder:
            # A folder left by a run that was killed would be mixed with this one's files.
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            result = _run(
                peer, Path(folder), interpreter, _job(peer, base, staged, config, samples)
            )
        if output.exists():
            output.rmdir()
        staged.rename(output)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return result


def _peer(backend: str) -> Peer:
    try:
        return PEERS[backend]
    except KeyError:
        raise ConfigError(f"backend is {backend!r}, expected one of {', '.join(PEERS)}") from None


def _find(peer: Peer, python: Path | None) -> Path:
    if python is None:
        try:
            importlib.metadata.version(peer.distribution)
        except importlib.metadata.PackageNotFoundError:
            raise _not_installed(peer, "this environment") from None
        return Path(sys.executable)
    command = [str(python), "-c", PROBE, peer.distribution]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QuantError(f"{python} does not run as a Python interpreter: {error}") from error
    if MISSING in probe.stderr:
        raise _not_installed(peer, f"the environment of {python}")
    if probe.returncode != 0:
        refused = QuantError(f"{python} does not run as a Python interpreter")
        refused.add_note(_tail(probe.stderr) or f"its exit code is {probe.returncode}")
        raise refused
    return python


def _not_installed(peer: Peer, place: str) -> QuantError:
    """What is missing, and the commands that bring it."""
    error = QuantError(f"the package {peer.distribution} is not installed in {place}")
    error.add_note(
        "\n".join(
            (
                "make an environment for it:",
                *(f"  {command}" for command in peer.install),
                f"and name its interpreter: --backend-python ~/envs/{peer.name}/bin/python",
            )
        )
    )
    error.add_note(f"these work together: {peer.works_with}")
    if peer.caveat:
        error.add_note(peer.caveat)
    return error


def _job(
    peer: Peer,
    base: Path,
    staged: Path,
    config: QuantConfig,
    samples: Sequence[Sequence[int]],
) -> dict[str, Any]:
    import torch

    # The peer's own damping, unless somebody asked for another.
    is_default = config.damp_percent == QuantConfig().damp_percent
    return {
        "backend": peer.name,
        "base": str(base.resolve()),
        "output": str(staged.resolve()),
        "method": config.method,
        "format": config.format,
        "bits": config.scheme.bits,
        "group_size": config.scheme.group_size,
        "sym": config.scheme.sym,
        "activations": config.scheme.activations,
        "desc_act": config.desc_act,
        "act_order": config.act_order,
        "true_sequential": config.true_sequential,
        "damp_percent": None if is_default else config.damp_percent,
        "smooth_alpha": config.smooth_alpha,
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "samples": [list(row) for row in samples if row],
    }


def _run(peer: Peer, folder: Path, interpreter: Path, job: Mapping[str, Any]) -> PeerResult:
    """Start the worker in the folder and wait for it."""
    worker = folder / WORKER.name
    shutil.copyfile(WORKER, worker)
    result, log = folder / "result.json", folder / "log.txt"
    job_file = folder / "job.json"
    job_file.write_text(json.dumps({**job, "result": str(result)}), encoding="utf-8")
    with log.open("wb") as stream:
        # subprocess.run kills the peer if this process is interrupted while it waits.
        done = subprocess.run(
            [str(interpreter), str(worker), str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    # As bytes: text mode would make a line of every state of a progress bar.
    printed = log.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
    if done.returncode != 0 or not result.exists():
        raise _failure(peer, done.returncode, printed)
    record = json.loads(result.read_text(encoding="utf-8"))
    return PeerResult(**record, log_tail=_tail(printed))


def _failure(peer: Peer, exit_code: int, printed: str) -> QuantError:
    last = _tail(printed).rpartition("\n")[2].strip() or "it printed nothing"
    error = QuantError(f"{peer.name} failed with exit code {exit_code}: {last}")
    for part, way_out in peer.known_failures.items():
        if part in printed:
            error.add_note(way_out)
    error.add_note(f"these work together: {peer.works_with}")
    error.add_note(f"the end of what it printed:\n{_tail(printed)}")
    return error


def _tail(printed: str) -> str:
    """The last lines; a progress bar counts as its last state."""
    lines = [line.rsplit("\r", 1)[-1] for line in printed.rstrip().split("\n")]
    return "\n".join(lines[-NUM_LOG_LINES:])
