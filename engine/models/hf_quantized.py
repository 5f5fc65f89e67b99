"""Quantized linear layers inside a transformers model, through transformers' quantizer interface.

transformers builds a model without memory behind it, lets a registered quantizer replace modules,
fills what remains from the checkpoint, and calls the quantizer again. Ours puts an empty module
in place of every quantized linear layer (nn.Linear, or GPT-2's Conv1D), and afterwards gives it
the codes that quant/formats read, behind the same kernels as the native decoder's. So no
full-precision copy of a quantized weight ever exists, and the packages that wrote the checkpoint
are not needed to run it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from llmbench.engine.errors import CheckpointError
from llmbench.engine.kernels.eager import EagerOps
from llmbench.engine.layers.linear import Linear
from llmbench.engine.models.quantized import CheckpointWeights
from llmbench.quant.quantized_weight import QuantizedWeight

QUANTIZER = "llmbench"

_loading: ContextVar[tuple[CheckpointWeights, torch.device] | None] = ContextVar(
    "llmbench_quantized_loading", default=None
)


class QuantizedModule(torch.nn.Module):
    """Stands where a linear layer was."""

    def __init__(self, module: Any, source: str) -> None:
        super().__init__()
        self.source = source
        # Conv1D calls them nx and nf.
        self.in_features = int(getattr(module, "in_features", None) or module.nx)
        self.out_features = int(getattr(module, "out_features", None) or module.nf)
        self.bias = module.bias
        # Modelling code asks weights for their type, and GPT-2's draws some anew: of no elements.
        self.weight = torch.empty(0, dtype=module.weight.dtype, device="meta")
        self.linear: Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] to [..., N]."""
        assert self.linear is not None, "the layer has no weight yet"
        rows = x.reshape(-1, x.shape[-1])
        return self.linear(rows).view(*x.shape[:-1], -1)


def quantized_modules(model: torch.nn.Module) -> list[QuantizedModule]:
    """The quantized layers of a model."""
    return [module for module in model.modules() if isinstance(module, QuantizedModule)]


@contextmanager
def quantized_loading(
    hf_config: Any, stored: CheckpointWeights, device: torch.device
) -> Iterator[None]:
    """Let from_pretrained put the quantized layers of `stored` into a model of this config.

    Their codes go to `device`, since moving the model afterwards does not move them.
    """
    _register()
    saved = getattr(hf_config, "quantization_config", None)
    hf_config.quantization_config = {"quant_method": QUANTIZER}
    token = _loading.set((stored, device))
    try:
        yield
    finally:
        _loading.reset(token)
        hf_config.quantization_config = saved


def _register() -> None:
    """Put our quantizer under its name; harmless to repeat."""
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if QUANTIZER in auto.AUTO_QUANTIZER_MAPPING:
        return

    class Config(QuantizationConfigMixin):
        def __init__(self, **kwargs: Any) -> None:
            self.quant_method = QUANTIZER  # type: ignore[assignment]

    class Quantizer(HfQuantizer):
        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            _replace_modules(model)
            return model

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            _fill_modules(model)
            return model

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    auto.register_quantization_config(QUANTIZER)(Config)
    auto.register_quantizer(QUANTIZER)(Quantizer)


def _replace_modules(model: Any) -> None:
    """Empty modules in place of the layers that the checkpoint holds quantized."""
    stored, _ = _current()
    modules = dict(model.named_modules())
    for name in stored.quantized_layers:
        path = _find(model, modules, name)
        module = modules[path]
        empty = QuantizedModule(module, name)
        expected = (empty.out_features, empty.in_features)
        if (found := stored.shape(f"{name}.weight")) != expected:
            raise CheckpointError(
                f"{name} should be {list(expected)} by {stored.folder}/config.json, but is "
                f"{list(found)} in the checkpoint"
            )
        parent, _, last = path.rpartition(".")
        setattr(modules[parent], last, empty)


def _fill_modules(model: Any) -> None:
    (stored, device), ops = _current(), EagerOps(model.dtype)
    for module in quantized_modules(model):
        weight = stored.get(f"{module.source}.weight")
        assert isinstance(weight, QuantizedWeight)
        bias = None if module.bias is None else module.bias.detach().to(device)
        module.weight = torch.empty(0, dtype=module.weight.dtype, device=device)
        module.linear = ops.make_quantized_linear(weight.to(device), bias)


def _find(model: Any, modules: dict[str, Any], name: str) -> str:
    """The path of a layer that the checkpoint calls `name`.

    transformers renames modules between versions, and a checkpoint may be of the part below the
    head: then the one layer whose path ends alike is meant.
    """
    for path in (name, f"{model.base_model_prefix}.{name}"):
        if _is_linear(modules.get(path)):
            return path
    tail = name[name.find("layers.") :] if "layers." in name else name
    found = [path for path, module in modules.items() if path.endswith(tail) and _is_linear(module)]
    if len(found) != 1:
        raise CheckpointError(
            f"{_current()[0].folder} holds the quantized layer {name}, and transformers' "
            f"{model.config.model_type} has no such linear layer"
        )
    return found[0]


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _current() -> tuple[CheckpointWeights, torch.device]:
    loading = _loading.get()
    assert loading is not None, "a quantized model is loaded within quantized_loading"
    return loading
