"""The command line's promises: exit codes, streams, error lines, help texts."""

import dataclasses
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from llmbench.bench.errors import BenchConfigError, ResultsError
from llmbench.bench.studies.registry import STUDIES
from llmbench.cli import study
from llmbench.cli.engine_options import parse_size
from llmbench.cli.main import main
from llmbench.cli.output import Output, as_clause, has_color, reset_logging
from llmbench.cli.progress import Progress
from llmbench.cli.workload_options import concurrencies_of, join_goodput, rates_of
from llmbench.engine.errors import CheckpointError, ConfigError, OutOfMemoryError

GOLDEN = Path(__file__).parent / "golden"
STUDY_COMMANDS = tuple(f"study {name}" for name in STUDIES)
COMMANDS = (
    "",
    "generate",
    "quantize",
    "convert",
    "eval",
    "serve-bench",
    "models",
    "models pull",
    "models list",
    "study",
    "study batching",
    "doctor",
)
WITH_EXAMPLES = (
    "",
    "models",
    "study",
    "generate",
    "quantize",
    "convert",
    "eval",
    "serve-bench",
    "models pull",
    "models list",
    "doctor",
    *STUDY_COMMANDS,
)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    reset_logging()


Raises = Callable[[BaseException], None]


@pytest.fixture
def raises(monkeypatch: pytest.MonkeyPatch) -> Raises:
    """Make `llmbench models list` raise."""

    def arrange(error: BaseException) -> None:
        def fail(name: str) -> bool:
            raise error

        monkeypatch.setattr("llmbench.cli.models.is_pulled", fail)

    return arrange


# Exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (BenchConfigError("a"), 2),
        (CheckpointError("a"), 3),
        (OutOfMemoryError("a"), 3),
        (ResultsError("a"), 3),
        (ZeroDivisionError("a"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_error_has_its_exit_code(
    raises: Raises, error: BaseException, code: int
) -> None:
    raises(error)
    assert main(["models", "list"]) == code


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["models"],
        ["serve-bnch"],
        ["serve-bench"],
        ["models", "pull", "smollm2"],
        ["generate", "smollm2-135m"],
        ["generate", "no-such-model", "--prompt", "x"],
        ["generate", "./no-such-folder", "--prompt", "x"],
        ["generate", ".", "--prompt", "x", "--max-tokens", "0"],
        ["generate", ".", "--prompt", "x", "--dtype", "float12"],
        ["generate", ".", "--prompt", "x", "--kv-cache-memory", "2GX"],
        ["serve-bench", ".", "--request-rate", "1,0"],
        ["serve-bench", ".", "--request-rate", "nan"],
        ["serve-bench", ".", "--max-concurrency", "0"],
        ["serve-bench", ".", "--burstiness", "0"],
        ["serve-bench", ".", "--goodput", "ttft:x"],
        ["serve-bench", ".", "--kv-cache-memory", "1GiB", "--num-kv-blocks", "4"],
        ["serve-bench", ".", "--dataset-name", "sharegpt"],
        ["serve-bench", ".", "--dataset-name", "sharegpt", "--dataset-path", "no-such-file"],
        ["serve-bench", ".", "--dataset-path", "file-for-random"],
        ["serve-bench", ".", "--random-range-ratio", "1.5"],
        ["study"],
        ["study", "kv-cach"],
        ["study", "kv-cache", "--output-lens", "4,x"],
        ["study", "kv-cache", "--output-lens", "0"],
        ["study", "paged-vs-reserved", "--input-lens", "4"],
        ["study", "batching", "--policies", "fast"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_before_anything_loads(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(("error: ", "Usage: "))
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--dataset-name", "random", "--sharegpt-output-len", "9"], "--sharegpt-output-len"),
        (["--dataset-name", "prefix_repetition", "--random-prefix-len", "9"], "--random-prefix"),
        (["--disable-shuffle"], "--disable-shuffle"),
        (["--reservation", "max_tokens"], "--reservation"),
        (["--kv-manager", "uncached", "--prefix-cache", "hash"], "--prefix-cache"),
        (["--burstiness", "0.5"], "--burstiness"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flags_without_effect_are_refused(
    arguments: list[str], flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-bench", ".", *arguments]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: {flag}")
    assert "has no effect with" in err


# Error lines


def test_known_error_is_one_line_and_its_notes_are_hints(
    raises: Raises, capfd: pytest.CaptureFixture[str]
) -> None:
    error = CheckpointError("Shard 2 of 3 is missing in `./model`.")
    error.add_note("download it again")
    error.add_note("or remove it")
    raises(error)
    assert main(["models", "list"]) == 3
    assert capfd.readouterr() == (
        "",
        "error: shard 2 of 3 is missing in `./model`\n\n"
        "hint: download it again\nhint: or remove it\n",
    )


def test_debug_shows_the_traceback_of_a_known_error(
    raises: Raises, capfd: pytest.CaptureFixture[str]
) -> None:
    raises(CheckpointError("broken"))
    assert main(["models", "list", "--debug"]) == 3
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: broken\n")


def test_fault_of_our_own_shows_traceback_versions_and_where_to_report(
    raises: Raises, capfd: pytest.CaptureFixture[str]
) -> None:
    raises(ZeroDivisionError("oh"))
    assert main(["models", "list"]) == 3
    err = capfd.readouterr().err
    for part in ("Traceback", f"llmbench {version('llmbench')}", f"torch {version('torch')}"):
        assert part in err
    assert "error: this is a fault in llmbench: ZeroDivisionError: oh\n" in err
    assert "hint: please report it" in err


def test_refused_settings_speak_of_flags(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-bench", ".", "--max-num-seqs", "0"]) == 2
    assert capfd.readouterr().err == "error: --max-num-seqs must be at least 1, not 0\n"


@pytest.mark.parametrize(
    ("message", "clause"),
    [
        ("No such option.", "no such option"),
        ("CUDA is absent.", "CUDA is absent"),
        ("I/O error", "I/O error"),
        ("One. Two.", "one. Two."),
        ("", ""),
    ],
)
def test_error_lines_start_small_and_end_without_a_stop(message: str, clause: str) -> None:
    assert as_clause(message) == clause


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("serve-bnch", "serve-bench"), ("docter", "doctor")],
)
def test_mistyped_commands_are_answered_with_the_right_one(
    typed: str, meant: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([typed]) == 2
    assert meant in capfd.readouterr().err


def test_mistyped_model_is_answered_with_the_right_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-bench", "smollm2-135"]) == 2
    assert "hint: did you mean `smollm2-135m`?" in capfd.readouterr().err


# Streams


def test_json_is_the_only_thing_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert rows[0]["name"] == "smollm2-135m"


def test_json_without_a_number_is_never_written() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        Output(as_json=True).document({"x": float("nan")})


def test_quiet_keeps_the_result_and_drops_the_rest(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(quiet=True)
    output.result("result")
    output.note("note")
    output.warning("warning")
    logging.getLogger("llmbench.engine").warning("logged")
    assert capfd.readouterr() == ("result\n", "")


@pytest.mark.parametrize(
    ("verbose", "expected"),
    [(False, "warning: slower path\n"), (True, "loading\nwarning: slower path\n")],
)
def test_log_records_take_the_form_of_messages(
    verbose: bool, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Output(verbose=verbose)
    logging.getLogger("llmbench.engine").info("loading")
    logging.getLogger("llmbench.engine").warning("slower %s", "path")
    assert capfd.readouterr() == ("", expected)


def test_a_command_leaves_logging_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["models", "list", "--json"]) == 0
    with caplog.at_level(logging.INFO):
        logging.getLogger("llmbench.engine").info("heard")
    assert caplog.messages == ["heard"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "on_terminal", "in_file"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_color_follows_the_conventions(
    variables: dict[str, str],
    on_terminal: bool,
    in_file: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_color(Terminal()) is on_terminal
    assert has_color(io.StringIO()) is in_file


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_off_a_terminal_is_a_line_every_ten_percent_or_ten_seconds(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    clock = Clock()
    with Progress(Output(), clock=clock) as progress:
        for percent in range(101):  # 0.5 s a percent
            clock.now = percent / 2
            progress.update("quick", percent, 100, "TTFT p50 41 ms")
        for percent in range(11):  # 4 s a percent
            clock.now = 100 + 4 * percent
            progress.update("slow", percent, 100)
        for percent in range(101):  # 0.01 s a percent
            clock.now = 200 + percent / 100
            progress.update("instant", percent, 100)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "quick: 10%, TTFT p50 41 ms"
    assert lines[9] == "quick: 100%, TTFT p50 41 ms"
    assert lines[10:] == ["slow: 3%", "slow: 6%", "slow: 9%"]


def test_progress_under_quiet_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(Output(quiet=True)) as progress:
        progress.update("stage", 1, 1)
        progress.note("text")
    assert capfd.readouterr() == ("", "")


# Values


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("512MB", 512_000_000), ("1.5 gib", 3 << 29), ("7", 7), ("1kB", 1000)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_lists_are_read_in_their_order() -> None:
    assert rates_of("4,inf,0.5") == (4.0, float("inf"), 0.5)
    assert concurrencies_of("16, none,1") == (16, None, 1)


def test_goodput_may_be_written_as_in_vllm() -> None:
    flags = ["--goodput", "ttft:200", "tpot:50", "e2el:9", "--seed", "1", "a:b"]
    assert join_goodput(flags) == ["--goodput", "ttft:200 tpot:50 e2el:9", "--seed", "1", "a:b"]


# Help


@pytest.mark.skipif(
    not version("typer").startswith("0.29."), reason="help texts are those of typer 0.29"
)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_text_is_the_reviewed_one(
    command: str,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    text = capfd.readouterr().out
    path = GOLDEN / f"help-{command.replace(' ', '-') or 'llmbench'}.txt"
    if request.config.getoption("--regenerate-golden"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", WITH_EXAMPLES)
def test_help_ends_with_real_commands(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    _, _, examples = capfd.readouterr().out.partition("Examples:")
    shown = [line for line in examples.splitlines() if line.strip().startswith("llmbench ")]
    assert 2 <= len(shown) <= 3
    assert any(command in line for line in shown)


@pytest.mark.parametrize("name", STUDIES)
def test_every_option_of_a_study_is_explained(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(STUDIES[name].settings_type)}
    assert fields <= study.HELP.keys() | study.SHARED.keys()


def test_version_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"{version('llmbench')}\n"
