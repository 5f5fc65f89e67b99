"""`llmbench quantize` as its users meet it: wrong input, the plan, a run, Ctrl-C and going on."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.cli.main import main
from llmbench.cli.options import SettingsError
from llmbench.cli.output import reset_logging
from llmbench.cli.quantize_checks import as_flags
from llmbench.cli.quantize_options import parse_override
from llmbench.cli.quantize_output import coverage_line, duration
from llmbench.quant.config import METHODS, Method, Override

Save = Callable[..., Path]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 40


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    reset_logging()


@pytest.fixture(scope="session")
def tiny(
    random_model: Callable[..., Any],
    byte_tokenizer: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A random two-layer Llama with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    random_model("llama", deviation=0.1, vocab_size=258).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text(TEXT)
    return path


def small(method: Method, text: Path) -> list[str]:
    """Flags of a run over a tiny model that takes a moment."""
    flags = ["--method", method]
    if method not in ("smoothquant", "int8"):
        flags += ["--group-size", "32"]
    if method not in ("rtn", "int8"):
        flags += ["--calibration", str(text)]
        flags += ["--num-calibration-samples", "4", "--max-seq-length", "64"]
    return flags


# Wrong input


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--output"),
        (["-o", "OUT", "--calibration", "no-such-text.txt"], "no-such-text.txt"),
        (["-o", "OUT", "--calibration", "./no/such/text"], "no/such/text"),
        (["-o", "OUT", "--calibration", "."], "is a folder"),
        (["-o", "MODEL", "--method", "rtn"], "is the model itself"),
        (["-o", "MODEL/config.json", "--method", "rtn"], "is a file"),
        (["-o", "FULL", "--method", "rtn"], "not empty"),
        (["-o", "OUT", "--method", "rtn", "--evaluate", "no-such-text.txt"], "--evaluate"),
        (["--method", "gptqq"], "gptqq"),
        (["--bits", "5"], "--bits is 5"),
        (["--bits", "x"], "--bits"),
        (["--group-size", "0"], "--group-size is 0"),
        (["--dry-run"], "--group-size 128 does not divide in_features"),
        (["--dry-run", "--group-size", "48"], "in_features 64"),
        (["--dry-run", "--format", "gguf"], "gguf"),
        (["--dry-run", "--group-size", "32", "--format", "qqq"], "qqq files"),
        (["--dry-run", "--method", "qqq", "--bits", "8"], "qqq works with 4 bits"),
        (["--dry-run", "--method", "smoothquant", "--asym"], "smoothquant has no zero points"),
        (["--dry-run", "--override", "down_proj"], "'down_proj'"),
        (["--dry-run", "--override", "down_proj:bits=8,wat"], "'wat'"),
        (["--dry-run", "--group-size", "32", "--override", "x_proj:bits=8"], "--override 'x_proj'"),
        (["--dry-run", "--group-size", "32", "--override", "q_proj:bits=8"], "one layer"),
        (["--dry-run", "--group-size", "32", "--skip", "x_proj"], "--skip 'x_proj'"),
        (["--dry-run", "--skip", "("], "--skip '('"),
        (["--damp-percent", "1.5"], "--damp-percent is 1.5"),
        (["--num-calibration-samples", "0"], "--num-calibration-samples is 0"),
        (["--max-seq-length", "0"], "--max-seq-length is 0"),
        (["--method", "rtn", "--damp-percent", "0.1"], "--damp-percent has no effect"),
        (["--method", "awq", "--desc-act"], "--desc-act has no effect"),
        (["--method", "gptq", "--smooth-alpha", "0.4"], "--smooth-alpha has no effect"),
        (["--method", "gptq", "--transform", "smooth"], "--transform has no effect"),
        (["--backend-python", "python"], "--backend-python has no effect"),
        (["--backend", "autogptq"], "autogptq"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_named_and_is_exit_code_2(
    flags: list[str],
    named: str,
    zero_checkpoint: Save,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = zero_checkpoint(LLAMA)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    places = {"OUT": tmp_path / "out", "MODEL": model, "FULL": tmp_path / "full"}
    flags = [
        re.sub("^(OUT|MODEL|FULL)", lambda place: str(places[place[0]]), flag) for flag in flags
    ]
    assert main(["quantize", str(model), *flags]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert named in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_run_without_text_lets_the_model_write_its_own(
    random_model: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    random_model("llama").save_pretrained(tmp_path / "base")
    flags = ["--method", "gptq", "--group-size", "32", "--num-calibration-samples", "3"]
    flags += ["--max-seq-length", "20", "--json"]
    assert main(["quantize", str(tmp_path / "base"), "-o", str(tmp_path / "out"), *flags]) == 0
    out, err = capfd.readouterr()
    assert "the model writes its own text" in err
    assert json.loads(out)["coverage"]["num_tokens"] == 60


def test_mistyped_text_is_answered_with_the_file_beside_it(
    zero_checkpoint: Save, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = str(text.with_name("text.txt"))
    arguments = ["quantize", str(zero_checkpoint(LLAMA)), "-o", "out", "--calibration", wrong]
    assert main(arguments) == 2
    assert f"did you mean `{text}`?" in capfd.readouterr().err


def test_notes_of_a_refusal_can_be_pasted_as_flags(
    zero_checkpoint: Save, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**LLAMA, "intermediate_size": 176}
    command = ["quantize", str(zero_checkpoint(settings)), "--group-size", "32", "--dry-run"]
    assert main(command) == 2
    err = capfd.readouterr().err
    rule = re.search(r"--override '(.+?)'", err)
    assert rule is not None, err
    assert main([*command, "--override", rule[1]]) == 0


def test_names_inside_rules_are_left_alone() -> None:
    assert as_flags("override 'x:group_size=4', or group_size 8") == (
        "--override 'x:group_size=4', or --group-size 8"
    )
    assert as_flags("or skip them") == "or skip them"


@pytest.mark.parametrize("method", ["smoothquant", "int8"])
def test_settings_that_a_loop_over_methods_shares_are_only_remarked_on(
    method: str, zero_checkpoint: Save, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(zero_checkpoint(LLAMA))
    arguments = ["quantize", model, "-m", method, "--group-size", "32", "--dry-run", "--json"]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    assert "--group-size is not used" in err
    schemes = [layer["scheme"] for layer in json.loads(out)["layers"] if layer["scheme"]]
    assert {scheme["group_size"] for scheme in schemes} == {-1}


# Rules for layers, in the spirit of case C41


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("down_proj:bits=8", Override(pattern="down_proj", bits=8)),
        ("down_proj:bits=8,group_size=32", Override(pattern="down_proj", bits=8, group_size=32)),
        ("a:group-size=-1", Override(pattern="a", group_size=-1)),
        ("a: bits = 8 , asym", Override(pattern="a", bits=8, sym=False)),
        ("a:sym", Override(pattern="a", sym=True)),
        ("a:sym=false", Override(pattern="a", sym=False)),
        ("a:skip", Override(pattern="a", skip=True)),
        ("a:bits=008", Override(pattern="a", bits=8)),
        ("(?:q|k):bits=8", Override(pattern="(?:q|k)", bits=8)),
        ("x=1,y:2:bits=3", Override(pattern="x=1,y:2", bits=3)),
        ("Bob's:skip", Override(pattern="Bob's", skip=True)),
        ("층 🙂:skip", Override(pattern="층 🙂", skip=True)),
    ],
)
def test_rules_are_read(rule: str, expected: Override) -> None:
    assert parse_override(rule) == expected


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("down_proj", "'down_proj'"),
        (":bits=8", "':bits=8'"),
        ("a:", "''"),
        ("a:flag", "'flag'"),
        ("a:bits=8,flag", "'flag'"),
        ("a:bits=8,,sym", "''"),
        ("a:bits=", "'bits='"),
        ("a:bits=four", "'bits=four'"),
        ("a:bits=4.0", "'bits=4.0'"),
        ("a:bits=5", "bits is 5"),
        ("a:group_size=0", "group_size is 0"),
        ("a:sym=maybe", "'sym=maybe'"),
        ("a:bits=4,bits=8", "'bits=8'"),
        ("a:sym,asym", "'asym'"),
        ("a:skip,bits=8", "no other settings"),
        ("(a:bits=8", "'(a'"),
        ("a:desc_act=1", "'desc_act=1'"),
    ],
)
def test_wrong_item_of_a_rule_names_itself(rule: str, named: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse_override(rule)
    assert named in str(error.value)
    assert rule in str(error.value)


@given(st.text(min_size=1).map(re.escape), st.sampled_from((2, 3, 4, 8)), st.integers(1, 10**6))
def test_any_expression_survives_in_front_of_settings(
    pattern: str, bits: int, group_size: int
) -> None:
    expected = Override(pattern=pattern, bits=bits, group_size=group_size)
    assert parse_override(f"{pattern}:bits={bits},group_size={group_size}") == expected


# The plan


@pytest.mark.parametrize("method", METHODS)
def test_dry_run_shows_layers_costs_and_consumers_and_writes_nothing(
    method: Method,
    zero_checkpoint: Save,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    text: Path,
) -> None:
    model, output = zero_checkpoint(LLAMA), tmp_path / "out"
    arguments = ["quantize", str(model), *small(method, text), "-o", str(output)]
    assert main([*arguments, "--dry-run"]) == 0
    out, _ = capfd.readouterr()
    for part in (
        "mlp.down_proj",
        "lm_head",
        "format ",
        "size ",
        "memory ",
        "disk ",
        "time ",
        "vLLM",
    ):
        assert part in out
    assert not output.exists()


def test_dry_run_as_json_needs_no_torch_and_no_text(zero_checkpoint: Save) -> None:
    arguments = [
        "quantize",
        str(zero_checkpoint(LLAMA)),
        "--group-size",
        "32",
        "--dry-run",
        "--json",
    ]
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'numpy']))"
    script = f"{blocked}; from llmbench.cli.main import main; sys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["format"] == "gptq"
    assert {consumer["name"] for consumer in plan["consumers"]} > {"llmbench", "vLLM", "SGLang"}
    assert plan["costs"]["bytes_after"] < plan["costs"]["bytes_before"]


# A run


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_in_a_checkpoint_and_a_report(
    method: Method, tiny: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(["quantize", str(tiny), *small(method, text), "-o", str(output)]) == 0
    out, err = capfd.readouterr()
    for part in ("error", "size ", "time ", "checked ", "GPTQModel"):
        assert part in out
    assert f"llmbench generate {output}" in err
    assert ("of 4 samples" in out) is (method not in ("rtn", "int8"))
    manifest = json.loads((output / "llmbench_quantization.json").read_text())
    assert len(manifest["layers"]) == 14


def test_json_of_a_run_is_one_document_with_every_layer(
    tiny: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(["quantize", str(tiny), *small("gptq", text), "-o", str(output), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert len(result["layers"]) == 14
    assert result["coverage"]["num_tokens"] == 4 * 64
    assert result["kept"] == {"lm_head": "output head"}
    assert result["bytes_after"] < result["bytes_before"]
    assert {"seconds", "peak_rss_bytes", "verification", "consumers"} <= result.keys()


def test_sizes_of_the_plan_are_those_of_the_result(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(tiny), "-m", "rtn", "--group-size", "32", "--json"]
    assert main([*arguments, "--dry-run"]) == 0
    planned = json.loads(capfd.readouterr().out)["costs"]
    assert main([*arguments, "-o", str(tmp_path / "out")]) == 0
    result = json.loads(capfd.readouterr().out)
    for name in ("bytes_before", "bytes_after"):
        assert planned[name] == result[name]


def test_ctrl_c_leaves_what_the_same_command_goes_on_from(
    tiny: Path,
    text: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def arguments(name: str) -> list[str]:
        return ["quantize", str(tiny), *small("gptq", text), "-o", str(tmp_path / name), "--json"]

    def interrupt(progress: object, step: Any) -> None:
        if step.num_done == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("llmbench.cli.quantize._show", interrupt)
        assert main(arguments("broken-off")) == 130
    out, err = capfd.readouterr()
    assert out == ""
    assert "the same command continues where this one stopped" in err
    assert main(arguments("broken-off")) == 0
    assert json.loads(capfd.readouterr().out)["num_resumed_blocks"] == 1
    assert main(arguments("undisturbed")) == 0
    assert _bytes(tmp_path / "broken-off") == _bytes(tmp_path / "undisturbed")


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("fault", ["missing tokenizer", "not a text"])
def test_what_fails_in_the_run_is_exit_code_3_without_traceback(
    fault: str, tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "texts.jsonl"
    text.write_text('{"text": "a"}\n' if fault == "missing tokenizer" else "{no json}\n")
    model = tiny
    if fault == "missing tokenizer":
        model = tmp_path / "model"
        model.mkdir()
        for path in tiny.iterdir():
            if not path.name.startswith("tokenizer"):
                (model / path.name).symlink_to(path)
    arguments = ["quantize", str(model), *small("gptq", text), "-o", str(tmp_path / "out")]
    assert main(arguments) == 3
    err = capfd.readouterr().err
    assert "error: " in err
    assert "Traceback" not in err


def test_evaluation_says_how_far_the_result_is_from_its_base(
    tiny: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(tiny), *small("rtn", text), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--evaluate", str(text), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["quality"]["kl_mean"] > 0
    assert result["quality"]["perplexity"] > 1
    assert text.name in result["quality_protocol"]


# Peers


def test_peer_that_is_not_there_comes_with_the_way_to_get_it(
    zero_checkpoint: Save, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(zero_checkpoint(LLAMA)), *small("gptq", text), "-o", "out"]
    assert main([*arguments, "--backend", "gptqmodel"]) == 3
    err = capfd.readouterr().err
    assert "gptqmodel is not installed" in err
    assert "pip install" in err
    assert "--backend-python" in err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--group-size", "48"], "--group-size 48 does not divide in_features 64"),
        (["--group-size", "32", "--bits", "8", "-m", "awq"], "autoawq"),
        (["--group-size", "32", "-m", "rtn"], "rtn"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_peer_would_stumble_over_is_refused_before_it_starts(
    flags: list[str], named: str, zero_checkpoint: Save, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(zero_checkpoint(LLAMA)), *flags, "--dry-run"]
    assert main([*arguments, "--backend", "autoawq"]) == 2
    assert named in capfd.readouterr().err


def test_what_a_peer_writes_is_read_and_reported(
    tiny: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The peer's interpreter is a script that copies a checkpoint quantized before."""
    ready = tmp_path / "ready"
    assert main(["quantize", str(tiny), *small("rtn", text), "-o", str(ready)]) == 0
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, shutil, sys\n"
        "if sys.argv[1] == '-c': sys.exit(print('7.7.0'))\n"
        "job = json.loads(pathlib.Path(sys.argv[2]).read_text())\n"
        f"shutil.copytree({str(ready)!r}, job['output'], dirs_exist_ok=True)\n"
        "result = {'seconds': 1.5, 'peak_rss_bytes': 10, 'versions': {'gptqmodel': '7.7.0'}}\n"
        "pathlib.Path(job['result']).write_text(json.dumps(result))\n"
    )
    python.chmod(0o755)
    peer = ["--backend", "gptqmodel", "--backend-python", str(python), "--json"]
    capfd.readouterr()
    output = tmp_path / "out"
    assert main(["quantize", str(tiny), *small("gptq", text), "-o", str(output), *peer]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["backend"], result["versions"]) == ("gptqmodel", {"gptqmodel": "7.7.0"})
    assert (result["format"], result["num_layers"]) == ("gptq", 14)
    assert result["bytes_after"] < result["bytes_before"]


# Words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "about 1 s"), (59, "about 59 s"), (600, "about 10 min"), (9000, "about 2.5 h")],
)
def test_durations_are_told_in_the_unit_of_plans(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_every_token_is_accounted_for() -> None:
    """Case C02."""
    line = coverage_line(
        {
            "num_samples": 4,
            "num_tokens": 70,
            "num_truncated_samples": 1,
            "num_truncated_tokens": 9,
            "num_dropped_samples": 2,
            "num_unused_tokens": 5,
        }
    )
    assert line == (
        "70 of 4 samples, 9 more cut off 1 long sample, 5 of the text not asked for, "
        "2 samples empty"
    )
