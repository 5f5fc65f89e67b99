"""Settings of the engine, checked when they are made; the only place where defaults live.

Imports no torch, so the command line can read defaults from here without loading it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from llmbench.engine.errors import ConfigError

DType = Literal["auto", "bfloat16", "float32", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
ModelBackend = Literal["auto", "native", "transformers"]
Policy = Literal["static", "prefill_first", "mixed", "chunked", "splitfuse"]
KVManagerName = Literal["paged", "contiguous", "uncached"]
Reservation = Literal["max_tokens", "max_model_len"]
PrefixCacheName = Literal["hash", "none"]
KVCacheDType = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and its requests are scheduled.

    Attributes:
        model: Folder of a checkpoint, a name from `llmbench models list`, or a hub id.
        tokenizer: Same, for the tokenizer; None takes the model's own.
        dtype: Computation and KV type; `auto` takes the checkpoint's, and bfloat16 in place of
            float16 on CPU, where float16 arithmetic is 20 times slower.
        load_format: `dummy` draws random weights from the config alone.
        model_backend: `native` decoder, `transformers` modelling code, or the first that fits.
        max_model_len: Longest prompt + output of a request, tokens; None takes the model's.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Token budget of a step. A policy that never splits a prompt may
            exceed it by a step that holds a single longer prompt and nothing else.
        policy: How a step's token budget is dealt out (see policies.py).
        kv_manager: `paged` blocks, `contiguous` reservation, or `uncached` recomputation.
        reservation: How much a contiguous reservation holds.
        prefix_cache: Prefix cache of the paged manager.
        block_size: Tokens in a KV block.
        kv_cache_dtype: `auto` holds keys and values in the type of computation; `int8` rounds
            each token's to 8 bits, with a scale a head, for half the memory.
        kv_cache_memory_bytes: Memory of the KV pool; None takes what `num_kv_blocks` says, or
            what the memory budget leaves.
        num_kv_blocks: Blocks in the KV pool, in place of a size in bytes.
        memory_utilization: Share of the device's free memory that weights, KV pool and
            activations may take where no KV size is given.
        num_threads: CPU threads of torch; None leaves torch's own choice.
        compile: Fused CPU kernels, compiled at first use and cached on disk: True demands them,
            False runs plain torch operations, None takes them where a C++ compiler is at hand.
        seed: Seeds requests that carry none, and `dummy` weights.
        check_integrity: Check the KV manager's and scheduler's invariants after each step.
    """

    model: str
    tokenizer: str | None = None
    dtype: DType = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    model_backend: ModelBackend = "auto"
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    policy: Policy = "chunked"
    kv_manager: KVManagerName = "paged"
    reservation: Reservation = "max_tokens"
    prefix_cache: PrefixCacheName = "hash"
    block_size: int = 16
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None
    memory_utilization: float = 0.8
    num_threads: int | None = None
    compile: bool | None = None
    seed: int = 0
    check_integrity: bool = False

    def __post_init__(self) -> None:
        choices = {
            "dtype": DType,
            "device": Device,
            "load_format": LoadFormat,
            "model_backend": ModelBackend,
            "policy": Policy,
            "kv_manager": KVManagerName,
            "reservation": Reservation,
            "prefix_cache": PrefixCacheName,
            "kv_cache_dtype": KVCacheDType,
        }
        for name, literal in choices.items():
            value, allowed = getattr(self, name), get_args(literal)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        positive = ("max_num_seqs", "max_num_batched_tokens", "block_size")
        optional = ("max_model_len", "kv_cache_memory_bytes", "num_kv_blocks", "num_threads")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if (value is None and name in positive) or (value is not None and value < 1):
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory_utilization must lie in (0, 1], not {self.memory_utilization}"
            )
        if self.kv_cache_memory_bytes is not None and self.num_kv_blocks is not None:
            error = ConfigError("kv_cache_memory_bytes and num_kv_blocks both size the KV pool")
            error.add_note("give one of them")
            raise error
