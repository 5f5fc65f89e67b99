"""Divergence and perplexity equal their definitions, and know when they are zero."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr, softmax
from torch import Tensor

from llmbench.bench.accuracy import divergence
from llmbench.bench.accuracy.baseline_store import BaselineStore
from llmbench.bench.accuracy.divergence import (
    QualityTotals,
    TokenDivergence,
    item_divergence,
    score_rows,
    token_divergence,
)
from llmbench.bench.accuracy.engine_model import EngineModel
from llmbench.bench.accuracy.quality import evaluate_quality
from llmbench.bench.accuracy.text_windows import cut_text
from llmbench.bench.errors import BenchError
from llmbench.engine.config import EngineConfig
from llmbench.engine.models.head import load_head
from llmbench.engine.scoring import ScoreRequest

ROWS, VOCAB = 9, 33
Logits = tuple[Tensor, Tensor, Tensor]


@dataclass
class LinearHead:
    """A head of its own; counts the rows that it is asked for at once."""

    weight: Tensor  # [V, H]
    largest_call: int = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.largest_call = max(self.largest_call, len(hidden))
        return hidden.float() @ self.weight.float().T


@pytest.fixture
def logits() -> Logits:
    generator = torch.Generator().manual_seed(0)
    base = 4 * torch.randn(ROWS, VOCAB, generator=generator)
    return base, base + torch.randn(ROWS, VOCAB, generator=generator), torch.arange(ROWS)


def one_row(base: list[float], candidate: list[float], target: int = 0) -> TokenDivergence:
    return score_rows(torch.tensor([base]), torch.tensor([candidate]), torch.tensor([target]))


def test_scores_equal_their_definitions(logits: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ENTRIES", 4 * VOCAB)  # chunks of 4, 4 and 1 rows
    base, candidate, targets = logits
    rows = (range(ROWS), targets.numpy())
    p, q = softmax(base.double().numpy(), axis=1), softmax(candidate.double().numpy(), axis=1)
    found = score_rows(base, candidate, targets)
    assert found.kl.tolist() == pytest.approx(rel_entr(p, q).sum(axis=1).tolist(), rel=1e-12)
    assert found.delta_p.tolist() == pytest.approx((q[rows] - p[rows]).tolist(), abs=1e-15)
    assert found.same_top.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    for side, stored in ((base, found.base_logprob), (candidate, found.logprob)):
        expected = log_softmax(side.double().numpy(), axis=1)[rows]
        assert stored.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_states_and_heads_give_what_whole_logits_give(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "LOGIT_ROWS", 4)
    generator = torch.Generator().manual_seed(1)
    base = LinearHead(torch.randn(VOCAB, 8, generator=generator).to(dtype))
    head = LinearHead(torch.randn(VOCAB, 12, generator=generator).to(dtype))  # another width
    base_hidden = torch.randn(ROWS, 8, generator=generator).to(dtype)
    hidden = torch.randn(ROWS, 12, generator=generator).to(dtype)
    found = token_divergence(base_hidden, base, hidden, head, list(range(ROWS)))
    assert base.largest_call == head.largest_call == 4
    whole = score_rows(base.logits(base_hidden), head.logits(hidden), torch.arange(ROWS))
    # Products of other sizes may be summed in another order.
    assert found.kl.tolist() == pytest.approx(whole.kl.tolist(), rel=1e-5)
    assert len(found) == ROWS


def test_model_does_not_diverge_from_itself(logits: Logits) -> None:
    base, _, targets = logits
    found = score_rows(base, base.clone(), targets)
    assert found.kl.tolist() == found.delta_p.tolist() == [0.0] * ROWS
    assert found.same_top.all()


def test_tiny_divergence_is_not_lost_in_rounding() -> None:
    """To second order KL is half the variance of the change of logits under p."""
    base = torch.zeros(1, 1000)
    change = torch.linspace(-1e-4, 1e-4, 1000)[None]
    expected = float(change.double().var(correction=0)) / 2
    found = float(score_rows(base, base + change, torch.tensor([0])).kl)
    assert found == pytest.approx(expected, rel=1e-3)


def test_divergence_is_of_the_base_from_the_candidate() -> None:
    """p = (1/2, 1/2), q = (1 - e, e): KL(p || q) = -ln 2 - (ln(1 - e) + ln e) / 2."""
    found = one_row([0.0, 0.0], [math.log(0.999), math.log(0.001)], target=1)
    forward = -math.log(2) - 0.5 * (math.log(0.999) + math.log(0.001))
    assert float(found.kl) == pytest.approx(forward, rel=1e-6)
    assert float(found.delta_p) == pytest.approx(0.001 - 0.5, rel=1e-6)
    assert float(found.base_logprob) == pytest.approx(math.log(0.5))
    backward = one_row([math.log(0.999), math.log(0.001)], [0.0, 0.0])
    assert float(backward.kl) == pytest.approx(
        math.log(2) + 0.999 * math.log(0.999) + 0.001 * math.log(0.001), rel=1e-6
    )


def test_token_that_only_the_base_excludes_costs_nothing() -> None:
    found = one_row([0.0, 0.0, -math.inf], [0.0, 0.0, 0.0], target=2)
    assert float(found.kl) == pytest.approx(math.log(1.5))
    assert float(found.base_logprob) == -math.inf
    assert float(found.delta_p) == pytest.approx(1 / 3)


def test_token_that_both_exclude_does_not_count() -> None:
    assert float(one_row([0.0, -math.inf], [5.0, -math.inf]).kl) == 0


def test_token_that_only_the_candidate_excludes_costs_infinitely_much() -> None:
    found = one_row([0.0, 0.0], [0.0, -math.inf])
    assert float(found.kl) == math.inf
    assert float(found.delta_p) == pytest.approx(0.5)


def test_rows_with_nan_are_undefined_and_leave_the_others_alone() -> None:
    broken = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    found = score_rows(torch.zeros(2, 2), broken, torch.tensor([0, 0]))
    assert math.isnan(found.kl[0])
    assert math.isnan(found.delta_p[0])
    assert found.same_top.tolist() == [False, True]
    assert float(found.kl[1]) == 0


def test_first_of_equal_tokens_is_the_likeliest() -> None:
    assert one_row([1.0, 1.0, 0.0], [2.0, 1.0, 0.0]).same_top.all()
    assert not one_row([1.0, 1.0, 0.0], [1.0, 2.0, 0.0]).same_top.any()


def test_other_vocabulary_is_refused() -> None:
    with pytest.raises(BenchError, match="vocabulary of 3 tokens, found 4"):
        score_rows(torch.zeros(1, 3), torch.zeros(1, 4), torch.tensor([0]))


def test_rows_that_do_not_correspond_are_refused() -> None:
    head = LinearHead(torch.zeros(3, 2))
    with pytest.raises(BenchError, match="of 2 targets, found 1 of the base and 2 of"):
        token_divergence(torch.zeros(1, 2), head, torch.zeros(2, 2), head, [0, 1])


def test_logits_that_were_rounded_are_refused() -> None:
    class Narrow(LinearHead):
        def logits(self, hidden: Tensor) -> Tensor:
            return super().logits(hidden).bfloat16()

    head = Narrow(torch.zeros(3, 2))
    with pytest.raises(BenchError, match="expected float32 logits, found bfloat16"):
        token_divergence(torch.zeros(1, 2), head, torch.zeros(1, 2), head, [0])


@pytest.mark.parametrize("is_loaded", [False, True])
def test_small_change_of_a_bfloat16_model_is_not_lost_in_its_logits(
    is_loaded: bool, byte_llama: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder, changed = byte_llama(), tmp_path / "changed"
    shutil.copytree(folder, changed)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    weight = tensors["lm_head.weight"].bfloat16()
    noise = 1 + 0.01 * torch.randn(weight.shape, generator=generator)
    tensors["lm_head.weight"] = (weight.float() * noise).bfloat16()
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})

    base, candidate = (
        EngineModel(EngineConfig(model=str(path), dtype="bfloat16", kv_cache_memory_bytes=1 << 20))
        for path in (folder, changed)
    )
    if is_loaded:
        candidate.load()
    hidden = torch.randn(40, 32, generator=generator).bfloat16()
    found = token_divergence(hidden, base.head(), hidden, candidate.head(), [0] * len(hidden))
    candidate.close()
    log_p, log_q = (
        (hidden.double() @ each.double().T).log_softmax(-1)
        for each in (weight, tensors["lm_head.weight"])
    )
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert 1e-6 < float(expected.mean()) < 1e-3
    assert found.kl.tolist() == pytest.approx(expected.tolist(), rel=1e-3)


def test_nothing_scored_is_no_error() -> None:
    head = LinearHead(torch.zeros(3, 2))
    assert len(token_divergence(torch.zeros(0, 2), head, torch.zeros(0, 2), head, [])) == 0


def test_item_holds_its_continuations_one_after_another(logits: Logits) -> None:
    base, candidate, targets = logits
    whole = item_divergence([score_rows(base, candidate, targets)], "key")
    parts = [
        score_rows(base[rows], candidate[rows], targets[rows])
        for rows in (slice(2), slice(2, ROWS))
    ]
    assert item_divergence(parts, "key") == whole
    assert whole.base_key == "key"
    assert all(isinstance(value, float) for value in whole.kl)
    assert all(isinstance(value, bool) for value in whole.same_top)


def test_stored_baseline_gives_the_divergence_of_transformers_models(
    tmp_path: Path, byte_llama: Callable[..., Path]
) -> None:
    """Base and candidate are never in memory together: of the base there are rows and a head."""
    from transformers import AutoModelForCausalLM

    request = ScoreRequest(
        context=(5, 6, 7, 8), continuations=((20, 21, 22), (20, 30), (40, 41, 42, 43))
    )
    targets = [token for ids in request.continuations for token in ids]
    folders = [byte_llama(seed) for seed in (0, 1)]
    configs = [EngineConfig(model=str(folder), dtype="float32") for folder in folders]
    hidden = []
    for config in configs:
        model = EngineModel(config)
        ((_, scores),) = model.score([request], with_hidden=True)
        hidden.append([rows for score in scores if (rows := score.hidden) is not None])
        model.close()
    with BaselineStore({"model": "base"}, root=tmp_path) as store:
        store.put("key", {}, hidden[0])
        stored = store.get("key")
    assert stored is not None
    assert stored.hidden is not None
    found = token_divergence(
        torch.cat(stored.hidden),
        load_head(configs[0]),
        torch.cat(hidden[1]),
        load_head(configs[1]),
        targets,
    )

    whole = []
    for folder in folders:
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = []
        for ids in request.continuations:
            with torch.inference_mode():
                all_rows = reference(torch.tensor([request.context + ids])).logits[0]
            logits.append(all_rows[len(request.context) - 1 : -1])
        whole.append(log_softmax(torch.cat(logits).double().numpy(), axis=1))
    log_p, log_q = whole
    expected = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    assert found.kl.tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    picked = (range(len(targets)), targets)
    assert found.logprob.tolist() == pytest.approx(log_q[picked].tolist(), abs=1e-4)
    assert found.base_logprob.tolist() == pytest.approx(log_p[picked].tolist(), abs=1e-4)


def scores_of(kl: list[float], nll: list[float]) -> TokenDivergence:
    ones = torch.ones(len(kl), dtype=torch.float64)
    return TokenDivergence(
        kl=torch.tensor(kl, dtype=torch.float64),
        delta_p=ones,
        same_top=ones.bool(),
        base_logprob=-ones,
        logprob=-torch.tensor(nll, dtype=torch.float64),
    )


def test_totals_weigh_positions_alike_and_take_their_error_from_windows() -> None:
    totals = QualityTotals()
    for kl, nll in (([0.1, 0.3], [1.0, 2.0]), ([0.5], [4.0])):
        totals.add(scores_of(kl, nll))
        totals.end_window()
    found = totals.result()
    assert found.perplexity == pytest.approx(math.exp(7 / 3))
    assert found.base_perplexity == pytest.approx(math.e)
    assert found.kl_mean == pytest.approx(0.3)
    # Sums 0.4 and 0.5, where 0.6 and 0.3 were expected: sqrt(2 / 1 * (0.2^2 + 0.2^2)) / 3 tokens.
    assert found.kl_sem == pytest.approx(0.4 / 3)
    assert found.num_tokens == 3


def test_one_window_has_no_standard_error() -> None:
    totals = QualityTotals()
    totals.add(scores_of([1.0, 1.0], [1.0, 1.0]))
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
