"""Other projects that quantize: what each can be asked for, and which versions work together.

Their releases follow torch's and transformers' closely and break with them, so a peer lives in an
environment of its own and the versions here are ones that have been run together on a CPU with
Python 3.11. What a peer cannot do is refused by name before its environment is even looked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llmbench.quant.config import PER_CHANNEL, Format, Method, QuantConfig

GPTQMODEL_GROUP_SIZES = (PER_CHANNEL, 16, 32, 64, 128, 256, 512, 1024)
"""As its `QuantizeConfig` accepts them."""
QQQ_GROUP_SIZES = (PER_CHANNEL, 128)
"""As the kernels do (QQQ/gptq/qlinear/qlinear_marlin.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A project behind `--backend`.

    Attributes:
        distribution: Its name on PyPI and in an environment's metadata.
        bits: Code widths by method; a method that is absent cannot be asked for.
        formats: Files by method, its own choice first.
        install: Commands that make an environment in which it works.
        works_with: The versions that these commands gave when they were last tried.
        caveat: What a user should know before choosing it; empty for nothing.
        known_failures: Part of an error that it ends with, and the way out.
    """

    name: str
    distribution: str
    bits: Mapping[Method, tuple[int, ...]]
    formats: Mapping[Method, tuple[Format, ...]]
    install: tuple[str, ...]
    works_with: str
    caveat: str = ""
    known_failures: Mapping[str, str]

    def refusal(self, config: QuantConfig) -> str | None:
        """Why this peer cannot do such a run; None if it can."""
        method, scheme = config.method, config.scheme
        if method not in self.bits:
            return f"method {method} is none of {self.name}'s: {', '.join(self.bits)}"
        if scheme.bits not in self.bits[method]:
            known = ", ".join(map(str, self.bits[method]))
            return f"bits {scheme.bits} with {method} is none of {self.name}'s: {known}"
        if config.format is not None and config.format not in self.formats[method]:
            known = ", ".join(self.formats[method])
            return f"format {config.format} with {method} is none of {self.name}'s: {known}"
        if config.overrides or config.quantize_lm_head:
            setting = "quantize_lm_head" if config.quantize_lm_head else "an override"
            return f"{setting} cannot be handed to {self.name}: it gets one scheme for all layers"
        return self._scheme_refusal(config)

    def _scheme_refusal(self, config: QuantConfig) -> str | None:
        method, scheme = config.method, config.scheme
        sizes: tuple[int, ...] | None = None
        if method == "qqq":
            sizes = QQQ_GROUP_SIZES
        elif self.name == "gptqmodel":
            sizes = GPTQMODEL_GROUP_SIZES
        if sizes is not None and scheme.group_size not in sizes:
            known = ", ".join(map(str, sizes))
            return f"group_size {scheme.group_size} with {method} is none of {self.name}'s: {known}"
        if self.name == "autoawq" and scheme.group_size == PER_CHANNEL:
            return "group_size -1 crashes autoawq: it wants groups of 16 to 128"
        writes_zeros = self.name == "autoawq" or (self.name, method) == ("gptqmodel", "awq")
        if writes_zeros and scheme.sym:
            return f"{self.name} writes AWQ with zero points only (sym is true)"
        if method == "qqq" and not scheme.sym:
            return f"{self.name} writes QQQ without zero points only (sym is false)"
        if scheme.activations == "int8" and method != "qqq" and self.name != "llmcompressor":
            return f"activations int8 with {method} is not to be had from {self.name}"
        if config.desc_act and self.name == "llmcompressor":
            return "desc_act is not to be had from llmcompressor: its groups stay in order"
        if config.desc_act and method != "gptq":
            return f"desc_act has no meaning for {method}"
        return None


LLMCOMPRESSOR = Peer(
    name="llmcompressor",
    distribution="llmcompressor",
    bits={
        "rtn": (2, 3, 4, 8),
        "gptq": (2, 3, 4, 8),
        "awq": (2, 3, 4, 8),
        "smoothquant": (8,),
    },
    formats=dict.fromkeys(("rtn", "gptq", "awq", "smoothquant"), ("compressed-tensors",)),
    install=(
        "python3 -m venv ~/envs/llmcompressor",
        "~/envs/llmcompressor/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1",
    ),
    works_with=(
        "llmcompressor 0.14.0.1, compressed-tensors 0.19.0, torch 2.13.0, transformers 5.17.0 "
        "(it refuses newer ones)"
    ),
    caveat="its awq needs an accelerator",
    known_failures={
        "Cannot access accelerator device": (
            "llmcompressor's awq runs on a GPU only; on a CPU autoawq, gptqmodel and llmbench's "
            "own `--method awq` do it"
        ),
    },
)

GPTQMODEL = Peer(
    name="gptqmodel",
    distribution="gptqmodel",
    bits={"gptq": (2, 3, 4, 8), "awq": (4,), "qqq": (4,)},
    formats={"gptq": ("gptq", "gptq_v2"), "awq": ("awq",), "qqq": ("qqq",)},
    install=(
        "python3 -m venv ~/envs/gptqmodel",
        "~/envs/gptqmodel/bin/pip install torch==2.14.1 gptqmodel==7.7.0",
    ),
    works_with=(
        "gptqmodel 7.7.0, torch 2.14.1 (older ones are refused), transformers 5.24.0; "
        "optimum 2.3.0 beside them for transformers to load its files"
    ),
    caveat="the first load of a file compiles kernels, which takes a minute or two",
    known_failures={
        "not divisible": (
            "QQQ's tiles want widths that are multiples of 64 and 128: `--method qqq` of llmbench "
            "writes such layers into a compressed-tensors file"
        ),
    },
)

AUTOAWQ = Peer(
    name="autoawq",
    distribution="autoawq",
    bits={"awq": (4,)},
    formats={"awq": ("awq",)},
    install=(
        "python3 -m venv ~/envs/autoawq",
        "~/envs/autoawq/bin/pip install torch==2.13.0 transformers==5.24.0 setuptools wheel",
        "~/envs/autoawq/bin/pip install --no-build-isolation torch==2.13.0 "
        "transformers==5.24.0 autoawq==0.2.9",
    ),
    works_with="autoawq 0.2.9 (its last release), torch 2.13.0, transformers 5.24.0",
    caveat=(
        "no longer maintained; on a CPU it takes many minutes for the smallest models, and its "
        "search is right only with the copies of weights that llmbench has it keep there"
    ),
    known_failures={
        "AssertionError": (
            "its clip search wants out_features that are multiples of 64, and its groups "
            "in_features that are multiples of the group size"
        ),
    },
)

AUTO_GPTQ = Peer(
    name="auto-gptq",
    distribution="auto-gptq",
    bits={"gptq": (2, 3, 4, 8)},
    formats={"gptq": ("gptq",)},
    install=(
        "python3 -m venv ~/envs/auto-gptq",
        "~/envs/auto-gptq/bin/pip install torch==2.13.0 auto-gptq==0.7.1 transformers==4.40.2 "
        "peft==0.10.0 accelerate==0.29.3 'datasets<2.20' 'pandas<2.3' 'numpy<2'",
    ),
    works_with=(
        "auto-gptq 0.7.1 (its last release, of March 2024) with transformers and peft of that "
        "spring, 4.40.2 and 0.10.0, torch 2.13.0"
    ),
    caveat=(
        "it quantizes on a CUDA GPU only; pip installs it beside newer versions, but `import "
        "auto_gptq` fails there (tried: transformers 5.24.0 and 4.46); it is no longer "
        "maintained, and gptqmodel, to which its authors point, writes the same files"
    ),
    known_failures={
        "requires CUDA available": (
            "auto-gptq quantizes on a GPU only: gptqmodel and llmbench's own `--method gptq` do "
            "it on a CPU, into the same files"
        ),
        "cannot import name": "it is installed beside versions that it does not work with",
    },
)

PEERS: dict[str, Peer] = {
    peer.name: peer for peer in (GPTQMODEL, LLMCOMPRESSOR, AUTO_GPTQ, AUTOAWQ)
}
