"""The two sides of `vs-transformers`: the built-in engine and transformers' own `generate`.

Each lives in a process of its own, which does nothing while the other one is timed: they share
neither threads nor caches of their libraries, and the memory of each can be read by itself. A side
that is not asked waits for a message; that its threads do not spin meanwhile is measured.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

from llmbench.bench.client.messages import Failed
from llmbench.bench.client.processes import (
    connected_pair,
    describe_exit,
    failure,
    peak_resident_bytes,
    raise_failure,
    spawn,
    stop_process,
)
from llmbench.bench.errors import TargetError
from llmbench.engine.config import Device, EngineConfig

Prompts = Sequence[Sequence[int]]


class Side(Protocol):
    """What is timed. Both answer greedily, to the full length, and give token ids."""

    def generate(self, prompts: Prompts, output_len: int) -> float:
        """Seconds to answer prompts that come all at once."""

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds to compute a prompt and the likeliest token after it."""

    def score(self, window: Sequence[int]) -> tuple[float, float]:
        """Seconds to compute the log-probability of each token but the first; their sum, nats."""

    def facts(self) -> dict[str, Any]:
        """Memory of the process, and which code runs."""


class MakeSide(Protocol):
    """Loads a side; picklable."""

    def __call__(self) -> Side:
        """Load the model."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """The engine of a configuration."""

    config: EngineConfig

    def __call__(self) -> Side:
        """Load the model."""
        return _BuiltInSide(self.config)


@dataclass(frozen=True, slots=True)
class Transformers:
    """`AutoModelForCausalLM` as it comes, in the type of the other side."""

    folder: Path
    dtype: str
    device: Device
    num_threads: int | None
    is_dummy: bool

    def __call__(self) -> Side:
        """Load the model."""
        return _TransformersSide(self)


class _BuiltInSide:
    def __init__(self, config: EngineConfig) -> None:
        from llmbench.engine.engine_core import EngineCore

        self._core = EngineCore(config)

    def generate(self, prompts: Prompts, output_len: int) -> float:
        from llmbench.engine.request import SamplingParams

        core = self._core
        core.reset_prefix_cache()
        core.step_records.clear()
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        requests = [
            request
            for index, prompt in enumerate(prompts)
            for request in core.make_requests(prompt, params, f"prompt-{index}")
        ]
        for request in requests:
            core.add_request(request)
        while core.has_unfinished:
            core.step()
        seconds = time.perf_counter() - started
        assert all(request.num_output_tokens == output_len for request in requests)
        return seconds

    def prefill(self, prompt: Sequence[int]) -> float:
        return self.generate([prompt], 1)

    def score(self, window: Sequence[int]) -> tuple[float, float]:
        from llmbench.engine.scoring import ScoreRequest, ScoringEngine

        self._core.reset_prefix_cache()
        request = ScoreRequest(context=tuple(window[:1]), continuations=(tuple(window[1:]),))
        started = time.perf_counter()
        ((_, (answer,)),) = ScoringEngine(self._core).score([request])
        return time.perf_counter() - started, answer.loglikelihood

    def facts(self) -> dict[str, Any]:
        plan = self._core.memory_plan
        return {
            "kernel": self._core.loaded.model.kernel,
            "peak_resident_bytes": peak_resident_bytes(),
            "weight_bytes": plan.weight_bytes,
            "kv_bytes": plan.kv_bytes,
        }


class _TransformersSide:
    def __init__(self, make: Transformers) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        from llmbench.engine.device import resolve_device

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if make.num_threads is not None:
            torch.set_num_threads(make.num_threads)
        dtype = getattr(torch, make.dtype)
        if make.is_dummy:
            config = AutoConfig.from_pretrained(make.folder)
            self._model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype
            )
        else:
            self._model = AutoModelForCausalLM.from_pretrained(make.folder, dtype=dtype)
        self._model = self._model.to(resolve_device(make.device)).eval()
        self._model.generation_config.eos_token_id = None  # answers run to their full length

    def generate(self, prompts: Prompts, output_len: int) -> float:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(prompt) for prompt in prompts], device=self._model.device)
            started = time.perf_counter()
            answers = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                do_sample=False,
                pad_token_id=0,
            ).tolist()
            seconds = time.perf_counter() - started
        assert all(len(answer) == ids.shape[1] + output_len for answer in answers)
        return seconds

    def prefill(self, prompt: Sequence[int]) -> float:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(prompt)], device=self._model.device)
            started = time.perf_counter()
            output = self._model(ids, use_cache=True, logits_to_keep=1)
            output.logits[:, -1].argmax(dim=-1).tolist()
            return time.perf_counter() - started

    def score(self, window: Sequence[int]) -> tuple[float, float]:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(window)], device=self._model.device)
            started = time.perf_counter()
            logits = self._model(ids, use_cache=False).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            return time.perf_counter() - started, -loss

    def facts(self) -> dict[str, Any]:
        return {
            "kernel": f"transformers {self._model.config._attn_implementation}",
            "peak_resident_bytes": peak_resident_bytes(),
        }


class SideProcess:
    """The parent's handle on a side; use `stop` to end it."""

    def __init__(self, make_side: MakeSide, name: str) -> None:
        self._connection, theirs = connected_pair()
        self._process = spawn(_serve, theirs, make_side, name=f"llmbench {name}")
        theirs.close()

    def wait_until_ready(self) -> None:
        """Return once the model is loaded, or raise the error that its loading raised."""
        self._receive()

    def generate(self, prompts: Prompts, output_len: int) -> float:
        """Seconds to answer the prompts, on the side's own clock."""
        seconds: float = self._call("generate", prompts, output_len)
        return seconds

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds to compute the prompt, on the side's own clock."""
        seconds: float = self._call("prefill", prompt)
        return seconds

    def score(self, window: Sequence[int]) -> tuple[float, float]:
        """Seconds to score the window's tokens but the first, and their log-probability."""
        answer: tuple[float, float] = self._call("score", window)
        return answer

    def facts(self) -> dict[str, Any]:
        """Memory of the process so far, and which code runs."""
        facts: dict[str, Any] = self._call("facts")
        return facts

    def cpu_s(self) -> float:
        """Processor time that the process has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        stop_process(self._process, timeout_s=1.0)

    def _call(self, method: str, *args: object) -> Any:
        try:
            self._connection.send((method, args))
        except OSError as error:
            raise self._died() from error
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(answer, Failed):
            raise_failure(answer)
        return answer

    def _died(self) -> TargetError:
        return TargetError(
            f"{self._process.name} ended unexpectedly ({describe_exit(self._process)})"
        )


def _serve(connection: Connection, make_side: MakeSide) -> None:
    try:
        side = make_side()
    except Exception as error:
        connection.send(failure(error))
        return
    connection.send("ready")
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(side, method)(*args)
        except Exception as error:
            answer = failure(error)
        connection.send(answer)
