"""Divergence and perplexity equal their definitions, and know when they are zero."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.special import log_softmax, rel_entr, softmax

from llmbench.bench.accuracy import divergence
from llmbench.bench.accuracy.divergence import (
    QualityTotals,
    negative_log_likelihood,
    score_rows,
)
from llmbench.bench.accuracy.quality import evaluate_quality
from llmbench.bench.accuracy.text_windows import cut_text
from llmbench.bench.errors import BenchError
from llmbench.engine.config import EngineConfig

ROWS, VOCAB = 9, 33


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = 4 * torch.randn(ROWS, VOCAB, generator=generator)
    return base, base + torch.randn(ROWS, VOCAB, generator=generator), torch.arange(ROWS)


def test_scores_equal_scipys(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ENTRIES", 4 * VOCAB)  # chunks of 4, 4 and 1 rows
    base, candidate, targets = logits
    p, q = softmax(base.double().numpy(), axis=1), softmax(candidate.double().numpy(), axis=1)
    expected_nll = -log_softmax(candidate.double().numpy(), axis=1)[range(ROWS), targets.numpy()]
    scores = score_rows(base, candidate, targets)
    assert scores.kl.tolist() == pytest.approx(rel_entr(p, q).sum(axis=1).tolist(), rel=1e-4)
    assert scores.nll.tolist() == pytest.approx(expected_nll.tolist(), rel=1e-5)
    assert scores.is_same_top.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    assert negative_log_likelihood(candidate, targets).tolist() == pytest.approx(
        expected_nll.tolist(), rel=1e-5
    )


def test_model_does_not_diverge_from_itself(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    base, _, targets = logits
    scores = score_rows(base, base.clone(), targets)
    assert scores.kl.tolist() == [0.0] * ROWS
    assert scores.is_same_top.all()


def test_a_token_that_only_the_base_finds_possible_costs_its_log_odds() -> None:
    """p = (1/2, 1/2), q = (1 - e, e): KL = -ln 2 - (ln(1 - e) + ln e) / 2."""
    q = torch.tensor([[math.log(0.999), math.log(0.001)]])
    kl = float(score_rows(torch.zeros(1, 2), q, torch.tensor([0])).kl)
    assert kl == pytest.approx(-math.log(2) - 0.5 * (math.log(0.999) + math.log(0.001)), rel=1e-5)


def test_totals_weigh_positions_alike_and_take_their_error_from_windows() -> None:
    totals = QualityTotals()
    for kl, nll in (([0.1, 0.3], [1.0, 2.0]), ([0.5], [4.0])):
        scores = divergence.RowScores(
            nll=torch.tensor(nll), kl=torch.tensor(kl), is_same_top=torch.tensor([True] * len(kl))
        )
        totals.add(torch.ones(len(kl)), scores)
        totals.end_window()
    found = totals.result()
    assert found.perplexity == pytest.approx(math.exp(7 / 3))
    assert found.base_perplexity == pytest.approx(math.e)
    assert found.kl_mean == pytest.approx(0.3)
    assert found.kl_sem == pytest.approx(0.3 / 2)  # window means 0.2 and 0.5: sd 0.212, / sqrt 2
    assert found.num_tokens == 3


def test_one_window_has_no_standard_error() -> None:
    totals = QualityTotals()
    ones = torch.ones(2)
    totals.add(ones, divergence.RowScores(nll=ones, kl=ones, is_same_top=ones.bool()))
    totals.end_window()
    assert totals.result().kl_sem is None


def test_windows_are_whole_and_do_not_overlap(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x" * 25, encoding="utf-8")
    cut = cut_text(path, byte_tokenizer(), window=10)
    assert [len(window) for window in cut.windows] == [10, 10]
    assert cut.num_text_tokens == 25
    assert "no BOS" in cut.protocol
    assert len(cut_text(path, byte_tokenizer(), window=99).windows[0]) == 25
    assert "a BOS" in cut_text(path, byte_tokenizer(adds_bos=True), window=10).protocol


def test_text_of_one_token_is_refused(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x", encoding="utf-8")
    with pytest.raises(BenchError, match="holds 1 tokens"):
        cut_text(path, byte_tokenizer(), window=10)


def test_perplexity_of_a_model_equals_transformers(
    tmp_path: Path, random_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]
) -> None:
    model = random_model("llama", vocab_size=258)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 4, encoding="utf-8")
    base = EngineConfig(model=str(tmp_path / "model"), dtype="float32")
    found, cut = evaluate_quality(base, {"itself": replace(base)}, path, window=32)
    losses = []
    for window in cut.windows:
        ids = torch.tensor([window])
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    expected = math.exp(sum(losses) / len(losses))
    assert found["itself"].perplexity == pytest.approx(expected, rel=1e-4)
    assert found["itself"].kl_mean == pytest.approx(0, abs=1e-7)
    assert found["itself"].top1_agreement == 1
