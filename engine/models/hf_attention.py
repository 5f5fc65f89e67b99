"""Our attention behind transformers' attention interface.

transformers' decoder layers hand query, key and value, rotated already, to a function that is
looked up by name (`ALL_ATTENTION_FUNCTIONS`, transformers.modeling_utils). Under the name below
stands one that writes K/V into the paged cache and attends through the same back end as the
native decoder. What it needs of the step travels in a context variable: keyword arguments reach
the function in most families, but some drop them.

This is the one place that knows the interface; tests/test_transformers_backend.py fails where it
moves. Because no mask function is registered under the name, transformers builds no mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.errors import UnsupportedModelError
from llmbench.engine.layers.attention.backend import AttentionBackend
from llmbench.engine.layers.attention.torch_backend import TorchAttention

ATTENTION = "llmbench"


@dataclass(slots=True)
class Step:
    """What attention needs of one forward pass."""

    batch: ForwardBatch
    caches: dict[int, Tensor]
    """Layer index → [num_slots, 2 * Hkv, D]."""
    num_new_slots: int | None = None
    """Makes a missing cache with this many slots: the first pass learns the layers' shapes."""
    called: set[int] = field(default_factory=set)
    """Layers that came through."""


_step: ContextVar[Step | None] = ContextVar("llmbench_attention_step", default=None)
_backend: AttentionBackend = TorchAttention()


@contextmanager
def attention_step(step: Step) -> Iterator[None]:
    """Run a transformers model's forward pass for `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def register() -> None:
    """Put our attention under its name; harmless to repeat."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def _attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, Dk]
    key: Tensor,  # [1, Hkv, T, Dk]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend; returns [1, T, H, Dv]."""
    step = _step.get()
    assert step is not None, "a transformers model ran outside attention_step"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _check(module, layer, attention_mask, sliding_window, others)
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    width = max(key_dim, value_dim)
    if step.num_new_slots is not None and layer not in step.caches:
        shape = (step.num_new_slots, 2 * key.shape[1], width)
        step.caches[layer] = torch.zeros(shape, dtype=key.dtype, device=key.device)
    step.called.add(layer)
    cache = step.caches[layer]
    # Zeros behind the narrower of the two change neither q·k nor the values that are kept.
    keys, values = (F.pad(x[0].transpose(0, 1), (0, width - x.shape[-1])) for x in (key, value))
    _backend.write_kv(keys, values, cache, step.batch)
    attended = _backend.attend(
        F.pad(query[0].transpose(0, 1), (0, width - key_dim)).contiguous(),
        cache,
        step.batch,
        scale=key_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return attended[None, :, :, :value_dim], None


def _check(
    module: torch.nn.Module,
    layer: int,
    attention_mask: Tensor | None,
    sliding_window: int | None,
    others: dict[str, Any],
) -> None:
    """Refuse what this attention would silently leave out."""
    config: Any = getattr(module, "config", None)
    kind = getattr(config, "model_type", type(module).__name__)
    if attention_mask is not None:
        raise UnsupportedModelError(f"{kind} adds a mask or bias of its own to attention scores")
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise UnsupportedModelError(f"{kind} has attention that is not causal (layer {layer})")
    for name, what in (("s_aux", "attention sinks"), ("position_bias", "a position bias")):
        if others.get(name) is not None:
            raise UnsupportedModelError(f"{kind} has {what}, which this engine's attention lacks")
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[layer] == "sliding_attention" and sliding_window is None:
        raise UnsupportedModelError(f"{kind} does not say its sliding window to attention")
