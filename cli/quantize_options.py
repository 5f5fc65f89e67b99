"""Options of `llmbench quantize`: the fields of QuantConfig, flag by flag, and rules for layers.

A rule is `REGEX:SETTINGS`, where the settings are `skip` or items such as `bits=8,group_size=32`.
The last colon parts the two, so the expression may hold colons, commas and equal signs; a wrong
item is named.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmbench.cli.options import SettingsError, as_settings_error, defaults_of, option
from llmbench.quant.config import Format, Method, Override, QuantConfig, Transform
from llmbench.quant.errors import ConfigError

QUANT = defaults_of(QuantConfig)
SCHEME, LAYERS, CALIBRATION, METHOD = "Scheme", "Layers", "Calibration", "Method"
CHECK, RUN = "Check", "Run"

Backend = Literal["llmbench", "gptqmodel", "llmcompressor", "auto-gptq", "autoawq"]
ComputeDType = Literal["auto", "bfloat16", "float32"]

NUMBERS = ("bits", "group_size")
SWITCHES = {
    "sym": True,
    "asym": False,
    "sym=true": True,
    "sym=1": True,
    "sym=false": False,
    "sym=0": False,
}
RULE_FORM = "REGEX:skip or REGEX:bits=8,group_size=32,sym"

USED_BY: dict[str, tuple[Method, ...]] = {
    "damp_percent": ("gptq", "qqq"),
    "act_order": ("gptq", "qqq"),
    "desc_act": ("gptq",),
    "true_sequential": ("gptq", "qqq"),
    "scale_search": ("rtn", "gptq", "qqq"),
    "transform": ("qqq",),
    "smooth_alpha": ("smoothquant",),
}
"""Settings that only some methods look at."""


def parse_override(text: str) -> Override:
    """The rule that `REGEX:SETTINGS` stands for.

    Raises:
        SettingsError: names the item that is wrong.
    """
    pattern, colon, settings = text.rpartition(":")
    if not colon or not pattern:
        raise _wrong(text, f"expected {RULE_FORM}")
    values: dict[str, Any] = {}
    for raw in settings.split(","):
        item = raw.strip()
        name, value = _setting(text, item)
        if name in values:
            raise _wrong(text, f"{item!r} says {name} a second time")
        values[name] = value
    if "skip" in values and len(values) > 1:
        raise _wrong(text, "a layer that is skipped has no other settings")
    try:
        override = Override(pattern=pattern, **values)
        override.apply(QUANT_SCHEME)
    except ConfigError as error:
        raise as_settings_error(error, f"--override {text!r}: {error}") from error
    return override


def parse_skip(pattern: str) -> Override:
    """The rule that leaves what the expression matches in full precision."""
    try:
        return Override(pattern=pattern, skip=True)
    except ConfigError as error:
        raise as_settings_error(error, f"--skip {pattern!r}: {error}") from error


def _setting(rule: str, item: str) -> tuple[str, Any]:
    if item == "skip":
        return "skip", True
    if item.lower() in SWITCHES:
        return "sym", SWITCHES[item.lower()]
    key, equals, value = item.partition("=")
    name = key.strip().replace("-", "_")
    if not equals or name not in (*NUMBERS, "sym"):
        raise _wrong(rule, f"{item!r} is no setting; known are skip, bits=, group_size=, sym, asym")
    if name == "sym" or not re.fullmatch(r"-?\d+", value.strip()):
        wanted = "true or false" if name == "sym" else "a whole number"
        raise _wrong(rule, f"{item!r} wants {wanted} behind the equal sign")
    return name, int(value)


def _wrong(rule: str, why: str) -> SettingsError:
    error = SettingsError(f"--override {rule!r}: {why}")
    if not why.startswith("expected"):
        error.add_note(f"a rule is {RULE_FORM}")
    return error


QUANT_SCHEME = QuantConfig().scheme

MethodOption = Annotated[Method, typer.Option("--method", "-m", help="How the integers are found.")]
Bits = Annotated[
    int | None,
    option(SCHEME, "--bits", help="Bits of a weight: 4, or 8 for smoothquant and int8."),
]
GroupSize = Annotated[
    int | None,
    option(
        SCHEME,
        "--group-size",
        help="Inputs that share a scale, -1 for a whole row: 128; always -1 for smoothquant and "
        "int8.",
    ),
]
Sym = Annotated[
    bool | None,
    option(SCHEME, "--sym/--asym", help="Zero point fixed or a group's own: own for awq."),
]
FormatOption = Annotated[
    Format | None,
    option(SCHEME, "--format", help="Layout of the file; by default the method's best known one."),
]
OverrideOption = Annotated[
    list[str] | None,
    option(
        LAYERS,
        "--override",
        help="Other settings for the layers whose name the expression is found in: "
        "'REGEX:bits=8,group_size=32', 'REGEX:asym', 'REGEX:skip'. May be repeated; the first "
        "that matches counts.",
        metavar="RULE",
    ),
]
SkipOption = Annotated[
    list[str] | None,
    option(
        LAYERS,
        "--skip",
        help="Leave these layers in full precision; comes before any --override. May be repeated.",
        metavar="REGEX",
    ),
]
QuantizeLMHead = Annotated[
    bool, option(LAYERS, "--quantize-lm-head", help="The output head too, where it is not tied.")
]
CalibrationOption = Annotated[
    str | None,
    option(
        CALIBRATION,
        "--calibration",
        help="Text that the model sees: a file (.txt, .jsonl with text or chat messages) or a "
        "dataset of the hub; without it the model writes its own. rtn and int8 need none.",
        metavar="FILE|ID",
    ),
]
NumCalibrationSamples = Annotated[
    int, option(CALIBRATION, "--num-calibration-samples", help="Most samples taken from it.")
]
MaxSeqLength = Annotated[
    int, option(CALIBRATION, "--max-seq-length", help="Most tokens of a sample.")
]
CalibrationSeed = Annotated[
    int, option(CALIBRATION, "--seed", help="Draws the samples, and what a method draws at random.")
]
DampPercent = Annotated[
    float,
    option(METHOD, "--damp-percent", help="First damping of the Hessian (gptq, qqq)."),
]
ActOrder = Annotated[
    bool,
    option(METHOD, "--act-order/--no-act-order", help="Weightiest inputs first (gptq, qqq)."),
]
DescAct = Annotated[
    bool,
    option(
        METHOD,
        "--desc-act",
        help="Groups follow that order too: a little better, slower to read (gptq).",
    ),
]
TrueSequential = Annotated[
    bool,
    option(
        METHOD,
        "--true-sequential/--no-true-sequential",
        help="Later layers of a block see the earlier ones quantized (gptq, qqq).",
    ),
]
ScaleSearch = Annotated[
    bool | None,
    option(
        METHOD,
        "--scale-search/--no-scale-search",
        help="Search each group's range, not its largest value (gptq, qqq; rtn only if asked).",
    ),
]
TransformOption = Annotated[
    Transform | None,
    option(METHOD, "--transform", help="What is done to outliers first (qqq); by family."),
]
SmoothAlpha = Annotated[
    float,
    option(
        METHOD,
        "--smooth-alpha",
        help="Share of the outliers' size that moves into the weights (smoothquant).",
    ),
]
ComputeDTypeOption = Annotated[
    ComputeDType, option(RUN, "--dtype", help="Type in which blocks run during calibration.")
]
BackendOption = Annotated[
    Backend, option(RUN, "--backend", help="Who quantizes: llmbench, or a peer that is installed.")
]
BackendPython = Annotated[
    Path | None,
    option(
        RUN,
        "--backend-python",
        help="Python interpreter of the environment that the peer is installed in.",
        metavar="PATH",
    ),
]
Evaluate = Annotated[
    Path | None,
    option(
        CHECK,
        "--evaluate",
        help="Then measure perplexity and KL divergence against the base on this text.",
        metavar="FILE",
    ),
]
