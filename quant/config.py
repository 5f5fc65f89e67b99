"""What a quantization run is asked to do.

A `Scheme` says which numbers a linear layer may hold; a `QuantConfig` says which method finds
them, from which calibration tokens, and which layers differ. Layers differ by regular expressions
over module names: the first match wins, so the special case is written before the general one.
No torch here: a wrong setting is refused before anything heavy is imported.
"""

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args

from llmbench.quant.errors import ConfigError

Method = Literal["rtn", "gptq", "awq", "qqq", "smoothquant", "int8"]
Activations = Literal["none", "int8"]
Format = Literal["gptq", "gptq_v2", "awq", "qqq", "compressed-tensors", "bitsandbytes"]
Transform = Literal["smooth", "rotate", "none"]

METHODS: tuple[Method, ...] = get_args(Method)
FORMATS: tuple[Format, ...] = get_args(Format)
BITS = (2, 3, 4, 8)
PER_CHANNEL = -1
"""The group size that means one group a row, as checkpoints write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Which numbers a linear layer's weight and input may hold.

    Attributes:
        group_size: Input channels that share a scale; -1 is the whole row.
        sym: Codes around a fixed zero; otherwise every group has a zero point of its own.
        activations: `int8` rounds each token's input to 8 bits at run time (W4A8, W8A8).
    """

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    activations: Activations = "none"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"bits is {self.bits}, expected one of {', '.join(map(str, BITS))}")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            error = ConfigError(f"group_size is {self.group_size}, expected -1 or a positive size")
            error.add_note("-1 is one scale per output channel; 32, 64 and 128 are usual")
            raise error
        if self.activations not in get_args(Activations):
            raise ConfigError(f"activations is {self.activations!r}, expected none or int8")

    def num_groups(self, in_features: int) -> int:
        """Groups of a row; the size must divide the row (the plan has checked it)."""
        return 1 if self.group_size == PER_CHANNEL else in_features // self.group_size

    @property
    def name(self) -> str:
        """The field's short name, such as `W4A16`."""
        return f"W{self.bits}A{8 if self.activations == 'int8' else 16}"


DEFAULT_SCHEMES: dict[Method, Scheme] = {
    "rtn": Scheme(),
    "gptq": Scheme(),
    "awq": Scheme(sym=False),
    "qqq": Scheme(activations="int8"),
    "smoothquant": Scheme(bits=8, group_size=PER_CHANNEL, activations="int8"),
    "int8": Scheme(bits=8, group_size=PER_CHANNEL, activations="int8"),
}
"""What a method makes where nothing else is asked. AWQ's format and its readers expect zero
points; the 8-bit methods scale whole rows, so that their products stay integer sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Other settings for the layers whose whole name a regular expression finds a place in.

    Attributes:
        pattern: Searched for in the module's name, as `re.search` does.
        skip: Leave the layer in full precision.
        bits, group_size, sym: None keeps the run's own.
    """

    pattern: str
    skip: bool = False
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                f"override pattern {self.pattern!r} is no regular expression: {error}"
            ) from None
        if not self.skip and (self.bits, self.group_size, self.sym) == (None, None, None):
            raise ConfigError(f"override {self.pattern!r} changes nothing")

    def matches(self, name: str) -> bool:
        """Whether the layer of this name is meant."""
        return re.search(self.pattern, name) is not None

    def apply(self, scheme: Scheme) -> Scheme:
        """The run's scheme with this override's changes."""
        changes = {
            key: value
            for key in ("bits", "group_size", "sym")
            if (value := getattr(self, key)) is not None
        }
        return replace(scheme, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """One quantization run.

    Attributes:
        format: None writes the method's default file (`formats.registry.default_format`).
        overrides: In order of precedence; a layer follows the first one that matches.
        quantize_lm_head: The output head too; refused for tied embeddings.
        damp_percent: First rung of GPTQ's damping ladder, a share of the Hessian's mean diagonal.
        act_order: Quantize columns in descending order of the Hessian's diagonal, with the
            groups where they are (static groups): no cost for the reader.
        desc_act: Groups follow that order too, which readers must undo at run time (`g_idx`).
        true_sequential: Later layers of a block see the quantized outputs of the earlier ones.
        scale_search: Search each group's range instead of taking its largest value. None does
            so for all methods but `rtn`: the baseline is the plain rule, which is also a little
            better there (perplexity 29.4 against 30.1 on SmolLM2-135M in groups of 64).
        transform: What QQQ does to outliers first; None chooses by family.
        smooth_alpha: SmoothQuant's migration strength.
        compute_dtype: The type in which blocks run during calibration.
    """

    method: Method = "gptq"
    scheme: Scheme = field(default_factory=Scheme)
    format: Format | None = None
    overrides: tuple[Override, ...] = ()
    quantize_lm_head: bool = False
    num_calibration_samples: int = 128
    max_seq_length: int = 512
    seed: int = 0
    damp_percent: float = 0.01
    act_order: bool = True
    desc_act: bool = False
    true_sequential: bool = True
    scale_search: bool | None = None
    transform: Transform | None = None
    smooth_alpha: float = 0.5
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method is {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(f"format is {self.format!r}, expected one of {', '.join(FORMATS)}")
        for name in ("num_calibration_samples", "max_seq_length"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        if not 0 < self.damp_percent < 1:
            raise ConfigError(f"damp_percent is {self.damp_percent}, expected between 0 and 1")
        if not 0 <= self.smooth_alpha <= 1:
            raise ConfigError(f"smooth_alpha is {self.smooth_alpha}, expected between 0 and 1")

    @property
    def needs_calibration(self) -> bool:
        """Whether the method looks at activations."""
        return self.method not in ("rtn", "int8")

    @property
    def searches_scales(self) -> bool:
        """Whether groups' ranges are searched."""
        return self.method != "rtn" if self.scale_search is None else self.scale_search

    def scheme_of(self, name: str) -> Scheme | None:
        """The scheme of the layer of this module name; None leaves it in full precision."""
        for override in self.overrides:
            if override.matches(name):
                return None if override.skip else override.apply(self.scheme)
        return self.scheme

    def to_json(self) -> dict[str, Any]:
        """All settings as plain values, for the manifest."""
        return {spec.name: _plain(getattr(self, spec.name)) for spec in fields(self)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Settings from a manifest."""
        values = dict(record)
        values["scheme"] = Scheme(**values["scheme"])
        values["overrides"] = tuple(Override(**item) for item in values["overrides"])
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Scheme | Override):
        return {spec.name: getattr(value, spec.name) for spec in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
