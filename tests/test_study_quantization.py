"""The quantization study: one row a scheme, the base among them, and an honest sentence."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.errors import BenchConfigError
from llmbench.bench.studies.quantization import STUDY, QuantizationSettings, conclude
from llmbench.bench.studies.study import run_study
from llmbench.reports.study_report import write_study_report

JSON_FIELDS = {
    "method",
    "bits",
    "group_size",
    "perplexity",
    "kl_mean",
    "top1_agreement",
    "weight_bytes",
    "one_stream_tok_s",
    "batch_tok_s",
}


def row(scheme: str, kind: str, kl: float, ratio: float) -> dict[str, Any]:
    return {
        "scheme": scheme,
        "kind": kind,
        "perplexity": 20.0 + kl,
        "kl_mean": kl,
        "top1_agreement": 1 - kl,
        "weight_bytes": 100,
        "one_stream_tok_s": 50 * ratio,
        "one_stream_ratio": ratio,
        "batch_tok_s": 500.0,
        "batch_ratio": 1.0,
        "protocol": "a text",
    }


def test_finding_names_the_nearest_scheme_of_each_kind() -> None:
    rows = [
        row("rtn", "W4A16", 0.4, 1.6),
        row("gptq", "W4A16", 0.1, 1.5),
        row("smoothquant", "W8A8", 0.02, 1.2),
        row("base", "bfloat16", 0.0, 1.0),
    ]
    found = conclude(rows)
    assert [line["scheme"] for line in found.table] == [
        "base bfloat16",
        "rtn W4A16",
        "gptq W4A16",
        "smoothquant W8A8",
    ]
    assert found.finding.startswith(
        "W4A16 is nearest to the base by gptq: perplexity 20.1 against 20.0, 1.50 times its speed"
    )
    assert "W8A8 is nearest to the base by smoothquant" in found.finding


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"calibration": ""}, "needs a file for calibration"),
        ({"text": ""}, "needs a file for text"),
        ({"schemes": ("w4",)}, "schemes are w4, expected some of rtn, gptq"),
        ({"schemes": ()}, "schemes are none"),
        ({"limit_windows": -1}, "limit_windows must not be negative"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchConfigError, match=words):
        QuantizationSettings(**({"calibration": "a.txt", "text": "b.txt"} | changes))


def test_study_makes_measures_draws_and_reuses_checkpoints(
    tmp_path: Path, random_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]
) -> None:
    base = tmp_path / "base"
    random_model("llama", vocab_size=258).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    settings = QuantizationSettings(
        model=str(base),
        dtype="float32",
        num_threads=1,
        calibration=str(text),
        text=str(text),
        schemes=("gptq", "smoothquant"),
        group_size=16,
        num_calibration_samples=4,
        max_seq_length=32,
        window=64,
        limit_windows=2,
        input_len=8,
        output_len=8,
        batch_sizes=(4,),
        repetitions=2,
        checkpoints=str(tmp_path / "checkpoints"),
    )
    result = run_study(STUDY, settings, tmp_path / "study")
    record = json.loads(json.dumps(result.to_record()))
    assert [found["scheme"] for found in record["rows"]] == ["gptq", "smoothquant", "base"]
    for found in record["rows"]:
        assert found.keys() >= JSON_FIELDS
        assert found["one_stream_tok_s"] > 0
    gptq, smooth, full = record["rows"]
    assert 0 < smooth["kl_mean"] < gptq["kl_mean"]
    assert full["kl_mean"] == 0
    assert gptq["weight_bytes"] < smooth["weight_bytes"] < full["weight_bytes"]
    pictures = [path for path in write_study_report(tmp_path / "study") if path.suffix == ".png"]
    assert len(pictures) == 2

    made = tmp_path / "checkpoints" / "gptq" / "model.safetensors"
    before = made.stat().st_mtime_ns
    again = dataclasses.replace(settings, schemes=("gptq",), repetitions=1)
    run_study(STUDY, again, tmp_path / "again")
    assert made.stat().st_mtime_ns == before
