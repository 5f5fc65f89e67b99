"""What a plan needs to know of a model, read from its files without loading it.

config.json gives the shape, the headers of the weight files give sizes; no tensor is read and no
torch imported, so a dry run answers in the time that the tokenizer takes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import CheckpointError
from llmbench.engine.memory import MemoryPlan, kv_row_bytes, plan_memory
from llmbench.engine.models.quantized import CheckpointWeights
from llmbench.quant.checkpoint import Checkpoint, read_config

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's sizes.

    Attributes:
        max_model_len: Longest prompt and output together, tokens, as the engine will have it.
        digest: Of config and weights; None where there are no weights (`dummy`).
        weight_bytes: In the type that the engine computes in; quantized layers packed.
        tied_head_bytes: Of the head, where it is the embedding table: a CPU holds it a second
            time, packed for multiplication.
        dtype: That type.
        quantization: File format and schemes of a quantized checkpoint; else None.
    """

    folder: Path
    digest: str | None
    max_model_len: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    kv_bytes_per_token: int
    weight_bytes: int
    tied_head_bytes: int
    dtype: str
    quantization: dict[str, Any] | None

    def memory_plan(self, config: EngineConfig, free_bytes: int, *, is_cpu: bool) -> MemoryPlan:
        """Size the KV pool as the engine will; OutOfMemoryError where the model cannot fit."""
        return plan_memory(
            config,
            is_cpu=is_cpu,
            free_bytes=free_bytes,
            weight_bytes=self.weight_bytes + (self.tied_head_bytes if is_cpu else 0),
            kv_bytes_per_token=self.kv_bytes_per_token,
            max_model_len=self.max_model_len,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            dtype_bytes=DTYPE_BYTES[self.dtype],
        )


def read_model_facts(folder: Path, config: EngineConfig) -> ModelFacts:
    """Read the facts of a checkpoint folder; CheckpointError where it is broken."""
    checkpoint = Checkpoint.open(folder) if config.load_format != "dummy" else None
    settings = checkpoint.config if checkpoint is not None else read_config(folder)
    text = settings.get("text_config", settings)
    hidden = _number(text, folder, "hidden_size", "n_embd", "d_model")
    num_heads = _number(text, folder, "num_attention_heads", "n_head")
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    head_dim = text.get("head_dim") or hidden // num_heads
    num_layers = _number(text, folder, "num_hidden_layers", "n_layer")
    intermediate = _intermediate_size(text, hidden)
    vocab = _number(text, folder, "vocab_size")
    dtype = _dtype(config, text, settings)
    stored = None if checkpoint is None else CheckpointWeights.open(checkpoint)
    is_tied = settings.get("tie_word_embeddings", True) and not (
        stored is not None and stored.has_quantized_head
    )
    if stored is not None:
        weight_bytes = stored.num_bytes(DTYPE_BYTES[dtype])
    else:
        attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
        num_parameters = num_layers * (attention + 3 * hidden * intermediate)
        num_parameters += vocab * hidden * (1 if is_tied else 2)
        weight_bytes = num_parameters * DTYPE_BYTES[dtype]
    return ModelFacts(
        folder=folder,
        digest=checkpoint.digest if checkpoint is not None else None,
        max_model_len=config.max_model_len
        or _number(text, folder, "max_position_embeddings", "n_positions", "n_ctx"),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        kv_bytes_per_token=2
        * num_layers
        * num_kv_heads
        * kv_row_bytes(head_dim, DTYPE_BYTES[dtype], config.kv_cache_dtype),
        weight_bytes=weight_bytes,
        tied_head_bytes=(
            vocab * hidden * DTYPE_BYTES[dtype] if is_tied and dtype == "bfloat16" else 0
        ),
        dtype=dtype,
        quantization=None if stored is None else stored.facts,
    )


def _number(settings: dict[str, Any], folder: Path, *names: str) -> int:
    """Return a setting under the first of its names in use (GPT-2 has names of its own)."""
    for name in names:
        if isinstance(value := settings.get(name), int):
            return value
    raise CheckpointError(f"{folder / 'config.json'} gives no {names[0]}")


def _intermediate_size(text: dict[str, Any], hidden: int) -> int:
    for name in ("intermediate_size", "ffn_dim", "n_inner"):
        if isinstance(value := text.get(name), int):
            return value
    return 4 * hidden  # GPT-2's rule where n_inner is null


def _dtype(config: EngineConfig, text: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return the type that `auto` means on a CPU; the engine itself decides with the device."""
    if config.dtype != "auto":
        return config.dtype
    own = text.get("dtype") or text.get("torch_dtype") or settings.get("dtype")
    own = own or settings.get("torch_dtype") or "float32"
    return "float32" if own == "float32" else "bfloat16"
