"""Item records: what comes back is what was written, and nothing finished is lost."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.bench.accuracy.items import (
    ItemDivergence,
    ItemFile,
    ItemRecord,
    id_ranges,
    items_path,
    read_id_ranges,
    read_items,
)
from llmbench.bench.errors import ResultsError


def make_item(doc_id: int, **changes: Any) -> ItemRecord:
    values: dict[str, Any] = {
        "task": "a_task",
        "doc_id": doc_id,
        "key": f"key-{doc_id}",
        "doc_hash": "d",
        "prompt_hash": "p",
        "target_hash": "t",
        "gold": 1,
        "choices": ("예", "no"),
        "loglikelihoods": (-1.25, -0.1),
        "is_greedy": (False, True),
        "num_tokens": (3, 1),
        "metrics": {"acc": 1.0},
        "pick": 1,
    }
    return ItemRecord(**(values | changes))


numbers = st.floats(allow_nan=False)
divergences = st.builds(
    ItemDivergence,
    base_key=st.text(),
    kl=st.tuples(numbers, numbers),
    delta_p=st.tuples(numbers, numbers),
    same_top=st.tuples(st.booleans(), st.booleans()),
    base_logprob=st.tuples(numbers, numbers),
    logprob=st.tuples(numbers, numbers),
)
records = st.builds(
    ItemRecord,
    task=st.just("a_task"),
    doc_id=st.integers(0, 9),
    key=st.text(),
    doc_hash=st.text(),
    prompt_hash=st.text(),
    target_hash=st.text(),
    fewshot_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    gold=st.integers(0, 3) | st.tuples(st.integers(0, 3), st.integers(0, 3)) | st.text(),
    choices=st.lists(st.text(), max_size=3).map(tuple),
    loglikelihoods=st.none() | st.lists(numbers, max_size=3).map(tuple),
    is_greedy=st.lists(st.booleans(), max_size=3).map(tuple),
    num_tokens=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    text_size=st.none() | st.tuples(st.integers(0), st.integers(0)),
    response=st.none() | st.text(),
    filtered=st.dictionaries(st.text(), st.text(), max_size=2),
    metrics=st.dictionaries(st.text(), numbers, max_size=2),
    pick=st.none() | st.integers(0, 3) | st.text(),
    is_tied=st.booleans(),
    invalid=st.none() | st.text(),
    divergence=st.none() | divergences,
)


@given(record=records)
def test_a_record_comes_back_as_it_was(record: ItemRecord) -> None:
    text = json.dumps(record.to_json(), allow_nan=False)
    assert ItemRecord.from_json(json.loads(text)) == record


def test_a_log_likelihood_that_is_no_number_stays_none(tmp_path: Path) -> None:
    with ItemFile(items_path(tmp_path, "a_task")) as file:
        file.append(make_item(0, loglikelihoods=(math.nan, -math.inf), invalid="NaN"))
    (item,) = read_items(items_path(tmp_path, "a_task"))
    assert item.loglikelihoods is not None
    assert math.isnan(item.loglikelihoods[0])
    assert item.loglikelihoods[1] == -math.inf


def test_written_items_are_there_without_closing(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    file = ItemFile(path)
    file.append(make_item(0))
    assert read_items(path) == [make_item(0)]
    file.close()


def test_a_torn_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    with ItemFile(path) as file:
        file.append(make_item(0))
        file.append(make_item(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with ItemFile(path) as file:
        assert set(file.items) == {0}
        file.append(make_item(1))
    assert path.read_bytes() == whole


def test_items_end_up_in_order_of_documents_each_once(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    file = ItemFile(path)
    for doc_id in (2, 0, 1, 0):
        file.append(make_item(doc_id, pick=doc_id))
    file.close(in_order=True)
    assert [json.loads(line)["doc_id"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_later_answer_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    with ItemFile(path) as file:
        file.append(make_item(0, key="old"))
        file.append(make_item(0, key="new"))
        assert file.items[0].key == "new"
    assert [item.key for item in read_items(path)] == ["new"]


def test_items_reach_the_disk_at_most_a_second_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [0.0], []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(now[0]))
    with ItemFile(tmp_path / "items.jsonl", clock=lambda: now[0]) as file:
        for doc_id in range(25):
            now[0] = doc_id / 10
            file.append(make_item(doc_id))
        assert synced == [1.0, 2.0]
    assert synced == [1.0, 2.0, 2.4]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"schema_version": 1, "task": NaN}', "strict JSON"),
        ("[1]", "JSON object"),
        ('{"schema_version": 2}', "schema_version 1, found 2"),
        ('{"schema_version": 1, "task": "a"}', "missing or unknown: choices, "),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(make_item(0).to_json()) + "\n" + line + "\n")
    with pytest.raises(ResultsError, match=problem) as error:
        ItemFile(path)
    assert f"line 2 of {path}" in str(error.value)


def test_no_file_is_no_items(tmp_path: Path) -> None:
    assert read_items(tmp_path / "items-none.jsonl") == []


@given(st.sets(st.integers(0, 60)))
def test_ranges_of_documents_come_back_as_they_were(doc_ids: set[int]) -> None:
    assert read_id_ranges(id_ranges(sorted(doc_ids))) == doc_ids


def test_ranges_are_as_short_as_people_write_them() -> None:
    assert id_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
