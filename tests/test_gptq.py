"""GPTQ: hand-solved and direct solutions, never worse than rounding to nearest, any Hessian."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmbench.quant.affine import affine_params, grouped
from llmbench.quant.block import LinearGroup
from llmbench.quant.config import BITS, PER_CHANNEL, QuantConfig, Scheme
from llmbench.quant.errors import CalibrationError
from llmbench.quant.gptq import GPTQ, GPTQResult, gptq_quantize
from llmbench.quant.refinement import row_errors
from llmbench.quant.rtn import rtn_quantize
from llmbench.quant.statistics import InputStatistics

W4 = Scheme(bits=4, group_size=16)


def random_layer(
    n: int = 8, c: int = 64, *, num_tokens: int = 200, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """W [N, C] and the Hessian of inputs whose channels are correlated and of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(n, c, generator=generator)
    x = torch.randn(num_tokens, c, generator=generator) @ torch.randn(c, c, generator=generator)
    x = x * torch.randn(c, generator=generator).exp()
    return W, x.t() @ x


def optimal_brain_surgeon(
    W: Tensor, H: Tensor, scheme: Scheme, order: Tensor, damp: float
) -> Tensor:
    """Codes by eq. 2 of Frantar et al. as it stands: float64, row by row, H inverted anew
    for the columns that are left after each column."""
    params = affine_params(grouped(W, scheme.group_size), scheme, dtype=torch.float32)
    size = W.shape[1] // params.scales.shape[1]
    H = H.double() + damp * H.double().diagonal().mean() * torch.eye(len(H))
    codes = torch.empty_like(W)
    for n in range(len(W)):
        w = W[n].double()
        for i, q in enumerate(order.tolist()):
            left = order[i:]
            Hinv = H[left][:, left].inverse()
            scale, zero = float(params.scales[n, q // size]), float(params.zeros[n, q // size])
            code = (w[q] / scale).round().add(zero).clamp(0, params.max_code)
            codes[n, q] = code
            w[left] -= (w[q] - (code - zero) * scale) / Hinv[0, 0] * Hinv[0]
    return codes


def errors(W: Tensor, H: Tensor, found: GPTQResult) -> Tensor:
    return row_errors((W - found.weight.dequantize()).double(), H.double())


def test_hand_solved_two_columns() -> None:
    """H = [[2, 1], [1, 2]], w = (7.5, 2.3), scale 1.

    Column 0 becomes the top code, 7, an error of 0.5. Column 1 makes up for half of it:
    Hinv_01 / Hinv_00 = -1/2, so 2.3 + 0.25 = 2.55 is rounded to 3 where nearest is 2. What is
    left is d = (0.5, -0.7), d H d = 0.78; rounding to nearest leaves (0.5, 0.3), 0.98.
    """
    W, H = torch.tensor([[7.5, 2.3]]), torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    scheme = Scheme(bits=4, group_size=2)
    found = gptq_quantize(
        W, H, scheme, damp_percent=1e-9, act_order=False, scale_search=False, sweeps=0
    )
    assert found.weight.scales.tolist() == [[1.0]]
    assert found.weight.codes.tolist() == [[15, 11]]
    assert float(found.errors) == pytest.approx(0.78, rel=1e-5)
    assert float(found.energies) == pytest.approx(2 * 7.5**2 + 2 * 2.3**2 + 2 * 7.5 * 2.3)
    nearest = rtn_quantize(W, scheme, scale_dtype=torch.float32, scale_search=False)
    assert nearest.codes.tolist() == [[15, 10]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [16, PER_CHANNEL])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_codes_are_those_of_the_direct_solution(
    bits: int, group_size: int, sym: bool, act_order: bool
) -> None:
    W, H = random_layer(4, 80)  # more columns than a block has
    scheme = Scheme(bits=bits, group_size=group_size, sym=sym)
    found = gptq_quantize(
        W,
        H,
        scheme,
        scale_dtype=torch.float32,
        act_order=act_order,
        scale_search=False,
        sweeps=0,
    )
    order = H.diagonal().argsort(descending=True) if act_order else torch.arange(80)
    expected = optimal_brain_surgeon(W, H, scheme, order, 0.01)
    assert torch.equal(found.weight.codes.float(), expected)
    assert found.weight.scheme == scheme
    assert found.weight.g_idx is None


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from([8, 32, PER_CHANNEL]),
    sym=st.booleans(),
    scale_search=st.booleans(),
    desc_act=st.booleans(),
    num_tokens=st.sampled_from([1, 5, 40, 400]),
    seed=st.integers(0, 1000),
)
def test_error_is_at_most_that_of_rounding_to_nearest(
    bits: int,
    group_size: int,
    sym: bool,
    scale_search: bool,
    desc_act: bool,
    num_tokens: int,
    seed: int,
) -> None:
    W, H = random_layer(8, 32, num_tokens=num_tokens, seed=seed)
    scheme = Scheme(bits=bits, group_size=group_size, sym=sym)
    found = gptq_quantize(
        W,
        H,
        scheme,
        scale_dtype=torch.float32,
        scale_search=scale_search,
        desc_act=desc_act,
    )
    nearest = rtn_quantize(W, scheme, scale_dtype=torch.float32, scale_search=False)
    allowed = row_errors((W - nearest.dequantize()).double(), H.double()).sum()
    assert float(errors(W, H, found).sum()) <= float(allowed)


def test_order_search_and_sweeps_each_lower_the_error() -> None:
    W, H = random_layer(32, 128, num_tokens=400)
    runs = [
        gptq_quantize(W, H, W4, act_order=act_order, scale_search=search, sweeps=sweeps)
        for act_order, search, sweeps in [
            (False, False, 0),
            (True, False, 0),
            (True, True, 0),
            (True, True, 2),
        ]
    ]
    totals = [float(errors(W, H, found).sum()) for found in runs]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)


def test_reported_errors_are_those_of_the_stored_weight() -> None:
    W, H = random_layer()
    found = gptq_quantize(W, H, W4, scale_dtype=torch.float16)
    torch.testing.assert_close(found.errors, errors(W, H, found), rtol=1e-3, atol=0)
    torch.testing.assert_close(found.energies, row_errors(W.double(), H.double()))


def test_codes_are_rounded_with_the_stored_scales() -> None:
    """The last column has nobody to make up for it and no later sweep: it is the nearest."""
    W, H = random_layer(16, 32)
    H = torch.diag(H.diagonal())
    found = gptq_quantize(W, H, W4, scale_dtype=torch.bfloat16, sweeps=0)
    scales = found.weight.scales
    assert scales.dtype is torch.bfloat16
    steps = (W / scales.float().repeat_interleave(16, dim=1)).round().clamp(-8, 7)
    assert torch.equal(found.weight.codes.float(), steps + 8)


@pytest.mark.parametrize("scale_search", [True, False])
def test_restricted_range_leaves_out_the_lowest_code(scale_search: bool) -> None:
    W, H = random_layer()
    scheme = Scheme(bits=4, group_size=PER_CHANNEL)
    found = gptq_quantize(W, H, scheme, code_range="restricted", scale_search=scale_search)
    assert int(found.weight.codes.min()) >= 1


def test_rows_do_not_depend_on_one_another() -> None:
    W, H = random_layer(12, 64)
    together = gptq_quantize(W, H, W4).weight
    alone = gptq_quantize(W[5:7], H, W4).weight
    assert torch.equal(together.rows(5, 7).codes, alone.codes)
    assert torch.equal(together.rows(5, 7).scales, alone.scales)


def test_inputs_are_not_changed() -> None:
    W, H = random_layer()
    before = W.clone(), H.clone()
    gptq_quantize(W, H, W4)
    assert torch.equal(W, before[0])
    assert torch.equal(H, before[1])


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40])
def test_number_of_tokens_in_the_sum_has_no_effect(factor: float) -> None:
    W, H = random_layer()
    assert torch.equal(
        gptq_quantize(W, H, W4).weight.codes, gptq_quantize(W, H * factor, W4).weight.codes
    )


# Groups in order of activity


def test_desc_act_groups_are_runs_of_the_activity_order() -> None:
    W, H = random_layer()
    weight = gptq_quantize(W, H, W4, desc_act=True).weight
    assert weight.g_idx is not None
    order = H.diagonal().argsort(descending=True)
    assert weight.g_idx.dtype is torch.int32
    assert weight.g_idx[order].tolist() == [i // 16 for i in range(64)]


def test_desc_act_is_the_sorted_layer_with_ordinary_groups() -> None:
    W, H = random_layer()
    weight = gptq_quantize(W, H, W4, desc_act=True).weight
    order = H.diagonal().argsort(descending=True)
    plain = gptq_quantize(W[:, order], H[order][:, order], W4).weight
    assert torch.equal(weight.codes[:, order], plain.codes)
    assert torch.equal(weight.dequantize()[:, order], plain.dequantize())


def test_desc_act_of_whole_rows_needs_no_group_index() -> None:
    W, H = random_layer()
    scheme = Scheme(bits=4, group_size=PER_CHANNEL)
    assert gptq_quantize(W, H, scheme, desc_act=True).weight.g_idx is None


# Hessians that are hard (AutoGPTQ#708, llm-compressor#1152)


@pytest.mark.parametrize("scale_search", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_fewer_tokens_than_channels(num_tokens: int, scale_search: bool) -> None:
    W, H = random_layer(num_tokens=num_tokens)
    found = gptq_quantize(W, H, W4, scale_search=scale_search)
    assert torch.isfinite(found.weight.dequantize()).all()
    assert (found.weight.scales > 0).all()
    assert found.damp == 0.01
    nearest = rtn_quantize(W, W4, scale_dtype=torch.float16, scale_search=scale_search)
    allowed = 1.05 * row_errors(W - nearest.dequantize(), H).sum()
    assert float(found.errors.sum()) <= float(allowed)


def test_constant_input_is_quantized() -> None:
    W, _ = random_layer()
    found = gptq_quantize(W, torch.full((64, 64), 8.0), W4)
    assert torch.isfinite(found.weight.dequantize()).all()
    assert float(found.errors.sum()) < 1e-3 * float(found.energies.sum())


@pytest.mark.parametrize("desc_act", [True, False])
def test_dead_input_has_no_say_in_the_scales(desc_act: bool) -> None:
    """A weight of 1000 that no input ever meets would cost its group all precision."""
    W, H = random_layer()
    dead = [3, 19, 20]
    H[dead] = 0
    H[:, dead] = 0
    poisoned = W.clone()
    poisoned[:, dead] = 1000.0
    clean = gptq_quantize(W, H, W4, desc_act=desc_act)
    found = gptq_quantize(poisoned, H, W4, desc_act=desc_act)
    assert torch.equal(found.weight.scales, clean.weight.scales)
    assert torch.equal(found.weight.codes[:, 21:], clean.weight.codes[:, 21:])


def test_dead_input_keeps_its_nearest_code() -> None:
    """Other texts than those of the calibration may wake it up."""
    W, H = random_layer()
    H[5] = 0
    H[:, 5] = 0
    weight = gptq_quantize(W, H, W4).weight
    scale = weight.scales[:, 0].float()
    steps = (W[:, 5] / scale).round().clamp(-8, 7)
    assert torch.equal(weight.codes[:, 5].float() - 8, steps)


def test_group_of_dead_inputs_is_rounded_to_nearest() -> None:
    W, H = random_layer()
    H[16:32] = 0
    H[:, 16:32] = 0
    weight = gptq_quantize(W, H, W4).weight
    nearest = rtn_quantize(W, W4, scale_dtype=torch.float16)
    torch.testing.assert_close(
        weight.dequantize()[:, 16:32], nearest.dequantize()[:, 16:32], rtol=2e-3, atol=0
    )


def test_inputs_that_are_all_zero_are_quantized() -> None:
    W, H = random_layer()
    found = gptq_quantize(W, torch.zeros_like(H), W4)
    nearest = rtn_quantize(W, W4, scale_dtype=torch.float16)
    torch.testing.assert_close(found.weight.dequantize(), nearest.dequantize())


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zero_groups_stay_exactly_zero(sym: bool, dtype: torch.dtype, desc_act: bool) -> None:
    """Although other columns of the row pass their errors on to them."""
    W, H = random_layer(3, 32)
    zeros = H.diagonal().argsort(descending=True)[16:] if desc_act else torch.arange(16)
    W[0, zeros] = 0
    W[2] = 0
    scheme = Scheme(bits=4, group_size=16, sym=sym)
    weight = gptq_quantize(W, H, scheme, scale_dtype=dtype, desc_act=desc_act).weight
    assert torch.isfinite(weight.scales).all()
    assert (weight.scales > 0).all()
    assert torch.isfinite(weight.dequantize()).all()
    assert (weight.dequantize()[0, zeros] == 0.0).all()
    assert (weight.dequantize()[2] == 0.0).all()
    assert weight.dequantize()[0].any()


# A block


class FakeBlock:
    """As much of a block as a method looks at."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = dict(weights)

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    def set_weight(self, name: str, weight: Tensor) -> None:
        self.weights[name] = weight


class FakeCalibration:
    """Groups of layers with the tokens that each of them sees."""

    def __init__(self, inputs: dict[tuple[str, ...], Tensor]) -> None:
        self.inputs = inputs
        self.asked: dict[str, Any] = {}

    def sequential(self, **asked: Any) -> Iterator[tuple[LinearGroup, InputStatistics]]:
        self.asked = asked
        for names, x in self.inputs.items():
            statistics = InputStatistics(x.shape[1])
            statistics.update(x)
            yield LinearGroup(names), statistics


@pytest.fixture
def block() -> Any:
    generator = torch.Generator().manual_seed(4)
    return FakeBlock({name: torch.randn(8, 32, generator=generator) for name in "qkvou"})


def tokens(count: int = 50) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(count))


def quantize_block(block: Any, calibration: Any, schemes: dict[str, Scheme], **changes: Any) -> Any:
    method = GPTQ(QuantConfig(method="gptq", **changes), torch.float16)
    return method.quantize_block(block, calibration, schemes)


def test_layers_of_a_group_are_quantized_with_their_own_schemes(block: Any) -> None:
    schemes = {"q": W4, "k": W4, "v": Scheme(bits=8, group_size=32), "o": W4}
    originals = dict(block.weights)
    calibration = FakeCalibration({("q", "k", "v"): tokens(), ("o", "u"): tokens(30)})
    results = quantize_block(block, calibration, schemes)
    assert results.keys() == schemes.keys()
    for name, result in results.items():
        assert result.weight.scheme == schemes[name]
        assert torch.equal(block.weights[name], result.weight.dequantize())
        x = tokens(30 if name == "o" else 50)
        outputs = x @ originals[name].t()
        lost = (outputs - x @ block.weights[name].t()).square().sum()
        report = result.report
        assert report.relative_mse == pytest.approx(float(lost / outputs.square().sum()), rel=1e-3)
        assert report.loss == pytest.approx(float(lost) / len(x), rel=1e-3)
        assert (report.num_tokens, report.damp, report.fallback) == (len(x), 0.01, None)
    assert torch.equal(block.weights["u"], originals["u"])


def test_settings_reach_the_algorithm(block: Any) -> None:
    originals = dict(block.weights)
    calibration = FakeCalibration({("q",): tokens()})
    results = quantize_block(
        block,
        calibration,
        {"q": W4},
        damp_percent=0.02,
        act_order=False,
        desc_act=True,
        scale_search=False,
        true_sequential=False,
    )
    H = tokens().t() @ tokens()
    expected = gptq_quantize(
        originals["q"],
        H,
        W4,
        damp_percent=0.02,
        act_order=False,
        desc_act=True,
        scale_search=False,
    )
    assert torch.equal(results["q"].weight.codes, expected.weight.codes)
    assert results["q"].report.damp == 0.02
    assert calibration.asked == {"is_true_sequential": False}


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "rtn: no calibration tokens"),
        ({("q",): tokens(0)}, "rtn: no calibration tokens"),
        ({("q",): torch.full((3, 32), torch.inf)}, "rtn: calibration inputs that are not finite"),
    ],
)
def test_layer_without_usable_tokens_is_visibly_rounded_to_nearest(
    block: Any,
    inputs: dict[tuple[str, ...], Tensor],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An expert that no token reached, or inputs that overflowed."""
    nearest = rtn_quantize(block.weights["q"], W4, scale_dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        results = quantize_block(block, FakeCalibration(inputs), {"q": W4})
    assert results["q"].report.fallback == reason
    assert torch.equal(results["q"].weight.codes, nearest.codes)
    assert torch.equal(block.weights["q"], nearest.dequantize())
    assert "q: rounded to nearest" in caplog.text


def test_hessian_without_a_factor_is_told(block: Any, caplog: pytest.LogCaptureFixture) -> None:
    H = torch.full((32, 32), 5.0).fill_diagonal_(1.0)  # no sum of squares
    statistics = SimpleNamespace(num_tokens=3, hessian=H)
    calibration: Any = SimpleNamespace(
        sequential=lambda **asked: [(LinearGroup(("q",)), statistics)]
    )
    with caplog.at_level(logging.WARNING):
        results = quantize_block(block, calibration, {"q": W4})
    assert results["q"].report.fallback == "diagonal: the Hessian could not be factored"
    assert torch.isfinite(results["q"].weight.dequantize()).all()
    assert "q: no damping" in caplog.text


def test_calibration_is_needed(block: Any) -> None:
    with pytest.raises(CalibrationError, match="none were given"):
        quantize_block(block, None, {"q": W4})
