"""A step's record: what follows from its fields, and that a file gives it back."""

from dataclasses import fields
from pathlib import Path

import pyarrow.parquet as pq

from llmbench.engine.step_record import StepRecord, read_parquet, write_parquet


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        start_s=12.5 + step,
        schedule_s=0.25,
        forward_s=0.5,
        update_s=0.125,
        num_waiting=2**40,
        num_running=2,
        num_seqs=3,
        num_prefill_tokens=4,
        num_decode_tokens=5,
        num_preempted=6,
        num_prefix_queried_tokens=7,
        num_prefix_hit_tokens=8,
        kv_num_blocks=9,
        kv_free_blocks=10,
        kv_cached_blocks=11,
        kv_reserved_slots=32,
        kv_used_slots=20,
        kernel="cpu+cpu",
    )


def test_duration_and_waste_follow_from_the_fields() -> None:
    assert record(0).duration_s == 0.875
    assert record(0).kv_wasted_slots == 12


def test_parquet_gives_back_what_was_written(tmp_path: Path) -> None:
    records = [record(step) for step in range(5)]
    write_parquet(records, tmp_path / "steps.parquet")
    assert read_parquet(tmp_path / "steps.parquet") == records


def test_parquet_has_a_typed_column_for_each_field_even_without_rows(tmp_path: Path) -> None:
    write_parquet([], tmp_path / "steps.parquet")
    schema = pq.read_schema(tmp_path / "steps.parquet")
    assert schema.names == [field.name for field in fields(StepRecord)]
    types = {int: "int64", float: "double", str: "string"}
    assert [str(schema.field(field.name).type) for field in fields(StepRecord)] == [
        types[field.type]  # type: ignore[index]
        for field in fields(StepRecord)
    ]
    assert read_parquet(tmp_path / "steps.parquet") == []
