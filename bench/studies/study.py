"""A study: a ready experiment that reproduces one published comparison on a model of one's own.

A study is a settings dataclass and two functions. `measure` yields a row for each thing measured,
as soon as it is measured; `conclude` is a pure function of those rows: the table, the headline
figures and one sentence that says what was found. So a row is on the disk before the next one is
measured, an interrupted study keeps what it has, and a conclusion can be drawn again from a folder.

A study's folder is a results folder (bench/results.py) with kind `study`:

    manifest.json      the study, its settings, the machine
    results.jsonl      a record a row, the row under `row`
    conclusion.json    finding, summary and table
    *.parquet, *.npz   raw data of the study's own, for its figure

Rows are flat and hold SI base values under names that end in their unit. Modules of studies import
nothing heavy at the top: the command line reads their settings before anything is loaded.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from llmbench.bench.errors import BenchConfigError, ResultsError
from llmbench.engine.config import Device, DType, EngineConfig, LoadFormat

Row = dict[str, Any]

DEMO_MODEL = "smollm2-135m"
CONCLUSION = "conclusion.json"


class Settings(Protocol):
    """What all settings have."""

    @property
    def seed(self) -> int:
        """Of prompts, lengths and arrivals."""


SettingsT = TypeVar("SettingsT", bound=Settings)
NameT = TypeVar("NameT", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of a study that runs a model; their meaning is that of EngineConfig."""

    model: str = DEMO_MODEL
    dtype: DType = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    num_threads: int | None = None
    compile: bool | None = None
    seed: int = 0

    def engine(self, **more: Any) -> EngineConfig:
        """The engine's configuration with these settings and `more`."""
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            device=self.device,
            load_format=self.load_format,
            num_threads=self.num_threads,
            compile=self.compile,
            seed=self.seed,
            **more,
        )


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def _no_note(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """What a running study works with.

    Attributes:
        folder: Where its raw data go.
        progress: Hears a stage and how many of its steps are done.
        note: Hears a line about what is being done.
    """

    folder: Path
    progress: Callable[[str, int, int], None] = _no_progress
    note: Callable[[str], None] = _no_note


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What the rows say.

    Attributes:
        finding: One sentence, made from the figures in it.
        table: What is compared, the baseline first.
        summary: Headline figures for programs.
        notes: Facts beside the comparison, a line each.
    """

    finding: str
    table: list[Row]
    notes: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study(Generic[SettingsT]):
    """One study."""

    name: str
    settings_type: type[SettingsT]
    measure: Callable[[SettingsT, Lab], Iterator[Row]]
    conclude: Callable[[Sequence[Row]], Conclusion]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """A study that has been run to its end."""

    name: str
    folder: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]
    conclusion: Conclusion

    @property
    def finding(self) -> str:
        """What was found, in one sentence."""
        return self.conclusion.finding

    def to_record(self) -> dict[str, Any]:
        """The JSON form; headline figures stand beside the rest, under names of their own."""
        return {
            "study": self.name,
            "folder": str(self.folder),
            "finding": self.finding,
            "notes": list(self.conclusion.notes),
            **self.conclusion.summary,
            "table": self.conclusion.table,
            "rows": self.rows,
            "settings": self.settings,
            "environment": self.environment,
        }


def run_study(
    study: Study[SettingsT],
    settings: SettingsT,
    folder: Path,
    *,
    on_progress: Callable[[str, int, int], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> StudyResult:
    """Run a study into a folder of its own, row by row; on Ctrl-C the rows so far stay there."""
    from llmbench.bench import strict_json
    from llmbench.bench.environment import collect_environment
    from llmbench.bench.results import ResultsFolder, build_manifest, write_json

    folder = folder.expanduser()
    if (folder / "manifest.json").exists():
        error = ResultsError(f"{folder} holds results already, and a study is measured in one go")
        error.add_note("choose another folder with --output")
        raise error
    config = {"study": study.name, "settings": settings}
    if isinstance(settings, ModelSettings):
        config["engine"] = {"model": settings.model}
    manifest = build_manifest(
        kind="study",
        config=config,
        workload_digest=None,
        model_digest=None,
        seed=settings.seed,
        environment=collect_environment(),
    )
    lab = Lab(folder=folder, progress=on_progress or _no_progress, note=on_note or _no_note)
    rows: list[Row] = []
    with ResultsFolder.create_or_resume(folder, manifest) as results:
        for row in study.measure(settings, lab):
            record = {"kind": "study", "cell_id": f"row={len(rows)}", "status": "complete"}
            rows.append(results.append(record | {"row": row})["row"])
            if on_row is not None:
                on_row(rows[-1])
        conclusion = study.conclude(rows)
        write_json(folder / CONCLUSION, conclusion)
    return StudyResult(
        name=study.name,
        folder=folder,
        settings=strict_json.strict(settings),
        environment=manifest["environment"],
        rows=rows,
        conclusion=conclusion,
    )


def interleaved(names: Sequence[NameT], repetitions: int) -> list[tuple[int, NameT]]:
    """Order of measuring: A B, B A, A B …, so that a drift of the machine favours neither."""
    return [
        (repetition, name)
        for repetition in range(repetitions)
        for name in (names if repetition % 2 == 0 else names[::-1])
    ]


def median_of(rows: Sequence[Row], key: str, **where: Any) -> float:
    """Median of a column over the rows that match."""
    return statistics.median(values_of(rows, key, **where))


def values_of(rows: Sequence[Row], key: str, **where: Any) -> list[float]:
    """A column of the rows that match, in order of measuring."""
    return [
        row[key] for row in rows if all(row.get(name) == value for name, value in where.items())
    ]


def three_digits(value: float) -> str:
    """A number for a finding: three significant digits and all digits before the dot."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")  # 9.996 has one digit before the dot, 10.0 two
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def time_text(value_s: float) -> str:
    """A time for a finding, in the unit that suits it."""
    if value_s >= 1:
        return f"{three_digits(value_s)} s"
    if value_s >= 1e-3:
        return f"{three_digits(value_s * 1e3)} ms"
    return f"{three_digits(value_s * 1e6)} µs"


def require_positive(settings: object, *names: str) -> None:
    """Refuse settings below 1; a tuple is meant item by item."""
    for name in names:
        value = getattr(settings, name)
        items = value if isinstance(value, tuple) else (value,)
        if not items or any(not item > 0 for item in items):  # written so that NaN fails
            raise BenchConfigError(f"{name} must be positive, not {value}")
