"""Any decoder-only model that transformers can run, over our paged KV cache.

The modelling code is transformers' own; only attention is ours (hf_attention.py). All sequences
of a step go through as one row [1, T] with their own positions and no cache object, so nothing
but attention may pass information from token to token. What does (recurrent layers, convolutions,
biases by distance) would run without an error and answer wrongly: a model is therefore accepted
only after hf_probe.py has seen it compute, in pieces and in company, what it computes alone.
"""

import copy
import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.config import KVCacheDType
from llmbench.engine.device import check_fits, zeros
from llmbench.engine.errors import CheckpointError, EngineError, UnsupportedModelError
from llmbench.engine.layers.output_head import Float32Linear
from llmbench.engine.memory import int8_row_bytes, kv_row_bytes
from llmbench.engine.models import hf_attention
from llmbench.engine.models.families import text_config
from llmbench.engine.models.hf_attention import ATTENTION, Step, attention_step
from llmbench.engine.models.hf_probe import probe
from llmbench.engine.models.hf_quantized import (
    QuantizedModule,
    quantized_loading,
    quantized_modules,
)
from llmbench.engine.models.linear_weights import StoredWeight
from llmbench.engine.models.quantized import CheckpointWeights
from llmbench.engine.models.rope_tables import fix_model_length

logger = logging.getLogger(__name__)

RECURRENT = "layers that carry state from token to token outside attention"
REFUSED = {
    "bloom": "a position bias by distance (ALiBi)",
    "mpt": "a position bias by distance (ALiBi)",
    "xglm": "attention that does not go through the attention interface",
    "bamba": RECURRENT,
    "falcon_h1": RECURRENT,
    "falcon_mamba": RECURRENT,
    "granitemoehybrid": RECURRENT,
    "jamba": RECURRENT,
    "kimi_linear": RECURRENT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "minimax": RECURRENT,
    "nemotron_h": RECURRENT,
    "olmo_hybrid": RECURRENT,
    "qwen3_5": RECURRENT,
    "qwen3_5_moe": RECURRENT,
    "qwen3_next": RECURRENT,
    "recurrent_gemma": RECURRENT,
    "rwkv": RECURRENT,
    "xlstm": RECURRENT,
    "zamba": RECURRENT,
    "zamba2": RECURRENT,
}
"""Known in advance; whatever is not listed still has to pass the probe."""
PARTS = ("transformers", "torch")
"""What a record calls this back end's operations."""
INT8_CACHE = "int8-kv-torch"
"""And its attention over a KV cache of 8 bits."""


class _Replay(torch.nn.Module):
    """Stands in the decoder's place and returns hidden states that it computed before."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        # In a tuple, so that torch does not register the decoder's weights a second time.
        self._decoder = (decoder,)
        self.output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_decoder"][0], name)


class _Float32Layer(torch.nn.Module):
    """Stands in an output layer's place and multiplies the same weight in float32."""

    def __init__(self, layer: torch.nn.Module, stored: CheckpointWeights | None) -> None:
        super().__init__()
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        self.weight = weight  # modelling code asks it for its type
        part: StoredWeight = weight
        if isinstance(layer, QuantizedModule):
            assert stored is not None, "only a checkpoint holds quantized layers"
            part = stored.get(f"{layer.source}.weight")
            part = part.to(weight.device)
        self._linear = Float32Linear((part,), bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., V] float32."""
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class TransformersModel:
    """A transformers causal language model behind the engine's interface."""

    def __init__(
        self, causal_lm: Any, *, num_layers: int, kv_cache_dtype: KVCacheDType = "auto"
    ) -> None:
        self.causal_lm = causal_lm
        self.kv_cache_dtype = kv_cache_dtype
        self._decoder = _decoder_of(causal_lm)
        self._replay = _Replay(self._decoder)
        # The model's own forward, with its scales and caps of logits, behind known hidden states.
        self._head = _with_module(causal_lm, self._decoder, self._replay)
        self._output_class: Any = None
        self.num_layers = num_layers
        self.cache_shapes: dict[int, tuple[int, int]] = {}
        self._quantized = [
            module.linear for module in quantized_modules(causal_lm) if module.linear is not None
        ]

    @property
    def kernel(self) -> str:
        """What runs: the kernels of quantized layers, each once, and torch's own operations."""
        kernels = dict.fromkeys(linear.kernel for linear in self._quantized)
        parts = [",".join(kernels), *PARTS] if kernels else [*PARTS]
        return "+".join([*parts, INT8_CACHE] if self.kv_cache_dtype == "int8" else parts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, tied ones once, and of quantized layers."""
        plain: int = sum(parameter.nbytes for parameter in self.causal_lm.parameters())
        return plain + sum(linear.weight_bytes for linear in self._quantized)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        itemsize = int(self.causal_lm.dtype.itemsize)
        return sum(
            heads * kv_row_bytes(width, itemsize, self.kv_cache_dtype)
            for heads, width in self.cache_shapes.values()
        )

    def make_kv_cache(self, num_slots: int) -> list[Tensor]:
        """Zeroed K/V tensors [num_slots, 2 * Hkv, D], one a layer; rows of 8 bits if asked for."""
        dtype, device = self.causal_lm.dtype, self.causal_lm.device
        if self.kv_cache_dtype == "int8":
            return [
                zeros((num_slots, heads, int8_row_bytes(width)), torch.int8, device)
                for heads, width in self.cache_shapes.values()
            ]
        return [zeros((num_slots, *shape), dtype, device) for shape in self.cache_shapes.values()]

    def forward(self, batch: ForwardBatch, kv_caches: list[Tensor]) -> Tensor:
        """Hidden states [T, H] after the final norm; writes K/V of the batch's tokens."""
        return self.run(Step(batch, dict(zip(self.cache_shapes, kv_caches, strict=True))))

    def run(self, step: Step) -> Tensor:
        """Hidden states [T, H] of one step."""
        with attention_step(step):
            output = self._decoder(
                input_ids=step.batch.input_ids[None],
                position_ids=step.batch.positions[None],
                use_cache=False,
            )
        self._output_class = type(output)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """The same rows: `forward` has applied the last norm."""
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [L, V] of rows [L, H] of `forward`'s result."""
        return self._logits(self._head, hidden)

    def float32_logits(self, stored: CheckpointWeights | None) -> Callable[[Tensor], Tensor]:
        """`compute_logits` with the output layer, and all behind it, in float32.

        `stored` is the checkpoint, from which a quantized layer's codes are read again.
        """
        layer = self.causal_lm.get_output_embeddings()
        wide = _with_module(self._head, layer, _Float32Layer(layer, stored))
        return functools.partial(self._logits, wide)

    def _logits(self, head: torch.nn.Module, hidden: Tensor) -> Tensor:
        self._replay.output = self._output_class(last_hidden_state=hidden[None])
        rows = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        logits: Tensor = head(input_ids=rows, use_cache=False).logits[0]
        self._replay.output = None
        return logits


def load_transformers_model(
    folder: Path,
    hf_config: Any,
    stored: CheckpointWeights | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    seed: int = 0,
    trust_remote_code: bool = False,
    kv_cache_dtype: KVCacheDType = "auto",
) -> TransformersModel:
    """Load a folder's model, or draw its weights where `stored` is None, and probe it.

    Raises:
        UnsupportedModelError: the model cannot be run this way; says why.
        CheckpointError: the weights do not fill the model.
    """
    check_can_run(hf_config, max_model_len, trust_remote_code=trust_remote_code)
    hf_attention.register()
    options = {
        "dtype": dtype,
        "attn_implementation": ATTENTION,
        "trust_remote_code": trust_remote_code,
    }
    if stored is None:
        check_fits(_count_parameters(hf_config, options), dtype, device)
        causal_lm = _draw(hf_config, options, seed)
    else:
        check_fits(
            stored.num_plain_parameters, dtype, device, quantized_bytes=stored.quantized_bytes
        )
        causal_lm = _read(folder, hf_config, options, stored, device)
    causal_lm = causal_lm.to(device).eval().requires_grad_(False)
    fix_model_length(causal_lm, max_model_len)
    model = TransformersModel(
        causal_lm,
        num_layers=text_config(hf_config).num_hidden_layers,
        kv_cache_dtype=kv_cache_dtype,
    )
    model.cache_shapes = probe(model, vocab_size=text_config(hf_config).vocab_size)
    return model


def check_can_run(hf_config: Any, max_model_len: int, *, trust_remote_code: bool = False) -> None:
    """Refuse by name, before any weight is read, what is known not to work."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = hf_config.model_type
    if kind in REFUSED:
        raise UnsupportedModelError(f"{kind} has {REFUSED[kind]}")
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; a decoder alone is wanted")
    if trust_remote_code and type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return  # its own code decides; the probe has the last word
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"transformers has no causal language model for {kind}")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModelError(f"{kind} has attention that transformers cannot replace")
    config = text_config(hf_config)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_model_len:
        error = UnsupportedModelError(f"{kind} attends in chunks of {chunk} tokens")
        error.add_note(f"--max-model-len {chunk} or less stays within one")
        raise error


def _decoder_of(causal_lm: Any) -> torch.nn.Module:
    """The part of a causal language model that computes hidden states."""
    from transformers import PreTrainedModel

    # Some call their head `decoder`, so what get_decoder finds may be a bare linear layer.
    for part in (causal_lm.get_decoder(), causal_lm.base_model, getattr(causal_lm, "model", None)):
        if isinstance(part, PreTrainedModel) and part is not causal_lm:
            return part
    raise UnsupportedModelError(f"{causal_lm.config.model_type} has no decoder below its head")


def _auto_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _count_parameters(hf_config: Any, options: dict[str, Any]) -> int:
    with torch.device("meta"):
        empty = _auto_model().from_config(copy.deepcopy(hf_config), **options)
    return sum(parameter.numel() for parameter in empty.parameters())


def _draw(hf_config: Any, options: dict[str, Any], seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return _auto_model().from_config(hf_config, **options)
        # A config that passes validation may still make no model, in as many ways as families.
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot build a {hf_config.model_type} model from its config: {error}"
            ) from error


def _read(
    folder: Path,
    hf_config: Any,
    options: dict[str, Any],
    stored: CheckpointWeights,
    device: torch.device,
) -> Any:
    from transformers.utils import logging

    hf_logging: Any = logging
    had_bar, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    is_quantized = stored.quantized is not None
    loading = quantized_loading(hf_config, stored, device) if is_quantized else nullcontext()
    try:
        with loading:
            causal_lm, info = _auto_model().from_pretrained(
                str(folder),
                config=hf_config,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                **options,
            )
    except EngineError:
        raise
    except Exception as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bar:
            hf_logging.enable_progress_bar()
    for what in ("missing_keys", "mismatched_keys"):
        if info.get(what):
            found = info[what]
            names = sorted(name if isinstance(name, str) else str(name[0]) for name in found)
            raise CheckpointError(
                f"{folder}: {what.replace('_', ' ')}: {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )
    unexpected = info.get("unexpected_keys") or ()
    if unused := sorted(name for name in unexpected if not stored.is_consumed(name)):
        logger.warning("%s: %d tensors are not used, such as %s", folder, len(unused), unused[0])
    return causal_lm


def _with_module(
    root: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module
) -> torch.nn.Module:
    """`root` with one of its modules replaced; both share all other modules and weights."""
    path = next(name for name, module in root.named_modules() if module is old)
    top = node = _shallow_copy(root)
    *parents, last = path.split(".")
    for name in parents:
        child = _shallow_copy(node._modules[name])
        node._modules[name] = child
        node = child
    node._modules[last] = new
    return top


def _shallow_copy(module: torch.nn.Module | None) -> torch.nn.Module:
    assert module is not None
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
