"""What a step did: the raw material of every comparison between schedulers and KV managers.

One record a step, kept in memory and written to Parquet by whoever runs the engine. Throughput,
waste, cache hits, preemptions and the stalls behind a slow token are all views on these rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of the engine; seconds on time.perf_counter's clock, counts in tokens or blocks.

    A prefill token belongs to a prompt, or to what is computed again: after a preemption, and in
    every step without a KV cache. The KV figures are those inside the step, when its own tokens
    are written and nothing that it ends is freed yet; `num_waiting` and `num_running` are the
    requests behind it.
    """

    step: int
    start_s: float
    schedule_s: float
    forward_s: float
    """Batch building, model, logits and sampling."""
    update_s: float
    num_waiting: int
    num_running: int
    num_seqs: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preempted: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    kv_num_blocks: int
    kv_free_blocks: int
    kv_cached_blocks: int
    kv_reserved_slots: int
    kv_used_slots: int
    kernel: str

    @property
    def duration_s(self) -> float:
        """Wall time of the step."""
        return self.schedule_s + self.forward_s + self.update_s

    @property
    def kv_wasted_slots(self) -> int:
        """Slots that a sequence holds without a token in them."""
        return self.kv_reserved_slots - self.kv_used_slots


def write_parquet(records: Sequence[StepRecord], path: Path) -> None:
    """Write the records, one row a step, one column a field."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [field.name for field in fields(StepRecord)]
    types: dict[Any, pa.DataType] = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    schema = pa.schema([(field.name, types[field.type]) for field in fields(StepRecord)])
    columns = {name: [getattr(record, name) for record in records] for name in names}
    pq.write_table(pa.table(columns, schema=schema), path)


def read_parquet(path: Path) -> list[StepRecord]:
    """Read what `write_parquet` wrote."""
    import pyarrow.parquet as pq

    return [StepRecord(**row) for row in pq.read_table(path).to_pylist()]
