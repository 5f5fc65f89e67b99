"""Workload files: what was written is read back, and anything else is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.bundle import Bundle, read_bundle, write_bundle
from llmbench.bench.workloads.workload import RequestSpec, Workload, workload_digest

specs = st.builds(
    RequestSpec,
    index=st.just(0),
    prompt_token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8).map(tuple),
    max_tokens=st.integers(1, 999),
    text=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(-1, 50),
    ignore_eos=st.booleans(),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=2).map(
        tuple
    ),
)


def bundle_of(requests: list[RequestSpec], offsets: list[float]) -> Bundle:
    workload = Workload(
        requests=tuple(requests), digest=workload_digest(requests), notes={"dataset": "x"}
    )
    return Bundle(workload, offsets)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    requests = [RequestSpec(index=i, prompt_token_ids=(i, 5), max_tokens=3) for i in range(3)]
    path = tmp_path / "workload.jsonl"
    write_bundle(path, bundle_of(requests, [0.0, 0.25, 1.0]))
    return path


@given(st.lists(st.tuples(specs, st.floats(0, 1e6)), max_size=6))
@settings(max_examples=50, deadline=None)
def test_bundle_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[RequestSpec, float]]
) -> None:
    bundle = bundle_of([spec for spec, _ in requests], [offset for _, offset in requests])
    path = tmp_path_factory.mktemp("bundle") / "workload.jsonl"
    write_bundle(path, bundle)
    assert read_bundle(path) == bundle


def test_nothing_but_the_bundle_is_left_behind(written: Path) -> None:
    assert list(written.parent.iterdir()) == [written]


def edit(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        records = [json.loads(line) for line in text.splitlines()]
        change(records)
        return "".join(json.dumps(record) + "\n" for record in records)

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (edit(lambda r: r[2]["prompt_token_ids"].append(1)), "expected digest"),
        (edit(lambda r: r[1].update(max_tokens=4)), "expected digest"),
        (edit(lambda r: r.pop()), "expected 3 requests, found 2"),
        (edit(lambda r: r[0].update(schema_version=2)), "schema version 1, found 2"),
        (edit(lambda r: r[0].update(kind="x")), "expected the header"),
        (edit(lambda r: r[3].pop("stop")), "line 4 .*stop"),
        (edit(lambda r: r[3].update(prompt_token_ids="ab")), "line 4 .*no list of token ids"),
        (edit(lambda r: r[3].update(prompt_token_ids=[-1])), "line 4 .*no list of token ids"),
        (edit(lambda r: r[3].update(arrival_s=-1)), "line 4 .*arrival_s"),
        (lambda text: text[:-20], "expected one JSON object a line"),
        (lambda text: "", "expected the header"),
    ],
)
def test_damaged_bundle_is_refused(written: Path, damage: Callable[[str], str], words: str) -> None:
    written.write_text(damage(written.read_text()))
    with pytest.raises(WorkloadError, match=words):
        read_bundle(written)


def test_missing_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no workload file .*gone\.jsonl"):
        read_bundle(tmp_path / "gone.jsonl")


def test_every_request_needs_a_time(tmp_path: Path) -> None:
    request = RequestSpec(index=0, prompt_token_ids=(1,), max_tokens=1)
    with pytest.raises(WorkloadError, match="a time for each of 1 requests, found 0"):
        write_bundle(tmp_path / "w.jsonl", bundle_of([request], []))


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot write"):
        write_bundle(tmp_path / "no" / "w.jsonl", bundle_of([], []))
