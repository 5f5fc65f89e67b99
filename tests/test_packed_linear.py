"""The few-row kernel over oneDNN's packed weights gives what oneDNN gives."""

import pytest
import torch

from llmbench.engine.kernels.cpu_ops import CpuOps
from llmbench.engine.kernels.packed_linear import FEW_ROWS, PackedLinear
from llmbench.engine.layers.linear import OneDNNLinear, can_pack

pytestmark = pytest.mark.skipif(
    not can_pack(torch.empty(1, dtype=torch.bfloat16)), reason="oneDNN packs no bfloat16 here"
)


def layers(outputs: int, inputs: int, *, bias: bool) -> tuple[PackedLinear, OneDNNLinear]:
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    vector = torch.randn(outputs, generator=generator).bfloat16() if bias else None
    packed = CpuOps(torch.bfloat16).make_linear(weight, vector)
    assert isinstance(packed, PackedLinear)
    return packed, OneDNNLinear(weight, vector)


def draw(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (960, 576), (192, 96), (576, 1536)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, FEW_ROWS, FEW_ROWS + 1])
def test_packed_linear_equals_onednn(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    packed, onednn = layers(outputs, inputs, bias=bias)
    x, residual = draw(rows, inputs), draw(rows, outputs)
    want, want_sum = onednn(x), onednn.add_to(residual.clone(), x)
    atol = 2**-6 * float(want.abs().max())
    torch.testing.assert_close(packed(x), want, rtol=2**-6, atol=atol)
    got_sum = packed.add_to(residual.clone(), x)
    torch.testing.assert_close(got_sum, want_sum, rtol=2**-6, atol=atol)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    packed, _ = layers(960, 576, bias=False)
    x = draw(FEW_ROWS, 576)
    together = packed(x)
    for row in range(FEW_ROWS):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(("outputs", "inputs"), [(17, 64), (100, 33)])
def test_widths_that_are_no_blocks_fall_back_to_onednn(outputs: int, inputs: int) -> None:
    packed, onednn = layers(outputs, inputs, bias=True)
    assert packed.kernel == "onednn"
    x = draw(1, inputs)
    assert torch.equal(packed(x), onednn(x))


def test_a_slice_of_a_wider_tensor_is_taken_as_it_stands() -> None:
    packed, onednn = layers(64, 64, bias=False)
    wide = draw(2, 128)
    torch.testing.assert_close(packed(wide[:, :64]), onednn(wide[:, :64]), rtol=2**-6, atol=0.5)
