"""Makes the KV manager that a configuration names."""

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import ConfigError
from llmbench.engine.kv.contiguous import ContiguousKVManager
from llmbench.engine.kv.manager import KVCacheManager
from llmbench.engine.kv.paged import PagedKVManager
from llmbench.engine.kv.prefix_cache import HashPrefixCache
from llmbench.engine.kv.uncached import UncachedKVManager


def make_kv_manager(config: EngineConfig, num_blocks: int, max_model_len: int) -> KVCacheManager:
    """Make the manager of a pool with `num_blocks` blocks besides the null block.

    `prefix_cache` counts for the paged manager alone: the others have nothing to share.
    """
    if num_blocks < 1:
        error = ConfigError(f"the KV pool has {num_blocks} blocks, at least 1 is needed")
        error.add_note("raise kv_cache_memory_bytes or num_kv_blocks")
        raise error
    block_size = config.block_size
    if config.kv_manager == "contiguous":
        return ContiguousKVManager(num_blocks, block_size, config.reservation, max_model_len)
    if config.kv_manager == "uncached":
        return UncachedKVManager(num_blocks, block_size)
    prefix_cache = HashPrefixCache(block_size) if config.prefix_cache == "hash" else None
    return PagedKVManager(num_blocks, block_size, prefix_cache)
