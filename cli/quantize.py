"""`llmbench quantize`: a checkpoint in, a smaller one out, with a plan before and a proof after."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmbench.cli import quantize_options as q
from llmbench.cli.engine_options import Model, NumThreads, TrustRemoteCode
from llmbench.cli.models import require_model
from llmbench.cli.options import (
    OUTPUT,
    Debug,
    Json,
    Quiet,
    SectionedCommand,
    Verbose,
    config_from,
    examples,
    option,
)
from llmbench.cli.output import Output
from llmbench.cli.progress import Progress
from llmbench.cli.quantize_checks import (
    check_calibration,
    check_can_read,
    check_output,
    check_text,
    refuse_idle_settings,
    scheme_from,
    with_flags,
)
from llmbench.cli.quantize_options import QUANT
from llmbench.cli.quantize_output import Evaluation, duration, print_plan, print_result
from llmbench.cli.quantize_peer import check_peer, print_peer_result, run_with_peer
from llmbench.engine.models.source import open_checkpoint, resolve_folder
from llmbench.quant.config import QuantConfig
from llmbench.quant.consumers import consumers
from llmbench.quant.errors import ConfigError
from llmbench.quant.plan import QuantPlan, plan_run
from llmbench.reports.format import counted, number, percent

if TYPE_CHECKING:
    from llmbench.bench.accuracy.golden_logits import GoldenLogits
    from llmbench.quant.calibration import CalibrationSet
    from llmbench.quant.pipeline import Progress as BlockProgress
    from llmbench.quant.pipeline import QuantResult

STAGES = {
    "quantize": "quantizing",
    "save": "saving",
    "verify": "reading back",
    "check": "running it in the engine",
}


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(
        "quantize",
        cls=SectionedCommand,
        epilog=examples(
            "llmbench quantize smollm2-135m --method gptq --group-size 64 \\\n"
            "    --calibration texts.txt -o smollm2-gptq",
            "llmbench quantize ./my-model --method awq --dry-run",
            "llmbench quantize ./my-model --method rtn --skip 'layers\\.0\\.' \\\n"
            "    --override 'down_proj:bits=8,group_size=32' -o my-model-w4",
        ),
    )(quantize_command)


def quantize_command(
    ctx: typer.Context,
    model: Model,
    output: Annotated[
        Path | None,
        option(
            OUTPUT, "--output", "-o", help="Folder of the new checkpoint; a broken-off run resumes."
        ),
    ] = None,
    method: q.MethodOption = QUANT.method,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan, sizes and who can load it; run nothing.")
    ] = False,
    bits: q.Bits = None,
    group_size: q.GroupSize = None,
    sym: q.Sym = None,
    format: q.FormatOption = QUANT.format,
    override: q.OverrideOption = None,
    skip: q.SkipOption = None,
    quantize_lm_head: q.QuantizeLMHead = QUANT.quantize_lm_head,
    calibration: q.CalibrationOption = None,
    num_calibration_samples: q.NumCalibrationSamples = QUANT.num_calibration_samples,
    max_seq_length: q.MaxSeqLength = QUANT.max_seq_length,
    seed: q.CalibrationSeed = QUANT.seed,
    damp_percent: q.DampPercent = QUANT.damp_percent,
    act_order: q.ActOrder = QUANT.act_order,
    desc_act: q.DescAct = QUANT.desc_act,
    true_sequential: q.TrueSequential = QUANT.true_sequential,
    scale_search: q.ScaleSearch = QUANT.scale_search,
    transform: q.TransformOption = QUANT.transform,
    smooth_alpha: q.SmoothAlpha = QUANT.smooth_alpha,
    compute_dtype: q.ComputeDTypeOption = QUANT.compute_dtype,
    num_threads: NumThreads = None,
    trust_remote_code: TrustRemoteCode = False,
    backend: q.BackendOption = "llmbench",
    backend_python: q.BackendPython = None,
    evaluate: q.Evaluate = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Make a smaller checkpoint of a model: GPTQ, AWQ, QQQ, SmoothQuant, LLM.int8, or rounding.

    Everything that could fail is checked before anything is computed. Blocks are written as they
    are done, so the same command continues where the last one stopped. The result is read back
    and compared with what was computed before it counts as done.
    """
    streams = Output(as_json=json, quiet=quiet, verbose=verbose)
    refuse_idle_settings(ctx, streams)
    config = config_from(
        QuantConfig,
        ctx,
        scheme=scheme_from(ctx, streams),
        overrides=(
            *(q.parse_skip(pattern) for pattern in skip or ()),
            *(q.parse_override(rule) for rule in override or ()),
        ),
    )
    require_model(model, "auto")
    folder = resolve_folder(model)
    if not dry_run:
        output = check_output(output, folder)
    check_calibration(calibration, config)
    check_text(evaluate, "--evaluate")
    if backend != "llmbench":
        _with_peer(folder, output, config, ctx, streams)
        return
    plan = _plan(folder, config, output)
    readers = consumers(plan.format, plan.targets, desc_act=config.desc_act)
    if dry_run:
        print_plan(plan, readers, streams)
        return
    assert output is not None, "check_output has seen to it"
    check_can_read(folder, calibration, evaluate)
    _set_threads(num_threads)
    streams.note(f"{counted(len(plan.quantized), 'layer')} to {plan.format} ({plan.format_reason})")
    result, golden = _run(folder, output, plan, ctx, streams)
    evaluation = None if evaluate is None else _evaluate(folder, output, ctx, streams)
    print_result(model, result, plan, readers, golden, evaluation, streams)


def _plan(folder: Path, config: QuantConfig, output: Path | None) -> QuantPlan:
    try:
        return plan_run(open_checkpoint(folder), config, output=output)
    except ConfigError as refusal:
        raise with_flags(refusal) from refusal


def _with_peer(
    folder: Path, output: Path | None, config: QuantConfig, ctx: typer.Context, streams: Output
) -> None:
    """The run of another project's tool; a dry run says only whether it could start."""
    values = ctx.params
    backend: str = values["backend"]
    interpreter = check_peer(folder, backend, config, values["backend_python"])
    if values["dry_run"]:
        streams.result(f"{backend} under {interpreter} takes these settings")
        streams.document({"backend": backend, "python": str(interpreter)})
        return
    assert output is not None, "check_output has seen to it"
    check_can_read(folder, values["calibration"], values["evaluate"])
    _set_threads(values["num_threads"])
    with Progress(streams) as progress:
        texts = _calibration(folder, config, ctx, progress)
    result, written = run_with_peer(folder, output, backend, config, texts, interpreter, streams)
    has_text = values["evaluate"] is not None
    evaluation = _evaluate(folder, output, ctx, streams) if has_text else None
    print_peer_result(
        values["model"], output, backend, config, result, written, evaluation, streams
    )


def _set_threads(num_threads: int | None) -> None:
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _run(
    folder: Path, output: Path, plan: QuantPlan, ctx: typer.Context, streams: Output
) -> "tuple[QuantResult, GoldenLogits]":
    """Quantize with a progress bar; Ctrl-C leaves what the same command goes on from."""
    from llmbench.bench.accuracy.golden_logits import check_golden_logits
    from llmbench.quant.pipeline import quantize

    trust_remote_code: bool = ctx.params["trust_remote_code"]
    golden: list[GoldenLogits] = []

    def check(staged: Path) -> None:
        golden.append(check_golden_logits(folder, staged, trust_remote_code=trust_remote_code))

    with Progress(streams) as progress:
        try:
            started = time.perf_counter()
            keep_in = output.with_name(f"{output.name}.partial")
            texts = _calibration(folder, plan.config, ctx, progress, keep_in)
            seconds = time.perf_counter() - started
            result = quantize(
                folder,
                output,
                plan=plan,
                calibration=texts,
                on_progress=lambda step: _show(progress, step),
                check=check,
                trust_remote_code=trust_remote_code,
            )
        except KeyboardInterrupt:
            progress.note("the same command continues where this one stopped")
            raise
    if texts is not None:
        result = replace(result, seconds={"texts": seconds, **result.seconds})
    return result, golden[0]


def _calibration(
    folder: Path,
    config: QuantConfig,
    ctx: typer.Context,
    progress: Progress,
    keep_in: Path | None = None,
) -> "CalibrationSet | None":
    """The texts that the user gave, else texts that the model writes, kept for a repeated run."""
    if not config.needs_calibration:
        return None
    trust_remote_code: bool = ctx.params["trust_remote_code"]
    source: str | None = ctx.params["calibration"]
    if source is None:
        from llmbench.bench.self_calibration import write_calibration

        progress.note("no --calibration: the model writes its own text; text of your use is better")
        return write_calibration(
            folder,
            num_samples=config.num_calibration_samples,
            max_seq_length=config.max_seq_length,
            seed=config.seed,
            num_threads=ctx.params["num_threads"],
            trust_remote_code=trust_remote_code,
            keep_in=keep_in,
            on_progress=lambda done, total: progress.update("writing texts", done, total),
        )
    from llmbench.engine.models.hf_config import load_hf_config
    from llmbench.engine.models.tokenizer import load_tokenizer
    from llmbench.quant.calibration import load_calibration

    hf_config = load_hf_config(folder, trust_remote_code=trust_remote_code)
    return load_calibration(
        source,
        load_tokenizer(folder, hf_config, trust_remote_code=trust_remote_code),
        num_samples=config.num_calibration_samples,
        max_seq_length=config.max_seq_length,
        seed=config.seed,
    )


def _show(progress: Progress, step: "BlockProgress") -> None:
    facts = []
    if step.relative_mse is not None:
        facts.append(f"mean error {percent(step.relative_mse)}")
    if step.eta_s is not None:
        facts.append(f"{duration(step.eta_s)} left")
    progress.update(
        STAGES.get(step.phase, step.phase), step.num_done, step.num_blocks, ", ".join(facts)
    )


def _evaluate(folder: Path, output: Path, ctx: typer.Context, streams: Output) -> "Evaluation":
    """Perplexity and divergence from the base, both measured in the same way."""
    from llmbench.bench.accuracy.quality import evaluate_quality
    from llmbench.engine.config import EngineConfig

    name, text = output.name, ctx.params["evaluate"]
    base = EngineConfig(
        model=str(folder),
        num_threads=ctx.params["num_threads"],
        trust_remote_code=ctx.params["trust_remote_code"],
    )
    with Progress(streams) as progress:
        qualities, windows = evaluate_quality(
            base,
            {name: replace(base, model=str(output))},
            text,
            on_progress=lambda done, total, perplexities: progress.update(
                "evaluating", done, total, f"perplexity {number(perplexities[name], 4)} so far"
            ),
        )
    return Evaluation(quality=qualities[name], protocol=windows.protocol)
