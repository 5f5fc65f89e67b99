"""`llmbench doctor`: each lack is named with its remedy, and machines are told apart."""

import json
from typing import Any

import pytest

from llmbench.cli import doctor
from llmbench.cli.main import main
from llmbench.engine.errors import KernelBuildError
from llmbench.engine.kernels import cpu_build


@pytest.fixture
def machine() -> dict[str, Any]:
    """A laptop without a GPU, as `collect_environment` describes it."""
    return {
        "cpu": {"model": "Test CPU", "num_usable_cores": 2.0, "flags": ["avx2", "avx512_bf16"]},
        "memory": {"total_bytes": 16 << 30, "available_bytes": 8 << 30, "limit_bytes": None},
        "os": {"name": "Test OS 1"},
        "python": {"version": "3.12.0"},
        "packages": {"torch": "2.13.0+cpu", "triton": None},
        "gpus": [],
    }


def test_bfloat16_without_instructions_is_slow(machine: dict[str, Any]) -> None:
    assert doctor.check_bfloat16(machine).state == "ready"
    machine["cpu"]["flags"] = ["avx2"]
    check = doctor.check_bfloat16(machine)
    assert check.state == "slow"
    assert "--dtype float32" in check.fix


def test_container_limit_counts_as_memory(machine: dict[str, Any]) -> None:
    assert doctor.check_memory(machine).state == "ready"
    machine["memory"]["limit_bytes"] = 1 << 30
    assert doctor.check_memory(machine).state == "missing"
    assert "limited to 1.0 GiB" in dict(doctor.machine_lines(machine))["memory"]


def test_gpu_with_a_cpu_build_of_torch_is_told_from_no_gpu(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    assert "no NVIDIA GPU" in doctor.check_gpu(machine).found
    machine["gpus"] = [
        {"name": "H200", "memory_total_bytes": 141 << 30, "driver_version": "570.1"},
    ]
    check = doctor.check_gpu(machine)
    assert check.state == "missing"
    assert "build without CUDA" in check.found
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert "570.1" in doctor.check_gpu(machine).fix
    assert "H200, 141 GiB" in dict(doctor.machine_lines(machine))["GPU"]


def test_compiler_check_carries_the_builder_s_own_advice(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing() -> list[str]:
        error = KernelBuildError("no compiler here")
        error.add_note("install one")
        raise error

    monkeypatch.setattr(cpu_build, "find_compiler", nothing)
    check = doctor.check_compiler(machine)
    assert (check.state, check.found, check.fix) == ("slow", "no compiler here", "install one")


def test_packages_that_are_absent_or_old_are_named(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.check_packages(machine).state == "ready"
    needs = ["pytest>=99999", "no-such-package-anywhere>=1", 'ignored>=1; extra == "gpu"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    check = doctor.check_packages(machine)
    assert check.state == "missing"
    assert check.is_required
    assert "needed is >=99999" in check.found
    assert "no-such-package-anywhere>=1 is not installed" in check.found
    assert "ignored" not in check.found


def test_absent_demo_model_is_one_command_away(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("LLMBENCH_CACHE", str(tmp_path))
    assert doctor.check_demo_model(machine).fix == "llmbench models pull smollm2-135m"


def test_json_holds_machine_and_checks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["environment"]["cpu"]["num_usable_cores"] >= 1
    assert {check["state"] for check in document["checks"]} <= {"ready", "slow", "missing"}
    assert all(check["fix"] for check in document["checks"] if check["state"] != "ready")


def test_a_required_lack_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["no-such-package-anywhere"])
    assert main(["doctor"]) == 3
    assert "no-such-package-anywhere" in capfd.readouterr().out
