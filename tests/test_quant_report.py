"""Tables of a quantization: kinds of layers, the worst of them, and what happened to whom."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Override, QuantConfig, Scheme
from llmbench.quant.consumers import consumers
from llmbench.quant.layer_report import LayerReport
from llmbench.quant.plan import QuantPlan, plan_run
from llmbench.reports.quant_report import (
    consumer_table,
    layer_kinds,
    layer_table,
    phase_line,
    plan_table,
    size_line,
)
from llmbench.reports.tables import Table, markdown

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def plan(zero_checkpoint: Callable[..., Path]) -> QuantPlan:
    """Three blocks, of which the last down projection stays as it is."""
    config = QuantConfig(
        method="rtn",
        scheme=Scheme(group_size=32),
        overrides=(Override(pattern=r"2\.mlp\.down_proj", skip=True),),
    )
    return plan_run(Checkpoint.open(zero_checkpoint(LLAMA)), config)


def cells(table: Table, name: str) -> tuple[str, ...]:
    return next(column.cells for column in table.columns if column.name == name)


def layers(**errors: float) -> dict[str, LayerReport]:
    return {name: LayerReport(relative_mse=error) for name, error in errors.items()}


def test_layers_alike_are_one_row_with_their_number(plan: QuantPlan) -> None:
    found = {(kind.name, kind.scheme): kind.count for kind in layer_kinds(plan)}
    assert found["mlp.up_proj", "W4A16 sym"] == 3
    assert found["mlp.down_proj", "W4A16 sym"] == 2
    assert found["mlp.down_proj", "full precision"] == 1
    assert sum(found.values()) == 3 * 7 + 1


def test_plan_says_why_a_layer_stays(plan: QuantPlan) -> None:
    notes = plan_table(plan).notes
    assert "lm_head: output head" in notes
    assert any(note.startswith("mlp.down_proj: skipped by") for note in notes)


def test_worst_layers_come_first() -> None:
    table = layer_table(layers(a=0.1, b=0.3, c=0.2), limit=2)
    assert cells(table, "layer") == ("b", "c")
    assert "the worst 2 of 3 layers" in table.notes
    assert any("mean 20.0 %, median 20.0 %" in note for note in table.notes)


def test_error_of_weights_is_not_called_one_of_outputs() -> None:
    assert "weights" in layer_table(layers(a=0.1)).notes[0]
    seen = {"a": LayerReport(relative_mse=0.1, num_tokens=5)}
    assert "output" in layer_table(seen).notes[0]


def test_fallbacks_and_notes_are_told_once_with_their_layers() -> None:
    found = {
        name: LayerReport(relative_mse=0.1, fallback="rtn: no tokens", notes=("skipped", name))
        for name in "abcd"
    }
    notes = layer_table(found, limit=1).notes
    assert "rtn: no tokens (a and 3 more)" in notes
    assert "skipped (a and 3 more)" in notes
    assert not any(note.startswith("a (") for note in notes), "a layer's own note is in the file"


def test_many_different_fallbacks_do_not_flood_the_table() -> None:
    found = {
        f"layer-{index}": LayerReport(relative_mse=0.1, fallback=f"rtn: reason {index}")
        for index in range(100)
    }
    notes = layer_table(found).notes
    assert len(notes) < 15
    assert "and 92 more such notes" in notes


@pytest.mark.parametrize(
    ("reports", "columns"),
    [
        ({"a": LayerReport(relative_mse=0.1)}, ["layer", "error"]),
        ({"a": LayerReport(relative_mse=0.1, damp=0.01, num_tokens=9)}, ["damping", "tokens"]),
    ],
)
def test_columns_follow_what_is_known(reports: Any, columns: list[str]) -> None:
    names = [column.name for column in layer_table(reports).columns]
    assert names[-2:] == columns


def test_consumers_without_a_kernel_have_a_dash_and_a_reason(plan: QuantPlan) -> None:
    table = consumer_table(consumers("qqq", plan.targets))
    row = cells(table, "loads in").index("vLLM")
    assert cells(table, "loads")[row] == "no"
    assert cells(table, "kernel")[row] == "–"  # noqa: RUF001
    assert any(note.startswith("vLLM: QQQ was removed") for note in table.notes)


def test_longest_phase_comes_first() -> None:
    assert phase_line({"load": 1.0, "quantize": 3.0}) == "4.00 s: quantize 3.00 s, load 1.00 s"


def test_size_is_told_before_and_after() -> None:
    assert size_line(2 << 20, 1 << 20) == "2.00 MiB → 1.00 MiB (50 %)"


def test_tables_are_drawn_without_torch(plan: QuantPlan) -> None:
    assert "mlp.down_proj" in markdown(plan_table(plan))
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'numpy']))"
    script = f"{blocked}; import llmbench.reports.quant_report"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
