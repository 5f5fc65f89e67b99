"""From an EngineConfig to a model in memory.

Everything that can be wrong is found out first, from headers and configs alone: the files against
one another (quant/checkpoint.py), the config against what the decoder can run, every tensor's
name and shape, the model length, and whether the weights fit. Then the tensors are read one
after another, each cast as it comes, so that the model is never in memory twice.
"""

import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmbench.engine.config import EngineConfig
from llmbench.engine.device import check_fits, free_memory_bytes, resolve_device
from llmbench.engine.errors import ConfigError, KernelBuildError, UnsupportedModelError
from llmbench.engine.models.architecture import DecoderArchitecture
from llmbench.engine.models.decoder import Decoder
from llmbench.engine.models.dummy_weights import draw_weights
from llmbench.engine.models.families import FAMILIES, text_config
from llmbench.engine.models.hf_config import load_hf_config, model_length_limits
from llmbench.engine.models.quantized import CheckpointWeights
from llmbench.engine.models.registry import Model, choose_architecture
from llmbench.engine.models.rope_tables import inverse_frequencies
from llmbench.engine.models.source import engine_errors, open_checkpoint, resolve_folder
from llmbench.engine.models.tokenizer import end_of_text_ids, has_tokenizer, load_tokenizer
from llmbench.engine.models.weight_names import (
    WeightNames,
    check_weights,
    has_own_head,
    read_weights,
)
from llmbench.quant.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmbench.engine.kernels.reference import TorchOps

logger = logging.getLogger(__name__)

SLOW_KERNEL = "reference"
COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, with what the engine must know about it.

    Attributes:
        architecture: None where transformers' own code runs the model.
        checkpoint: None with `dummy` weights.
        quantization: File format and schemes of a quantized checkpoint, for records; else None.
        free_bytes: Free memory of the device before the weights were loaded.
    """

    model: Model
    folder: Path
    hf_config: Any
    architecture: DecoderArchitecture | None
    checkpoint: Checkpoint | None
    quantization: dict[str, Any] | None = None
    tokenizer: "PreTrainedTokenizerBase | None"
    eos_token_ids: frozenset[int]
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    kv_bytes_per_token: int
    weight_bytes: int
    free_bytes: int


def load_model(config: EngineConfig) -> LoadedModel:
    """Load the model, and its tokenizer where it has one.

    Raises:
        CheckpointError: the files are missing, broken or contradict one another.
        UnsupportedModelError: a sound checkpoint that the asked-for back end cannot run.
        ConfigError: the settings do not fit the model or the machine.
        OutOfMemoryError: the weights do not fit; the note shows the sum.
    """
    with engine_errors():
        device = resolve_device(config.device)
        is_dummy = config.load_format == "dummy"
        folder = resolve_folder(config.model, with_weights=not is_dummy)
        checkpoint = None if is_dummy else open_checkpoint(folder)
        stored = None if checkpoint is None else CheckpointWeights.open(checkpoint)
        kernels = Kernels(config, device)
        hf_config = load_hf_config(folder, trust_remote_code=config.trust_remote_code)
        if stored is None:
            _refuse_quantized_dummy(hf_config)
        max_model_len = _model_length(config, hf_config)
        dtype = compute_dtype(config, hf_config, stored, device)
        architecture = choose_architecture(hf_config, config.model_backend)
        free_bytes = free_memory_bytes(device)
        ops = kernels.ops(architecture, dtype)
        if config.kv_cache_dtype == "int8" and architecture is not None:
            ops = _with_int8_cache(ops, dtype)
        model: Model
        if architecture is not None:
            model = _load_decoder(
                config, architecture, hf_config, stored, dtype, device, max_model_len, ops
            )
            kv_bytes_per_token = architecture.kv_bytes_per_token(
                dtype.itemsize, config.kv_cache_dtype
            )
        else:
            from llmbench.engine.models.transformers_backend import load_transformers_model

            model = load_transformers_model(
                folder,
                hf_config,
                stored,
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                seed=config.seed,
                trust_remote_code=config.trust_remote_code,
                kv_cache_dtype=config.kv_cache_dtype,
            )
            kv_bytes_per_token = model.kv_bytes_per_token
        if stored is not None and stored.quantized is not None and SLOW_KERNEL in model.kernel:
            logger.warning(
                "no fast kernel in %s for some layers (%s): their weights are dequantized at "
                "every call, which is slow%s",
                str(dtype).removeprefix("torch."),
                ", ".join(stored.facts["schemes"]) if stored.facts else "",
                "; --dtype bfloat16 has more kernels" if dtype is torch.float32 else "",
            )
        tokenizer = _load_tokenizer(config, folder, hf_config)
        text = text_config(hf_config)
        return LoadedModel(
            model=model,
            folder=folder,
            hf_config=hf_config,
            architecture=architecture,
            checkpoint=checkpoint,
            quantization=None if stored is None else stored.facts,
            tokenizer=tokenizer,
            eos_token_ids=end_of_text_ids(folder, hf_config, tokenizer),
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            kv_bytes_per_token=kv_bytes_per_token,
            weight_bytes=model.weight_bytes,
            free_bytes=free_bytes,
        )


def _load_decoder(
    config: EngineConfig,
    arch: DecoderArchitecture,
    hf_config: Any,
    stored: CheckpointWeights | None,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    ops: "TorchOps | None",
) -> Decoder:
    names = FAMILIES[hf_config.model_type].weight_names
    if stored is not None:
        arch = with_own_head(arch, names, stored)
        check_weights(arch, names, stored)
    num_parameters, quantized_bytes = arch.num_parameters, 0
    if stored is not None:
        num_parameters -= stored.num_quantized_parameters
        quantized_bytes = stored.quantized_bytes
    if arch.tie_embeddings and device.type == "cpu" and dtype is torch.bfloat16:
        # oneDNN reorders the head's matrix; the embeddings need the plain one beside it.
        num_parameters += arch.vocab_size * arch.hidden_size
    check_fits(num_parameters, dtype, device, quantized_bytes=quantized_bytes)
    ropes = inverse_frequencies(text_config(hf_config), arch, max_model_len)
    decoder = Decoder(arch, ropes, dtype=dtype, device=device, ops=ops)
    if stored is None:
        decoder.load_weights(draw_weights(arch, seed=config.seed, dtype=dtype, device=device))
    else:
        decoder.load_weights(read_weights(arch, names, stored))
    return decoder


def with_own_head(
    arch: DecoderArchitecture, names: WeightNames, stored: CheckpointWeights
) -> DecoderArchitecture:
    """The architecture, untied where the checkpoint's head differs from its embeddings."""
    if not arch.tie_embeddings or not has_own_head(names, stored):
        return arch
    logger.warning(
        "%s ties embeddings in its config but stores a head of its own, which is used",
        stored.folder,
    )
    return replace(arch, tie_embeddings=False)


def _with_int8_cache(ops: "TorchOps | None", dtype: torch.dtype) -> "TorchOps":
    """The operations with a KV cache of 8 bits, whose attention is torch's."""
    from llmbench.engine.kernels.eager import EagerOps
    from llmbench.engine.kernels.int8_cache_ops import Int8CacheOps

    if ops is not None:
        logger.warning(
            "kv_cache_dtype int8 takes torch's attention in place of the compiled one, which is "
            "slower"
        )
    return Int8CacheOps(ops if ops is not None else EagerOps(dtype))


def _refuse_quantized_dummy(hf_config: Any) -> None:
    """Random weights are drawn in full precision, which a quantized config does not mean."""
    for part in (hf_config, text_config(hf_config)):
        if getattr(part, "quantization_config", None) is not None:
            error = UnsupportedModelError(
                f"load_format dummy draws full-precision weights, and this {hf_config.model_type} "
                "config describes a quantized model (quantization_config)"
            )
            error.add_note("take the config of the model that was quantized")
            raise error


class Kernels:
    """The C++ kernels, compiled in a thread of their own while configs and weights are read.

    A daemon thread: whatever ends the program meanwhile need not wait for the compiler.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._is_demanded = config.compile is True
        self._failure: KernelBuildError | None = None
        self._thread: threading.Thread | None = None
        if device.type == "cpu" and config.compile is not False:
            self._thread = threading.Thread(target=self._build, daemon=True)
            self._thread.start()
        elif self._is_demanded:
            raise ConfigError(f"compile builds kernels for the CPU, the device is {device.type}")

    def ops(self, arch: DecoderArchitecture | None, dtype: torch.dtype) -> "TorchOps | None":
        """The kernels for a model and its type; None takes the decoder's default.

        Raises KernelBuildError or ConfigError where kernels are demanded and cannot be had.
        """
        if self._thread is None:
            return None
        from llmbench.engine.kernels.cpu_ops import CpuOps, unsupported_reason

        reason = unsupported_reason(arch, dtype)
        if reason is not None:
            if self._is_demanded:
                raise ConfigError(f"compile is not possible: {reason}")
            if arch is not None:
                logger.warning("%s: running plain torch operations, which are slower", reason)
            return None
        self._thread.join()
        if self._failure is None:
            return CpuOps(dtype)
        if self._is_demanded:
            raise self._failure
        logger.warning("%s: running plain torch operations, which are slower", self._failure)
        return None

    def _build(self) -> None:
        from llmbench.engine.kernels.cpu_build import load_library

        try:
            load_library()
        except KernelBuildError as error:
            self._failure = error


def _model_length(config: EngineConfig, hf_config: Any) -> int:
    limits = model_length_limits(text_config(hf_config))
    if limits is None:
        if config.max_model_len is None:
            error = ConfigError(f"the config of {config.model} states no longest sequence")
            error.add_note("give --max-model-len")
            raise error
        return config.max_model_len
    stated, longest = limits
    if config.max_model_len is None:
        return stated
    if config.max_model_len > longest:
        error = ConfigError(
            f"max_model_len is {config.max_model_len}, the model's own longest is {longest} tokens"
        )
        error.add_note(f"give --max-model-len {longest} or less")
        raise error
    return config.max_model_len


def compute_dtype(
    config: EngineConfig, hf_config: Any, stored: CheckpointWeights | None, device: torch.device
) -> torch.dtype:
    """The type to compute in: the asked-for one, else the checkpoint's."""
    on_cpu = device.type == "cpu"
    if config.dtype != "auto":
        if config.dtype == "float16" and on_cpu:
            error = ConfigError("dtype float16 is not for CPUs, whose float16 is 20 times slower")
            error.add_note("use --dtype bfloat16, or float32 for exactness")
            raise error
        asked: torch.dtype = getattr(torch, config.dtype)
        return asked
    dtype = getattr(hf_config, "dtype", None) or getattr(text_config(hf_config), "dtype", None)
    if dtype is None and stored is not None and stored.float_dtype is not None:
        dtype = getattr(torch, stored.float_dtype)
    if dtype is torch.float16 and on_cpu:
        logger.info("the checkpoint is float16: running in bfloat16, which CPUs compute faster")
        return torch.bfloat16
    return dtype if dtype in COMPUTE_DTYPES else torch.float32


def _load_tokenizer(
    config: EngineConfig, folder: Path, hf_config: Any
) -> "PreTrainedTokenizerBase | None":
    """The asked-for tokenizer, else the model's own; None where the model has none."""
    trust = config.trust_remote_code
    if config.tokenizer is not None:
        other = resolve_folder(config.tokenizer, with_weights=False)
        # The other folder's config decides about its tokenizer's class.
        return load_tokenizer(other, None, trust_remote_code=trust)
    if not has_tokenizer(folder):
        logger.warning("%s has no tokenizer: prompts must be token ids", folder)
        return None
    return load_tokenizer(folder, hf_config, trust_remote_code=trust)
