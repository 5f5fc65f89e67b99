"""Linear layers on packed weights against torch's, and their independence of the batch."""

import pytest
import torch

from llmbench.engine.errors import KernelBuildError
from llmbench.engine.kernels.cpu_linear import CpuLinear, can_pack
from llmbench.engine.kernels.cpu_ops import CpuOps
from llmbench.engine.kernels.reference import TorchOps
from llmbench.engine.layers.linear import Linear
from llmbench.engine.models.architecture import Activation


class PlainOps(TorchOps):
    """The specification in float32: torch's own bfloat16 product may round on its way."""

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        wide = None if bias is None else bias.float()
        return super().make_linear(weight.float(), wide)


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    try:
        built = CpuOps(torch.bfloat16)
    except KernelBuildError as error:
        pytest.skip(str(error))
    if not can_pack(built._library, torch.empty(1, dtype=torch.bfloat16)):
        pytest.skip("this processor has no dot product of bfloat16 pairs")
    return built


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    atol = 2**-8 * float(expected.abs().max())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-7, atol=atol)


SHAPES = [(64, 64), (960, 576), (576, 1536), (48, 96), (17, 64), (100, 33), (6, 10)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 40])
def test_linear_equals_torch(ops: CpuOps, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    weight, vector = draw(outputs, inputs), draw(outputs) if bias else None
    x, residual = draw(rows, inputs), draw(rows, outputs)
    layer, plain = (o.make_linear(weight, vector) for o in (ops, PlainOps()))
    assert isinstance(layer, CpuLinear)
    assert_close(layer(x), plain(x.float()))
    assert_close(layer.add_to(residual.clone(), x), plain.add_to(residual.float(), x.float()))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 64), (36, 48)])
@pytest.mark.parametrize("rows", [1, 35])
def test_activated_linear_equals_torch(
    ops: CpuOps,
    rows: int,
    outputs: int,
    inputs: int,
    bias: bool,
    gated: bool,
    activation: Activation,
) -> None:
    weight, vector = draw(outputs, inputs), draw(outputs) if bias else None
    x = draw(rows, inputs)
    layer, plain = (
        o.make_activated_linear(weight, vector, activation, gated=gated) for o in (ops, PlainOps())
    )
    assert_close(layer(x), plain(x.float()))


@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (100, 34)])
def test_a_row_has_the_same_bits_in_any_company(ops: CpuOps, outputs: int, inputs: int) -> None:
    layer = ops.make_linear(draw(outputs, inputs), draw(outputs))
    x = draw(70, inputs)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = layer(x)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for start, stop in ((0, 1), (3, 5), (15, 40), (60, 70)):
                assert torch.equal(layer(x[start:stop]), together[start:stop])
    finally:
        torch.set_num_threads(before)


def test_torch_multiplies_right_after_the_kernel(ops: CpuOps) -> None:
    """Both use the processor's tile registers and must leave them to each other."""
    weight, x = draw(64, 64), draw(64, 64)
    layer = ops.make_linear(weight, None)
    expected = x @ weight.t()
    for _ in range(3):
        assert_close(layer(x), expected)
        assert torch.equal(x @ weight.t(), expected)


@pytest.mark.parametrize("wrong", [draw(2, 65), draw(2, 64).float()], ids=["width", "dtype"])
def test_a_linear_layer_refuses_memory_of_another_shape(ops: CpuOps, wrong: torch.Tensor) -> None:
    layer = ops.make_linear(draw(64, 64), None)
    with pytest.raises(ValueError, match="linear layer cannot take"):
        layer(wrong)
    with pytest.raises(ValueError, match="linear layer cannot add to"):
        layer.add_to(draw(3, 64), draw(2, 64))
