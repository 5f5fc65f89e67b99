"""Calibration batches on their way through the model, paused where a method wants to look.

Each batch runs the model's own forward in a greenlet, a function call that can be suspended: it
stops in front of a block, and inside the block in front of each group of linear layers, with all
that the family computes in between left as it is. A method that quantizes a group before the
next one runs (GPTQ's "true sequential" order) so needs one run of each block, no knowledge of
the architecture, and no more activations in memory than those between two groups.

Batches hold texts of equal length only: there is no padding that could enter the statistics.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor, nn

from llmbench.quant.block import Block, LinearGroup, trace_groups
from llmbench.quant.block_model import BlockModel
from llmbench.quant.linear import round_activations
from llmbench.quant.statistics import InputStatistics

BATCH_TOKENS = 4096
"""Enough rows for a matrix product at full speed; more only costs memory."""


class _Pass:
    """One batch's run of the decoder, suspended between two resumes."""

    running: "_Pass | None" = None
    """The run that is being computed now; None while a block is run by itself."""

    def __init__(self, decoder: nn.Module, input_ids: Tensor) -> None:
        self.input_ids = input_ids
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.group_input: Tensor | None = None
        self.restored: Tensor | None = None
        self.output: Tensor | None = None
        self._decoder = decoder
        self._greenlet = greenlet(self._run)

    def _run(self) -> None:
        result = self._decoder(input_ids=self.input_ids, use_cache=False)
        self.output = result.last_hidden_state

    def resume(self) -> None:
        """Go on to the next pause, or to the end."""
        _Pass.running = self
        try:
            self._greenlet.switch()
        finally:
            _Pass.running = None

    def pause(self) -> None:
        """Called inside the run: give control back to whoever resumed it."""
        parent = self._greenlet.parent
        assert parent is not None
        parent.switch()

    def close(self) -> None:
        """Unwind the suspended call, so that its activations are freed."""
        if self._greenlet:
            self._greenlet.throw()

    @property
    def hidden(self) -> Tensor:
        """What the block in front of which the run waits is given."""
        hidden: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return hidden


class _Restored(nn.Module):
    """Stands in the place of blocks that a resumed run need not repeat."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that torch does not register the block as a part of this one.
        self._block = (block,)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert _Pass.running is not None
        assert _Pass.running.restored is not None
        return _Pass.running.restored

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)


class CalibrationPasses:
    """All batches; they move through the model together, a block at a time."""

    def __init__(
        self, model: BlockModel, samples: Sequence[Sequence[int]], *, device: str = "cpu"
    ) -> None:
        self._model = model
        batches = batches_of_equal_length(samples)
        self._passes = [
            _Pass(model.decoder, torch.tensor(batch, device=device)) for batch in batches
        ]
        self.num_tokens = sum(len(sample) for sample in samples)
        self._groups: dict[tuple[type[nn.Module], tuple[str, ...]], list[tuple[str, ...]]] = {}
        self._handles = [
            model.module(index).register_forward_pre_hook(self._at_block, with_kwargs=True)
            for index in range(model.num_blocks)
        ]

    def start(self, restored: Sequence[Tensor] | None = None, *, at_block: int = 0) -> None:
        """Bring every batch in front of a block, from the embeddings or from stored states."""
        if restored is not None:
            for one, hidden in zip(self._passes, restored, strict=True):
                one.restored = hidden.to(self._model.dtype)
            for index in range(at_block):
                self._model.replace_block(index, _Restored(self._model.module(index)))
        self.advance()

    @torch.no_grad()
    def advance(self) -> None:
        """Run every batch to the next block, or out of the last one."""
        for one in self._passes:
            one.resume()

    def hidden_states(self) -> list[Tensor]:
        """What the next block gets (behind the last: the normed output), a tensor a batch."""
        return [one.hidden if one.output is None else one.output for one in self._passes]

    def at(self, block: Block, int8_inputs: frozenset[str] = frozenset()) -> "BlockCalibration":
        """The batches in front of a filled block."""
        groups = self.groups_of(block)
        return BlockCalibration(block, self._passes, groups, self.num_tokens, int8_inputs)

    def groups_of(self, block: Block) -> list[LinearGroup]:
        """The block's linear layers by common input; blocks of one shape are traced once."""
        relative = tuple(block.relative(name) for name in block.linears)
        key = (type(block.module), relative)
        if key not in self._groups:
            smallest = min(self._passes, key=lambda one: one.hidden.numel())
            groups = trace_groups(block, smallest.args, smallest.kwargs)
            self._groups[key] = [tuple(map(block.relative, group.names)) for group in groups]
        return [
            LinearGroup(tuple(f"{block.name}.{name}" for name in names))
            for names in self._groups[key]
        ]

    def close(self) -> None:
        """Drop all suspended runs."""
        for handle in self._handles:
            handle.remove()
        for one in self._passes:
            one.close()

    def _at_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        one = _Pass.running
        if one is not None:
            one.args, one.kwargs = args, kwargs
            one.pause()
            one.args, one.kwargs = (), {}


class BlockCalibration:
    """The calibration tokens in front of one block; a context that is open until they leave it.

    Attributes:
        groups: The block's linear layers by common input, in the order in which they run.
        int8_inputs: Layers whose input the saved model rounds to 8 bits: so do the batches here.
        outlier_threshold: Input values of at least this size are not rounded (LLM.int8).
        timer: A context around the batches' own computation, for whoever counts seconds.
    """

    def __init__(
        self,
        block: Block,
        passes: Sequence[_Pass],
        groups: list[LinearGroup],
        num_tokens: int,
        int8_inputs: frozenset[str],
    ) -> None:
        self.groups = groups
        self.num_tokens = num_tokens
        self.int8_inputs = int8_inputs
        self._block = block
        self._passes = passes
        self._pause_at: frozenset[str] = frozenset()
        self._observed: dict[str, InputStatistics] = {}
        self.outlier_threshold: float | None = None
        self.timer: Callable[[], AbstractContextManager[object]] = nullcontext
        self._handles: list[Any] = []

    def __enter__(self) -> "BlockCalibration":
        for name, module in self._block.linears.items():
            self._handles.append(module.register_forward_pre_hook(self._hook(name)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def observe(
        self, *, hessian: bool = False, sample_rows: int = 0
    ) -> dict[LinearGroup, InputStatistics]:
        """Statistics of all groups' inputs, unrounded, from one run of the block as it is."""
        found = {group: self._statistics(group, hessian, sample_rows) for group in self.groups}
        self._observed = {group.names[0]: statistics for group, statistics in found.items()}
        with self.timer():
            for one in self._passes:
                self._block.module(*one.args, **one.kwargs)
        self._observed = {}
        return found

    @torch.no_grad()
    def sequential(
        self, *, is_true_sequential: bool = True, hessian: bool = True, sample_rows: int = 0
    ) -> Iterator[tuple[LinearGroup, InputStatistics]]:
        """The groups in the order in which they run, each with its inputs' statistics.

        Every batch waits in front of the group while the caller works, so a weight that is set
        before the next group is asked for is what that group's inputs are computed with. Inputs
        of `int8_inputs` are seen rounded. Out of the last group the batches are led by
        `CalibrationPasses.advance`.
        """
        if not is_true_sequential:
            yield from self.observe(hessian=hessian, sample_rows=sample_rows).items()
            return
        self._pause_at = frozenset(group.names[0] for group in self.groups)
        for group in self.groups:
            statistics = self._statistics(group, hessian, sample_rows)
            with self.timer():
                for one in self._passes:
                    one.resume()
                    assert one.group_input is not None
                    statistics.update(self._as_served(group.names[0], one.group_input))
                    one.group_input = None
            yield group, statistics
        self._pause_at = frozenset()

    def _statistics(self, group: LinearGroup, hessian: bool, sample_rows: int) -> InputStatistics:
        return InputStatistics(
            self._block.layers[group.names[0]].in_features,
            hessian=hessian,
            sample_rows=sample_rows,
            total_tokens=self.num_tokens,
            device=self._block.parameter(group.names[0]).device,
        )

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            one, x = _Pass.running, inputs[0]
            if one is None:
                if name in self._observed:
                    self._observed[name].update(x)
                return None
            if name in self._pause_at:
                one.group_input = x
                one.pause()
            # Only now: all batches wait above at once, and a rounded copy of each would wait too.
            return (self._as_served(name, x), *inputs[1:])

        return hook

    def _as_served(self, name: str, x: Tensor) -> Tensor:
        """A layer's input as the saved model gives it to the layer."""
        if name not in self.int8_inputs:
            return x
        return round_activations(x, self.outlier_threshold)


def batches_of_equal_length(samples: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Texts in a canonical order, cut into batches of equal length.

    The order of the texts has no effect on the batches, so none on any result.
    """
    batches: list[list[list[int]]] = []
    for sample in sorted(map(list, samples), key=lambda tokens: (-len(tokens), tokens)):
        size = max(1, BATCH_TOKENS // len(sample))
        if batches and len(batches[-1]) < size and len(batches[-1][0]) == len(sample):
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches
