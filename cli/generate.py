"""`llmbench generate`: a first look at what a model says, and how fast, in the built-in engine."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from llmbench.cli.engine_options import (
    ENGINE,
    BlockSize,
    Compile,
    DeviceOption,
    DTypeOption,
    KVCacheDTypeOption,
    KVCacheMemory,
    KVManagerOption,
    LoadFormatOption,
    MaxModelLen,
    Model,
    ModelBackendOption,
    NumThreads,
    Tokenizer,
    TrustRemoteCode,
)
from llmbench.cli.models import require_model
from llmbench.cli.options import (
    Debug,
    Json,
    Quiet,
    SectionedCommand,
    Seed,
    Verbose,
    config_from,
    defaults_of,
    examples,
    option,
)
from llmbench.cli.output import Output
from llmbench.cli.sampling_options import (
    SAMPLING,
    MinP,
    SkipChatTemplate,
    Stop,
    Temperature,
    TopK,
    TopP,
)
from llmbench.engine.config import EngineConfig
from llmbench.engine.request import SamplingParams

if TYPE_CHECKING:
    from llmbench.engine.engine_core import EngineCore
    from llmbench.engine.request import Request

FIRST_LOOK_TOKENS = 128
SAMPLING_DEFAULTS = defaults_of(SamplingParams)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(
        "generate",
        cls=SectionedCommand,
        epilog=examples(
            'llmbench generate smollm2-135m --prompt "Why is the sky blue?"',
            'llmbench generate ./my-model --prompt "Once upon" --skip-chat-template \\\n'
            "    --temperature 0.8",
            "llmbench generate smollm2-135m --prompt - --max-tokens 32 --json < question.txt",
        ),
    )(generate_command)


def generate_command(
    ctx: typer.Context,
    model: Model,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", help="What to answer; `-` reads stdin. May be repeated."),
    ],
    max_tokens: Annotated[
        int, option(SAMPLING, "--max-tokens", help="Most tokens of an answer.")
    ] = FIRST_LOOK_TOKENS,
    temperature: Temperature = 0.0,
    top_p: TopP = SAMPLING_DEFAULTS.top_p,
    top_k: TopK = SAMPLING_DEFAULTS.top_k,
    min_p: MinP = SAMPLING_DEFAULTS.min_p,
    stop: Stop = None,
    ignore_eos: Annotated[
        bool, option(SAMPLING, "--ignore-eos", help="Do not end before --max-tokens.")
    ] = False,
    skip_chat_template: SkipChatTemplate = False,
    seed: Seed = ENGINE.seed,
    tokenizer: Tokenizer = ENGINE.tokenizer,
    dtype: DTypeOption = ENGINE.dtype,
    device: DeviceOption = ENGINE.device,
    load_format: LoadFormatOption = ENGINE.load_format,
    model_backend: ModelBackendOption = ENGINE.model_backend,
    trust_remote_code: TrustRemoteCode = ENGINE.trust_remote_code,
    max_model_len: MaxModelLen = ENGINE.max_model_len,
    num_threads: NumThreads = ENGINE.num_threads,
    compile: Compile = ENGINE.compile,
    kv_manager: KVManagerOption = ENGINE.kv_manager,
    block_size: BlockSize = ENGINE.block_size,
    kv_cache_dtype: KVCacheDTypeOption = ENGINE.kv_cache_dtype,
    kv_cache_memory_bytes: KVCacheMemory = ENGINE.kv_cache_memory_bytes,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Answer prompts with the built-in engine, for a first look.

    The answers go to stdout; what they cost in time and memory goes to stderr.
    """
    output = Output(as_json=json, quiet=quiet, verbose=verbose)
    config = config_from(EngineConfig, ctx)
    params = config_from(SamplingParams, ctx, stop=tuple(stop or ()), seed=None)
    require_model(model, config.load_format)
    texts = [sys.stdin.read() if text == "-" else text for text in prompt]

    from llmbench.engine.engine_core import EngineCore

    started = time.perf_counter()
    core = EngineCore(config, on_progress=output.note)
    output.note(f"ready after {time.perf_counter() - started:.1f} s")
    groups = [
        core.make_requests(
            text if skip_chat_template else _chat_prompt(core, text), params, f"prompt-{index}"
        )
        for index, text in enumerate(texts)
    ]
    requests = [request for group in groups for request in group]
    started = time.perf_counter()
    _answer(core, requests, output)
    duration_s = time.perf_counter() - started

    for index, request in enumerate(requests):
        if request.finish_reason == "length" and request.num_output_tokens < max_tokens:
            output.warning(
                f"answer {index + 1} ends after {request.num_output_tokens} tokens: the model's "
                "length or the KV pool holds no more"
            )
        elif request.error is not None:
            output.warning(f"answer {index + 1} failed: {request.error}")
    num_prompt = sum(request.num_prompt_tokens for request in requests)
    num_output = sum(request.num_output_tokens for request in requests)
    output.note(
        f"{num_prompt:,} prompt and {num_output:,} output tokens in {duration_s:.2f} s: "
        f"{num_output / duration_s:.1f} output tok/s"
    )
    output.document(
        {
            "model": model,
            "answers": [_answer_record(text, r) for text, r in zip(texts, requests, strict=True)],
            "num_prompt_tokens": num_prompt,
            "num_output_tokens": num_output,
            "duration_s": duration_s,
            "output_throughput_tok_s": num_output / duration_s,
        }
    )


def _answer(core: "EngineCore", requests: "list[Request]", output: Output) -> None:
    """Run the requests to their end; a lone answer is printed as it comes."""
    for request in requests:
        core.add_request(request)
    is_streamed = len(requests) == 1 and not output.as_json
    while core.has_unfinished:
        for step in core.step():
            if is_streamed:
                output.piece(step.text_delta)
    if is_streamed:
        output.result("")
        return
    for index, request in enumerate(requests):
        text = request.detokenizer.text if request.detokenizer is not None else ""
        output.result(f"[{index + 1}] {text}")


def _chat_prompt(core: "EngineCore", text: str) -> str | list[int]:
    """The prompt as a user's turn in the model's chat template, where it has one."""
    if core.tokenizer is None or not core.tokenizer.chat_template:
        return text
    turn = [{"role": "user", "content": text}]
    rendered = core.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    # The template writes every special token itself.
    ids: list[int] = core.tokenizer.encode(rendered, add_special_tokens=False)
    return ids


def _answer_record(prompt: str, request: "Request") -> dict[str, object]:
    return {
        "prompt": prompt,
        "text": request.detokenizer.text if request.detokenizer is not None else "",
        "token_ids": request.output_token_ids,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": request.num_output_tokens,
    }
