"""Stored baselines come back bit by bit or not at all, and never as another's answer."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.bench.accuracy import baseline_store, store_folders
from llmbench.bench.accuracy.baseline_store import INDEX, ROWS, BaselineStore
from llmbench.bench.accuracy.store_folders import LOCK
from llmbench.bench.errors import BenchError

IDENTITY: dict[str, Any] = {
    "model_digest": "a1",
    "quantization": None,
    "dtype": "bfloat16",
    "packages": {"llmbench": "0.1.0", "torch": "2.13.0"},
    "chat_template": "c1",
}
Open = Callable[..., BaselineStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Open:
    def build(identity: dict[str, Any] = IDENTITY, **settings: Any) -> BaselineStore:
        return BaselineStore(identity, root=tmp_path / "eval", **settings)

    return build


def rows(num_rows: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fill(store: BaselineStore, keys: Sequence[str], num_rows: int = 4) -> None:
    for seed, key in enumerate(keys):
        store.put(key, {"n": seed}, [rows(num_rows, seed)])


def is_as_filled(store: BaselineStore, key: str, seed: int) -> bool:
    found = store.get(key)
    if found is None:
        return False
    assert found.hidden is not None
    return found.answer == {"n": seed} and torch.equal(found.hidden[0], rows(4, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_answers_come_back_bit_by_bit(open_store: Open, dtype: torch.dtype) -> None:
    hidden = [rows(3, 1, dtype), rows(1, 2, dtype), rows(0, 3, dtype), rows(5, 4, dtype)]
    hidden[0][0, 0] = torch.nan
    answer = {
        "logs": [-0.1, -1e-300, float("-inf")],
        "text": "안녕 \r\n \u2028 \ud800",
        "none": None,
    }
    with open_store() as store:
        store.put("key", answer, hidden)
    with open_store() as store:
        found = store.get("key")
    assert found is not None
    assert found.answer == answer
    assert found.hidden is not None
    for before, after in zip(hidden, found.hidden, strict=True):
        assert after.dtype is dtype
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_answer_without_hidden_states_is_no_answer_with_them(open_store: Open) -> None:
    with open_store() as store:
        store.put("key", {"text": "so"})
        assert store.has("key")
        assert not store.has("key", with_hidden=True)
        found = store.get("key")
        assert found is not None
        assert found.hidden is None
        store.put("key", {"text": "so"}, [rows(1)])
        assert store.has("key", with_hidden=True)
    with open_store() as store:
        assert store.has("key", with_hidden=True)
        assert len(store) == 1


def test_choices_with_the_same_rows_share_them(open_store: Open) -> None:
    with open_store() as store:
        store.put("key", {}, [rows(1)] * 4)
        assert (store.folder / ROWS).stat().st_size == 8 * 2
        found = store.get("key")
    assert found is not None
    assert found.hidden is not None
    assert len(found.hidden) == 4
    assert all(torch.equal(part, rows(1)) for part in found.hidden)


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "b2"},
        {"quantization": "gptq-w4a16"},
        {"dtype": "float32"},
        {"packages": {"llmbench": "0.2.0", "torch": "2.13.0"}},
        {"packages": {"llmbench": "0.1.0", "torch": "2.14.0"}},
        {"chat_template": "c2"},
        {"kernel": "reference"},
    ],
    ids=str,
)
def test_another_model_never_gets_an_answer(open_store: Open, change: dict[str, Any]) -> None:
    with open_store() as store:
        fill(store, ["key"])
    with open_store(IDENTITY | change) as store:
        assert store.get("key") is None
        assert not store.has("key")
    with open_store(dict(reversed(IDENTITY.items()))) as store:  # the same in another order
        assert is_as_filled(store, "key", 0)


def test_another_request_never_gets_an_answer(open_store: Open) -> None:
    with open_store() as store:
        fill(store, ["key"])
        assert store.get("kez") is None
        assert store.get("") is None


def test_another_layout_of_records_is_not_read(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store() as store:
        fill(store, ["key"])
    monkeypatch.setattr(baseline_store, "FORMAT", baseline_store.FORMAT + 1)
    with open_store() as store:
        assert store.get("key") is None


def test_folder_says_whose_it_is(open_store: Open) -> None:
    with open_store() as store:
        identity = json.loads((store.folder / "identity.json").read_text())["identity"]
    assert identity == IDENTITY


def test_second_writer_is_refused(open_store: Open) -> None:
    with open_store() as store:
        with pytest.raises(BenchError, match=f"in use by another run .process {os.getpid()}."):
            open_store()
        with open_store(IDENTITY | {"dtype": "float16"}):
            pass  # another model's folder is free
        assert store.get("key") is None
    open_store().close()


# Crashes and damage


@pytest.mark.parametrize("num_lost", [1, 20, 60])
def test_torn_line_is_dropped_with_its_rows(open_store: Open, num_lost: int) -> None:
    with open_store() as store:
        fill(store, ["one", "two"])
    index, stored_rows = store.folder / INDEX, store.folder / ROWS
    os.truncate(index, index.stat().st_size - num_lost)
    with open_store() as store:
        assert is_as_filled(store, "one", 0)
        assert store.get("two") is None
        assert stored_rows.stat().st_size == 4 * 8 * 2
        fill(store, ["again", "two"])
    with open_store() as store:
        assert [is_as_filled(store, key, seed) for key, seed in (("one", 0), ("two", 1))] == [
            True,
            True,
        ]


def test_rows_without_a_line_are_cut_off(open_store: Open) -> None:
    with open_store() as store:
        fill(store, ["one"])
    with (store.folder / ROWS).open("ab") as file:
        file.write(b"torn")
    with open_store() as store:
        assert store.num_bytes == sum(
            (store.folder / name).stat().st_size for name in (INDEX, ROWS)
        )
        assert (store.folder / ROWS).stat().st_size == 4 * 8 * 2
        assert is_as_filled(store, "one", 0)


def test_rows_that_were_lost_are_computed_again(open_store: Open) -> None:
    with open_store() as store:
        fill(store, ["one", "two"])
    os.truncate(store.folder / ROWS, 4 * 8 * 2 + 5)
    with open_store() as store:
        assert is_as_filled(store, "one", 0)
        assert store.get("two") is None
        fill(store, ["three"])  # lies where the lost rows were
        store.put("two", {"n": 1}, [rows(4, 1)])
    with open_store() as store:
        assert is_as_filled(store, "one", 0)
        assert is_as_filled(store, "two", 1)
        assert is_as_filled(store, "three", 0)


def test_any_changed_byte_makes_a_record_absent_but_never_wrong(open_store: Open) -> None:
    keys = ("one", "two")
    with open_store() as store:
        fill(store, keys)
    for name in (INDEX, ROWS):
        path = store.folder / name
        content = path.read_bytes()
        for position in range(0, len(content), 7):
            changed = bytearray(content)
            changed[position] ^= 1
            path.write_bytes(changed)
            with open_store() as store:
                damaged = [
                    key
                    for seed, key in enumerate(("one", "two"))
                    if not is_as_filled(store, key, seed)
                ]
                assert len(damaged) >= 1
                assert all(store.get(key) is None for key in damaged)
            path.write_bytes(content)


def test_damaged_record_gives_way_to_a_new_one(
    open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store() as store:
        fill(store, ["one"])
        with (store.folder / ROWS).open("r+b") as file:
            file.write(b"\xff")
        assert store.get("one") is None
        assert "damaged" in caplog.text
        assert not store.has("one")
        fill(store, ["one"])
        assert is_as_filled(store, "one", 0)


def test_full_disk_is_an_error_and_leaves_the_store_whole(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store() as store:
        fill(store, ["one"])
        size = store.num_bytes
        write = os.write
        room = [30]

        def write_some(file: int, content: Any) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write(file, content[: room[0]])
            room[0] -= written
            return written

        monkeypatch.setattr(os, "write", write_some)
        with pytest.raises(BenchError, match="No space left") as caught:
            store.put("two", {}, [rows(4)])
        assert "LLMBENCH_CACHE" in caught.value.__notes__[0]
        monkeypatch.setattr(os, "write", write)
        assert store.num_bytes == size
        fill(store, ["one", "two"])
        assert is_as_filled(store, "two", 1)


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot write to"):
        BaselineStore(IDENTITY, root=tmp_path / "file")


@pytest.mark.parametrize(
    "hidden", [torch.zeros(2), torch.zeros(2, 3, dtype=torch.int8)], ids=["flat", "int8"]
)
def test_rows_of_another_kind_are_refused(open_store: Open, hidden: Tensor) -> None:
    with open_store() as store, pytest.raises(BenchError, match=r"expected hidden states \[k, H\]"):
        store.put("key", {}, [hidden])


def test_rows_of_two_widths_are_refused(open_store: Open) -> None:
    with open_store() as store, pytest.raises(BenchError, match="one type and size"):
        store.put("key", {}, [torch.zeros(1, 3), torch.zeros(1, 4)])


# Room


def three_models(open_store: Open) -> list[Path]:
    """Fill folders of three models; the first was used longest ago."""
    folders = []
    for age, name in enumerate("abc"):
        with open_store({"model": name}) as store:
            fill(store, ["key"], num_rows=100)
        os.utime(store.folder / LOCK, (1000 + age, 1000 + age))
        folders.append(store.folder)
    return folders


def test_models_used_longest_ago_are_dropped_first(open_store: Open) -> None:
    first, second, third = three_models(open_store)
    with open_store(limit_bytes=6000) as store:
        store.require_room(num_tokens=60, hidden_size=8, dtype="bfloat16")
    assert [folder.exists() for folder in (first, second, third)] == [False, True, True]


def test_using_a_model_keeps_it(open_store: Open) -> None:
    first, second, _ = three_models(open_store)
    with open_store({"model": "a"}) as store:
        assert store.get("key") is not None
    with open_store(limit_bytes=6000) as store:
        store.require_room(num_tokens=60, hidden_size=8, dtype="bfloat16")
    assert first.exists()
    assert not second.exists()


def test_model_in_use_is_never_dropped(open_store: Open) -> None:
    folders = three_models(open_store)
    with open_store({"model": "a"}) as used, open_store(limit_bytes=2500) as store:
        store.require_room(num_tokens=1, hidden_size=8, dtype="bfloat16")
        assert [folder.exists() for folder in folders] == [True, False, False]
        with pytest.raises(BenchError, match=r"of models in use .* whose limit is 2,500 bytes"):
            store.require_room(num_tokens=100, hidden_size=8, dtype="bfloat16")
        assert used.get("key") is not None


def test_run_that_cannot_fit_is_refused_before_it_starts(open_store: Open) -> None:
    with open_store(limit_bytes=1000) as store:
        with pytest.raises(BenchError, match="need 1,600 bytes more, found 0 of this model") as it:
            store.require_room(num_tokens=100, hidden_size=8, dtype="bfloat16")
        assert str(store.folder) in it.value.__notes__[0]
        store.require_room(num_tokens=50, hidden_size=8, dtype="bfloat16")


def test_answers_take_room_too(open_store: Open) -> None:
    with open_store(limit_bytes=5000) as store, pytest.raises(BenchError, match="6,144 bytes more"):
        store.require_room(num_tokens=0, hidden_size=8, dtype="bfloat16", num_answers=3)


def test_disk_that_is_too_small_is_refused(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_599))
    with (
        open_store() as store,
        pytest.raises(BenchError, match=r"need 1,600 bytes .* found 1,599 free"),
    ):
        store.require_room(num_tokens=100, hidden_size=8, dtype="bfloat16")


def test_unknown_type_is_refused(open_store: Open) -> None:
    with open_store() as store, pytest.raises(BenchError, match="found int3"):
        store.require_room(num_tokens=1, hidden_size=8, dtype="int3")


def test_limit_holds_while_records_come(open_store: Open) -> None:
    three_models(open_store)
    with open_store(limit_bytes=7000) as store:
        with pytest.raises(BenchError, match="whose limit is 7,000 bytes"):
            fill(store, [f"key{number}" for number in range(100)], num_rows=20)
        root = store.root
        files = [path for path in root.rglob("*") if path.name in (INDEX, ROWS)]
        assert sum(path.stat().st_size for path in files) <= 7000
        assert len(store) > 5
        assert is_whole(store)


def is_whole(store: BaselineStore) -> bool:
    return all(store.get(f"key{number}") is not None for number in range(len(store)))


def test_waiting_for_a_folder_that_was_dropped_makes_a_new_one(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store() as store:
        folder = store.folder
    try_lock = store_folders._try_lock
    is_first = [True]

    def drop_meanwhile(file: Any) -> bool:
        if is_first.pop() if is_first else False:
            shutil.rmtree(folder)  # another run was faster
        return try_lock(file)

    monkeypatch.setattr(store_folders, "_try_lock", drop_meanwhile)
    with open_store() as store:
        fill(store, ["one"])
    with open_store() as store:
        assert is_as_filled(store, "one", 0)
