"""`llmbench serve-bench`: latency and throughput of an engine over a grid of loads."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmbench.bench.config import ServeBenchConfig
from llmbench.bench.errors import BenchError
from llmbench.bench.slo import Goodput
from llmbench.bench.workloads.workload import WorkloadConfig
from llmbench.cli import engine_options as e
from llmbench.cli import workload_options as w
from llmbench.cli.engine_options import ENGINE
from llmbench.cli.models import require_model
from llmbench.cli.options import (
    KNOWN_ERRORS,
    Debug,
    Json,
    OutputFolder,
    Quiet,
    SectionedCommand,
    Seed,
    SettingsError,
    Verbose,
    as_settings_error,
    config_from,
    defaults_of,
    examples,
)
from llmbench.cli.output import Output
from llmbench.cli.progress import Progress
from llmbench.cli.sampling_options import SkipChatTemplate, Stop, Temperature, TopK, TopP
from llmbench.cli.unused_flags import refuse_unused_flags
from llmbench.cli.workload_options import WORKLOAD
from llmbench.engine.config import EngineConfig
from llmbench.reports.format import TOKENS_PER_SECOND, counted, quantity, setting, time

if TYPE_CHECKING:
    from llmbench.bench.plan import Plan
    from llmbench.bench.sweep import SweepProgress

Record = dict[str, Any]
BENCH = defaults_of(ServeBenchConfig)
NO_VERDICT, INTERRUPTED = 4, 130


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(
        "serve-bench",
        cls=SectionedCommand,
        epilog=examples(
            "llmbench serve-bench smollm2-135m --num-prompts 32 --max-concurrency 1,4,16",
            "llmbench serve-bench ./my-model --dataset-name sharegpt \\\n"
            "    --dataset-path talks.json --request-rate 1,2,4,inf --goodput ttft:500 tpot:100",
            "llmbench serve-bench smollm2-135m --request-rate 1,2,4,inf --dry-run",
        ),
    )(serve_bench_command)


def serve_bench_command(
    ctx: typer.Context,
    model: e.Model,
    seed: Seed = BENCH.seed,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan, time and memory; run nothing.")
    ] = False,
    dataset_name: w.DatasetNameOption = WORKLOAD.dataset_name,
    dataset_path: w.DatasetPath = WORKLOAD.dataset_path,
    num_prompts: w.NumPrompts = WORKLOAD.num_prompts,
    random_input_len: w.RandomInputLen = WORKLOAD.random_input_len,
    random_output_len: w.RandomOutputLen = WORKLOAD.random_output_len,
    random_range_ratio: w.RandomRangeRatio = WORKLOAD.random_range_ratio,
    random_length_distribution: w.RandomLengthDistribution = WORKLOAD.random_length_distribution,
    random_prefix_len: w.RandomPrefixLen = WORKLOAD.random_prefix_len,
    sharegpt_output_len: w.ShareGPTOutputLen = WORKLOAD.sharegpt_output_len,
    prefix_repetition_prefix_len: w.PrefixRepetitionPrefixLen = (
        WORKLOAD.prefix_repetition_prefix_len
    ),
    prefix_repetition_suffix_len: w.PrefixRepetitionSuffixLen = (
        WORKLOAD.prefix_repetition_suffix_len
    ),
    prefix_repetition_num_prefixes: w.PrefixRepetitionNumPrefixes = (
        WORKLOAD.prefix_repetition_num_prefixes
    ),
    prefix_repetition_output_len: w.PrefixRepetitionOutputLen = (
        WORKLOAD.prefix_repetition_output_len
    ),
    custom_output_len: w.CustomOutputLen = WORKLOAD.custom_output_len,
    sonnet_input_len: w.SonnetInputLen = WORKLOAD.sonnet_input_len,
    sonnet_output_len: w.SonnetOutputLen = WORKLOAD.sonnet_output_len,
    sonnet_prefix_len: w.SonnetPrefixLen = WORKLOAD.sonnet_prefix_len,
    disable_shuffle: w.DisableShuffle = WORKLOAD.disable_shuffle,
    no_oversample: w.NoOversample = WORKLOAD.no_oversample,
    ignore_eos: w.IgnoreEOS = WORKLOAD.ignore_eos,
    request_rate: w.RequestRate = "inf",
    max_concurrency: w.MaxConcurrency = "none",
    burstiness: w.Burstiness = BENCH.burstiness,
    num_warmups: w.NumWarmups = BENCH.num_warmups,
    time_limit_s: w.TimeLimit = BENCH.time_limit_s,
    goodput: w.GoodputOption = None,
    temperature: Temperature = WORKLOAD.temperature,
    top_p: TopP = WORKLOAD.top_p,
    top_k: TopK = WORKLOAD.top_k,
    stop: Stop = None,
    skip_chat_template: SkipChatTemplate = WORKLOAD.skip_chat_template,
    tokenizer: e.Tokenizer = ENGINE.tokenizer,
    dtype: e.DTypeOption = ENGINE.dtype,
    device: e.DeviceOption = ENGINE.device,
    load_format: e.LoadFormatOption = ENGINE.load_format,
    model_backend: e.ModelBackendOption = ENGINE.model_backend,
    trust_remote_code: e.TrustRemoteCode = ENGINE.trust_remote_code,
    max_model_len: e.MaxModelLen = ENGINE.max_model_len,
    num_threads: e.NumThreads = ENGINE.num_threads,
    compile: e.Compile = ENGINE.compile,
    policy: e.PolicyOption = ENGINE.policy,
    max_num_seqs: e.MaxNumSeqs = ENGINE.max_num_seqs,
    max_num_batched_tokens: e.MaxNumBatchedTokens = ENGINE.max_num_batched_tokens,
    kv_manager: e.KVManagerOption = ENGINE.kv_manager,
    reservation: e.ReservationOption = ENGINE.reservation,
    prefix_cache: e.PrefixCacheOption = ENGINE.prefix_cache,
    block_size: e.BlockSize = ENGINE.block_size,
    kv_cache_dtype: e.KVCacheDTypeOption = ENGINE.kv_cache_dtype,
    kv_cache_memory_bytes: e.KVCacheMemory = ENGINE.kv_cache_memory_bytes,
    num_kv_blocks: e.NumKVBlocks = ENGINE.num_kv_blocks,
    memory_utilization: e.MemoryUtilization = ENGINE.memory_utilization,
    output: OutputFolder = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Measure latency and throughput of the built-in engine over a grid of loads.

    Each combination of a request rate and a concurrency is a cell. Cells are written as they
    end, so the same command continues where the last one stopped; Ctrl-C keeps what is there.
    """
    streams = Output(as_json=json, quiet=quiet, verbose=verbose)
    refuse_unused_flags(ctx)
    engine = config_from(EngineConfig, ctx)
    workload = config_from(WorkloadConfig, ctx, stop=tuple(stop or ()))
    if dataset_path is not None and not Path(dataset_path).exists():
        raise SettingsError(f"no file {dataset_path} (--dataset-path)")
    config = config_from(
        ServeBenchConfig,
        ctx,
        engine=engine,
        workload=workload,
        output=(output.expanduser() if output else default_folder(engine, workload, seed, goodput)),
        request_rates=w.rates_of(request_rate),
        max_concurrencies=w.concurrencies_of(max_concurrency),
        goodput=_goodput(goodput),
    )
    require_model(model, engine.load_format)
    if dry_run:
        _print_plan(config, streams)
        return
    _run(config, streams)


def default_folder(
    engine: EngineConfig, workload: WorkloadConfig, seed: int, goodput: str | None
) -> Path:
    """A folder that the same settings always lead to, so that the same command resumes."""
    from llmbench.bench.strict_json import digest

    settings = digest({"engine": engine, "workload": workload, "seed": seed, "goodput": goodput})[
        :8
    ]
    return Path("results") / f"{Path(engine.model).name}-{workload.dataset_name}-{settings}"


def _goodput(text: str | None) -> Goodput | None:
    try:
        return None if text is None else Goodput.parse(text)
    except BenchError as error:
        raise as_settings_error(error) from error


def _print_plan(config: ServeBenchConfig, streams: Output) -> None:
    from llmbench.bench.plan import prepare
    from llmbench.bench.strict_json import strict

    plan = prepare(config, on_progress=streams.note)
    cells = [
        {"cell": strict(cell), "least_seconds": plan.least_seconds(cell)} for cell in plan.cells
    ]
    streams.document(
        {
            "cells": cells,
            "num_requests": len(plan.workload.requests),
            "num_prompt_tokens": plan.workload.num_prompt_tokens,
            "max_output_tokens": plan.workload.num_output_tokens,
            "workload_digest": plan.workload.digest,
            "notes": plan.workload.notes,
            "memory": _memory_record(plan),
            "output": str(config.output),
        }
    )
    requests = len(plan.workload.requests)
    streams.result(
        f"requests  {requests:,} in each cell: {plan.workload.num_prompt_tokens:,} prompt tokens, "
        f"at most {plan.workload.num_output_tokens:,} output tokens"
    )
    streams.result(f"memory    {plan.memory}")
    streams.result(f"output    {config.output}")
    streams.result(f"cells     {len(plan.cells)}")
    for cell in plan.cells:
        seconds = plan.least_seconds(cell)
        needs = (
            "as fast as the engine goes" if seconds is None else f"about {seconds:,.0f} s or more"
        )
        streams.result(f"  {cell.label:32} {needs}")


def _memory_record(plan: "Plan") -> dict[str, int | str]:
    memory = plan.memory
    return {
        "free_bytes": memory.free_bytes,
        "weight_bytes": memory.weight_bytes,
        "kv_bytes": memory.kv_bytes,
        "kv_tokens": memory.kv_tokens,
        "activation_bytes": memory.activation_bytes,
        "limited_by": memory.limited_by,
    }


def _run(config: ServeBenchConfig, streams: Output) -> None:
    from llmbench.bench.sweep import run_serve_bench

    is_interrupted = False
    records: list[Record] = []
    with Progress(streams) as progress:
        try:
            records = run_serve_bench(
                config,
                on_progress=lambda sweep: _show(progress, sweep),
                on_record=lambda record: progress.note(cell_line(record)),
            )
        except KeyboardInterrupt:
            is_interrupted = True
        except KNOWN_ERRORS as error:
            if (config.output / "results.jsonl").exists():
                error.add_note(f"what is finished is in {config.output}")
            raise
    if is_interrupted and not (config.output / "results.jsonl").exists():
        raise typer.Exit(INTERRUPTED)
    _report(config, streams)
    if is_interrupted:
        streams.note("the same command continues where this one stopped")
        raise typer.Exit(INTERRUPTED)
    if not any(record.get("validity", {}).get("is_valid") for record in records):
        raise typer.Exit(NO_VERDICT)


def _report(config: ServeBenchConfig, streams: Output) -> list[Record]:
    """Print the table and the conclusion of what the folder holds, and draw its plots."""
    from llmbench.bench.results import read_results
    from llmbench.reports.serve_report import report_table, write_serve_report
    from llmbench.reports.tables import render

    records = read_results(config.output).records
    if not records:
        return records
    table, conclusion = report_table(config.output)
    streams.result(render(table, sys.stdout))
    streams.result(f"\n{conclusion}")
    written = write_serve_report(config.output)
    streams.document(
        {
            "output": str(config.output),
            "conclusion": conclusion,
            "records": records,
            "files": [str(path) for path in written],
        }
    )
    streams.note("")
    for path in written:
        if path.suffix == ".png":
            streams.note(f"plot     {path}")
    streams.note(f"results  {config.output}")
    return records


def _show(progress: Progress, sweep: "SweepProgress") -> None:
    if sweep.load is None or sweep.cell is None:
        progress.note(sweep.text)
        return
    load = sweep.load
    stage = f"cell {sweep.cell_number}/{sweep.num_cells} {sweep.cell.label}"
    if sweep.stage == "warm-up":
        stage += " (warm-up)"
    facts = []
    if load.ttft_p50_s is not None:
        facts.append(f"TTFT p50 {time(load.ttft_p50_s)}")
    if load.tpot_p50_s is not None:
        facts.append(f"TPOT p50 {time(load.tpot_p50_s)}")
    if load.elapsed_s > 0 and load.num_output_tokens:
        facts.append(quantity(load.num_output_tokens / load.elapsed_s, TOKENS_PER_SECOND))
    if load.num_failed:
        facts.append(f"{load.num_failed} failed")
    if sweep.remaining_s is not None:
        facts.append(f"all done in about {sweep.remaining_s:,.0f} s")
    done = load.num_completed + load.num_failed
    progress.update(stage, done, load.num_total, ", ".join(facts))


def cell_line(record: Record) -> str:
    """What stays on the terminal of a cell that has ended."""
    cell = record["cell"]
    rate, cap = setting(cell["request_rate"]), setting(cell["max_concurrency"])
    facts = [f"rate={rate} concurrency={cap}: {record['status']}"]
    metrics = record.get("metrics")
    if metrics is None:
        return facts[0]
    facts.append(f"{metrics['num_completed']} of {counted(metrics['num_requests'], 'request')}")
    facts.append(f"{quantity(metrics['output_throughput_tok_s'], TOKENS_PER_SECOND)} of output")
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        facts.append(f"{label} p50 {time(metrics[name]['median'])}")
    return ", ".join([*facts, record["validity"]["verdict"]])
