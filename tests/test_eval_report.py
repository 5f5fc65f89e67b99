"""The report of an evaluation: its tables, its figure's rows, its files."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest

from llmbench.bench import strict_json
from llmbench.bench.accuracy.aggregate import GroupScore, TaskScore
from llmbench.bench.accuracy.divergence_summary import summarize_divergence
from llmbench.bench.accuracy.items import ItemDivergence, ItemRecord, items_path
from llmbench.bench.accuracy.metric_scores import MetricScore
from llmbench.bench.accuracy.paired_score import Flips, PairedScore
from llmbench.reports.errors import NothingToReportError
from llmbench.reports.eval_comparison import divergence_tables, paired_table
from llmbench.reports.eval_report import (
    read_eval,
    report_sentences,
    report_tables,
    score_data,
    write_eval_report,
)
from llmbench.reports.eval_table import decisive_flags, families, score_table
from llmbench.reports.figure import Caption
from llmbench.reports.score_figure import kl_figure, kl_frame, score_figure, score_frame
from llmbench.reports.tables import Table, markdown

ACC = MetricScore(value=0.31, stderr=0.046, low=0.227, high=0.406, interval="wilson", n=100)
SUBJECTS = tuple(f"mmlu_{index}" for index in range(10))


def task(name: str, **changes: Any) -> TaskScore:
    facts: dict[str, Any] = {
        "task": name,
        "primary_metric": "acc_norm",
        "metrics": {"acc": ACC, "acc_norm": dataclasses.replace(ACC, value=0.35)},
        "num_items": 100,
        "num_shots": 25,
    }
    return TaskScore(**(facts | changes))


def mmlu() -> GroupScore:
    return GroupScore(
        group="mmlu",
        metric="acc",
        weighting="items",
        members=SUBJECTS,
        tasks=SUBJECTS,
        by_items=dataclasses.replace(ACC, value=0.27, n=1000),
        by_tasks=dataclasses.replace(ACC, value=0.28, n=1000),
        num_items=1000,
        num_truncated=3,
    )


def scores(**changes: Any) -> dict[str, Any]:
    tasks = {"arc_challenge": task("arc_challenge")}
    tasks |= {name: task(name, num_shots=5) for name in SUBJECTS}
    record = {
        "schema_version": 1,
        "model": "models/small",
        "status": "complete",
        "tasks": tasks,
        "groups": {"mmlu": mmlu()},
        "perplexity": None,
        "comparison": None,
        "doc_ids": {},
        "flags": (),
        "notices": (),
    }
    plain: dict[str, Any] = strict_json.strict(record | changes)
    return plain


PAIRED = PairedScore(
    task="arc_challenge",
    metric="acc_norm",
    unit="share",
    higher_is_better=True,
    n=100,
    base=0.38,
    candidate=0.35,
    difference=-0.03,
    low=-0.09,
    high=0.03,
    flips=Flips(num_right_to_wrong=6, num_wrong_to_right=3, num_wrong_to_other=11),
    p_value=0.5078,
    adjusted_p=0.5078,
)
DIVERGENCE = ItemDivergence(
    base_key="k",
    kl=(0.01, 0.2, 0.0),
    delta_p=(0.01, -0.1, 0.0),
    same_top=(True, False, True),
    base_logprob=(-1.0, -2.0, -0.1),
    logprob=(-1.1, -2.5, -0.1),
)


def comparison() -> dict[str, Any]:
    summary = summarize_divergence([DIVERGENCE] * 8).to_record()
    record = {
        "baseline": "models/base",
        "verdict": "No difference from models/base found.",
        "notes": ["a caveat"],
        "paired": [PAIRED.to_record()],
        "divergence": summary,
        "task_divergence": {"arc_challenge": summary, "mmlu_0": summary},
        "group_divergence": {"mmlu": summary},
    }
    plain: dict[str, Any] = strict_json.strict(record)
    return plain


def item(name: str, doc_id: int) -> ItemRecord:
    return ItemRecord(
        task=name,
        doc_id=doc_id,
        key=f"{name}{doc_id}",
        doc_hash="",
        prompt_hash="",
        target_hash="",
        gold=0,
        choices=("a", "b", "c", "d"),
        divergence=DIVERGENCE,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An evaluation's folder, with a baseline."""
    facts = {name: {"deviations": [], "num_fewshot": 5} for name in SUBJECTS}
    facts["arc_challenge"] = {"deviations": ["no train split"], "num_fewshot": 25}
    manifest = {"schema_version": 1, "hardware": {}, "software": {}, "plan": {"tasks": facts}}
    (tmp_path / "manifest.json").write_text(strict_json.dumps(manifest))
    doc_ids = {"arc_challenge": "0-7", "mmlu_0": "0-7"}
    record = scores(comparison=comparison(), doc_ids=doc_ids)
    (tmp_path / "scores.json").write_text(strict_json.dumps(record))
    (tmp_path / "baseline").mkdir()
    base = scores(model="models/base", tasks={"arc_challenge": task("arc_challenge")})
    (tmp_path / "baseline" / "scores.json").write_text(strict_json.dumps(base))
    for name in ("arc_challenge", "mmlu_0"):
        lines = [strict_json.dumps(item(name, doc).to_json()) + "\n" for doc in range(8)]
        items_path(tmp_path, name).write_text("".join(lines))
    return tmp_path


def cells(table: Table, name: str) -> tuple[str, ...]:
    return next(column.cells for column in table.columns if column.name == name)


# Tables


def test_every_score_has_its_error_interval_shots_and_items() -> None:
    table = score_table(scores(), {})
    row = {column.name: column.cells[1] for column in table.columns}
    assert row == {
        "task": "arc_challenge",
        "shots": "25",
        "metric": "acc",
        "score": "31.0 %",
        "± stderr": "± 4.60",
        "95 % interval": "[22.7, 40.6]",
        "items": "100",
    }


def test_number_that_stands_for_a_task_comes_first() -> None:
    assert cells(score_table(scores(), {}), "metric")[:2] == ("acc_norm", "acc")


def test_subjects_of_a_large_group_are_told_by_both_its_means() -> None:
    record = scores()
    assert families(record) == dict.fromkeys(SUBJECTS, "mmlu")
    table = score_table(record, {})
    assert not any(name.startswith("mmlu_") for name in cells(table, "task"))
    assert cells(table, "metric")[2:] == ("acc, mean over questions", "acc, mean over tasks")
    assert "the 10 tasks of mmlu are in table.csv" in table.notes
    assert any("3 of 1,000 prompts lost their beginning" in note for note in table.notes)


def test_group_of_unlike_tasks_hides_none_of_them() -> None:
    unlike = dataclasses.replace(mmlu(), group="six", tasks=("arc_challenge", *SUBJECTS))
    assert families(scores(groups={"six": unlike})) == {}


def test_what_makes_a_score_worth_less_is_a_letter_and_a_sentence() -> None:
    few = {"acc_norm": dataclasses.replace(ACC, note="only 12 items")}
    weak = task("arc_challenge", metrics=few, num_tied=2, flags=("1 of 100 items is invalid",))
    notices = ["arc_challenge: 1 prompt was cut", "a general one"]
    record = scores(tasks={"arc_challenge": weak}, groups={}, notices=notices)
    table = score_table(record, {"arc_challenge": {"deviations": ["no train split"]}})
    assert cells(table, "task") == ("arc_challenge [a,b,c,d]",)
    assert cells(table, "items") == ("100 [e]",)
    assert table.notes == (
        "[a] no train split",
        "[b] 1 prompt was cut",
        "[c] 1 of 100 items is invalid",
        "[d] 2 ties: the first choice was taken",
        "[e] only 12 items",
    )


def test_perplexity_has_its_protocol_and_no_digits_that_nobody_reads() -> None:
    text = {
        **dict.fromkeys(("reason", "word", "byte", "bits_per_byte"), None),
        "token": 21.7784,
        "low": 20.9,
        "high": 22.7,
        "num_windows": 148,
        "protocol": "wiki.test.raw: 148 windows of 2048",
    }
    table = score_table(scores(tasks={}, groups={}, perplexity=text), {})
    assert cells(table, "score")[0] == "21.778"
    assert table.notes == ("[a] wiki.test.raw: 148 windows of 2048",)
    huge = {"acc_norm": dataclasses.replace(ACC, value=8.98e14, unit="perplexity")}
    table = score_table(scores(tasks={"t": task("t", metrics=huge)}, groups={}), {})
    assert cells(table, "score") == ("8.98e+14",)


def test_flips_stand_beside_the_difference_and_its_interval() -> None:
    table = paired_table([PAIRED.to_record()], base="base", candidate="small")
    row = {column.name: column.cells[0] for column in table.columns}
    assert row == {
        "task": "arc_challenge",
        "metric": "acc_norm",
        "base": "38.0 %",
        "candidate": "35.0 %",
        "difference": "-3.0 points",
        "95 % interval": "[-9, +3]",
        "R→W / W→R / W→W": "6 / 3 / 11",
        "p (Holm)": "0.508",
    }


@pytest.mark.parametrize(
    ("changes", "difference", "p"),
    [
        ({"unit": "ratio", "difference": 0.4071, "adjusted_p": 0.0004}, "+40.7 %", "< 0.001"),
        ({"unit": "bits", "difference": -0.0123, "adjusted_p": 1.0}, "-0.012 bits", "1.000"),
        ({"difference": None, "adjusted_p": None}, "–", "–"),  # noqa: RUF001
    ],
)
def test_differences_are_told_in_their_unit(
    changes: Mapping[str, Any], difference: str, p: str
) -> None:
    record = dataclasses.replace(PAIRED, **changes).to_record()
    table = paired_table([record], base="base", candidate="small")
    assert cells(table, "difference") == (difference,)
    assert cells(table, "p (Holm)") == (p,)


def test_percentiles_that_the_tokens_cannot_carry_are_dashes() -> None:
    record = summarize_divergence([DIVERGENCE] * 8).to_record()
    kl, changes = divergence_tables({"": record})
    assert cells(kl, "task") == ("all tasks",)
    assert cells(kl, "p99.9") == ("–",)  # noqa: RUF001
    assert cells(kl, "KL mean") == ("0.0700 ± 0",)
    assert cells(changes, "same top token") == ("66.7 ± 0 %",)


def test_infinite_divergence_is_called_so() -> None:
    excluded = dataclasses.replace(DIVERGENCE, kl=(float("inf"), 0.1, 0.0))
    kl, _ = divergence_tables({"": summarize_divergence([excluded] * 8).to_record()})
    assert cells(kl, "KL mean") == ("inf",)


# Figures


def texts(figure: matplotlib.figure.Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def test_figure_has_both_models_chance_and_the_paired_difference() -> None:
    rows = [
        {
            "panel": "score",
            "row": "arc\nacc",
            "series": series,
            "value": value,
            "low": 0.2,
            "high": 0.4,
            "n": 100,
            "chance": 0.25,
        }
        for series, value in (("base", 0.31), ("candidate", 0.30))
    ]
    rows.append(
        {
            "panel": "difference",
            "row": "arc\nacc",
            "series": "candidate",
            "value": -0.01,
            "low": -0.05,
            "high": 0.03,
            "n": 100,
        }
    )
    figure = score_figure(score_frame(rows), Caption(title="t"), names={"base": "big"})
    score, difference = figure.axes
    assert score.get_xlabel() == "score (%)"
    assert difference.get_xlabel() == "difference (percentage points)"
    found = texts(figure)
    for part in ("arc\nacc", "big", "95 % intervals", "dotted mark is chance", "paired"):
        assert part in found
    marks = [line.get_xdata()[0] for line in score.lines if line.get_linestyle() == ":"]  # type: ignore[index]
    assert marks == [25.0, 25.0]


def test_figure_of_nothing_says_so() -> None:
    assert "no task has a score" in texts(score_figure(score_frame([]), Caption(title="t")))
    assert "no token diverges" in texts(kl_figure(kl_frame({"a": [0.0]}), Caption(title="t")))


def test_perplexities_far_apart_share_a_logarithmic_axis() -> None:
    rows = [
        {"panel": "perplexity", "row": name, "series": "candidate", "value": value, "n": 9}
        for name, value in (("near", 20.0), ("far", 9e12))
    ]
    figure = score_figure(score_frame(rows), Caption(title="t"))
    assert figure.axes[0].get_xscale() == "log"


def test_curve_gives_the_share_of_tokens_above_each_divergence() -> None:
    frame = kl_frame({"a": [0.0, 0.4, 0.1, 0.2]})
    assert frame["n"].unique().tolist() == [4]
    assert dict(zip(frame["kl"], frame["share"], strict=True)) == pytest.approx(
        {0.1: 0.75, 0.2: 0.5, 0.4: 0.25}
    )


def test_long_curves_keep_their_tail() -> None:
    frame = kl_frame({"a": [index / 1e5 for index in range(1, 50_001)]})
    assert len(frame) <= 1000
    assert frame["kl"].iloc[-1] == 0.5
    assert frame["kl"].iloc[-2] == pytest.approx(0.49999)


# Files


def test_report_holds_tables_verdict_data_and_figures(folder: Path) -> None:
    records = read_eval(folder)
    written = {path.relative_to(folder).as_posix() for path in write_eval_report(records)}
    plots = {f"plots/{name}.{end}" for name in ("scores", "kl") for end in ("png", "svg", "csv")}
    assert written == {"summary.md", "table.csv"} | plots
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith("# small against base\n")
    for table in report_tables(records):
        assert markdown(table) in summary
    assert "[a] no train split" in summary
    assert summary.rstrip().endswith("No difference from models/base found.")


def test_divergence_of_a_family_is_one_row(folder: Path) -> None:
    kl = report_tables(read_eval(folder))[2]
    assert cells(kl, "task") == ("arc_challenge", "mmlu", "all tasks")


def test_items_that_the_scores_are_not_of_are_not_drawn(folder: Path) -> None:
    """As of an earlier run of the folder with a larger limit."""
    write_eval_report(read_eval(folder))
    files = [folder / "plots" / name for name in ("kl.csv", "scores.csv")]
    before = [file.read_bytes() for file in files]
    stale = dataclasses.replace(
        item("arc_challenge", 8),
        choices=("a", "b"),
        divergence=dataclasses.replace(DIVERGENCE, kl=(5.0, 6.0, 7.0)),
    )
    with items_path(folder, "arc_challenge").open("a") as file:
        file.write(strict_json.dumps(stale.to_json()) + "\n")
    write_eval_report(read_eval(folder))
    assert [file.read_bytes() for file in files] == before


def test_data_hold_every_score_and_the_difference_where_it_was_compared(folder: Path) -> None:
    frame = score_data(read_eval(folder)).set_index(["task", "metric"])
    assert len(frame) == 11 * 2 + 2
    assert frame.loc[("arc_challenge", "acc_norm"), "difference"] == -0.03
    assert frame.loc[("arc_challenge", "acc_norm"), "num_right_to_wrong"] == 6
    assert frame["difference"].notna().sum() == 1
    assert frame.loc[("arc_challenge", "acc"), "base_value"] == 0.31


def test_incomplete_run_and_flags_are_told_below_the_tables(folder: Path) -> None:
    flagged = task("arc", flags=["3 items are ties"])
    notices = ["all was cut", "no train split", "arc: seen at its row"]
    record = scores(status="partial", tasks={"arc": flagged}, groups={}, notices=notices)
    (folder / "scores.json").write_text(strict_json.dumps(record))
    lines = report_sentences(read_eval(folder))
    assert lines == [
        "The run is not complete: these are the items answered so far.",
        "All was cut.",
        "Not to be relied on: arc: 3 items are ties.",
    ]


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"num_tied": 100}, []),
        ({"num_tied": 101}, ["mmlu: 101 of 1,000 items are ties"]),
        ({"num_tied": 14, "num_items": 29}, []),
        ({"num_invalid": 2}, ["mmlu: 2 of 1,000 items could not be scored"]),
    ],
)
def test_family_is_judged_as_a_whole(changes: Mapping[str, Any], flags: list[str]) -> None:
    tied = {name: task(name, flags=["1 of 5 items are ties"]) for name in SUBJECTS}
    group = dataclasses.replace(mmlu(), **changes)
    assert decisive_flags(scores(tasks=tied, groups={"mmlu": group})) == flags


def test_folder_without_scores_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(NothingToReportError, match=r"scores\.json") as refusal:
        read_eval(tmp_path)
    assert "--output" in refusal.value.__notes__[0]


def test_report_is_written_without_torch(folder: Path) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers']))\n"
        "from pathlib import Path\n"
        "from llmbench.reports.eval_report import read_eval, write_eval_report\n"
        f"write_eval_report(read_eval(Path({str(folder)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
