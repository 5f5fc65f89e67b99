"""Item records as Parquet, for those who analyse them in a data frame: a row an item."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench.accuracy.items import ItemRecord, items_path, read_items
from llmbench.bench.errors import ResultsError

if TYPE_CHECKING:
    import pyarrow


def write_item_tables(folder: Path) -> list[Path]:
    """Write `items-<task>.parquet` beside each `items-<task>.jsonl`; returns the new files.

    Columns are the records' fields, of the same types for every task; metrics and filtered answers
    are columns of their own, such as `metrics.acc`. Numbers stay numbers: what JSON has no word for
    is NaN or infinite here. `gold` and `pick` are numbers, texts or lists of them, as the task has
    them; where its documents differ, the wider of these.
    """
    import pyarrow.parquet

    written = []
    for records in sorted(folder.glob(items_path(folder, "*").name)):
        path = records.with_suffix(".parquet")
        partial = path.with_name(path.name + ".partial")
        table = item_table(read_items(records))
        try:
            pyarrow.parquet.write_table(table, partial)
            partial.replace(path)
        except OSError as cause:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            error = ResultsError(f"cannot write to {path}: {cause.strerror or cause}")
            error.add_note("choose another folder with --output")
            raise error from cause
        written.append(path)
    return written


def item_table(items: Sequence[ItemRecord]) -> "pyarrow.Table":
    """The items as a table of the types that `write_item_tables` describes."""
    import pyarrow as pa

    text, integer, number, truth = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    divergence = {"base_key": text, "same_top": pa.list_(truth)} | dict.fromkeys(
        ("kl", "delta_p", "base_logprob", "logprob"), pa.list_(number)
    )
    types = {
        "doc_id": integer,
        "num_truncated_tokens": integer,
        "fewshot_ids": pa.list_(integer),
        "num_tokens": pa.list_(integer),
        "text_size": pa.list_(integer),
        "choices": pa.list_(text),
        "loglikelihoods": pa.list_(number),
        "is_greedy": pa.list_(truth),
        "is_tied": truth,
        "divergence": pa.struct(list(divergence.items())),
    }
    rows = [dataclasses.asdict(item) for item in items]
    columns = {}
    for field in dataclasses.fields(ItemRecord):
        values = [row[field.name] for row in rows]
        if field.name in ("gold", "pick"):
            columns[field.name] = _of_one_type(values)
        elif field.name in ("metrics", "filtered"):
            for key in dict.fromkeys(key for value in values for key in value):
                columns[f"{field.name}.{key}"] = pa.array(
                    [value.get(key) for value in values],
                    number if field.name == "metrics" else text,
                )
        else:
            columns[field.name] = pa.array(values, types.get(field.name, text))
    return pa.table(columns)


def _of_one_type(values: Sequence[Any]) -> "pyarrow.Array[Any]":
    """Numbers or texts, and lists of them where any value is one."""
    import pyarrow as pa

    lists = [value if isinstance(value, tuple) else (value,) for value in values]
    is_list = any(isinstance(value, tuple) for value in values)
    is_text = any(isinstance(part, str) for parts in lists for part in parts)
    if is_text:
        lists = [tuple(None if part is None else str(part) for part in parts) for parts in lists]
    kind = pa.string() if is_text else pa.int64()
    if is_list:
        return pa.array(lists, pa.list_(kind))
    return pa.array([parts[0] for parts in lists], kind)
