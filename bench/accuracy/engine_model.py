"""A checkpoint on the built-in engine, as an evaluation sees it.

Weights are read when the first question without an answer comes: who the model is, how it cuts
text into tokens and how long it reads is known from its files, so a run that finds everything
answered loads nothing. The identity names what decides about an answer: every byte of the
checkpoint's weights, the type and kernels it is computed with, the KV cache's type, the tokenizer
and the tokens that end an answer, and the engine's very sources. Batch size, threads and cache
sizes are not part of it; without compiled kernels they may move the last bit of a score.
"""

import functools
import gc
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench.accuracy.model import GenerateRequest
from llmbench.bench.accuracy.model_digest import dummy_digest, weights_digest
from llmbench.bench.environment import cpu_facts, gpu_facts, package_versions
from llmbench.bench.errors import BenchError
from llmbench.bench.model_facts import read_model_facts
from llmbench.engine.config import EngineConfig
from llmbench.engine.models.hf_config import load_hf_config
from llmbench.engine.models.source import resolve_folder
from llmbench.engine.models.tokenizer import end_of_text_ids, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmbench.engine.engine_core import EngineCore
    from llmbench.engine.models.head import Head
    from llmbench.engine.request import SamplingParams
    from llmbench.engine.scoring import ContinuationScore, ScoreRequest, ScoringEngine

_REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCE_FOLDERS = ("quant", "engine", "bench/accuracy")
"""What computes logits from a checkpoint and scores from logits."""


class EngineModel:
    """An `EvaluatedModel` on the built-in engine."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """Read the model's files but for its weights; raises EngineError where they are broken.

        `on_progress` hears a line a stage when the weights are loaded.
        """
        self.config = config
        self.name = name or config.model
        self.folder = resolve_folder(config.model, with_weights=config.load_format != "dummy")
        self.facts = read_model_facts(self.folder, config)
        self.max_length = self.facts.max_model_len
        self._on_progress = on_progress
        self._scoring: ScoringEngine | None = None

    @functools.cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The asked-for tokenizer, else the model's own."""
        trust = self.config.trust_remote_code
        if self.config.tokenizer is not None:
            other = resolve_folder(self.config.tokenizer, with_weights=False)
            return load_tokenizer(other, None, trust_remote_code=trust)
        return load_tokenizer(self.folder, self._hf_config, trust_remote_code=trust)

    @functools.cached_property
    def _hf_config(self) -> Any:
        return load_hf_config(self.folder, trust_remote_code=self.config.trust_remote_code)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """All that an answer may depend on besides the request.

        Hashes the weight files, which takes a second a gigabyte unless it is remembered.
        """
        config, facts = self.config, self.facts
        ends = end_of_text_ids(self.folder, self._hf_config, self.tokenizer)
        return {
            "kind": "engine",
            "model_digest": self._weights_digest(),
            "tokenizer": tokenizer_digest(self.tokenizer),
            "end_of_text_ids": sorted(ends),
            "quantization": facts.quantization,
            "dtype": facts.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "model_backend": config.model_backend,
            "kernels": self._kernels(),
            "max_model_len": facts.max_model_len,  # some position encodings depend on it
            "device": _device_name(config),
            "packages": package_versions(("llmbench", "torch", "transformers", "tokenizers")),
            "sources": _source_digest(),
        }

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._scoring is not None

    def load(self) -> "EngineCore":
        """Load the weights, if they are not there yet."""
        return self._engine().core

    @property
    def notices(self) -> tuple[str, ...]:
        """None: the identity says it all."""
        return ()

    def check_scores(self) -> None:
        """Do nothing: every model on the engine scores."""

    def score(
        self, requests: "Sequence[ScoreRequest]", *, with_hidden: bool = False
    ) -> "Iterator[tuple[int, tuple[ContinuationScore, ...]]]":
        """Yield (index of the request, scores of its continuations) in order of completion."""
        if requests:
            yield from self._engine().score(requests, with_hidden=with_hidden)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, str]]:
        """Yield (index of the request, its answer's text) in order of completion."""
        if not requests:
            return
        prompts = [request.prompt for request in requests]
        params = [self._sampling(request) for request in requests]
        for index, result in self._engine().generate(prompts, params):
            answer = result.answers[0]
            if answer.error is not None:
                raise BenchError(f"the engine could not answer a prompt: {answer.error}")
            yield index, answer.text

    def head(self) -> "Head":
        """What turns a final hidden state into float32 logits, for divergence.

        Scores come from the type of computation. In bfloat16 it rounds logits to 8 bits, more
        than a good candidate differs from its base, so distances are measured on finer ones.
        Shares the loaded model's weights where it can, else reads the head alone.
        """
        from llmbench.engine.models.head import load_float32_head

        loaded = None if self._scoring is None else self._scoring.core.loaded
        return load_float32_head(self.config, loaded)

    def close(self) -> None:
        """Give the memory back; a later question loads the weights again."""
        self._scoring = None
        gc.collect()  # the engine's parts know one another in circles

    def _engine(self) -> "ScoringEngine":
        if self._scoring is None:
            from llmbench.engine.engine_core import EngineCore
            from llmbench.engine.scoring import ScoringEngine

            self._scoring = ScoringEngine(EngineCore(self.config, on_progress=self._on_progress))
        return self._scoring

    def _sampling(self, request: GenerateRequest) -> "SamplingParams":
        from llmbench.engine.request import SamplingParams

        # A special token leaves no text behind, so a stop string that is one is met as an id.
        specials = {
            added.content: token_id
            for token_id, added in self.tokenizer.added_tokens_decoder.items()
            if added.special
        }
        return SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop=request.until,
            stop_token_ids=tuple(specials[stop] for stop in request.until if stop in specials),
        )

    def _weights_digest(self) -> str:
        if self.facts.digest is None:
            return dummy_digest(self.folder, self.config.seed)
        return weights_digest(
            self.folder,
            with_code=self.config.trust_remote_code,
            on_progress=self._on_progress,
        )

    def _kernels(self) -> str:
        """Which kernels the engine takes; without loading it, so by what its choice depends on."""
        if self.config.compile is False:
            return "torch"
        compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
        has_compiler = any(name and shutil.which(name.split()[0]) for name in compilers)
        return "compiled" if has_compiler else "torch"


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a digest of the rules by which text becomes ids: equal for equal tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        parts["truncation"] = parts["padding"] = None  # settings of the last call
        rules = json.dumps(parts, sort_keys=True)
    else:
        rules = repr(sorted(tokenizer.get_vocab().items())) + repr(tokenizer.special_tokens_map)
    return hashlib.sha256(rules.encode()).hexdigest()


def _device_name(config: EngineConfig) -> str:
    """Return the processor that computes: another one may round differently."""
    if config.device != "cpu" and (gpus := gpu_facts()):
        return str(gpus[0]["name"])
    return str(cpu_facts()["model"] or platform.machine())


@functools.cache
def _source_digest() -> str:
    """Return a digest of the sources, so that a changed checkout never meets old answers."""
    sha = hashlib.sha256()
    for folder in _SOURCE_FOLDERS:
        for path in sorted((_REPOSITORY / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                sha.update(str(path.relative_to(_REPOSITORY)).encode())
                sha.update(path.read_bytes())
    return sha.hexdigest()
