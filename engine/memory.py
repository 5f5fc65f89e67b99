"""How large the KV pool may be: the memory budget, and the sum that leads to it.

KV pool = min(what the budget leaves, what max_num_seqs requests of max_model_len can use)
budget  = memory_utilization * free memory - weights - activations of the largest step
"""

from dataclasses import dataclass

from llmbench.engine.config import EngineConfig, KVCacheDType
from llmbench.engine.errors import OutOfMemoryError

MIB = 1024**2
CPU_POOL_BYTES = 4 * 1024**3
INT8_SCALE_BYTES = 4
"""Of the float32 scale that every key and value of a cache in 8 bits has."""


def int8_row_bytes(head_dim: int) -> int:
    """Bytes of a key or value in 8 bits with its scale, which lies at a multiple of its size."""
    return -(-head_dim // INT8_SCALE_BYTES) * INT8_SCALE_BYTES + INT8_SCALE_BYTES


def kv_row_bytes(head_dim: int, dtype_bytes: int, kv_cache_dtype: KVCacheDType) -> int:
    """Bytes of one head's key or value of one token."""
    return int8_row_bytes(head_dim) if kv_cache_dtype == "int8" else head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of each part, and the KV pool that follows."""

    free_bytes: int
    """Free memory of the device before the weights were loaded."""
    weight_bytes: int
    activation_bytes: int
    block_bytes: int
    num_kv_blocks: int
    block_size: int
    limited_by: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.num_kv_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_kv_blocks * self.block_size

    def __str__(self) -> str:
        """The arithmetic in one line."""
        per_token = self.block_bytes // self.block_size
        return (
            f"weights {self.weight_bytes / MIB:,.0f} MiB + KV {self.kv_bytes / MIB:,.0f} MiB "
            f"({self.num_kv_blocks:,} blocks x {self.block_size} tokens x {per_token:,} bytes, "
            f"limited by {self.limited_by}) + activations {self.activation_bytes / MIB:,.0f} MiB "
            f"of {self.free_bytes / MIB:,.0f} MiB free"
        )


def plan_memory(
    config: EngineConfig,
    *,
    is_cpu: bool,
    free_bytes: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    max_model_len: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    dtype_bytes: int,
) -> MemoryPlan:
    """Size the KV pool; raises OutOfMemoryError with the sum where not even one block fits.

    Without KV (`uncached`) the pool is scratch for the sequences of one step.
    """
    # Live at once in a layer: residual, norm, QKV and attention (about six hidden widths) and
    # the MLP's two halves and product; and for sampling the logits with a float64 working copy.
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    activation_bytes = tokens * (6 * hidden_size + 3 * intermediate_size) * dtype_bytes
    activation_bytes += config.max_num_seqs * vocab_size * (dtype_bytes + 16)
    block_bytes = kv_bytes_per_token * config.block_size
    blocks_per_request = -(-max_model_len // config.block_size)
    useful = config.max_num_seqs * blocks_per_request
    limited_by_use = f"{config.max_num_seqs} requests of {max_model_len} tokens"
    if is_cpu and useful * block_bytes > CPU_POOL_BYTES:
        useful = max(CPU_POOL_BYTES // block_bytes, blocks_per_request)
        limited_by_use = "the default on CPU"
    budget = int(config.memory_utilization * free_bytes) - weight_bytes - activation_bytes
    if config.num_kv_blocks is not None:
        num_blocks, limited_by = config.num_kv_blocks, "num_kv_blocks"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
        limited_by = "kv_cache_memory"
    elif budget // block_bytes < useful:
        num_blocks = budget // block_bytes
        limited_by = f"memory_utilization {config.memory_utilization:g}"
    else:
        num_blocks, limited_by = useful, limited_by_use
    plan = MemoryPlan(
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        block_bytes=block_bytes,
        num_kv_blocks=max(num_blocks, 0),
        block_size=config.block_size,
        limited_by=limited_by,
    )
    if num_blocks < 1 or weight_bytes + activation_bytes + plan.kv_bytes > free_bytes:
        error = OutOfMemoryError(f"the engine does not fit in memory: {plan}")
        error.add_note(_way_out(config, plan))
        raise error
    return plan


def _way_out(config: EngineConfig, plan: MemoryPlan) -> str:
    smaller_steps = "lower --max-num-batched-tokens or --max-num-seqs"
    if plan.weight_bytes + plan.activation_bytes > plan.free_bytes:
        return f"{smaller_steps}, or take a smaller or quantized model"
    if config.num_kv_blocks is not None:
        return "lower --num-kv-blocks"
    if config.kv_cache_memory_bytes is None:
        return f"raise --memory-utilization, or {smaller_steps}"
    if plan.num_kv_blocks < 1:
        return f"raise --kv-cache-memory to a block's {plan.block_bytes:,} bytes or more"
    return "lower --kv-cache-memory"
