"""Means of a divergence carry errors over items, and what a sample cannot say is not said."""

import math
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import sem
from scipy.stats import t as student

from llmbench.bench.accuracy.divergence_summary import clustered_mean, summarize_divergence
from llmbench.bench.accuracy.items import ItemDivergence, ItemRecord
from llmbench.bench.stats import required_sample_size


def tokens(
    kl: Sequence[float],
    *,
    delta_p: Sequence[float] | None = None,
    same_top: Sequence[bool] | None = None,
    base_logprob: Sequence[float] | None = None,
    logprob: Sequence[float] | None = None,
) -> ItemDivergence:
    zeros = (0.0,) * len(kl)
    return ItemDivergence(
        base_key="base",
        kl=tuple(kl),
        delta_p=zeros if delta_p is None else tuple(delta_p),
        same_top=(True,) * len(kl) if same_top is None else tuple(same_top),
        base_logprob=zeros if base_logprob is None else tuple(base_logprob),
        logprob=zeros if logprob is None else tuple(logprob),
    )


def reread(divergence: ItemDivergence) -> ItemDivergence:
    """What is left after the item went to a file and back."""
    record = ItemRecord(
        task="arc",
        doc_id=0,
        key="k",
        doc_hash="d",
        prompt_hash="p",
        target_hash="t",
        gold=0,
        divergence=divergence,
    )
    found = ItemRecord.from_json(record.to_json()).divergence
    assert found is not None
    return found


def test_error_of_items_of_one_token_is_the_ordinary_one() -> None:
    values = np.random.default_rng(0).exponential(size=50)
    found = clustered_mean(values, [1] * 50)
    assert found.value == pytest.approx(values.mean())
    assert found.se == pytest.approx(sem(values))


def test_error_of_equal_items_is_that_of_their_means() -> None:
    values = np.random.default_rng(1).exponential(size=(20, 7))
    found = clustered_mean(values.sum(axis=1), [7] * 20)
    assert found.se == pytest.approx(sem(values.mean(axis=1)))


def test_repeating_every_token_adds_no_certainty() -> None:
    values = np.random.default_rng(2).exponential(size=30)
    once, often = clustered_mean(values, [1] * 30), clustered_mean(100 * values, [100] * 30)
    assert often.se == pytest.approx(once.se)


def test_error_agrees_with_resampling_whole_items() -> None:
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 30, size=200)
    sums = sizes * rng.exponential(size=200)
    drawn = rng.integers(200, size=(4000, 200))
    resampled = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    assert clustered_mean(sums, sizes.tolist()).se == pytest.approx(resampled.std(), rel=0.05)


def test_one_item_has_no_error() -> None:
    assert clustered_mean([3.0], [10]).se is None
    found = summarize_divergence([tokens([0.1, 0.2])])
    assert found.kl_mean == pytest.approx(0.15)
    assert found.kl_se is None
    assert found.perplexity_ratio_low is None
    assert "1 items are too few" in " ".join(found.notes)


def test_tokens_count_alike_whatever_item_they_are_of() -> None:
    found = summarize_divergence([tokens([0.0, 0.3]), tokens([0.6])])
    assert found.kl_mean == pytest.approx(0.3)
    assert (found.num_items, found.num_tokens) == (2, 3)


def test_percentiles_interpolate_linearly() -> None:
    values = np.random.default_rng(4).exponential(size=4000)
    found = summarize_divergence([tokens(part.tolist()) for part in np.split(values, 40)])
    expected = np.quantile(values, [0.5, 0.9, 0.99, 0.999, 1.0])
    said = [found.kl_median, found.kl_p90, found.kl_p99, found.kl_p99_9, found.kl_max]
    assert said == pytest.approx(expected.tolist())
    assert found.withheld == ()


@pytest.mark.parametrize(
    ("num_tokens", "withheld"),
    [
        (35, ("kl_p90", "kl_p99", "kl_p99_9")),
        (36, ("kl_p99", "kl_p99_9")),
        (368, ("kl_p99_9",)),
        (required_sample_size(0.999), ()),
    ],
)
def test_percentiles_beyond_the_sample_are_withheld(
    num_tokens: int, withheld: tuple[str, ...]
) -> None:
    found = summarize_divergence([tokens([0.1] * num_tokens)])
    assert found.withheld == withheld
    record = found.to_record()
    assert [name for name in withheld if record[name] is not None] == []
    assert record["kl_median"] == pytest.approx(0.1)
    assert all(name in " ".join(found.notes) for name in withheld)


def test_probability_shift_has_sign_size_and_errors() -> None:
    """0.1, -0.3 and 0.2: mean 0, mean square 0.14 / 3; errors by hand from items of one token."""
    shifts = [0.1, -0.3, 0.2]
    found = summarize_divergence([tokens([0.0], delta_p=[shift]) for shift in shifts])
    rms = math.sqrt(0.14 / 3)
    assert found.mean_delta_p == pytest.approx(0.0)
    assert found.mean_delta_p_se == pytest.approx(sem(shifts))
    assert found.rms_delta_p == pytest.approx(rms)
    assert found.rms_delta_p_se == pytest.approx(sem(np.square(shifts)) / (2 * rms))


def test_model_against_itself_shifts_nothing() -> None:
    found = summarize_divergence([tokens([0.0]) for _ in range(10)])
    assert found.kl_mean == found.kl_max == found.rms_delta_p == found.rms_delta_p_se == 0
    assert found.perplexity_ratio == found.perplexity_ratio_low == found.perplexity_ratio_high == 1


def test_agreement_is_a_share_of_tokens() -> None:
    found = summarize_divergence([tokens([0, 0], same_top=[True, False]), tokens([0])])
    assert found.top1_agreement == pytest.approx(2 / 3)
    # Items agree at 1 of 2 and 1 of 1 tokens, where 4/3 and 2/3 were expected.
    assert found.top1_agreement_se == pytest.approx(math.sqrt(2 * 2 * (1 / 3) ** 2) / 3)


def test_agreement_without_exception_says_how_little_that_proves() -> None:
    notes = " ".join(summarize_divergence([tokens([0.1])] * 30).notes)
    assert f"up to {1 - 0.05 ** (1 / 30):.1%} may still hold a disagreement" in notes


def test_interval_of_the_perplexity_ratio_knows_the_covariance() -> None:
    rng = np.random.default_rng(5)
    base = -rng.exponential(3, size=400)
    candidate = base - 0.1 + rng.normal(0, 0.2, size=400)
    found = summarize_divergence(
        [tokens([0.0], base_logprob=[p], logprob=[q]) for p, q in zip(base, candidate, strict=True)]
    )
    variance = base.var(ddof=1) + candidate.var(ddof=1) - 2 * np.cov(base, candidate)[0, 1]
    reach = student.ppf(0.975, 399) * math.sqrt(variance / 400)
    middle = (base - candidate).mean()
    assert found.base_perplexity == pytest.approx(math.exp(-base.mean()))
    assert found.perplexity == pytest.approx(math.exp(-candidate.mean()))
    assert found.perplexity_ratio == pytest.approx(math.exp(middle))
    assert found.perplexity_ratio_low == pytest.approx(math.exp(middle - reach))
    assert found.perplexity_ratio_high == pytest.approx(math.exp(middle + reach))


def excluded() -> list[ItemDivergence]:
    """49 tokens as they should be, and one that the candidate finds impossible."""
    usual = [tokens([0.1], base_logprob=[-1.0], logprob=[-1.1]) for _ in range(49)]
    return [
        *usual,
        tokens([math.inf], delta_p=[-0.2], base_logprob=[-1.6], logprob=[-math.inf]),
    ]


def test_infinite_divergence_is_named_and_no_nan() -> None:
    found = summarize_divergence(excluded())
    assert found.num_infinite_tokens == 1
    assert found.infinite == ("kl_mean", "kl_max", "perplexity", "perplexity_ratio")
    assert found.kl_mean is None
    assert found.kl_median == pytest.approx(0.1)
    assert found.base_perplexity is not None
    assert found.mean_delta_p == pytest.approx(-0.2 / 50)
    assert "at 1 tokens the candidate excludes" in " ".join(found.notes)


def test_file_keeps_infinite_and_undefined_apart() -> None:
    broken = tokens([math.nan], delta_p=[math.nan], base_logprob=[-1.0], logprob=[math.nan])
    items = [*excluded(), broken]
    assert summarize_divergence([reread(item) for item in items]) == summarize_divergence(items)


def test_items_with_nan_are_left_out_and_counted() -> None:
    good = [tokens([0.1, 0.2])] * 10
    broken = tokens([0.1, math.nan], delta_p=[0.0, math.nan])
    found = summarize_divergence([*good, broken])
    assert found.num_undefined_items == 1
    assert found.kl_mean == summarize_divergence(good).kl_mean
    assert found.num_tokens == 20
    assert "1 more items are left out" in " ".join(found.notes)


def test_nothing_measured_is_no_number() -> None:
    found = summarize_divergence([tokens([])])
    assert (found.num_items, found.num_tokens) == (0, 0)
    assert found.kl_mean is None
    assert found.to_record()["kl_max"] is None
    assert found.notes == ()


def test_scope_names_tokens_items_and_direction() -> None:
    found = summarize_divergence([tokens([0.1] * 1500)] * 2)
    assert "every scored token of every continuation: 3,000 tokens of 2 items" in found.scope
    assert "KL(base || candidate)" in found.scope


def test_reports_can_summarize_without_torch() -> None:
    code = (
        "import sys, llmbench.bench.accuracy.divergence_summary, llmbench.bench.accuracy.verdict, "
        "llmbench.bench.accuracy.paired; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
