"""Which device is computed on, and how much memory is free there."""

from pathlib import Path

import pytest
import torch

from llmbench.engine.device import _cgroup_headroom, resolve_device
from llmbench.engine.errors import ConfigError


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="no CUDA device"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", None), ("1000", 1000 - 700 + 200), ("300", 0)]
)
def test_a_containers_limit_bounds_free_memory(
    tmp_path: Path, limit: str, expected: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\nactive_file 100\n")
    assert _cgroup_headroom(tmp_path) == expected


def test_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert _cgroup_headroom(tmp_path / "absent") is None
