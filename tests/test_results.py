"""Results folders: nothing finished is lost, repeated or mixed."""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.errors import ResultsError
from llmbench.bench.results import ResultsFolder, build_manifest, read_results, write_json

ENVIRONMENT: dict[str, Any] = {
    "cpu": {"model": "Test CPU", "num_usable_cores": 2.0},
    "gpus": [],
    "packages": {"llmbench": "0.1.0", "torch": "2.13.0", "triton": None, "transformers": "5.24.0"},
    "code": {"git_revision": "abc"},
}


def manifest(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "kind": "serve-bench",
        "config": {"engine": {"model": "m", "policy": "chunked"}, "burstiness": math.inf},
        "workload_digest": "w",
        "model_digest": "d",
        "seed": 0,
        "environment": ENVIRONMENT,
        "plan": {"request_rates": [1.0, math.inf]},
    }
    return build_manifest(**(settings | changes))


def record(cell_id: str, status: str = "complete", **fields: Any) -> dict[str, Any]:
    return {"kind": "serve-bench", "cell_id": cell_id, "status": status, **fields}


def lines(path: Path) -> list[str]:
    return (path / "results.jsonl").read_text().splitlines()


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_records_are_appended_and_read_back(tmp_path: Path) -> None:
    with ResultsFolder.create_or_resume(tmp_path / "new" / "run", manifest()) as folder:
        folder.append(record("a", metrics={"ttft_s": 0.5}))
        assert len(lines(folder.path)) == 1  # on the disk before the next cell starts
        folder.append(record("b", "interrupted"))
        assert folder.finished_cell_ids == {"a"}
    read = read_results(tmp_path / "new" / "run")
    assert [each["cell_id"] for each in read.records] == ["a", "b"]
    assert read.records[0]["metrics"] == {"ttft_s": 0.5}
    assert read.records[0]["schema_version"] == 1
    assert read.manifest["config"]["engine"]["model"] == "m"


def test_every_file_is_strict_json_even_for_an_infinite_rate(tmp_path: Path) -> None:
    """Case C38, own result of an infinite-rate run."""
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        folder.append(record("a", cell={"request_rate": math.inf}, metrics={"x": math.nan}))
    (line,) = lines(tmp_path)
    written = json.loads(line, parse_constant=refuse)
    assert written["cell"]["request_rate"] == "inf"
    assert written["metrics"]["x"] is None
    text = (tmp_path / "manifest.json").read_text()
    stored = json.loads(text, parse_constant=refuse)
    assert stored["plan"]["request_rates"] == [1.0, "inf"]
    assert stored["config"]["burstiness"] == "inf"


def test_same_run_resumes_and_knows_what_is_finished(tmp_path: Path) -> None:
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        folder.append(record("a"))
        folder.append(record("b", "interrupted"))
        folder.append(record("c", "failed"))
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        assert folder.finished_cell_ids == {"a"}
        folder.append(record("b"))
        assert folder.finished_cell_ids == {"a", "b"}
        assert [each["cell_id"] for each in folder.records] == ["a", "b", "c"]
    assert len(lines(tmp_path)) == 4  # appended, never rewritten
    assert len(read_results(tmp_path).manifest["resumed"]) == 1


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (
            {"config": {"engine": {"model": "m", "policy": "mixed"}, "burstiness": math.inf}},
            'config.engine.policy was "chunked", now "mixed"',
        ),
        ({"workload_digest": "v"}, 'workload_digest was "w", now "v"'),
        ({"model_digest": None}, 'model_digest was "d", now null'),
        ({"seed": 7}, "seed was 0, now 7"),
        ({"kind": "spec-sweep"}, 'kind was "serve-bench", now "spec-sweep"'),
        (
            {"environment": ENVIRONMENT | {"cpu": {"model": "Other", "num_usable_cores": 2.0}}},
            'hardware.cpu_model was "Test CPU", now "Other"',
        ),
        (
            {"environment": ENVIRONMENT | {"packages": ENVIRONMENT["packages"] | {"torch": "3"}}},
            'software.torch was "2.13.0", now "3"',
        ),
    ],
)
def test_another_run_is_refused_and_the_difference_named(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        folder.append(record("a"))
    with pytest.raises(ResultsError) as caught:
        ResultsFolder.create_or_resume(tmp_path, manifest(**changes))
    assert str(caught.value).endswith(f"holds another run's results: {difference}")
    assert "--output" in caught.value.__notes__[0]
    assert len(read_results(tmp_path).records) == 1  # untouched
    ResultsFolder.create_or_resume(tmp_path, manifest()).close()  # and not left locked


def test_refusal_names_the_first_differences_and_counts_the_rest(tmp_path: Path) -> None:
    ResultsFolder.create_or_resume(tmp_path, manifest(config={})).close()
    config = {f"k{letter}": 1 for letter in "abcdefghijkl"}
    with pytest.raises(ResultsError, match=r"config\.kh was null, now 1; and 4 more"):
        ResultsFolder.create_or_resume(tmp_path, manifest(config=config))


def test_larger_grid_continues_the_run(tmp_path: Path) -> None:
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        folder.append(record("a"))
    with ResultsFolder.create_or_resume(tmp_path, manifest(plan={"request_rates": [9]})) as folder:
        assert folder.finished_cell_ids == {"a"}
    assert read_results(tmp_path).manifest["plan"] == {"request_rates": [9]}


def test_other_revision_continues_the_run_and_is_written_down(tmp_path: Path) -> None:
    ResultsFolder.create_or_resume(tmp_path, manifest()).close()
    later = ENVIRONMENT | {"code": {"git_revision": "def"}}
    ResultsFolder.create_or_resume(tmp_path, manifest(environment=later)).close()
    (resumed,) = read_results(tmp_path).manifest["resumed"]
    assert resumed["environment_changes"] == ['code.git_revision was "abc", now "def"']


@pytest.mark.parametrize("torn", [b'{"schema_version": 1, "ki', b"\x00\x00\x00", b'{"a": 1}'])
def test_torn_last_record_is_dropped_and_the_file_stays_whole(
    tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        folder.append(record("a"))
    with (tmp_path / "results.jsonl").open("ab") as file:
        file.write(torn)
    with caplog.at_level(logging.WARNING):
        assert [each["cell_id"] for each in read_results(tmp_path).records] == ["a"]
    assert "torn record" in caplog.text
    assert (tmp_path / "results.jsonl").read_bytes().endswith(torn)  # reading changes nothing
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        folder.append(record("b"))
    assert [json.loads(line)["cell_id"] for line in lines(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{torn", "expected strict JSON in line 1"),
        ('{"schema_version": 1, "x": NaN}', "NaN is not JSON"),
        ("[1]", "expected a JSON object in line 1"),
        ('{"kind": "k"}', "expected schema_version 1, found None"),
        ('{"schema_version": 2}', "expected schema_version 1, found 2"),
        ('{"schema_version": 1, "kind": "k"}', "lacks cell_id, status"),
        (
            '{"schema_version": 1, "kind": "k", "cell_id": "a", "status": "odd"}',
            "expected status complete, interrupted, failed, found 'odd'",
        ),
    ],
)
def test_damaged_record_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    ResultsFolder.create_or_resume(tmp_path, manifest()).close()
    (tmp_path / "results.jsonl").write_text(line + "\n")
    with pytest.raises(ResultsError, match=message):
        read_results(tmp_path)


@pytest.mark.parametrize("cell_id", ["", "a/b", "../a", ".hidden", "a b", "ü"])
def test_cell_id_that_is_no_file_name_is_refused(tmp_path: Path, cell_id: str) -> None:
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        with pytest.raises(ResultsError, match="cell id"):
            folder.events_path(cell_id)
        with pytest.raises(ResultsError, match="cell id"):
            folder.append(record(cell_id))


def test_files_of_a_cell_are_named_after_it(tmp_path: Path) -> None:
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        assert folder.events_path("rate=4.0_cap=8").name == "events-rate=4.0_cap=8.parquet"
        assert folder.steps_path("a").name == "steps-a.parquet"


def test_second_run_in_the_folder_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    with ResultsFolder.create_or_resume(tmp_path, manifest()):
        with pytest.raises(ResultsError, match=f"in use by another run \\(process {os.getpid()}"):
            ResultsFolder.create_or_resume(tmp_path, manifest())
        assert read_results(tmp_path).records == []  # a reader is not kept out
    ResultsFolder.create_or_resume(tmp_path, manifest()).close()


def test_folder_of_a_killed_run_can_be_resumed(tmp_path: Path) -> None:
    script = (
        "import json, os, sys; from pathlib import Path\n"
        "from llmbench.bench.results import ResultsFolder\n"
        "folder = ResultsFolder.create_or_resume(Path(sys.argv[1]), json.loads(sys.argv[2]))\n"
        "folder.append({'kind': 'k', 'cell_id': 'a', 'status': 'complete'})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), json.dumps(manifest())]
    assert subprocess.run(command, timeout=60, check=False).returncode == -9
    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        assert folder.finished_cell_ids == {"a"}


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ResultsError, match="cannot write to") as caught:
            ResultsFolder.create_or_resume(path, manifest())
        assert "--output" in caught.value.__notes__[0]
        with pytest.raises(ResultsError):
            read_results(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ResultsError, match="Permission denied"):
        ResultsFolder.create_or_resume(tmp_path / "run", manifest())


def test_full_disk_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with ResultsFolder.create_or_resume(tmp_path, manifest()) as folder:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(ResultsError, match="No space left on device"):
                folder.append(record("a"))
        folder.append(record("b"))  # space was made: no half line is in the way
    assert [each["cell_id"] for each in read_results(tmp_path).records] == ["b"]


def test_folder_without_results_is_refused_for_reading(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"expected a results folder with a manifest\.json"):
        read_results(tmp_path)


def test_records_without_their_manifest_are_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ResultsError, match=r"found results\.jsonl without its manifest\.json"):
        ResultsFolder.create_or_resume(tmp_path, manifest())


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": NaN}', '{"schema_version": 99}'])
def test_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ResultsError):
        read_results(tmp_path)


def test_json_file_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "a.json", {"x": 1})

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ResultsError, match="Input/output error"):
        write_json(tmp_path / "a.json", {"x": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
