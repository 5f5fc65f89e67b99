"""Log-probabilities are the model's own, with ranks and lists in a definite order."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbench.engine.sampling import logprobs as logprobs_module
from llmbench.engine.sampling.logprobs import row_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chosen_and_top_are_those_of_log_softmax(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = (20 * torch.randn(9, 257, generator=generator) + 300).to(dtype)
    token_ids = torch.randint(0, 257, (9,), generator=generator).tolist()
    expected = torch.log_softmax(logits.double(), -1)
    for row, found in enumerate(row_logprobs(logits, token_ids, 5)):
        assert found.token_id == token_ids[row]
        assert found.logprob == pytest.approx(float(expected[row, token_ids[row]]), abs=1e-4)
        order = sorted(range(257), key=lambda i: (-float(logits[row, i]), i))
        assert found.rank == 1 + order.index(token_ids[row])
        assert [token_id for token_id, _ in found.top] == order[:5]
        assert [value for _, value in found.top] == pytest.approx(
            [float(expected[row, i]) for i in order[:5]], abs=1e-4
        )


@given(
    row=st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.0]), min_size=1).filter(
        lambda row: max(row) > -math.inf
    ),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_equal_logits_rank_by_id(row: list[float], data: st.DataObject) -> None:
    token_id = data.draw(st.integers(0, len(row) - 1))
    found = row_logprobs(torch.tensor([row]), [token_id], len(row))[0]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    assert [i for i, _ in found.top] == order
    assert found.top[found.rank - 1] == (token_id, found.logprob)


def test_chosen_token_is_listed_with_its_own_value() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    for found in row_logprobs(logits, logits.argmax(-1).tolist(), 1):
        assert found.rank == 1
        assert found.top == ((found.token_id, found.logprob),)


def test_each_row_lists_as_many_as_it_asks_for() -> None:
    found = row_logprobs(torch.randn(4, 10), [0, 1, 2, 3], [0, 2, 1, 99])
    assert [len(entry.top) for entry in found] == [0, 2, 1, 10]


@pytest.mark.parametrize("num_asked", [1, 5, 300])  # 300: their ranks come from one sort
def test_asked_tokens_have_their_own_probability_and_rank(num_asked: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 400, generator=generator).mul(8).round().div(4)  # many equal ones
    asked = [torch.randint(0, 400, (num_asked,), generator=generator).tolist() for _ in range(3)]
    expected = torch.log_softmax(logits.double(), -1)
    for row, found in enumerate(row_logprobs(logits, [7, 8, 9], 0, asked=asked)):
        order = sorted(range(400), key=lambda i: (-float(logits[row, i]), i))
        assert found.token_id == 7 + row
        assert [token_id for token_id, _, _ in found.asked] == asked[row]
        for token_id, logprob, rank in found.asked:
            assert logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
            assert rank == 1 + order.index(token_id)


def test_each_row_is_asked_of_its_own_tokens() -> None:
    found = row_logprobs(torch.randn(3, 10), [0, 1, 2], 0, asked=[(4,), (), (5, 5, 0)])
    assert [[i for i, _, _ in entry.asked] for entry in found] == [[4], [], [5, 5, 0]]


def test_rows_of_a_larger_tensor_are_those_rows() -> None:
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(0))
    rows, asked = [7, 0, 3], [(1,), (2,), (3,)]
    want = row_logprobs(logits[rows], [4, 5, 6], 2, asked=asked)
    assert row_logprobs(logits, [4, 5, 6], 2, asked=asked, rows=rows) == want


def test_broken_row_has_no_probability_and_harms_no_other() -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = float("nan")
    found = row_logprobs(logits, [0, 0, 0], 0, asked=[(4,)] * 3)
    assert [math.isnan(entry.logprob) for entry in found] == [False, True, False]
    assert [math.isnan(entry.asked[0][1]) for entry in found] == [False, True, False]


def test_impossible_token_has_no_probability() -> None:
    found = row_logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), [1], 3)[0]
    assert found.logprob == -math.inf
    assert found.rank == 3
    assert found.top[-1] == (1, -math.inf)


@pytest.mark.parametrize("entries", [1, 40, 100])
def test_rows_are_the_same_in_chunks_of_any_size(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(11, 20, generator=torch.Generator().manual_seed(0))
    token_ids = list(range(11))
    asked = [range(row) for row in range(11)]
    whole = row_logprobs(logits, token_ids, 3, asked=asked)
    monkeypatch.setitem(logprobs_module._CHUNK_ENTRIES, "cpu", entries)
    assert row_logprobs(logits, token_ids, 3, asked=asked) == whole


def test_ranks_off_the_cpu_are_those_on_it() -> None:
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(0)).round()
    pairs = [(row, token_id) for row in range(5) for token_id in range(60)]
    rows, token_ids = [row for row, _ in pairs], [token_id for _, token_id in pairs]
    want = logprobs_module._ranks_on_cpu(logits, rows, token_ids)
    assert logprobs_module._ranks_by_torch(logits, rows, token_ids) == want
