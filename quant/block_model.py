"""A causal language model whose decoder blocks are in memory one at a time.

The skeleton is transformers' model with parameters on the `meta` device, which have a shape and
no memory; a block's tensors are read from the checkpoint when its turn comes and dropped after.
So quantizing needs the memory of one block and of the embeddings, whatever the model's size.

A transform (rotation) may stand between the checkpoint and the model: every tensor passes
through it, one by one, as it is read.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llmbench.quant.block import Block
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.errors import CheckpointError, QuantError
from llmbench.quant.linear_layers import HEADS, find_linears


class TensorSource(Protocol):
    """Where the model's tensors come from, by their names in the checkpoint."""

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""

    def get(self, name: str) -> Tensor:
        """A tensor in the type in which it is stored."""

    def wide(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A tensor in float32, where `dtype` cannot hold its values; else None."""


class BlockModel:
    """The skeleton, its blocks' names, and the way to fill a block."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        hf_config: Any,
        source: TensorSource,
        *,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
    ) -> None:
        """Build the skeleton and read what lies outside the blocks.

        Raises:
            QuantError: transformers has no such model, or its names are not the checkpoint's.
        """
        self.dtype = dtype
        self.source = source
        self._names = set(source.names)
        causal_lm = _build(hf_config, dtype, trust_remote_code)
        self.causal_lm = causal_lm
        layers = [layer for layer in find_linears(checkpoint) if layer.block]
        self.block_names = list(dict.fromkeys(layer.block for layer in layers))
        self._layers = {
            name: [layer for layer in layers if layer.block == name] for name in self.block_names
        }
        self.text_config = hf_config.get_text_config()
        self.decoder, self._prefix = self._find_decoder()
        self._modules: list[nn.Module] = [
            self.decoder.get_submodule(self._in_decoder(name)) for name in self.block_names
        ]
        self._fill_outside_blocks()

    @property
    def num_blocks(self) -> int:
        """Decoder blocks."""
        return len(self.block_names)

    def module(self, index: int) -> nn.Module:
        """A block's module, filled or not."""
        return self._modules[index]

    def load_block(self, index: int) -> Block:
        """Fill a block's module with its tensors."""
        name, module = self.block_names[index], self._modules[index]
        self._fill(module, name)
        return Block(
            name,
            index,
            module,
            self._layers[name],
            self.text_config,
            lambda layer: self.source.wide(f"{layer}.weight", self.dtype),
        )

    def drop_block(self, index: int) -> None:
        """Give a block's memory back."""
        for _, owner, name, tensor in _parameters(self._modules[index]):
            empty = torch.empty_like(tensor, device="meta")
            setattr(owner, name, nn.Parameter(empty, requires_grad=False))

    def load_head(self) -> None:
        """Fill the output head: its own tensor, or the embeddings where they are tied."""
        head = self.causal_lm.get_output_embeddings()
        name = next((name for name in HEADS if f"{name}.weight" in self._names), None)
        if name is None:
            head.weight = self.causal_lm.get_input_embeddings().weight
        for kind, parameter in list(head.named_parameters(recurse=False)):
            if name is not None:
                self._set(head, kind, parameter, f"{name}.{kind}")

    def replace_block(self, index: int, module: nn.Module) -> None:
        """Let another module stand in a block's place when the decoder runs."""
        parent_name, _, last = self._in_decoder(self.block_names[index]).rpartition(".")
        self.decoder.get_submodule(parent_name)._modules[last] = module

    def block_tensors(self, index: int) -> list[str]:
        """The checkpoint's names of a block's tensors."""
        prefix = f"{self.block_names[index]}."
        return [name for name in self.source.names if name.startswith(prefix)]

    def outside_tensors(self) -> list[str]:
        """The checkpoint's names of all tensors outside blocks."""
        prefixes = tuple(f"{name}." for name in self.block_names)
        return [name for name in self.source.names if not name.startswith(prefixes)]

    def _in_decoder(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _find_decoder(self) -> tuple[nn.Module, str]:
        """The module that runs the blocks, and its name in the checkpoint with a dot."""
        first = self.block_names[0]
        decoder = self.causal_lm.get_decoder()
        named = {id(module): name for name, module in self.causal_lm.named_modules()}
        # A checkpoint of the bare decoder has no prefix; OPT's blocks are one module deeper.
        path = named.get(id(decoder), "")
        for prefix in (f"{path}.", f"{path.partition('.')[2]}.", ""):
            if prefix != "." and first.startswith(prefix):
                try:
                    decoder.get_submodule(first.removeprefix(prefix))
                except AttributeError:
                    continue
                return decoder, prefix
        raise QuantError(
            f"the checkpoint's block {first} is not where transformers' "
            f"{type(self.causal_lm).__name__} has its blocks"
        )

    def _fill_outside_blocks(self) -> None:
        blocks = {id(module) for block in self._modules for module in block.modules()}
        for path, owner, name, tensor in _parameters(self.decoder):
            if id(owner) not in blocks:
                self._set(owner, name, tensor, f"{self._prefix}{path}.{name}")

    def _fill(self, module: nn.Module, prefix: str) -> None:
        for path, owner, name, tensor in _parameters(module):
            self._set(owner, name, tensor, ".".join(filter(None, (prefix, path, name))))

    def _set(self, owner: nn.Module, name: str, tensor: Tensor, source_name: str) -> None:
        if source_name not in self._names:
            raise CheckpointError(f"the checkpoint has no tensor {source_name}")
        value = self.source.get(source_name)
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{source_name} is {list(value.shape)}, expected {list(tensor.shape)}"
            )
        setattr(owner, name, nn.Parameter(value.to(self.dtype), requires_grad=False))


class CheckpointSource:
    """The checkpoint's own tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return self._checkpoint.names

    def get(self, name: str) -> Tensor:
        """A tensor in the type in which it is stored."""
        return self._checkpoint.get(name)

    def wide(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A tensor in float32, where `dtype` cannot hold its values; else None."""
        stored: torch.dtype = getattr(torch, self._checkpoint.dtype(name))
        return None if stored in (dtype, torch.bfloat16) else self.get(name).float()


class TransformedSource:
    """The checkpoint's tensors, each changed as it is read; a tied head gets one of its own."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        transform: Callable[[str, Tensor], Tensor],
        *,
        unties: tuple[str, str] | None = None,
    ) -> None:
        """`unties` names a head that the checkpoint lacks, and the embedding it copies."""
        self._checkpoint = checkpoint
        self._transform = transform
        self._unties = unties

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        names = self._checkpoint.names
        return [*names, self._unties[0]] if self._unties is not None else names

    def get(self, name: str) -> Tensor:
        """A transformed tensor in the type in which it is stored."""
        tensor = self._stored(name)
        return self._transform(name, tensor.float()).to(tensor.dtype)

    def wide(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A transformed tensor in float32: no short type holds all of its values."""
        return self._transform(name, self._stored(name).float())

    def _stored(self, name: str) -> Tensor:
        if self._unties is not None and name == self._unties[0]:
            name = self._unties[1]
        return self._checkpoint.get(name)


def _build(hf_config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(hf_config)
    try:
        with _parameters_on_meta():
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(
                config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
    # A config that passes validation may still make no model, in as many ways as families.
    except Exception as error:
        raise QuantError(
            f"transformers cannot build a {hf_config.model_type} model from its config: {error}"
        ) from error
    return model.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters made here take no memory; buffers (rotary frequencies) keep their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(module, name, param)

    module_class: Any = nn.Module
    module_class.register_parameter = register_on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register


def _parameters(module: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Path of the owner, the owner, the parameter's name in it, and the parameter."""
    return [
        (path, owner, name, parameter)
        for path, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]
