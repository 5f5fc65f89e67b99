"""`llmbench eval` as its users meet it: wrong input, the plan, a run, a baseline, Ctrl-C."""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from llmbench.bench.accuracy.items import ItemFile, items_path, read_items
from llmbench.bench.accuracy.sample_answers import answer_prompts
from llmbench.cli.eval_options import joiner_of, limits_of, names_of, shard_of
from llmbench.cli.main import main
from llmbench.cli.output import reset_logging

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL = ["--no-compile", "--max-gen-toks", "4", "--num-kv-blocks", "256"]
CHOICES = {
    "capitals": [
        {"country": "Korea", "choices": ["Busan", "Seoul", "Daegu"], "answer": 1},
        {"country": "Portugal", "choices": ["Lisbon", "Porto", "Faro"], "answer": 0},
        {"country": "Chile", "choices": ["Arica", "Temuco", "Santiago"], "answer": 2},
    ],
    "shots": [
        {"country": "France", "choices": ["Paris", "Lyon", "Nice"], "answer": 0},
        {"country": "Italy", "choices": ["Milan", "Turin", "Rome"], "answer": 2},
    ],
}


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    reset_logging()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def models(
    random_model: Callable[..., Any],
    byte_tokenizer: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """A random two-layer Llama with a byte tokenizer, and another with other weights."""
    folders = []
    for name, deviation in (("base", 0.1), ("small", 0.12)):
        folder = tmp_path_factory.mktemp(name)
        model = random_model(
            "llama", deviation=deviation, vocab_size=258, max_position_embeddings=512
        )
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="session")
def example() -> str:
    """The task file that the guide shows."""
    guide = (REPOSITORY / "docs" / "evaluation.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(task: capitals\n.*?)```", guide, re.DOTALL)
    assert found is not None, "the guide shows a task file"
    return found[1]


@pytest.fixture
def own(tmp_path: Path, example: str) -> Path:
    """A folder with the guide's task and its data."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "capitals.yaml").write_text(example, encoding="utf-8")
    for name, rows in CHOICES.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


# Wrong input


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "expected names of tasks (--tasks)"),
        (["--tasks", "arc_easy,,piqa"], "expected names with commas"),
        (["--tasks", "arc_esy", "--data-dir", "."], "unknown task 'arc_esy'"),
        (["--tasks", "arc_easy", "--limit", "0"], "expected a number of items, found `0`"),
        (["--tasks", "arc_easy", "--limit", "0.5"], "found `0.5`"),
        (["--tasks", "arc_easy", "--limit", "5,6"], "two limits"),
        (["--tasks", "arc_easy", "--shard", "5/4"], "found `5/4`"),
        (["--tasks", "arc_easy", "--num-fewshot", "-1"], "--num-fewshot must not be negative"),
        (["--tasks", "arc_easy", "--data-dir", "no-such-folder"], "no folder no-such-folder"),
        (["--tasks", "arc_easy", "--include", "no.yaml"], "no task file or folder no.yaml"),
        (["--tasks", "perplexity"], "needs a text (--text)"),
        (["--tasks", "perplexity", "--text", "no.txt"], "no file no.txt (--text)"),
        (["--tasks", "arc_easy", "--text", "wikitext2"], "--text is read by the task perplexity"),
        (["--tasks", "arc_easy", "--window", "9"], "--window has no effect without --text"),
        (
            ["--tasks", "perplexity", "--text", "wikitext2", "--stride", "9"],
            "--stride has no effect with --protocol gptq",
        ),
        (["--tasks", "arc_easy", "--baseline", "no-model"], "no-model is neither a folder"),
        (["--tasks", "arc_easy", "--baseline-args", "dtype=float32"], "without --baseline"),
        (["--tasks", "arc_easy", "--cache-limit", "1GiB"], "without --baseline"),
        (
            ["--tasks", "arc_easy", "--baseline", ".", "--baseline-args", "dtpe=float32"],
            "no setting `dtpe`",
        ),
        (["--tasks", "arc_easy", "--baseline", ".", "--baseline-args", "flag"], "found `flag`"),
        (["--tasks", "arc_easy", "--samples", "99"], "at most 32 samples"),
        (["--tasks", "arc_easy", "--samples-file", "no.jsonl"], "no file no.jsonl"),
        (["--tasks", "arc_easy", "--fewshot-as-multiturn"], "needs a chat template"),
        (["--tasks", "arc_easy", "--base-url", "http://x"], "(--tokenizer)"),
        (
            ["--tasks", "arc_easy", "--base-url", "http://x", "--tokenizer", ".", "--samples", "2"],
            "--samples needs the tokens of answers",
        ),
        (
            ["--tasks", "a", "--base-url", "http://x", "--tokenizer", ".", "--dtype", "float32"],
            "--dtype has no effect with --base-url",
        ),
        *(
            (["--tasks", "a", "--backend", "lm-eval", *flags], f"{flags[0]} is not for")
            for flags in (
                ["--samples", "2"],
                ["--dry-run"],
                ["--format", "lm-eval"],
                ["--baseline", "b"],
                ["--divergence"],
                ["--protocol", "gptq"],
                ["--shard", "1/2"],
                ["--on-overflow", "error"],
                ["--max-gen-toks", "3"],
            )
        ),
        (["--tasks", "a", "--backend", "lm-eval", "--limit", "a=5"], "one number for all tasks"),
        (["--tasks", "perplexity", "--backend", "lm-eval"], "lm-eval has no task perplexity"),
        (["--tasks", "a", "--chat-template", "x"], "no effect without --apply-chat-template"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_and_exit_code_2_before_anything_loads(
    flags: list[str],
    named: str,
    models: tuple[Path, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmbench.bench.accuracy.engine_model.EngineModel.load", _never)
    assert main(["eval", str(models[1]), *flags]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert named in err.splitlines()[0]


def _never(*_: object) -> None:
    raise AssertionError("a model was loaded")


def test_model_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--tasks", "arc_easy"]) == 2
    assert "expected a model to evaluate (MODEL)" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["notes.md", "things"])
def test_output_that_is_no_evaluation_is_left_alone(
    name: str, models: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "mine").write_text("mine")
    arguments = ["--tasks", "arc_easy", "-o", str(tmp_path / name)]
    assert main(["eval", str(models[1]), *arguments]) == 2
    assert "(--output)" in capfd.readouterr().err


def test_limit_of_a_task_that_is_not_asked_is_refused(
    models: tuple[Path, Path], own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tasks", "capitals", "--include", str(own), "--limit", "2,mmlu=3"]
    assert main(["eval", str(models[1]), *flags]) == 2
    assert "mmlu" in capfd.readouterr().err


def test_missing_data_file_is_named(
    models: tuple[Path, Path], own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (own / "shots.jsonl").unlink()
    assert main(["eval", str(models[1]), "--tasks", "capitals", "--include", str(own)]) == 3
    assert "no data file" in capfd.readouterr().err


# Lists


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        (None, None),
        ("5", 5),
        ("5,mmlu=2,gsm8k=1", {"*": 5, "mmlu": 2, "gsm8k": 1}),
        ("mmlu=2", {"mmlu": 2}),
    ],
)
def test_limits_are_for_all_or_by_name(text: str | None, limits: object) -> None:
    assert limits_of(text) == limits


def test_shards_are_counted_from_one() -> None:
    assert [shard_of(text) for text in ("1/2", "2/2", None)] == [(0, 2), (1, 2), None]
    with pytest.raises(typer.BadParameter):
        shard_of("0/2")


def test_names_are_taken_once_and_joiners_as_typed() -> None:
    assert names_of("a, b,a") == ("a", "b")
    assert joiner_of(r"\n\t ") == "\n\t "


# Plans


def test_tasks_are_listed_with_the_users_own(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--list-tasks", "--include", str(own)]) == 0
    out = capfd.readouterr().out
    for name in ("open-llm-v1", "mmlu_<subject>", "kobest_copa", "capitals", "perplexity"):
        assert re.search(rf"^\| {re.escape(name)} ", out, re.MULTILINE), name
    assert main(["eval", "--list-tasks", "--json"]) == 0
    assert {"name", "kind", "num_fewshot", "summary"} <= json.loads(capfd.readouterr().out)[
        0
    ].keys()


def test_dry_run_counts_and_computes_nothing(
    models: tuple[Path, Path],
    own: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmbench.bench.accuracy.engine_model.EngineModel.load", _never)
    monkeypatch.setattr("llmbench.engine.engine_core.EngineCore.__init__", _never)
    base, small = models
    text = tmp_path / "text.txt"
    text.write_text("An example. " * 20)
    flags = ["--tasks", "capitals,perplexity", "--include", str(own), "--text", str(text)]
    flags += ["--window", "64", "--baseline", str(base), "--dry-run", "-o", str(tmp_path / "out")]
    assert main(["eval", str(small), *flags, "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    capitals, windows = plan["tasks"]["capitals"], plan["tasks"]["perplexity"]
    assert (capitals["num_items"], capitals["num_requests"]) == (3, 9)
    # A byte is a token: " Lisbon" is scored, and each prompt holds two solved examples.
    words = [f" {choice}" for row in CHOICES["capitals"] for choice in row["choices"]]  # type: ignore[attr-defined]
    assert capitals["num_scored_tokens"] == sum(map(len, words))
    assert (windows["num_items"], windows["longest"]) == (240 // 64, 64)
    scored = capitals["num_scored_tokens"] + windows["num_scored_tokens"]
    assert plan["store_bytes"] >= scored * 64 * 4  # 64 numbers of float32
    assert not (tmp_path / "out").exists()


# Runs


def run(small: Path, own: Path, output: Path, *flags: str) -> int:
    arguments = ["--tasks", "capitals", "--include", str(own), "-o", str(output), *SMALL, *flags]
    return main(["eval", str(small), *arguments])


def test_guides_own_task_runs_and_prints_its_scores(
    models: tuple[Path, Path], own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(models[1], own, tmp_path / "out") == 0
    out, err = capfd.readouterr()
    rows = [line for line in out.splitlines() if line.startswith("| capitals")]
    assert [row.split("|")[2].strip() for row in rows] == ["2"] * len(rows)
    assert {row.split("|")[3].strip() for row in rows} >= {"acc", "acc_norm"}
    assert "too few items" in out
    assert f"results  {tmp_path / 'out'}" in err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"manifest.json", "items-capitals.jsonl", "scores.json", "summary.md"} <= names


def test_comparison_is_one_document_with_flips_divergence_verdict_and_samples(
    models: tuple[Path, Path], own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, small = models
    flags = ["--baseline", str(base), "--samples", "2", "--format", "lm-eval", "--json"]
    assert run(small, own, tmp_path / "out", *flags) == 0
    printed = capfd.readouterr()
    assert "and samples of 1 task beside it" in printed.err
    document = json.loads(printed.out)
    comparison = document["comparison"]
    assert comparison["paired"][0]["flips"].keys() >= {"num_right_to_wrong"}
    assert comparison["divergence"]["kl_mean"] > 0
    assert comparison["verdict"].endswith(".")
    assert document["baseline_scores"]["model"] == str(base)
    files = {Path(path).name for path in document["files"]}
    assert files >= {"summary.md", "table.csv", "scores.png", "kl.png", "samples.html"}
    record = json.loads((tmp_path / "out" / "samples.json").read_text(encoding="utf-8"))
    languages = [sample["prompt"]["language"] for sample in record["samples"]]
    assert languages == ["en", "en", "ko", "ko"]
    assert list((tmp_path / "out").rglob("results_*.json"))


def test_interrupted_run_says_how_to_go_on_and_ends_like_an_undisturbed_one(
    models: tuple[Path, Path],
    own: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = models[1]
    assert run(small, own, tmp_path / "whole", "--format", "parquet") == 0
    assert list((tmp_path / "whole").glob("items-*.parquet"))
    original = ItemFile.append
    written: list[Any] = []

    def interrupted(self: ItemFile, record: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(record)
        original(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(ItemFile, "append", interrupted)
        assert run(small, own, tmp_path / "out") == 130
    out, err = capfd.readouterr()
    assert "The run is not complete" in out
    assert f"--output {tmp_path / 'out'} continues where this one stopped" in err
    assert run(small, own, tmp_path / "out") == 0
    scores = [(tmp_path / name / "scores.json").read_bytes() for name in ("whole", "out")]
    assert scores[0] == scores[1]
    whole, resumed = (
        read_items(items_path(tmp_path / name, "capitals")) for name in ("whole", "out")
    )
    assert [item.key for item in whole] == [item.key for item in resumed]
    for one, other in zip(whole, resumed, strict=True):
        # Other items stood beside it in the batch, which may round the last digit otherwise.
        assert one.loglikelihoods == pytest.approx(other.loglikelihoods, abs=1e-5)


def test_folder_of_another_model_is_refused_with_what_differs(
    models: tuple[Path, Path], own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(models[0], own, tmp_path / "out") == 0
    capfd.readouterr()
    assert run(models[1], own, tmp_path / "out") == 3
    err = capfd.readouterr().err
    assert "holds another run's results" in err
    assert f"hint: it was begun for {models[0]}, which has other model_digest\n" in err


def test_shards_in_one_folder_are_scored_together_without_asking_again(
    models: tuple[Path, Path],
    own: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for shard in ("1/2", "2/2"):
        assert run(models[1], own, tmp_path / "out", "--shard", shard) == 0
    capfd.readouterr()
    monkeypatch.setattr("llmbench.engine.engine_core.EngineCore.__init__", _never)
    assert run(models[1], own, tmp_path / "out", "--json") == 0
    assert json.loads(capfd.readouterr().out)["tasks"]["capitals"]["num_items"] == 3


def test_samples_that_are_there_are_not_answered_again(
    models: tuple[Path, Path],
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, output = models[1], tmp_path / "out"
    calls = []

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        return answer_prompts(*arguments, **more)

    monkeypatch.setattr("llmbench.bench.accuracy.sample_answers.answer_prompts", counted)
    for count, expected in (("1", 1), ("1", 1), ("2", 2)):
        assert run(small, own, output, "--samples", count) == 0
        assert len(calls) == expected


def test_scores_that_cannot_be_relied_on_are_exit_code_4(
    scripted_llama: Callable[..., Path],
    byte_tokenizer: Callable[..., Any],
    own: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Every token repeats itself, whatever stands before: all choices of one length are ties.
    folder = scripted_llama({}, vocab_size=258, tokenizer=byte_tokenizer())
    rows = [{"country": "X", "choices": ["aa", "bb", "cc"], "answer": 0}] * 30
    content = "".join(json.dumps(row) + "\n" for row in rows)
    (own / "capitals.jsonl").write_text(content, encoding="utf-8")
    assert run(folder, own, tmp_path / "out", "--num-fewshot", "0") == 4
    assert "Not to be relied on: capitals: 30 of 30 items are ties" in capfd.readouterr().out


def test_server_is_asked_and_compared_by_its_answers(
    models: tuple[Path, Path], own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from llmbench.bench.accuracy.engine_model import EngineModel
    from llmbench.engine.config import EngineConfig

    path = Path(__file__).with_name("completions_server.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    base, small = models
    model = EngineModel(EngineConfig(model=str(small), compile=False, num_kv_blocks=64))
    flags = ["--tasks", "capitals", "--include", str(own), "--num-fewshot", "1"]
    flags += ["--tokenizer", str(small), "--baseline", str(base), *SMALL, "--json"]
    server = module.CompletionsServer(model.load().loaded, model.tokenizer, "vllm")
    with server:
        arguments = ["eval", "--base-url", server.url, *flags, "-o", str(tmp_path / "out")]
        assert main(arguments) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["model"] == "tiny"
    assert document["comparison"]["divergence"] is None
    assert document["comparison"]["paired"][0]["n"] == 3
