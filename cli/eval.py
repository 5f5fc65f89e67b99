"""`llmbench eval`: how well a model answers, and how far it is from its baseline."""

import contextlib
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmbench.bench.accuracy.eval_config import EvalConfig
from llmbench.cli import engine_options as e
from llmbench.cli import eval_options as v
from llmbench.cli.engine_options import ENGINE
from llmbench.cli.eval_checks import check_engine_settings, check_flags, check_output
from llmbench.cli.eval_options import EVAL
from llmbench.cli.eval_output import (
    exit_code,
    print_dry_run,
    print_harness_result,
    print_result,
    print_tasks,
    told_notices,
)
from llmbench.cli.eval_progress import say_how_to_resume, say_what_is_kept, shown_on
from llmbench.cli.eval_samples import sample_prompts, write_answers
from llmbench.cli.models import require_model
from llmbench.cli.options import (
    KNOWN_ERRORS,
    Debug,
    Json,
    OutputFolder,
    Quiet,
    SectionedCommand,
    Verbose,
    config_from,
    examples,
)
from llmbench.cli.output import Output
from llmbench.cli.progress import Progress
from llmbench.engine.config import EngineConfig
from llmbench.engine.models.source import resolve_folder
from llmbench.reports.format import counted

if TYPE_CHECKING:
    from llmbench.bench.accuracy.eval_plan import PreparedEval
    from llmbench.bench.accuracy.eval_result import EvalResult
    from llmbench.bench.accuracy.model import EvaluatedModel
    from llmbench.bench.accuracy.sample_prompts import SamplePrompt

INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(
        "eval",
        cls=SectionedCommand,
        epilog=examples(
            "llmbench eval smollm2-135m --tasks arc_easy,kobest_copa --limit 100",
            "llmbench eval ./my-model-w4 --baseline ./my-model --tasks open-llm-v1 \\\n"
            "    --limit 100,mmlu=5,gsm8k=16 --data-dir data --samples 8 -o results/w4",
            "llmbench eval ./my-model --tasks perplexity --text wikitext2 --protocol gptq",
        ),
    )(eval_command)


def eval_command(
    ctx: typer.Context,
    model: v.OptionalModel = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print tasks, items, tokens and disk; run nothing.")
    ] = False,
    tasks: v.Tasks = None,
    list_tasks: v.ListTasks = False,
    num_fewshot: v.NumFewshot = EVAL.num_fewshot,
    limit: v.Limit = None,
    data_dir: v.DataDir = EVAL.data_dir,
    include: v.Include = None,
    seed: v.FewshotSeed = EVAL.seed,
    shard: v.Shard = None,
    apply_chat_template: v.ApplyChatTemplate = EVAL.apply_chat_template,
    chat_template: v.ChatTemplate = EVAL.chat_template,
    system_instruction: v.SystemInstruction = EVAL.system_instruction,
    fewshot_as_multiturn: v.FewshotAsMultiturn = EVAL.fewshot_as_multiturn,
    add_bos: v.AddBOS = EVAL.add_bos,
    on_overflow: v.OnOverflowOption = EVAL.on_overflow,
    max_length: v.MaxLength = EVAL.max_length,
    max_gen_toks: v.MaxGenToks = EVAL.max_gen_toks,
    text: v.Text = EVAL.text,
    protocol: v.ProtocolOption = EVAL.protocol,
    window: v.Window = EVAL.window,
    stride: v.Stride = EVAL.stride,
    joiner: v.Joiner = EVAL.joiner,
    baseline: v.Baseline = None,
    baseline_args: v.BaselineArgs = None,
    divergence: v.WithDivergence = True,
    cache_limit: v.CacheLimit = None,
    samples: v.Samples = None,
    samples_file: v.SamplesFile = None,
    backend: v.BackendOption = "engine",
    base_url: v.BaseURL = None,
    tokenizer: e.Tokenizer = ENGINE.tokenizer,
    dtype: e.DTypeOption = ENGINE.dtype,
    device: e.DeviceOption = ENGINE.device,
    load_format: e.LoadFormatOption = ENGINE.load_format,
    model_backend: e.ModelBackendOption = ENGINE.model_backend,
    trust_remote_code: e.TrustRemoteCode = ENGINE.trust_remote_code,
    max_model_len: e.MaxModelLen = ENGINE.max_model_len,
    num_threads: e.NumThreads = ENGINE.num_threads,
    compile: e.Compile = ENGINE.compile,
    max_num_seqs: e.MaxNumSeqs = ENGINE.max_num_seqs,
    max_num_batched_tokens: e.MaxNumBatchedTokens = ENGINE.max_num_batched_tokens,
    prefix_cache: e.PrefixCacheOption = ENGINE.prefix_cache,
    block_size: e.BlockSize = ENGINE.block_size,
    kv_cache_dtype: e.KVCacheDTypeOption = ENGINE.kv_cache_dtype,
    kv_cache_memory_bytes: e.KVCacheMemory = ENGINE.kv_cache_memory_bytes,
    num_kv_blocks: e.NumKVBlocks = ENGINE.num_kv_blocks,
    memory_utilization: e.MemoryUtilization = ENGINE.memory_utilization,
    output: OutputFolder = None,
    format: v.FormatOption = "llmbench",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Ask a model the questions of benchmark tasks, and compare it with a baseline.

    Prompts, draws and scores are those of lm-evaluation-harness 0.4.13. Each answer is written
    when it comes, so the same command with the same --output continues where the last one
    stopped.
    """
    streams = Output(as_json=json, quiet=quiet, verbose=verbose)
    if list_tasks:
        print_tasks(tuple(include or ()), streams)
        return
    check_flags(ctx)
    config = config_from(
        EvalConfig,
        ctx,
        tasks=v.names_of(tasks or ""),
        limits=v.limits_of(limit),
        data_dir=None if data_dir is None else data_dir.expanduser(),
        include=tuple(include or ()),
        shard=v.shard_of(shard),
        joiner=v.joiner_of(joiner),
    )
    folder = output.expanduser() if output else default_folder(model or "server")
    if not dry_run:
        check_output(folder)
    prompts = sample_prompts(samples, samples_file)
    with contextlib.ExitStack() as stack:
        candidate, base = _models(ctx, streams)
        for each in (candidate, base):
            if each is not None:
                stack.callback(each.close)
        if backend == "lm-eval":
            _run_harness(config, candidate, folder, streams)
            return
        with Progress(streams) as progress:
            progress.update("preparing prompts", 0, 1)
            prepared = _prepare(config, candidate)
        if dry_run:
            print_dry_run(
                prepared,
                candidate,
                base,
                folder,
                cache_limit=cache_limit,
                with_divergence=divergence and base_url is None,
                streams=streams,
            )
            return
        for line in told_notices(prepared):
            streams.warning(line)
        _run(prepared, candidate, base, folder, prompts, ctx, streams)


def default_folder(model: str) -> Path:
    """A new folder each time: going on with an old one is a wish that --output expresses."""
    return Path("results") / f"eval-{Path(model).name}-{datetime.now():%Y%m%d-%H%M%S}"


def _models(ctx: typer.Context, streams: Output) -> "tuple[EvaluatedModel, EvaluatedModel | None]":
    """The candidate and the baseline; none has loaded its weights yet."""
    values = ctx.params
    name: str | None = values["baseline"]
    settings = v.engine_overrides(values["baseline_args"])
    check_engine_settings(settings)
    base_config = candidate_config = None
    if values["base_url"] is None:
        require_model(values["model"], values["load_format"])
        candidate_config = config_from(EngineConfig, ctx, seed=ENGINE.seed)
    if name is not None:
        require_model(name, settings.get("load_format", values["load_format"]))
        base_config = config_from(
            EngineConfig, ctx, model=name, seed=ENGINE.seed, **{"tokenizer": None, **settings}
        )
    from llmbench.bench.accuracy.engine_model import EngineModel

    base = None
    if base_config is not None:
        base = EngineModel(base_config, name=name, on_progress=streams.note)
    if candidate_config is None:
        return _server(values), base
    return EngineModel(candidate_config, name=values["model"], on_progress=streams.note), base


def _server(values: dict[str, Any]) -> "EvaluatedModel":
    from llmbench.bench.accuracy.server_model import ServerModel
    from llmbench.engine.models.tokenizer import load_tokenizer

    folder = resolve_folder(values["tokenizer"], with_weights=False)
    tokenizer = load_tokenizer(folder, None, trust_remote_code=values["trust_remote_code"])
    return ServerModel(
        values["base_url"], tokenizer, model=values["model"], max_length=values["max_length"]
    )


def _prepare(config: EvalConfig, model: "EvaluatedModel") -> "PreparedEval":
    from llmbench.bench.accuracy.eval_plan import prepare

    return prepare(config, load_tokenizer=lambda: model.tokenizer)


def _run(
    prepared: "PreparedEval",
    candidate: "EvaluatedModel",
    base: "EvaluatedModel | None",
    folder: Path,
    prompts: "tuple[SamplePrompt, ...]",
    ctx: typer.Context,
    streams: Output,
) -> None:
    """Evaluate, write the report, and print it; Ctrl-C keeps and shows what is there."""
    from llmbench.bench.accuracy.evaluation import evaluate

    values = ctx.params
    result: EvalResult | None = None
    with Progress(streams) as progress:
        try:
            result = evaluate(
                prepared,
                candidate,
                folder,
                baseline=base,
                with_divergence=values["divergence"] and values["base_url"] is None,
                store_limit_bytes=values["cache_limit"],
                settings=_speed_settings(values),
                on_progress=shown_on(progress, [each.name for each in (base, candidate) if each]),
            )
            if prompts:
                write_answers(
                    candidate,
                    base,
                    prompts,
                    prepared.config.system_instruction,
                    folder,
                    progress,
                )
        except KeyboardInterrupt:
            say_how_to_resume(folder, progress.note)
        except KNOWN_ERRORS as error:
            say_what_is_kept(folder, candidate, error)
            raise
    if (folder / "scores.json").exists():
        print_result(folder, streams)
    if result is None:
        raise typer.Exit(INTERRUPTED)
    if values["format"] == "lm-eval":
        _write_harness_files(folder, prepared, candidate, streams)
    elif values["format"] == "parquet":
        _write_item_tables(folder, streams)
    if code := exit_code(folder):
        raise typer.Exit(code)


def _speed_settings(values: dict[str, Any]) -> dict[str, Any]:
    names = ("num_threads", "max_num_seqs", "max_num_batched_tokens", "prefix_cache", "block_size")
    return {name: values[name] for name in (*names, "kv_cache_memory_bytes", "num_kv_blocks")}


def _write_harness_files(
    folder: Path, prepared: "PreparedEval", model: "EvaluatedModel", streams: Output
) -> None:
    from llmbench.bench.accuracy.lm_eval_format import write_lm_eval

    results, *samples = write_lm_eval(folder, prepared, model)
    streams.note(f"lm-eval  {results} and samples of {counted(len(samples), 'task')} beside it")


def _write_item_tables(folder: Path, streams: Output) -> None:
    from llmbench.bench.accuracy.item_tables import write_item_tables

    tables = write_item_tables(folder)
    streams.note(f"parquet  {counted(len(tables), 'table')} of items in {folder}")


def _run_harness(
    config: EvalConfig, model: "EvaluatedModel", folder: Path, streams: Output
) -> None:
    """Let lm-eval itself ask, on our engine."""
    from llmbench.bench.accuracy.lm_eval_model import evaluate_with_lm_eval

    assert config.limits is None or isinstance(config.limits, int)  # refused by `check_flags`
    result = evaluate_with_lm_eval(
        model,
        config.tasks,
        num_fewshot=config.num_fewshot,
        limit=config.limits,
        data_dir=config.data_dir,
        include=config.include,
        seed=config.seed,
        apply_chat_template=config.apply_chat_template,
        chat_template=config.chat_template,
        system_instruction=config.system_instruction,
        fewshot_as_multiturn=config.fewshot_as_multiturn,
        add_bos=config.add_bos,
        max_length=config.max_length,
    )
    print_harness_result(result, folder, streams)
