"""Rows of tasks: files of every kind, what is wrong with them, and how they deviate."""

import bz2
import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.accuracy.data_files import read_data_file
from llmbench.bench.accuracy.task import Task
from llmbench.bench.accuracy.task_catalog import load_tasks
from llmbench.bench.accuracy.task_data import load_task_data
from llmbench.bench.errors import BenchError, WorkloadError

ROWS = [{"question": f"Is {n} even?", "label": n % 2} for n in range(6)]
TASK = """\
task: parity
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: label
"""


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def stock(name: str) -> Task:
    (task,) = load_tasks([name]).tasks
    return task


@pytest.fixture
def own_task(tmp_path: Path) -> Callable[..., Task]:
    """Make a task from keys and files beside its own."""

    def make(keys: str, files: Mapping[str, bytes]) -> Task:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
        path = tmp_path / "task.yaml"
        path.write_text(TASK + keys, encoding="utf-8")
        (task,) = load_tasks(["parity"], include=[path]).tasks
        return task

    return make


def parquet(rows: list[dict[str, Any]]) -> bytes:
    import io

    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", lines),
        ("rows.json", lines),
        ("rows.json", lambda rows: json.dumps(rows, indent=1).encode()),
        ("rows.json", lambda rows: b"\xef\xbb\xbf" + json.dumps(rows).encode()),
        ("rows.jsonl.gz", lambda rows: gzip.compress(lines(rows))),
        ("rows.jsonl.bz2", lambda rows: bz2.compress(lines(rows))),
        ("rows.parquet", parquet),
    ],
)
def test_every_kind_of_file_gives_the_same_rows(
    tmp_path: Path, name: str, write: Callable[[list[dict[str, Any]]], bytes]
) -> None:
    path = tmp_path / name
    path.write_bytes(write(ROWS))
    found = read_data_file(path)
    assert list(found.rows) == ROWS
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_csv_gives_texts(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'question,label\r\n"Is 1,\n2 odd?",0\r\n')
    assert list(read_data_file(path).rows) == [{"question": "Is 1,\n2 odd?", "label": "0"}]


def test_line_separators_inside_text_end_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "a\u2028b\u0085c\x1cd"}]
    path.write_text(json.dumps(rows[0], ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert list(read_data_file(path).rows) == rows


def test_fields_stand_in_one_order_in_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([{"a": {"x": 1, "y": 2}, "b": 3}, {"b": 4, "a": {"y": 5, "x": 6}}]))
    first, second = read_data_file(path).rows
    assert list(first) == list(second) == ["a", "b"]
    assert list(second["a"].items()) == [("x", 6), ("y", 5)]


@pytest.mark.parametrize(
    ("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_compressed_file_is_named(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes], damage: str
) -> None:
    path = tmp_path / f"t.jsonl.{suffix}"
    whole = compress(lines(ROWS) * 50)
    middle = len(whole) // 2
    broken = whole[:middle] + (b"" if damage == "cut" else b"\xff" * 8 + whole[middle + 8 :])
    path.write_bytes(broken)
    with pytest.raises(WorkloadError, match=f"cannot read .*t.jsonl.{suffix}: "):
        read_data_file(path)


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS))
    before = read_data_file(path)
    path.write_bytes(lines(ROWS[:2]))
    assert len(read_data_file(path).rows) == 2
    assert read_data_file(path).sha256 != before.sha256


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"x": 1}\n{"x": \n', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"x": 1}\n[1]\n', r"a\.jsonl:2 is no object with fields, found list"),
        ("a.jsonl", b'{"x": 1}\n{"x": "\xff"}\n', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b"\n", "holds no rows"),
        ("a.json", b'[{"x": 1},\n{]', r"a\.json:2 is not JSON"),
        ("a.json", b'[{"x": 1}, 3]', r"a\.json, row 1 is no object"),
        ("a.csv", b"x,y\n1,2\n3\n", r"a\.csv:3 has not the 2 columns"),
        ("a.csv", b"x,y\n1,2,3\n", r"a\.csv:2 has not the 2 columns"),
        ("a.csv", b'x\n"1"2\n', r"a\.csv:2 is not CSV"),
        ("a.csv", b"x\n\xff\n", r"a\.csv:2 is not UTF-8"),
        ("a.parquet", b"PAR1", r"a\.parquet is not Parquet"),
        ("a.jsonl.gz", b"{}", r"cannot read .*a\.jsonl\.gz"),
        ("a.txt", b"{}", r"cannot tell what .*a\.txt holds"),
    ],
)
def test_broken_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkloadError, match=message):
        read_data_file(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "docs", "pool"),
    [
        ("arc_challenge", 1172, 1119),
        ("arc_easy", 2376, 2251),
        ("gsm8k", 1319, 7473),
        ("hellaswag", 1000, 1000),
        ("kobest_boolq", 1404, 1000),
        ("kobest_copa", 1000, 3076),
        ("kobest_hellaswag", 500, 2029),
        ("kobest_sentineg", 397, 3649),
        ("kobest_wic", 1260, 1000),
        ("piqa", 1838, 1838),
        ("truthfulqa_mc1", 817, None),
        ("truthfulqa_mc2", 817, None),
        ("wikitext", 62, None),
        ("winogrande", 1267, 640),
    ],
)
def test_shared_files_have_the_known_numbers_of_rows(
    data_dir: Path, name: str, docs: int, pool: int | None
) -> None:
    data = load_task_data(stock(name), data_dir)
    assert len(data.docs) == docs
    assert (None if data.pool is None else len(data.pool)) == pool
    assert all(len(value) == 64 for value in data.sha256s.values())


def test_mmlu_rows_are_shared_out_to_57_subjects(data_dir: Path) -> None:
    all_data = [load_task_data(task, data_dir) for task in load_tasks(["mmlu"]).tasks]
    assert sum(len(data.docs) for data in all_data) == 14042
    assert {len(data.pool or ()) for data in all_data} == {5}
    assert all(data.deviations == () for data in all_data)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("arc_challenge", []),
        ("gsm8k", []),
        ("wikitext", []),
        ("truthfulqa_mc1", []),
        ("piqa", ["no train split .* the questions themselves"]),
        ("winogrande", ["train split .* 640 rows, the published one has 40,398: other shots"]),
        ("kobest_wic", ["train split .* 1,000 rows, the published one has 3,318: other shots"]),
        (
            "hellaswag",
            [
                "validation split .* 1,000 rows, the published one has 10,042: scores",
                "mixed otherwise .* activitynet 913, wikihow 87 ",
                "no train split .* the questions themselves",
            ],
        ),
    ],
)
def test_deviations_of_the_shared_files_are_said(
    data_dir: Path, name: str, said: list[str]
) -> None:
    import re

    found = load_task_data(stock(name), data_dir).deviations
    assert len(found) == len(said)
    for sentence, pattern in zip(found, said, strict=True):
        assert re.search(pattern, sentence), sentence


def test_fair_part_of_a_split_has_no_other_mix(tmp_path: Path) -> None:
    rows = [{"source_id": "activitynet~v" if n % 100 < 32 else "wikihow~1"} for n in range(500)]
    (tmp_path / "hellaswag").mkdir()
    (tmp_path / "hellaswag" / "val_1000.jsonl").write_bytes(lines(rows))
    found = load_task_data(stock("hellaswag"), tmp_path, needs_pool=False).deviations
    assert len(found) == 1
    assert "500 rows" in found[0]


def test_questions_leave_their_own_shots_where_they_are_the_pool(data_dir: Path) -> None:
    (hellaswag,) = [t for t in load_tasks(["openllm"]).tasks if t.name == "hellaswag"]
    assert hellaswag.fewshot_split == "train"
    assert load_task_data(hellaswag, data_dir).must_exclude_doc


@pytest.mark.parametrize(
    ("name", "excludes"),
    [("hellaswag", True), ("winogrande", True), ("piqa", True), ("arc_easy", False)],
)
def test_exclusion_follows_the_harness(data_dir: Path, name: str, excludes: bool) -> None:
    assert load_task_data(stock(name), data_dir).must_exclude_doc == excludes


def test_files_are_found_beside_an_own_task(own_task: Callable[..., Task]) -> None:
    task = own_task(
        "test_split: test\nfewshot_split: dev\nlocal_files: {test: t.jsonl, dev: d/d.json}\n",
        {"t.jsonl": lines(ROWS), "d/d.json": json.dumps(ROWS[:2]).encode()},
    )
    for data_dir in (None, Path("/elsewhere")):
        data = load_task_data(task, data_dir)
        assert list(data.docs) == ROWS
        assert list(data.pool or ()) == ROWS[:2]
        assert data.deviations == ()


def test_files_are_named_as_in_the_harness(own_task: Callable[..., Task]) -> None:
    task = own_task(
        "test_split: test\ndataset_path: json\ndataset_kwargs: {data_files: {test: t.jsonl}}\n",
        {"t.jsonl": lines(ROWS)},
    )
    assert list(load_task_data(task, None).docs) == ROWS


def test_bare_data_file_is_refused(own_task: Callable[..., Task]) -> None:
    with pytest.raises(BenchError, match="data_files needs a mapping") as caught:
        own_task("test_split: test\ndataset_path: json\ndataset_kwargs: {data_files: x}\n", {})
    assert "named train" in caught.value.__notes__[0]


def test_several_files_make_one_split(own_task: Callable[..., Task]) -> None:
    files = {"a.jsonl": lines(ROWS[:2]), "b.jsonl": lines(ROWS[2:])}
    task = own_task("test_split: test\nlocal_files: {test: [a.jsonl, b.jsonl]}\n", files)
    assert list(load_task_data(task, None).docs) == ROWS


def test_only_rows_of_the_task_are_taken(own_task: Callable[..., Task]) -> None:
    keys = "test_split: test\nlocal_files: {test: t.jsonl}\nlocal_filter: {label: %s}\n"
    data = load_task_data(own_task(keys % 1, {"t.jsonl": lines(ROWS)}), None)
    assert list(data.docs) == ROWS[1::2]
    with pytest.raises(WorkloadError, match="no row with label = 7"):
        load_task_data(own_task(keys % 7, {}), None)


def test_row_without_the_column_of_its_task_is_named(own_task: Callable[..., Task]) -> None:
    keys = "test_split: test\nlocal_files: {test: t.jsonl}\nlocal_filter: {label: 1}\n"
    task = own_task(keys, {"t.jsonl": lines([*ROWS, {"question": "?"}])})
    with pytest.raises(WorkloadError, match=r"row 6 of .*t\.jsonl lacks the column label"):
        load_task_data(task, None)


def test_sole_split_serves_as_pool_and_says_so(own_task: Callable[..., Task]) -> None:
    task = own_task("test_split: t\nlocal_files: {t: t.jsonl}\n", {"t.jsonl": lines(ROWS)})
    data = load_task_data(task, None)
    assert data.must_exclude_doc
    assert data.deviations == (
        "parity names no other split: shots are drawn from the questions themselves",
    )


def test_missing_file_is_named_and_nothing_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no data file .*piqa/validation\.jsonl, the valid"):
        load_task_data(stock("piqa"), tmp_path)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no data folder .*gone"):
        load_task_data(stock("piqa"), tmp_path / "gone")


def test_file_of_shots_is_not_needed_without_shots(tmp_path: Path) -> None:
    (tmp_path / "arc_easy").mkdir()
    (tmp_path / "arc_easy" / "test.jsonl").write_bytes(lines(ROWS))
    assert load_task_data(stock("arc_easy"), tmp_path, needs_pool=False).pool is None
    with pytest.raises(WorkloadError, match=r"arc_easy/train\.jsonl, the train split"):
        load_task_data(stock("arc_easy"), tmp_path)


def test_hub_task_without_local_files_refuses_a_folder(own_task: Callable[..., Task]) -> None:
    task = own_task("test_split: test\ndataset_path: some/set\n", {})
    with pytest.raises(WorkloadError, match="parity names no local files"):
        load_task_data(task, task.path.parent)


def test_hub_rows_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, name: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((path, name, split))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    data = load_task_data(stock("mmlu_virology"), None)
    assert asked == [("cais/mmlu", "virology", "test"), ("cais/mmlu", "virology", "dev")]
    assert list(data.docs) == ROWS
    assert data.source == "cais/mmlu (virology) on the hub"
    assert set(data.sha256s) == {"test", "dev"}


def test_unreachable_hub_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline\nmore")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(BenchError, match="cannot load the split test of openai/gsm8k") as caught:
        load_task_data(stock("gsm8k"), None)
    assert caught.value.__notes__ == ["give a folder with the data files: --data-dir DIR"]
