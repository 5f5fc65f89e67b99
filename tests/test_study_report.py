"""A study's folder becomes a table, a sentence and a picture, whichever study it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from llmbench.bench.studies.eval_invariance import VARIANTS
from llmbench.bench.studies.registry import STUDIES
from llmbench.bench.studies.study import Lab, Row, Study, run_study
from llmbench.reports.errors import NothingToReportError
from llmbench.reports.study_figures import FIGURES
from llmbench.reports.study_report import report_table, write_study_report
from llmbench.reports.study_table import heading, study_table
from llmbench.reports.tables import markdown

ROWS: dict[str, list[Row]] = {
    "kv-cache": [
        {
            "kv_manager": manager,
            "num_output_tokens": length,
            "duration_s": length * scale,
            "output_throughput_tok_s": 1 / scale,
        }
        for manager, scale in (("paged", 0.02), ("uncached", 0.1))
        for length in (16, 32)
    ],
    "prefix-cache": [
        {
            "prefix_cache": cache,
            "num_prefix_tokens": length,
            "request": request,
            "ttft_s": 0.01 if cache == "hash" else 0.01 * length,
            "num_prompt_tokens": length + 8,
            "num_cached_tokens": length if cache == "hash" else 0,
            "kv_held_bytes": 2**20 * length,
        }
        for cache in ("none", "hash")
        for request in ("first", "second")
        for length in (16, 64)
    ],
    "vs-lm-eval": [
        {
            "task": task,
            "num_items": 8,
            "llmbench_s": 2.0,
            "lm_eval_s": 8.0,
            "lm_eval_batch_size": 4,
            "speedup_ratio": 4.0,
            "max_logprob_difference": difference,
            "same_answer_share": 1.0,
            "max_score_difference": 0.0,
            "has_equal_scores": True,
            "peak_resident_bytes": 3 * 2**30,
            "weight_bytes": 2**30,
            "kv_bytes": 2**30,
            "lm_eval_peak_resident_bytes": 2**32,
        }
        for task, difference in (("winogrande", 2e-6), ("gsm8k", None))
    ],
    "eval-invariance": [
        {
            "task": task,
            "variant": variant,
            "num_items": 8,
            "duration_s": 2.0,
            "num_answers": 8,
            "num_same_answers": same,
            "max_logprob_difference": difference,
            "num_logprobs": 0 if difference is None else 32,
            "num_equal_logprobs": 0 if difference is None else 24,
            "num_unlike_logprobs": 0,
        }
        for variant, same in zip(VARIANTS, (8, 8, 7, 6, 8), strict=True)
        for task, difference in (("winogrande", 2e-6), ("gsm8k", None))
    ],
    "step-cost": [
        {
            "num_seqs": size,
            "schedule_p50_s": 1e-5,
            "run_p50_s": 2e-4,
            "update_p50_s": 1e-4,
            "step_p50_s": 3.1e-4,
            "step_p99_s": None,
            "step_max_s": 1e-3,
        }
        for size in (1, 64)
    ],
    "load-generator": [
        {
            "request_rate_req_s": 2000.0,
            "achieved_rate_req_s": 2001.0,
            "num_requests": 100,
            "num_lost": 0,
            "send_error_p50_s": 3e-6,
            "send_error_p99_s": None,
            "send_error_max_s": 1e-3,
            "round_trip_p50_s": 2e-4,
        }
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSettings:
    seed: int = 0


def finished(name: str, folder: Path) -> Path:
    """The folder of a study that measured ROWS."""

    def measure(settings: NoSettings, lab: Lab) -> Iterator[Row]:
        yield from ROWS[name]

    study = Study(
        name=name, settings_type=NoSettings, measure=measure, conclude=STUDIES[name].conclude
    )
    run_study(study, NoSettings(), folder)
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_report_is_written_from_the_folder_alone(name: str, tmp_path: Path) -> None:
    folder = finished(name, tmp_path / name)
    written = {path.relative_to(folder).as_posix() for path in write_study_report(folder)}
    assert written == {"summary.md", "table.csv"} | {
        f"plots/{name}.{suffix}" for suffix in ("svg", "png", "csv")
    }
    table, finding = report_table(folder)
    summary = (folder / "summary.md").read_text()
    assert markdown(table) in summary
    assert finding[1:] in summary
    assert len(pd.read_csv(folder / "table.csv")) == table.num_rows


def test_every_study_has_its_figure() -> None:
    assert FIGURES.keys() == STUDIES.keys()


def test_study_without_an_end_has_no_report(tmp_path: Path) -> None:
    folder = finished("step-cost", tmp_path / "study")
    (folder / "conclusion.json").unlink()
    with pytest.raises(NothingToReportError, match=r"conclusion\.json"):
        report_table(folder)


def test_columns_take_their_units_from_their_names() -> None:
    rows = [
        {
            "policy": "chunked",
            "num_seqs": 64,
            "itl_p99_s": 0.0412,
            "ttft_median_s": None,
            "kv_used_bytes": 3 * 2**30,
            "hit_share": 0.5,
            "output_throughput_tok_s": 123.4,
            "speedup_ratio": 2.0,
        }
    ]
    table = study_table(rows, ["a note"])
    assert [column.header for column in table.columns] == [
        "policy",
        "seqs",
        "ITL p99 (ms)",
        "TTFT p50 (ms)",
        "KV used (GiB)",
        "hit (%)",
        "output throughput (tok/s)",
        "speedup (×)",  # noqa: RUF001
    ]
    assert [column.cells[0] for column in table.columns] == [
        "chunked",
        "64",
        "41.2",
        "–",  # noqa: RUF001
        "3.00",
        "50.0",
        "123",
        "2.00",
    ]
    assert table.notes == ("a note",)


def test_times_of_a_table_share_one_unit() -> None:
    table = study_table([{"short_s": 0.5, "long_s": 70.0}])
    assert [column.unit for column in table.columns] == ["s", "s"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("num_output_tokens", "output tokens"), ("ratio", "ratio"), ("kv_waste_share", "KV waste")],
)
def test_headings_are_words(name: str, words: str) -> None:
    assert heading(name) == words
