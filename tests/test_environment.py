"""Facts about machines, from the texts that other machines print."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmbench.bench import environment
from llmbench.bench.environment import (
    code_facts,
    collect_environment,
    cpu_flags,
    gpu_facts,
    hardware_identity,
    package_versions,
    parse_nvidia_smi,
    software_identity,
    usable_cores,
)

LINUX_X86 = """\
processor	: 0
model name	: Intel(R) Xeon(R) Platinum 8488C
flags		: fpu sse2 avx2 fma f16c avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile
"""
LINUX_ARM = """\
processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd evtstrm asimdhp asimddp sve i8mm bf16
"""
MACOS_ARM = """\
machdep.cpu.brand_string: Apple M2
machdep.cpu.core_count: 8
hw.optional.neon: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_SME: 0
"""
MACOS_INTEL = """\
machdep.cpu.brand_string: Intel(R) Core(TM) i7-1068NG7 CPU @ 2.30GHz
machdep.cpu.features: FPU SSE4.2 FMA F16C AVX1.0
machdep.cpu.leaf7_features: RDWRFSGS AVX2 AVX512F AVX512VNNI
"""


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (
            LINUX_X86,
            "avx2 fma f16c avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16",
        ),
        (LINUX_ARM, "neon fp16 dotprod bf16 i8mm sve"),
        (MACOS_ARM, "neon fp16 dotprod bf16"),
        (MACOS_INTEL, "avx2 fma f16c avx512f avx512_vnni"),
        ("", ""),
    ],
)
def test_processor_features_have_one_spelling_on_all_systems(text: str, flags: str) -> None:
    assert set(cpu_flags(text)) == set(flags.split())


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (LINUX_X86, "Intel(R) Xeon(R) Platinum 8488C"),
        (MACOS_ARM, "Apple M2"),
        (LINUX_ARM, None),
    ],
)
def test_processor_model_is_read_or_unknown(text: str, model: str | None) -> None:
    assert environment._cpu_model(text) == model


@pytest.mark.parametrize("text", ["", "max 100000", "garbage"])
def test_no_quota_leaves_the_cores_of_the_affinity(text: str) -> None:
    assert usable_cores(text) == usable_cores()
    assert usable_cores() >= 1


def test_quota_of_a_container_cuts_the_cores() -> None:
    assert usable_cores("50000 100000") == 0.5
    assert usable_cores("6400000000 100000") == usable_cores()  # more than there are


def test_environment_is_strict_json_and_names_this_machine() -> None:
    facts = collect_environment()
    json.dumps(facts, allow_nan=False)
    assert facts["cpu"]["num_logical_cores"] >= 1
    assert 0 < facts["memory"]["available_bytes"] <= facts["memory"]["total_bytes"]
    assert facts["python"]["version"].startswith(f"{sys.version_info.major}.")
    assert facts["packages"]["numpy"] is not None
    assert hardware_identity(facts)["cpu_model"]
    assert software_identity(facts)["torch"] == facts["packages"]["torch"]


def test_package_that_is_not_installed_has_no_version() -> None:
    assert package_versions(["numpy", "no-such-package"])["no-such-package"] is None


def test_gpus_are_read_from_nvidia_smi() -> None:
    text = "NVIDIA H200, 143771, 143000, 570.86.15, 9.0\nNVIDIA L4, [N/A], 22000, 570.86.15, 8.9\n"
    first, second = parse_nvidia_smi(text)
    assert first == {
        "name": "NVIDIA H200",
        "memory_total_bytes": 143771 * 2**20,
        "memory_free_bytes": 143000 * 2**20,
        "driver_version": "570.86.15",
        "compute_capability": "9.0",
    }
    assert second["memory_total_bytes"] is None


@pytest.mark.parametrize("text", ["", "No devices were found\n"])
def test_no_gpu_is_an_empty_list(text: str) -> None:
    assert parse_nvidia_smi(text) == []


class FakeNvml:
    """nvidia-ml-py with one GPU."""

    class NVMLError(Exception):
        """As the library's own."""

    def __init__(self, *, has_driver: bool) -> None:
        self.has_driver = has_driver

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": b"570.1",  # older versions answer in bytes
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": object(),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100, free=60),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetName": "NVIDIA H200",
        }
        return lambda *_: answers[name]


def test_gpus_are_read_from_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=True))
    assert gpu_facts() == [
        {
            "name": "NVIDIA H200",
            "memory_total_bytes": 100,
            "memory_free_bytes": 60,
            "driver_version": "570.1",
            "compute_capability": "9.0",
        }
    ]


def test_library_without_a_driver_leaves_it_to_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=False))
    monkeypatch.setattr(environment, "_run", lambda _: "NVIDIA L4, 10, 5, 1.0, 8.9\n")
    assert [gpu["name"] for gpu in gpu_facts()] == ["NVIDIA L4"]


def git(folder: Path, *command: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, *command],
        cwd=folder,
        env=outside,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_revision_of_a_checkout_and_whether_it_was_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert code_facts(tmp_path) == {"git_revision": revision, "git_has_changes": False}
    (tmp_path / "code.py").write_text("a = 2\n")
    assert code_facts(tmp_path) == {"git_revision": revision, "git_has_changes": True}


def test_package_installed_below_another_repository_has_no_revision(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    installed = tmp_path / "venv" / "llmbench"
    installed.mkdir(parents=True)
    (installed / "module.py").touch()
    assert code_facts(installed) == {"git_revision": None, "git_has_changes": None}


def test_program_that_is_missing_says_nothing() -> None:
    assert environment._run(["no-such-program-anywhere"]) == ""


def test_records_can_be_read_without_heavy_libraries() -> None:
    heavy = ("torch", "transformers", "pandas", "scipy", "matplotlib")
    modules = ("results", "stats", "metrics", "validity", "environment", "strict_json", "slo")
    script = f"import sys; sys.modules.update(dict.fromkeys({heavy}))\n" + "\n".join(
        f"import llmbench.bench.{module}" for module in modules
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
