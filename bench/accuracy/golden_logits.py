"""Does the engine compute what the codes on disk say? One short text, in float32, both ways.

The expected logits come from transformers' own modules, block by block, with the weights that an
independent reader decodes from the saved files (quant/verify.py) and, where the scheme asks for
it, inputs rounded to 8 bits. The found ones come from the engine running the quantized
checkpoint. A zero point off by one, a swapped nibble or a wrong scale turns a model's answers
into "!!!!" without any error; here it is an error before anybody serves it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmbench.bench.errors import BenchError
from llmbench.engine.config import EngineConfig
from llmbench.engine.window import WindowModel
from llmbench.quant.block_calibration import CalibrationPasses
from llmbench.quant.block_model import BlockModel
from llmbench.quant.checkpoint import Checkpoint, read_config
from llmbench.quant.llm_int8 import OUTLIER_THRESHOLD
from llmbench.quant.verify import IndependentReader

NUM_TOKENS = 24
TOLERANCE = 1e-3
"""Median relative error of a row of logits; float32 rounding gives 1e-6 and wrong codes ~1."""
NUDGE = 1e-6
"""How much copies of the text are disturbed at the embeddings: what float32 itself errs."""
NUM_NUDGED = 7
SENSITIVITY = 2.0
"""Times the largest effect of a nudge that the engine may differ by, besides TOLERANCE. With
8-bit inputs a last bit may move an input to the neighbouring code, and a deep model makes
percents of it; how many is measured on the model itself."""
TOLERANCE_SERVED = 0.2
"""For the type and kernels that the engine serves with: bfloat16 costs some percent over a deep
model, a wrong kernel ~100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenLogits:
    """The comparison's outcome.

    Attributes:
        relative_error: In float32, of the reference kernels.
        tolerance: What it was held against: a fixed share, and the model's own sensitivity.
        served_relative_error: In the type and with the kernel that the engine serves with.
    """

    num_tokens: int
    relative_error: float
    tolerance: float
    served_relative_error: float
    served_dtype: str
    served_kernel: str


class GoldenLogitsError(BenchError):
    """The engine computes something else than the saved codes stand for."""


def check_golden_logits(
    base: Path, quantized: Path, *, trust_remote_code: bool = False
) -> GoldenLogits:
    """Compare the engine's logits of a quantized checkpoint with transformers' own.

    `base` is what it was made from, for the names of its layers.

    Raises:
        GoldenLogitsError: they differ by more than rounding.
    """
    reader = IndependentReader(quantized)
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(read_config(quantized).get("vocab_size", 0)) or _vocab_size(reader)
    tokens = torch.randint(vocab_size, (NUM_TOKENS,), generator=generator).tolist()
    expected, nudged = _expected_logits(base, quantized, reader, tokens, trust_remote_code)
    sensitivity = max(_relative_error(logits, expected) for logits in nudged)
    tolerance = TOLERANCE + SENSITIVITY * sensitivity
    errors: dict[str, float] = {}
    dtype = kernel = ""
    for asked, bound in (("float32", tolerance), ("auto", max(tolerance, TOLERANCE_SERVED))):
        config = EngineConfig(
            model=str(quantized),
            dtype=asked,  # type: ignore[arg-type]
            trust_remote_code=trust_remote_code,
            max_model_len=NUM_TOKENS,
        )
        engine = WindowModel(config, NUM_TOKENS)
        found = engine.logits(engine.hidden(tokens)).float()
        dtype = str(engine.loaded.dtype).removeprefix("torch.")
        kernel = engine.loaded.model.kernel
        del engine
        error = _relative_error(found, expected)
        if not error <= bound:  # NaN too
            raise GoldenLogitsError(
                f"{quantized}: the engine's logits ({dtype}, kernel {kernel}) differ from those of "
                f"the saved weights by {error:.2g} (relative, median of {NUM_TOKENS} positions), "
                f"expected at most {bound:g}"
            )
        errors[asked] = error
    return GoldenLogits(
        num_tokens=NUM_TOKENS,
        relative_error=errors["float32"],
        tolerance=tolerance,
        served_relative_error=errors["auto"],
        served_dtype=dtype,
        served_kernel=kernel,
    )


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Median over the rows of two sets of logits [T, V]."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def _vocab_size(reader: IndependentReader) -> int:
    """Rows of the embeddings, where the config names no vocabulary at its top level."""
    return max(reader.tensor(name).shape[0] for name in reader.names if "embed" in name)


class _DecodedTensors:
    """The saved checkpoint's tensors as a full-precision model has them."""

    def __init__(self, reader: IndependentReader, transposed: set[str]) -> None:
        self._reader = reader
        self._layers = {f"{name}.weight": name for name in reader.layers}
        self._transposed = transposed

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        parts = tuple(f"{name}." for name in self._layers.values())
        others = (
            name
            for name in self._reader.names
            if not name.startswith(parts) or name.endswith(".bias")
        )
        return [*self._layers, *others]

    def get(self, name: str) -> Tensor:
        """A tensor in the orientation that transformers' module has."""
        if name not in self._layers:
            return self._reader.tensor(name)
        weight = torch.from_numpy(self._reader.weight(self._layers[name]))
        return weight.t().contiguous() if self._layers[name] in self._transposed else weight

    def wide(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Everything here is float32 already."""
        return None


@torch.no_grad()
def _expected_logits(
    base: Path,
    quantized: Path,
    reader: IndependentReader,
    tokens: list[int],
    trust_remote_code: bool,
) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of the text, and [NUM_NUDGED, T, V] of it with its embeddings nudged."""
    from transformers import AutoConfig
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    hf_config: Any = AutoConfig.from_pretrained(
        str(quantized), trust_remote_code=trust_remote_code, local_files_only=True
    )
    del hf_config.quantization_config
    checkpoint = Checkpoint.open(base)
    rounded = {name for name in reader.layers if reader.schemes[name]["activations"] == "int8"}
    model = BlockModel(
        checkpoint,
        hf_config,
        _DecodedTensors(reader, _transposed(checkpoint)),
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
    )
    copies = [tokens] * (1 + NUM_NUDGED)
    passes = CalibrationPasses(model, copies)
    passes.start()
    embeddings = passes.hidden_states()[0]  # [1 + NUM_NUDGED, T, H]
    noise = torch.randn(embeddings[1:].shape, generator=torch.Generator().manual_seed(0))
    embeddings[1:] *= 1 + NUDGE * noise
    for index in range(model.num_blocks):
        block = model.load_block(index)
        names = frozenset(name for name in block.linears if name in rounded)
        with passes.at(block, names) as calibration:
            if reader.format == "bitsandbytes":
                calibration.outlier_threshold = OUTLIER_THRESHOLD
            passes.advance()
        model.drop_block(index)
    (hidden,) = passes.hidden_states()
    passes.close()
    model.load_head()
    decoder: Any = model.decoder
    # The model's own head, with its scales and caps, behind the hidden states found above.
    decoder.forward = lambda *args, **kwargs: BaseModelOutputWithPastAndCrossAttentions(
        last_hidden_state=hidden
    )
    logits: Tensor = model.causal_lm(input_ids=torch.tensor(copies), use_cache=False).logits
    return logits[0].float(), logits[1:].float()


def _transposed(base: Checkpoint) -> set[str]:
    from llmbench.quant.linear_layers import find_linears

    return {layer.name for layer in find_linears(base) if layer.is_transposed}
