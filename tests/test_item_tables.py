"""Item records as Parquet: every field, numbers as numbers."""

import math
from pathlib import Path
from typing import Any

import pandas as pd

from llmbench.bench.accuracy.item_tables import item_table, write_item_tables
from llmbench.bench.accuracy.items import ItemFile, ItemRecord, items_path


def item(doc_id: int, **changes: Any) -> ItemRecord:
    fields: dict[str, Any] = {
        "task": "sums",
        "doc_id": doc_id,
        "key": f"key-{doc_id}",
        "doc_hash": "d",
        "prompt_hash": "p",
        "target_hash": "t",
        "gold": 1,
    }
    return ItemRecord(**fields | changes)


def test_each_task_becomes_a_table_of_its_items(tmp_path: Path) -> None:
    chosen = item(
        0,
        fewshot_ids=(3, 5),
        choices=("4", "하나"),
        loglikelihoods=(-1.5, math.nan),
        metrics={"acc": 1.0, "acc_norm": 0.0},
        pick=0,
    )
    written = item(
        0, task="spoken", gold="넷", response="four", filtered={"strict": "four"}, pick="four"
    )
    with ItemFile(items_path(tmp_path, "sums")) as file:
        file.append(chosen)
        file.append(
            item(1, loglikelihoods=(-math.inf, -2.0), metrics={"acc": 0.0, "acc_bytes": 1.0})
        )
    with ItemFile(items_path(tmp_path, "spoken")) as file:
        file.append(written)
    assert [path.name for path in write_item_tables(tmp_path)] == [
        "items-spoken.parquet",
        "items-sums.parquet",
    ]
    sums = pd.read_parquet(tmp_path / "items-sums.parquet")
    assert list(sums["doc_id"]) == [0, 1]
    assert list(sums["metrics.acc"]) == [1.0, 0.0]
    assert math.isnan(sums["metrics.acc_norm"][1])  # the second has none
    assert math.isnan(sums["metrics.acc_bytes"][0])
    assert sums["metrics.acc_bytes"][1] == 1.0
    assert list(sums["choices"][0]) == ["4", "하나"]
    assert list(sums["fewshot_ids"][0]) == [3, 5]
    assert sums["loglikelihoods"][0][0] == -1.5
    assert math.isnan(sums["loglikelihoods"][0][1])
    assert sums["loglikelihoods"][1][0] == -math.inf
    spoken = pd.read_parquet(tmp_path / "items-spoken.parquet")
    assert list(spoken["gold"]) == ["넷"]
    assert list(spoken["filtered.strict"]) == list(spoken["pick"]) == ["four"]


def test_documents_whose_targets_are_of_several_kinds_share_a_column() -> None:
    def gold(*values: Any) -> list[Any]:
        found: list[Any] = item_table([item(n, gold=value) for n, value in enumerate(values)])[
            "gold"
        ].to_pylist()
        return found

    assert gold(1, 2) == [1, 2]
    assert gold(1, (0, 2)) == [[1], [0, 2]]
    assert gold("a", ("b", "c")) == [["a"], ["b", "c"]]
    assert gold(1, "b") == ["1", "b"]


def test_types_do_not_depend_on_what_a_task_left_empty() -> None:
    plain = item_table([item(0)])
    full = item_table([item(0, fewshot_ids=(1,), response="x", text_size=(1, 2))])
    assert plain.schema == full.schema
