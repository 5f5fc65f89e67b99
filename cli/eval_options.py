"""Options of `llmbench eval`: flag by flag, and how their lists are read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmbench.bench.accuracy.eval_config import (
    EVERY_TASK,
    EvalConfig,
    OnOverflow,
    PerplexityProtocol,
)
from llmbench.cli.engine_options import MODEL, complete_model, parse_size
from llmbench.cli.key_values import parse_key_values
from llmbench.cli.options import OUTPUT, defaults_of, option

EVAL = defaults_of(EvalConfig)
TASKS, PROMPTS, COMPARISON, PERPLEXITY_PANEL = "Tasks", "Prompts", "Comparison", "Perplexity"

OutputFormat = Literal["llmbench", "lm-eval", "parquet"]
Backend = Literal["engine", "lm-eval"]


def parse_names(text: str) -> str:
    """Check a list of names as early as other values; `names_of` reads it."""
    names_of(text)
    return text


def names_of(text: str) -> tuple[str, ...]:
    """Names of `a,b,c`, each once."""
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise typer.BadParameter(f"expected names with commas, found `{text}`")
    return tuple(dict.fromkeys(names))


def parse_limits(text: str) -> str:
    """Check limits as early as other values; `limits_of` reads them."""
    limits_of(text)
    return text


def limits_of(text: str | None) -> Mapping[str, int] | int | None:
    """A limit for all tasks (`100`), or by name (`100,mmlu=5,gsm8k=16`)."""
    if text is None:
        return None
    limits: dict[str, int] = {}
    for item in text.split(","):
        name, sign, value = (part.strip() for part in item.rpartition("="))
        name = name if sign else EVERY_TASK
        if not value.isdecimal() or int(value) < 1 or not name:
            error = typer.BadParameter(f"expected a number of items, found `{item}`")
            error.add_note("as in --limit 100, or --limit 100,mmlu=5,gsm8k=16")
            raise error
        if name in limits:
            what = "all other tasks" if name == EVERY_TASK else f"`{name}`"
            raise typer.BadParameter(f"{what} have two limits in `{text}`")
        limits[name] = int(value)
    return limits[EVERY_TASK] if limits.keys() == {EVERY_TASK} else limits


def parse_shard(text: str) -> str:
    """Check a shard as early as other values; `shard_of` reads it."""
    shard_of(text)
    return text


def shard_of(text: str | None) -> tuple[int, int] | None:
    """Shard `2/4` as (1, 4): people count from one."""
    if text is None:
        return None
    place, sign, count = text.partition("/")
    if not (sign and place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count)):
        raise typer.BadParameter(f"expected I/N with I from 1 to N, found `{text}`")
    return int(place) - 1, int(count)


def check_key_values(text: str) -> str:
    """Check a list of settings as early as other values; `parse_key_values` reads it."""
    parse_key_values(text)
    return text


def joiner_of(text: str | None) -> str | None:
    r"""Return a joiner as it was typed, `\n` and `\t` being what they are elsewhere."""
    return None if text is None else text.replace("\\n", "\n").replace("\\t", "\t")


def complete_tasks(incomplete: str) -> list[str]:
    """Names of tasks and groups that start with what was typed behind the last comma."""
    from llmbench.bench.accuracy.task_catalog import list_tasks

    before, sign, last = incomplete.rpartition(",")
    names = [line.name for line in list_tasks() if line.name.startswith(last)]
    return [f"{before}{sign}{name}" for name in names]


OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Checkpoint folder, name from `llmbench models list`, or Hugging Face id; with "
        "--base-url the server's name of it, which may be left out.",
        autocompletion=complete_model,
    ),
]
Tasks = Annotated[
    str | None,
    option(
        TASKS,
        "--tasks",
        help="Tasks, groups and `perplexity`, with commas.",
        parser=parse_names,
        metavar="NAME[,…]",
        autocompletion=complete_tasks,
    ),
]
ListTasks = Annotated[
    bool, option(TASKS, "--list-tasks", help="List the tasks and groups; --include adds to them.")
]
NumFewshot = Annotated[
    int | None,
    option(TASKS, "--num-fewshot", help="Solved examples in each prompt; as the task says."),
]
Limit = Annotated[
    str | None,
    option(
        TASKS,
        "--limit",
        help="First N items of each task, or by name: 100,mmlu=5,gsm8k=16.",
        parser=parse_limits,
        metavar="N[,NAME=N…]",
    ),
]
DataDir = Annotated[
    Path | None,
    option(TASKS, "--data-dir", help="Folder of local data: nothing is then fetched."),
]
Include = Annotated[
    list[Path] | None,
    option(
        TASKS,
        "--include",
        help="Task file, or folder of them. May be repeated.",
        metavar="PATH",
    ),
]
FewshotSeed = Annotated[int, option(TASKS, "--seed", help="Seed of the draws of solved examples.")]
Shard = Annotated[
    str | None,
    option(
        TASKS,
        "--shard",
        help="Only every Nth item, from the Ith on: 1/4 to 4/4.",
        parser=parse_shard,
        metavar="I/N",
    ),
]

ApplyChatTemplate = Annotated[
    bool,
    option(PROMPTS, "--apply-chat-template", help="Put prompts into the model's chat template."),
]
ChatTemplate = Annotated[
    str | None,
    option(
        PROMPTS,
        "--chat-template",
        help="Name of one of the tokenizer's several templates, for --apply-chat-template.",
        metavar="NAME",
    ),
]
SystemInstruction = Annotated[
    str | None, option(PROMPTS, "--system-instruction", help="Said before everything else.")
]
FewshotAsMultiturn = Annotated[
    bool | None,
    option(
        PROMPTS,
        "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
        help="Turns of its own for each example; by default with a template.",
    ),
]
AddBOS = Annotated[
    bool | None,
    option(PROMPTS, "--add-bos/--no-add-bos", help="Begin texts with BOS; as the tokenizer does."),
]
OnOverflowOption = Annotated[
    OnOverflow,
    option(
        PROMPTS,
        "--on-overflow",
        help="Cut what is too long from the left, leave out whole examples first, or refuse it.",
    ),
]
MaxLength = Annotated[
    int | None,
    option(PROMPTS, "--max-length", help="Longest prompt and answer, tokens; as the model reads."),
]
MaxGenToks = Annotated[
    int | None,
    option(PROMPTS, "--max-gen-toks", help="Longest generated answer, tokens; as the task says."),
]

Text = Annotated[
    str | None,
    option(
        PERPLEXITY_PANEL, "--text", help="Text file, JSON Lines, or `wikitext2`, for `perplexity`."
    ),
]
ProtocolOption = Annotated[
    PerplexityProtocol,
    option(PERPLEXITY_PANEL, "--protocol", help="How the text is cut into windows and scored."),
]
Window = Annotated[
    int | None, option(PERPLEXITY_PANEL, "--window", help="Tokens of a window; by protocol.")
]
Stride = Annotated[
    int | None,
    option(PERPLEXITY_PANEL, "--stride", help="Tokens between windows of `strided`; half of one."),
]

Joiner = Annotated[
    str | None,
    option(
        PERPLEXITY_PANEL, "--joiner", help=r"Put between the rows of a text; two line feeds (\n\n)."
    ),
]

Baseline = Annotated[
    str | None,
    option(COMPARISON, "--baseline", help="Model to compare with, on the same items."),
]
BaselineArgs = Annotated[
    str | None,
    option(
        COMPARISON,
        "--baseline-args",
        help="Engine settings of the baseline alone: dtype=float32,…",
        parser=check_key_values,
        metavar="NAME=VALUE[,…]",
    ),
]
WithDivergence = Annotated[
    bool,
    option(
        COMPARISON,
        "--divergence/--no-divergence",
        help="Compare whole distributions of tokens too: KL and kin.",
    ),
]
CacheLimit = Annotated[
    int | None,
    option(
        COMPARISON,
        "--cache-limit",
        help="Most disk for baselines' answers, such as 8GiB.",
        parser=parse_size,
        metavar="SIZE",
    ),
]
Samples = Annotated[
    int | None,
    option(COMPARISON, "--samples", help="Write answers to this many prompts side by side.", min=1),
]
SamplesFile = Annotated[
    Path | None,
    option(COMPARISON, "--samples-file", help="Prompts of your own, JSON Lines of `prompt`."),
]

BackendOption = Annotated[
    Backend,
    option(MODEL, "--backend", help="Who asks: llmbench, or lm-eval itself on our engine."),
]
BaseURL = Annotated[
    str | None,
    option(MODEL, "--base-url", help="OpenAI-compatible server to ask, such as http://host:8000."),
]
FormatOption = Annotated[
    OutputFormat,
    option(
        OUTPUT,
        "--format",
        help="`lm-eval` also writes the harness's results and samples, `parquet` tables of items.",
    ),
]


def engine_overrides(text: str | None) -> dict[str, Any]:
    """Engine settings of `--baseline-args`."""
    return parse_key_values(text) if text is not None else {}
