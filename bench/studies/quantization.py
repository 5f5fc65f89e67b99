"""What does each quantization cost in quality, and what does it buy in size and speed?

Every scheme is made from the same checkpoint and the same calibration tokens, proved after saving,
and held against the base in two ways. Quality: perplexity, KL divergence and the share of equal
likeliest tokens over one text, all models on the same windows. Speed: one stream, and several
numbers of requests at once, each scheme in turn with the base (A B, B A …), so that each ratio is
of two neighbours in time. Weight-only schemes win while memory is the limit and fade as the batch
grows; 8-bit activations keep their gain where arithmetic is the limit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from llmbench.bench.errors import BenchConfigError
from llmbench.bench.studies.study import (
    Conclusion,
    Lab,
    ModelSettings,
    Row,
    Study,
    interleaved,
    require_positive,
    three_digits,
)
from llmbench.engine.config import DType, EngineConfig
from llmbench.quant.config import DEFAULT_SCHEMES, PER_CHANNEL, Method, QuantConfig

if TYPE_CHECKING:
    from llmbench.bench.accuracy.divergence import Quality
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.quant.calibration import CalibrationSet
    from llmbench.quant.checkpoint import Checkpoint
    from llmbench.quant.plan import QuantPlan

SchemeName = Literal["rtn", "gptq", "awq", "qqq-channel", "qqq-group", "smoothquant", "int8"]
BASE = "base"
ONE_STREAM = 1
WARMUP_TOKENS = 8
SHARE_OF_MEMORY = 0.4
"""Models are evaluated together while their weights stay below this share of the free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSettings(ModelSettings):
    """What is compared, on which texts, under which loads.

    Attributes:
        calibration: Text or JSON Lines file, or hub dataset, for the methods that need it.
        text: File over which perplexity and divergence are measured.
        limit_windows: Windows of the text that are read; 0 reads all.
        batch_sizes: Requests at once, beside the single stream; the last one is the `batch`.
        checkpoints: Folder that keeps the quantized checkpoints; those in it are used again.
    """

    dtype: DType = "bfloat16"
    num_threads: int | None = 2
    calibration: str = ""
    text: str = ""
    schemes: tuple[SchemeName, ...] = get_args(SchemeName)
    group_size: int = 64
    num_calibration_samples: int = 128
    max_seq_length: int = 512
    window: int = 2048
    limit_windows: int = 0
    input_len: int = 128
    output_len: int = 128
    batch_sizes: tuple[int, ...] = (8, 64)
    repetitions: int = 3
    checkpoints: str = ""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_calibration_samples",
            "max_seq_length",
            "window",
            "input_len",
            "output_len",
            "batch_sizes",
            "repetitions",
        )
        if self.limit_windows < 0:
            raise BenchConfigError(f"limit_windows must not be negative, not {self.limit_windows}")
        known = get_args(SchemeName)
        if not self.schemes or (unknown := set(self.schemes) - set(known)):
            found = ", ".join(sorted(unknown)) if self.schemes else "none"
            raise BenchConfigError(f"schemes are {found}, expected some of {', '.join(known)}")
        for scheme in self.schemes:
            self.quant_config(scheme)
        for file in ("calibration", "text"):
            if not getattr(self, file):
                error = BenchConfigError(f"this study needs a file for {file}, none was given")
                error.add_note(f"give --{file} FILE")
                raise error

    def quant_config(self, name: SchemeName) -> QuantConfig:
        """The run that makes a scheme's checkpoint."""
        method: Method = "qqq" if name == "qqq-channel" or name == "qqq-group" else name
        scheme = DEFAULT_SCHEMES[method]
        if name == "qqq-channel":
            scheme = replace(scheme, group_size=PER_CHANNEL)
        elif scheme.group_size != PER_CHANNEL:
            scheme = replace(scheme, group_size=self.group_size)
        return QuantConfig(
            method=method,
            scheme=scheme,
            num_calibration_samples=self.num_calibration_samples,
            max_seq_length=self.max_seq_length,
            seed=self.seed,
        )

    def engine_config(self, folder: Path) -> EngineConfig:
        """An engine of a checkpoint, with a KV pool that the largest load just fills."""
        block_size, largest = 16, max(ONE_STREAM, *self.batch_sizes)
        length = self.input_len + self.output_len
        return replace(
            self.engine(
                max_num_seqs=largest,
                max_num_batched_tokens=max(512, largest),
                max_model_len=length,
                num_kv_blocks=largest * -(-length // block_size),
                block_size=block_size,
            ),
            model=str(folder),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A scheme's checkpoint."""

    name: str
    folder: Path
    config: QuantConfig
    format: str


def measure(settings: QuantizationSettings, lab: Lab) -> Iterator[Row]:
    """Make every checkpoint, measure quality of all, then yield a row a scheme with its speed."""
    from llmbench.bench.model_facts import read_model_facts
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.engine.models.source import resolve_folder
    from llmbench.engine.models.tokenizer import load_tokenizer
    from llmbench.quant.calibration import load_calibration
    from llmbench.quant.checkpoint import Checkpoint
    from llmbench.quant.plan import plan_run

    if not Path(settings.text).expanduser().is_file():
        raise BenchConfigError(f"the text {settings.text} is no file")
    base = resolve_folder(settings.model)
    checkpoint = Checkpoint.open(base)
    # Whatever a plan or the texts may be refused for is found before the first scheme is made.
    plans = {name: plan_run(checkpoint, settings.quant_config(name)) for name in settings.schemes}
    texts = None
    if any(plan.config.needs_calibration for plan in plans.values()):
        texts = load_calibration(
            settings.calibration,
            load_tokenizer(base, None),
            num_samples=settings.num_calibration_samples,
            max_seq_length=settings.max_seq_length,
            seed=settings.seed,
        )
    candidates = [
        _make(name, plan, texts, checkpoint, settings, lab) for name, plan in plans.items()
    ]
    qualities, protocol = _qualities(base, candidates, settings, lab)
    facts = read_model_facts(base, settings.engine_config(base))
    prompts = PromptSource.of_folder(base, facts.vocab_size, settings.seed)
    rows: list[Row] = []
    for candidate in candidates:
        speeds, memory = _speeds(base, candidate, settings, lab, prompts)
        quality, scheme = qualities[candidate.name], candidate.config.scheme
        row: Row = {
            "scheme": candidate.name,
            "method": candidate.config.method,
            "kind": scheme.name,
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "format": candidate.format,
            "perplexity": quality.perplexity,
            "base_perplexity": quality.base_perplexity,
            "kl_mean": quality.kl_mean,
            "kl_sem": quality.kl_sem,
            "top1_agreement": quality.top1_agreement,
            "protocol": protocol,
            "checkpoint": str(candidate.folder),
            **memory,
            **speeds,
        }
        yield row
        rows.append(row)
    yield _base_row(rows, facts.dtype)


def _base_row(rows: Sequence[Row], dtype: str) -> Row:
    """The base as a scheme of its own; its speed is the median of its turns beside the others."""
    import statistics

    row: Row = {
        "scheme": BASE,
        "method": "none",
        "kind": dtype,
        "bits": 32 if dtype == "float32" else 16,
        "group_size": None,
        "format": "safetensors",
        "perplexity": rows[0]["base_perplexity"],
        "kl_mean": 0.0,
        "top1_agreement": 1.0,
        "weight_bytes": rows[0]["base_weight_bytes"],
        "kernel": rows[0]["base_kernel"],
    }
    for key in rows[0]:
        if key.endswith("_base_tok_s"):
            stem = key.removesuffix("_base_tok_s")
            row[f"{stem}_tok_s"] = statistics.median(other[key] for other in rows)
            row[f"{stem}_ratio"] = 1.0
    return row


def _make(
    name: str,
    plan: "QuantPlan",
    texts: "CalibrationSet | None",
    base: "Checkpoint",
    settings: QuantizationSettings,
    lab: Lab,
) -> Candidate:
    """Quantize, unless an earlier study left the same checkpoint."""
    from llmbench.bench.accuracy.golden_logits import check_golden_logits
    from llmbench.quant.output_folder import OutputFolder, read_fingerprint
    from llmbench.quant.pipeline import quantize

    folder = Path(settings.checkpoints or lab.folder / "checkpoints").expanduser() / name
    calibration = texts if plan.config.needs_calibration else None
    digest = None if calibration is None else calibration.digest
    if read_fingerprint(folder) != OutputFolder(folder, base).fingerprint(plan, digest):
        folder.parent.mkdir(parents=True, exist_ok=True)

        def check(staged: Path) -> None:
            check_golden_logits(base.folder, staged)

        quantize(
            base.folder,
            folder,
            plan=plan,
            calibration=calibration,
            on_progress=lambda step: lab.progress(
                f"quantizing, {name}", step.num_done, step.num_blocks
            ),
            check=check,
        )
    return Candidate(name=name, folder=folder, config=plan.config, format=plan.format)


def _qualities(
    base: Path, candidates: Sequence[Candidate], settings: QuantizationSettings, lab: Lab
) -> "tuple[dict[str, Quality], str]":
    """Quality of every candidate; the base is read once where all fit into memory together."""
    import psutil

    from llmbench.bench.accuracy.quality import evaluate_quality
    from llmbench.quant.checkpoint import Checkpoint

    weights = sum(
        Checkpoint.open(folder).num_bytes for folder in (base, *(c.folder for c in candidates))
    )
    fits = weights < SHARE_OF_MEMORY * psutil.virtual_memory().available
    groups = [list(candidates)] if fits else [[candidate] for candidate in candidates]
    found: dict[str, Quality] = {}
    protocol = ""
    for group in groups:
        qualities, windows = evaluate_quality(
            settings.engine(),
            {c.name: replace(settings.engine(), model=str(c.folder)) for c in group},
            Path(settings.text).expanduser(),
            window=settings.window,
            limit_windows=settings.limit_windows or None,
            on_progress=lambda done, total, perplexities: lab.progress("quality", done, total),
        )
        found |= qualities
        protocol = windows.protocol
    return found, protocol


def _speeds(
    base: Path,
    candidate: Candidate,
    settings: QuantizationSettings,
    lab: Lab,
    prompts: "PromptSource",
) -> tuple[Row, Row]:
    """Output tok/s of a scheme and its ratios to the base, and the memory of its weights."""
    from llmbench.bench.studies.sides import BuiltIn, SideProcess

    folders = {BASE: base, candidate.name: candidate.folder}
    sides: dict[str, SideProcess] = {}
    try:
        for name, folder in folders.items():
            sides[name] = SideProcess(BuiltIn(settings.engine_config(folder)), name)
        for side in sides.values():
            side.wait_until_ready()
        speeds: Row = {}
        for size in (ONE_STREAM, *settings.batch_sizes):
            found = _interleaved_speeds(size, sides, settings, lab, prompts)
            speeds |= _summary(size, found[candidate.name], found[BASE], settings)
        facts = {name: side.facts() for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.stop()
    return speeds, {
        "weight_bytes": facts[candidate.name]["weight_bytes"],
        "base_weight_bytes": facts[BASE]["weight_bytes"],
        "kernel": facts[candidate.name]["kernel"],
        "base_kernel": facts[BASE]["kernel"],
    }


def _interleaved_speeds(
    size: int,
    sides: "Mapping[str, Any]",
    settings: QuantizationSettings,
    lab: Lab,
    prompts: "PromptSource",
) -> dict[str, list[float]]:
    """Output tok/s of both sides, repetition by repetition."""
    for name, side in sides.items():
        drawn = prompts.draw([settings.input_len] * size, f"{name}/{size}/warm-up")
        side.generate(drawn, min(WARMUP_TOKENS, settings.output_len))
    found: dict[str, list[float]] = {name: [] for name in sides}
    order = interleaved(tuple(sides), settings.repetitions)
    for done, (repetition, name) in enumerate(order):
        lab.progress(f"{size} at once, {name}", done, len(order))
        drawn = prompts.draw([settings.input_len] * size, f"{size}/{repetition}")
        seconds = sides[name].generate(drawn, settings.output_len)
        found[name].append(size * settings.output_len / seconds)
    return found


def _summary(
    size: int, speeds: list[float], base: list[float], settings: QuantizationSettings
) -> Row:
    """Medians under the names of the load; every batch size has a column of its own too."""
    import statistics

    ratios = [one / other for one, other in zip(speeds, base, strict=True)]
    values = {
        "tok_s": statistics.median(speeds),
        "base_tok_s": statistics.median(base),
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }
    names = ["one_stream"] if size == ONE_STREAM else [f"batch_{size}"]
    if size == settings.batch_sizes[-1]:
        names.append("batch")
    return {f"{name}_{key}": value for name in names for key, value in values.items()}


def conclude(rows: Sequence[Row]) -> Conclusion:
    """The schemes side by side behind the base, and the one that is nearest to it a kind."""
    (base,) = (row for row in rows if row["scheme"] == BASE)
    schemes = [row for row in rows if row["scheme"] != BASE]
    columns = (
        "perplexity",
        "kl_mean",
        "weight_bytes",
        "one_stream_tok_s",
        "one_stream_ratio",
        "batch_tok_s",
        "batch_ratio",
    )
    table = [
        {"scheme": f"{row['scheme']} {row['kind']}"} | {column: row[column] for column in columns}
        for row in (base, *schemes)
    ]
    best: dict[str, Row] = {}
    for row in schemes:
        if row["kind"] not in best or row["kl_mean"] < best[row["kind"]]["kl_mean"]:
            best[row["kind"]] = row
    sentences = [
        f"{kind} is nearest to the base by {row['scheme']}: perplexity "
        f"{three_digits(row['perplexity'])} against {three_digits(base['perplexity'])}, "
        f"{three_digits(row['one_stream_ratio'])} times its speed for one stream and "
        f"{three_digits(row['batch_ratio'])} times in the largest batch"
        for kind, row in best.items()
    ]
    return Conclusion(
        finding="; ".join(sentences),
        table=table,
        notes=(
            schemes[0]["protocol"],
            "speed ratios are medians of neighbouring runs of scheme and base",
        ),
    )


STUDY = Study(
    name="quantization",
    settings_type=QuantizationSettings,
    measure=measure,
    conclude=conclude,
)
