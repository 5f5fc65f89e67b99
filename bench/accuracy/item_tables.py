"""Item records as Parquet, for those who analyse them in a data frame: a row an item."""

import dataclasses
from pathlib import Path
from typing import Any

from llmbench.bench.accuracy.items import ItemRecord, items_path, read_items
from llmbench.bench.errors import ResultsError


def write_item_tables(folder: Path) -> list[Path]:
    """Write `items-<task>.parquet` beside each `items-<task>.jsonl`; returns the new files.

    Columns are the records' fields; metrics and filtered answers are columns of their own, such as
    `metrics.acc`. Numbers stay numbers: what JSON has no word for is NaN or infinite here.
    """
    import pyarrow
    import pyarrow.parquet

    written = []
    for records in sorted(folder.glob(items_path(folder, "*").name)):
        path = records.with_suffix(".parquet")
        partial = path.with_name(path.name + ".partial")
        rows = [_row(item) for item in read_items(records)]
        names = dict.fromkeys(name for row in rows for name in row)
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        try:
            pyarrow.parquet.write_table(table, partial)
            partial.replace(path)
        except OSError as cause:
            raise ResultsError(f"cannot write to {path}: {cause.strerror or cause}") from cause
        written.append(path)
    return written


def _row(item: ItemRecord) -> dict[str, Any]:
    row = dataclasses.asdict(item)
    for name in ("metrics", "filtered"):
        row |= {f"{name}.{key}": value for key, value in row.pop(name).items()}
    return row
