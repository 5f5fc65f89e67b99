"""Peers behind `--backend`: what is refused, what is said where one is missing, and its process.

A small script plays the peer's interpreter. The peers themselves run in tests/peers.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llmbench.quant import peer_worker
from llmbench.quant.config import DEFAULT_SCHEMES, Override, QuantConfig, Scheme
from llmbench.quant.errors import ConfigError, QuantError
from llmbench.quant.peer_backends import find_peer, run_peer
from llmbench.quant.peers import PEERS

FAKE = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "-c":
    installed = {installed}
    if sys.argv[3] not in installed:
        sys.exit("PackageNotFoundError: " + sys.argv[3])
    print(installed[sys.argv[3]])
    sys.exit()
job = json.loads(pathlib.Path(sys.argv[2]).read_text())
pathlib.Path({seen!r}).write_text(json.dumps(job))
print("working\\rdone")
{act}
result = {{"seconds": 1.5, "peak_rss_bytes": 10, "versions": {{"torch": "9"}}}}
pathlib.Path(job["result"]).write_text(json.dumps(result))
"""
SAVE = "pathlib.Path(job['output'], 'model.safetensors').write_text('weights')"
GPTQ = QuantConfig(method="gptq")


class FakePeer:
    """An interpreter that has a peer, does `act` and keeps the job that it was given."""

    def __init__(self, folder: Path, act: str = SAVE, installed: str = "gptqmodel") -> None:
        self.python = folder / "python"
        self._seen = folder / "seen.json"
        self.python.write_text(
            FAKE.format(
                python=sys.executable, installed={installed: "1"}, seen=str(self._seen), act=act
            )
        )
        self.python.chmod(0o755)

    @property
    def job(self) -> dict[str, Any]:
        job: dict[str, Any] = json.loads(self._seen.read_text())
        return job


@pytest.mark.parametrize("backend", PEERS)
def test_missing_peer_is_named_with_commands_and_versions(backend: str, tmp_path: Path) -> None:
    method = next(iter(PEERS[backend].bits))
    config = QuantConfig(method=method, scheme=DEFAULT_SCHEMES[method])
    python = FakePeer(tmp_path, installed="something-else").python
    with pytest.raises(QuantError, match=f"package {PEERS[backend].distribution} is not") as caught:
        find_peer(backend, config, python)
    notes = "\n".join(caught.value.__notes__)
    assert "pip install" in notes
    assert "torch" in PEERS[backend].works_with
    assert PEERS[backend].works_with in notes


def test_peer_is_looked_for_in_this_environment_without_an_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    assert find_peer("gptqmodel", GPTQ) == Path(sys.executable)


def test_path_that_is_no_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuantError, match="nowhere does not run as a Python interpreter"):
        find_peer("gptqmodel", GPTQ, tmp_path / "nowhere")


def scheme(**changes: Any) -> Scheme:
    return Scheme(**{"group_size": 64, **changes})


REFUSED: dict[str, tuple[str, QuantConfig, str]] = {
    "method": ("autoawq", GPTQ, "method gptq is none of autoawq's: awq"),
    "bits": (
        "autoawq",
        QuantConfig(method="awq", scheme=scheme(bits=8, sym=False)),
        "bits 8 with awq",
    ),
    "format": (
        "llmcompressor",
        QuantConfig(method="gptq", format="gptq"),
        "format gptq with gptq is none of llmcompressor's: compressed-tensors",
    ),
    "override": (
        "gptqmodel",
        QuantConfig(method="gptq", overrides=(Override(pattern="q_proj", skip=True),)),
        "an override cannot be handed to gptqmodel",
    ),
    "head": ("gptqmodel", QuantConfig(method="gptq", quantize_lm_head=True), "quantize_lm_head"),
    "group": (
        "gptqmodel",
        QuantConfig(method="gptq", scheme=scheme(group_size=96)),
        "group_size 96 with gptq is none of gptqmodel's",
    ),
    "tiles": (
        "gptqmodel",
        QuantConfig(method="qqq", scheme=scheme(activations="int8")),
        "group_size 64 with qqq",
    ),
    "whole rows": (
        "autoawq",
        QuantConfig(method="awq", scheme=scheme(group_size=-1, sym=False)),
        "group_size -1 crashes autoawq",
    ),
    "symmetric awq": ("autoawq", QuantConfig(method="awq", scheme=scheme()), "sym is true"),
    "asymmetric qqq": (
        "gptqmodel",
        QuantConfig(method="qqq", scheme=Scheme(sym=False, activations="int8")),
        "sym is false",
    ),
    "8-bit inputs": (
        "gptqmodel",
        QuantConfig(method="gptq", scheme=scheme(activations="int8")),
        "activations int8 with gptq",
    ),
    "order of awq": (
        "gptqmodel",
        QuantConfig(method="awq", scheme=scheme(sym=False), desc_act=True),
        "desc_act has no meaning for awq",
    ),
    "order of groups": (
        "llmcompressor",
        QuantConfig(method="gptq", scheme=scheme(), desc_act=True),
        "its groups stay in order",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_peer_is_not_asked_for_what_it_cannot_do(case: str, tmp_path: Path) -> None:
    backend, config, message = REFUSED[case]
    python = FakePeer(tmp_path, installed=PEERS[backend].distribution).python
    with pytest.raises(ConfigError, match=message):
        find_peer(backend, config, python)


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gptq', expected one of gptqmodel, llmcompressor"):
        find_peer("gptq", GPTQ)


def test_peer_gets_tokens_and_scheme_and_its_output_gets_its_name(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path)
    config = QuantConfig(method="gptq", scheme=Scheme(bits=8, group_size=32), desc_act=True)
    result = run_peer(
        "gptqmodel",
        base=tmp_path / "base",
        output=tmp_path / "out",
        config=config,
        samples=[[1, 2, 3], [], [4]],
        python=peer.python,
    )
    assert peer.job["samples"] == [[1, 2, 3], [4]]
    asked = {"bits": 8, "group_size": 32, "sym": True, "desc_act": True, "damp_percent": None}
    assert {key: peer.job[key] for key in asked} == asked
    assert (result.seconds, result.peak_rss_bytes) == (1.5, 10)
    assert (result.versions, result.log_tail) == ({"torch": "9"}, "done")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_damping_that_was_asked_for_reaches_the_peer(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path)
    config = QuantConfig(method="gptq", damp_percent=0.05)
    run_peer(
        "gptqmodel",
        base=tmp_path,
        output=tmp_path / "out",
        config=config,
        samples=[[1]],
        python=peer.python,
    )
    assert peer.job["damp_percent"] == 0.05


def test_failing_peer_leaves_nothing_and_its_last_words(tmp_path: Path) -> None:
    peer = FakePeer(
        tmp_path,
        act=f"{SAVE}\nsys.exit('RuntimeError: Cannot access accelerator device')",
        installed="llmcompressor",
    )
    config = QuantConfig(method="awq", scheme=scheme(sym=False))
    with pytest.raises(QuantError, match="exit code 1: RuntimeError: Cannot access") as caught:
        run_peer(
            "llmcompressor",
            base=tmp_path / "base",
            output=tmp_path / "out",
            config=config,
            samples=[[1]],
            python=peer.python,
        )
    assert "runs on a GPU only" in caught.value.__notes__[0]
    assert "done" in caught.value.__notes__[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"python", "seen.json"}


def test_output_of_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "kept").touch()
    peer = FakePeer(tmp_path)
    with pytest.raises(QuantError, match="out exists and is not empty"):
        run_peer(
            "gptqmodel",
            base=tmp_path,
            output=output,
            config=GPTQ,
            samples=[[1]],
            python=peer.python,
        )
    assert (output / "kept").exists()


def test_calibration_without_tokens_is_refused(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path)
    with pytest.raises(QuantError, match="there are none"):
        run_peer(
            "gptqmodel",
            base=tmp_path,
            output=tmp_path / "out",
            config=GPTQ,
            samples=[[]],
            python=peer.python,
        )


def test_worker_runs_where_llmbench_is_not_installed() -> None:
    """It is copied out of the package, so it may import nothing of it, nor need a new Python."""
    tree = ast.parse(Path(peer_worker.__file__).read_text(), feature_version=(3, 10))
    modules = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not [name for name in modules if name and name.startswith("llmbench")]
    loaded = {
        alias.name.split(".")[0] if isinstance(node, ast.Import) else (node.module or "")
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert loaded <= sys.stdlib_module_names | {"importlib.metadata"}


def test_every_backend_has_a_worker() -> None:
    assert set(peer_worker.BACKENDS) == set(PEERS)
