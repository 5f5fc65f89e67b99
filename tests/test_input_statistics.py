"""Statistics of a layer's inputs cover every token once, however the tokens arrive."""

import pytest
import torch

from llmbench.quant.statistics import STRIPE, InputStatistics


def tokens(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator).to(dtype)


def gather(*batches: torch.Tensor, sample_rows: int = 0) -> InputStatistics:
    statistics = InputStatistics(
        batches[0].shape[-1],
        sample_rows=sample_rows,
        total_tokens=sum(batch.shape[:-1].numel() for batch in batches),
    )
    for batch in batches:
        statistics.update(batch)
    return statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, STRIPE + 7])
def test_hessian_is_the_sum_of_outer_products(width: int, dtype: torch.dtype) -> None:
    x = tokens(40, width, dtype)
    expected = x.double().t() @ x.double()
    torch.testing.assert_close(gather(x).hessian.double(), expected, rtol=1e-5, atol=1e-4)


def test_hessian_of_bfloat16_inputs_keeps_float32_digits() -> None:
    x = tokens(512, 8, torch.bfloat16)
    exact = x.double().t() @ x.double()
    error = (gather(x).hessian.double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5, "sums in bfloat16 would be off by 1e-3"


def test_float32_products_elsewhere_keep_their_precision() -> None:
    gather(tokens(4, 8, torch.bfloat16))
    x = tokens(256, 64)
    exact = x.double().t() @ x.double()
    torch.testing.assert_close((x.t() @ x).double(), exact, rtol=1e-5, atol=1e-4)


def test_tokens_count_alike_in_any_batching() -> None:
    x = tokens(70, 6)
    whole = gather(x)
    parts = gather(x[:40], x[40:46].reshape(2, 3, 6), x[46:69], x[69:])
    assert parts.num_tokens == whole.num_tokens == 70
    torch.testing.assert_close(parts.hessian, whole.hessian, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.abs_mean, x.abs().mean(dim=0))
    assert torch.equal(parts.low, x.amin(dim=0))
    assert torch.equal(parts.high, x.amax(dim=0))


def test_sample_has_a_token_of_every_stretch_of_the_set() -> None:
    x = torch.arange(100.0)[:, None]
    sample = gather(x[:30], x[30:35], x[35:], sample_rows=10).sample[:, 0]
    assert (sample // 10).tolist() == list(range(10))


def test_sample_is_not_in_step_with_the_texts() -> None:
    """Texts of 64 tokens: their first ones are no more frequent in the sample than in the set."""
    x = (torch.arange(4096.0) % 64)[:, None]
    sample = gather(x, sample_rows=256).sample[:, 0]
    assert int((sample == 0).sum()) <= 256 // 64 + 2


def test_sample_is_all_tokens_where_there_are_few() -> None:
    x = tokens(7, 3)
    assert torch.equal(gather(x[:3], x[3:], sample_rows=100).sample, x)
