"""A model's output head alone: whole distributions from stored hidden states.

What a model says at a position, probabilities of all tokens included, follows from its final
hidden state and its head. A hidden state is a few kilobytes, a distribution over a vocabulary of
150,000 is hundreds; so a baseline is stored as hidden states, and compared with later through its
head, which is one matrix and takes none of the memory of its layers.

`load_head` and `head_of` compute what the model computes, bit for bit. `load_float32_head` takes
the same weights and multiplies in float32, for comparing two models whose logits differ by less
than the type of computation resolves.

transformers' own code mixes scales and caps of many families into the way from hidden states to
logits; a model that only it can run is loaded whole, and a warning says so.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmbench.engine.config import EngineConfig
from llmbench.engine.device import check_fits, resolve_device
from llmbench.engine.kernels.eager import EagerOps
from llmbench.engine.layers.linear import PlainLinear
from llmbench.engine.layers.output_head import Float32Linear, OutputHead
from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.decoder import Decoder
from llmbench.engine.models.dummy_weights import draw_weights
from llmbench.engine.models.families import FAMILIES
from llmbench.engine.models.hf_config import load_hf_config
from llmbench.engine.models.linear_weights import LinearWeight, make_linear, move, stack
from llmbench.engine.models.loader import (
    Kernels,
    LoadedModel,
    compute_dtype,
    load_model,
    with_own_head,
)
from llmbench.engine.models.quantized import CheckpointWeights
from llmbench.engine.models.registry import choose_architecture
from llmbench.engine.models.source import engine_errors, open_checkpoint, resolve_folder
from llmbench.engine.models.weight_names import WeightNames, check_weights

logger = logging.getLogger(__name__)


class Head(Protocol):
    """What turns final hidden states into logits."""

    @property
    def device(self) -> torch.device:
        """Where it computes, and its logits lie."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, H] behind the last norm, from any device."""


@dataclass(frozen=True, slots=True)
class _DecoderHead:
    head: OutputHead
    device: torch.device
    dtype: torch.dtype

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden.to(self.device, self.dtype))


@dataclass(frozen=True, slots=True)
class _WholeModelHead:
    loaded: LoadedModel

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        # Behind the last norm already: `final_hidden` of such a model changes nothing.
        return self.loaded.model.compute_logits(hidden.to(self.device, self.loaded.dtype))


@dataclass(frozen=True, slots=True)
class _WholeModelFloat32Head:
    loaded: LoadedModel
    compute: Callable[[Tensor], Tensor]

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.compute(hidden.to(self.device, self.loaded.dtype))


def load_head(config: EngineConfig) -> Head:
    """Load the head of a model, computing as the whole model would, bit for bit.

    Raises what `load_model` raises.
    """
    with engine_errors():
        kernels = Kernels(config, resolve_device(config.device))
        weight = _HeadWeight.read(config)
        if weight is None:
            return head_of(load_model(config))
        ops = kernels.ops(weight.arch, weight.dtype) or EagerOps(weight.dtype)
        linear = make_linear(ops, weight.weight, None)
        head = OutputHead(linear, weight.arch.final_softcap)
        return _DecoderHead(head, weight.device, weight.dtype)


def head_of(loaded: LoadedModel) -> Head:
    """The head of a model that is loaded anyway; shares its weights."""
    model = loaded.model
    if isinstance(model, Decoder):
        assert model.head is not None, "load_weights comes first"
        return _DecoderHead(model.head, loaded.device, loaded.dtype)
    return _WholeModelHead(loaded)


def load_float32_head(config: EngineConfig, loaded: LoadedModel | None = None) -> Head:
    """Load a head that multiplies in float32 and gives float32 logits.

    Its weights are those that the model has in its type of computation, or the numbers that
    quantized ones stand for. Of `loaded`, the model of the same config, it shares what it can; a
    matrix that a kernel has laid out in its own way is read again.

    Raises what `load_model` raises.
    """
    with engine_errors():
        if loaded is None:
            weight = _HeadWeight.read(config)
            if weight is None:
                return load_float32_head(config, load_model(config))
            return _float32_head(weight.weight, weight.arch.final_softcap, weight.device)
        model = loaded.model
        if not isinstance(model, Decoder):
            return _WholeModelFloat32Head(loaded, _float32_logits(loaded))
        held = _row_major_head(model)
        if held is None:
            return load_float32_head(config)
        return _float32_head(held, model.arch.final_softcap, loaded.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadWeight:
    """A native model's head matrix, on its device and in its type, and what belongs to it."""

    arch: DecoderArchitecture
    weight: LinearWeight
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def read(cls, config: EngineConfig) -> "_HeadWeight | None":
        """Read or draw it; None, with a warning, where only transformers runs the model."""
        device = resolve_device(config.device)
        is_dummy = config.load_format == "dummy"
        folder = resolve_folder(config.model, with_weights=not is_dummy)
        stored = None if is_dummy else CheckpointWeights.open(open_checkpoint(folder))
        hf_config = load_hf_config(folder, trust_remote_code=config.trust_remote_code)
        dtype = compute_dtype(config, hf_config, stored, device)
        arch = choose_architecture(hf_config, config.model_backend)
        if arch is None:
            logger.warning("the head of %s needs transformers' own code: loading it whole", folder)
            return None
        names = FAMILIES[hf_config.model_type].weight_names
        if stored is not None:
            arch = with_own_head(arch, names, stored)
            check_weights(arch, names, stored)
        check_fits(arch.vocab_size * arch.hidden_size, dtype, device)
        if stored is None:
            weight = _draw(arch, seed=config.seed, dtype=dtype, device=device)
        else:
            weight = _read(arch, names, stored)
        weight = move(weight, device, dtype)
        return cls(arch=arch, weight=weight, device=device, dtype=dtype)


def _float32_head(weight: LinearWeight, softcap: float | None, device: torch.device) -> Head:
    linear = Float32Linear(weight if isinstance(weight, tuple) else (weight,))
    return _DecoderHead(OutputHead(linear, softcap), device, torch.float32)


def _row_major_head(model: Decoder) -> Tensor | None:
    """The matrix of a loaded head where it is still one: tied, or behind torch's own linear."""
    assert model.head is not None, "load_weights comes first"
    if model.arch.tie_embeddings:
        return model.embed_tokens
    linear = model.head.linear
    return linear.weight if isinstance(linear, PlainLinear) else None


def _float32_logits(loaded: LoadedModel) -> Callable[[Tensor], Tensor]:
    from llmbench.engine.models.transformers_backend import TransformersModel

    assert isinstance(loaded.model, TransformersModel)
    stored = None if loaded.checkpoint is None else CheckpointWeights.open(loaded.checkpoint)
    return loaded.model.float32_logits(stored)


def _weight_name(arch: DecoderArchitecture) -> str:
    return "embed_tokens.weight" if arch.tie_embeddings else "lm_head.weight"


def _read(arch: DecoderArchitecture, names: WeightNames, stored: CheckpointWeights) -> LinearWeight:
    return stack([stored.get(name) for name in names.sources(_weight_name(arch), stored)])


def _draw(
    arch: DecoderArchitecture, *, seed: int, dtype: torch.dtype, device: torch.device
) -> LinearWeight:
    drawn = draw_weights(arch, seed=seed, dtype=dtype, device=device)
    return next(weight for name, weight in drawn if name == _weight_name(arch))
