"""One decoder block of a model, held in memory while its linear layers are quantized.

The module is transformers' own, so whatever the family computes between its linear layers is
computed here too. Weights are handled as [N out, C in] float32 whatever the module stores: a
weight that a method changes keeps its float32 value here beside the module's, so that folding a
scale into it and quantizing it afterwards rounds once and not twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmbench.quant.linear_layers import LinearLayer


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linear layers that read the same tensor, by module name, in the order in which they run."""

    names: tuple[str, ...]


class Block:
    """A decoder block: its module, and the linear layers in it by their full names.

    Attributes:
        name: Such as `model.layers.3`.
        module: transformers' decoder layer in the compute type, with its weights.
        config: transformers' config of the text model.
    """

    def __init__(
        self,
        name: str,
        index: int,
        module: nn.Module,
        layers: list[LinearLayer],
        config: Any,
        wide: Callable[[str], Tensor | None] = lambda name: None,
    ) -> None:
        """`wide` reads a layer's stored weight where the module's type cannot hold all of it."""
        self.name = name
        self.index = index
        self.module = module
        self.config = config
        self.layers: Mapping[str, LinearLayer] = {layer.name: layer for layer in layers}
        self.linears = {layer.name: self.get(self.relative(layer.name)) for layer in layers}
        self._weights: dict[str, Tensor] = {}
        self._wide = wide

    def relative(self, name: str) -> str:
        """A module's name within the block."""
        return name.removeprefix(f"{self.name}.")

    def get(self, relative_name: str) -> nn.Module:
        """A module by its name within the block, such as `self_attn.q_proj`."""
        return self.module.get_submodule(relative_name)

    def weight(self, name: str) -> Tensor:
        """[N, C] float32, a linear layer's weight as it is now; not to be changed in place."""
        if name in self._weights:
            return self._weights[name]
        weight = self._wide(name)
        if weight is None:
            weight = self.parameter(name).detach()
        return (weight.t() if self.layers[name].is_transposed else weight).float()

    def set_weight(self, name: str, weight: Tensor) -> None:
        """Replace a linear layer's weight [N, C]; from now on the block computes with it."""
        self._weights[name] = weight.float()
        parameter = self.parameter(name)
        stored = weight.t() if self.layers[name].is_transposed else weight
        parameter.data.copy_(stored.to(parameter.dtype))

    def parameter(self, name: str) -> nn.Parameter:
        """A linear layer's weight as the module holds it."""
        parameter = self.linears[name].weight
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def bias(self, name: str) -> Tensor | None:
        """[N], a linear layer's bias; changes in place are kept."""
        bias = self.linears[name].bias
        return bias.detach() if isinstance(bias, Tensor) else None

    def changed_weight(self, name: str) -> Tensor | None:
        """The float32 weight of a layer that `set_weight` replaced."""
        return self._weights.get(name)


@torch.no_grad()
def trace_groups(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LinearGroup]:
    """The block's linear layers by the tensor that they read, from one run of the block.

    Raises nothing of its own; a layer that does not run (an expert without tokens) is absent.
    """
    seen: list[tuple[Tensor, list[str]]] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            # The tensors are held until the end, so that no address is used twice.
            x = inputs[0]
            if seen and seen[-1][0] is x:
                seen[-1][1].append(name)
            else:
                seen.append((x, [name]))

        return hook

    handles = [
        module.register_forward_pre_hook(watch(name)) for name, module in block.linears.items()
    ]
    try:
        block.module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return [LinearGroup(tuple(names)) for _, names in seen]
