"""How large the KV pool becomes, what limits it, and what is said where nothing fits."""

from typing import Any

import pytest

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import OutOfMemoryError
from llmbench.engine.memory import MemoryPlan, plan_memory

GIB = 1024**3
MIB = 1024**2


def plan(*, is_cpu: bool = True, free_bytes: int = 64 * GIB, **changes: Any) -> MemoryPlan:
    facts: dict[str, Any] = {
        "weight_bytes": 2 * GIB,
        "kv_bytes_per_token": 1024,
        "max_model_len": 4096,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "dtype_bytes": 2,
    }
    config = {key: value for key, value in changes.items() if key not in facts}
    facts |= {key: value for key, value in changes.items() if key in facts}
    return plan_memory(
        EngineConfig(model="m", **config), is_cpu=is_cpu, free_bytes=free_bytes, **facts
    )


# 512 tokens x (6 x 512 + 3 x 1024) x 2 bytes, and 64 rows x 1000 logits x (2 + 16) bytes.
ACTIVATION_BYTES = 512 * 6144 * 2 + 64 * 1000 * 18


def test_pool_is_what_all_requests_can_use() -> None:
    found = plan()
    assert found.num_kv_blocks == 64 * 4096 // 16
    assert found.kv_tokens == 64 * 4096
    assert found.kv_bytes == 64 * 4096 * 1024
    assert found.block_bytes == 16 * 1024
    assert found.activation_bytes == ACTIVATION_BYTES
    assert found.limited_by == "64 requests of 4096 tokens"


def test_last_block_of_a_request_may_be_open() -> None:
    assert plan(max_model_len=33, max_num_seqs=2).num_kv_blocks == 2 * 3


def test_activations_grow_with_the_wider_of_budget_and_sequences() -> None:
    found = plan(max_num_batched_tokens=64, max_num_seqs=100)
    assert found.activation_bytes == 100 * 6144 * 2 + 100 * 1000 * 18


def test_memory_utilization_limits_the_pool() -> None:
    found = plan(free_bytes=3 * GIB, memory_utilization=0.7)
    left = int(0.7 * 3 * GIB) - 2 * GIB - ACTIVATION_BYTES
    assert found.num_kv_blocks == left // (16 * 1024)
    assert found.limited_by == "memory_utilization 0.7"


@pytest.mark.parametrize(("is_cpu", "expected"), [(True, 4 * GIB), (False, 16 * GIB)])
def test_cpu_pool_is_4_gib_unless_asked_otherwise(is_cpu: bool, expected: int) -> None:
    found = plan(is_cpu=is_cpu, max_model_len=262_144)
    assert found.kv_bytes == expected
    assert found.limited_by == ("the default on CPU" if is_cpu else "64 requests of 262144 tokens")


def test_cpu_pool_holds_one_longest_request_all_the_same() -> None:
    found = plan(max_model_len=8 * 1024**2, max_num_seqs=4)
    assert found.kv_bytes == 8 * GIB


def test_asked_for_sizes_are_taken_as_they_are() -> None:
    by_bytes = plan(kv_cache_memory_bytes=10 * MIB + 1)
    assert (by_bytes.num_kv_blocks, by_bytes.limited_by) == (640, "kv_cache_memory")
    by_blocks = plan(num_kv_blocks=7)
    assert (by_blocks.num_kv_blocks, by_blocks.limited_by) == (7, "num_kv_blocks")


def test_asked_for_size_may_exceed_the_utilization_but_not_the_memory() -> None:
    found = plan(free_bytes=3 * GIB, memory_utilization=0.1, kv_cache_memory_bytes=GIB // 2)
    assert found.kv_bytes == GIB // 2


def test_plan_reads_as_a_sum() -> None:
    assert str(plan(free_bytes=8 * GIB, kv_cache_memory_bytes=512 * MIB)) == (
        "weights 2,048 MiB + KV 512 MiB (32,768 blocks x 16 tokens x 1,024 bytes, limited by "
        "kv_cache_memory) + activations 7 MiB of 8,192 MiB free"
    )


@pytest.mark.parametrize(
    ("changes", "found", "hint"),
    [
        # Weights alone are beyond the share that may be taken.
        (
            {"free_bytes": 2 * GIB + 100 * MIB, "memory_utilization": 0.8},
            "KV 0 MiB (0 blocks",
            "raise --memory-utilization",
        ),
        # More KV than there is memory.
        (
            {"free_bytes": 3 * GIB, "kv_cache_memory_bytes": 2 * GIB},
            "KV 2,048 MiB (131,072 blocks x 16 tokens x 1,024 bytes, limited by kv_cache_memory)",
            "lower --kv-cache-memory",
        ),
        ({"free_bytes": 3 * GIB, "num_kv_blocks": 10**6}, "(1,000,000 blocks", "lower --num-kv"),
        # Less than a block.
        ({"kv_cache_memory_bytes": 16_383}, "KV 0 MiB (0 blocks", "raise --kv-cache-memory"),
        # Activations alone.
        (
            {"free_bytes": 16 * GIB, "max_num_batched_tokens": 10**7},
            "activations 117,189 MiB of 16,384 MiB free",
            "lower --max-num-batched-tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum_and_a_way_out(
    changes: dict[str, Any], found: str, hint: str
) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        plan(**changes)
    assert found in str(caught.value)
    assert f"of {changes.get('free_bytes', 64 * GIB) / MIB:,.0f} MiB free" in str(caught.value)
    assert hint in caught.value.__notes__[0]
