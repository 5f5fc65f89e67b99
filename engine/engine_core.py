"""EngineCore: one step after another, schedule → run → update.

Everything synchronous and in one thread; llm.py drives it to the end of a list of prompts,
async_engine.py drives it from a thread for streams. Each step leaves a StepRecord. A step that
fails half-way takes all requests with it, since nobody knows how far it came; the engine itself
starts over and can be used again.
"""

import itertools
import logging
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from llmbench.engine.config import EngineConfig
from llmbench.engine.detokenizer import Detokenizer
from llmbench.engine.errors import RequestError
from llmbench.engine.kv.factory import make_kv_manager
from llmbench.engine.memory import MemoryPlan, plan_memory
from llmbench.engine.models.loader import LoadedModel, load_model
from llmbench.engine.request import Request, RequestOutput, RequestStatus, SamplingParams
from llmbench.engine.runner import ModelRunner
from llmbench.engine.sampling.rng import request_seed
from llmbench.engine.sampling.sampler import Sampler
from llmbench.engine.scheduler import Scheduler
from llmbench.engine.shared_prompts import SharedPrompts
from llmbench.engine.step_record import StepRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class EngineCore:
    """A model, a KV pool, a scheduler and the loop between them."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        loaded: LoadedModel | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """Load the model and size the KV pool; `on_progress` hears a line a stage.

        `loaded` takes the place of the model that `config` names (tests, the null model).
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.config = config
        say = on_progress or logger.info
        if loaded is None:
            say(f"loading {config.model}")
            loaded = load_model(config)
        self.loaded = loaded
        self.tokenizer: PreTrainedTokenizerBase | None = loaded.tokenizer
        self.max_model_len = loaded.max_model_len
        self.memory_plan: MemoryPlan = plan_memory(
            config,
            is_cpu=loaded.device.type == "cpu",
            free_bytes=loaded.free_bytes,
            weight_bytes=loaded.weight_bytes,
            kv_bytes_per_token=loaded.kv_bytes_per_token,
            max_model_len=self.max_model_len,
            hidden_size=loaded.hidden_size,
            intermediate_size=loaded.intermediate_size,
            vocab_size=loaded.vocab_size,
            dtype_bytes=loaded.dtype.itemsize,
        )
        say(str(self.memory_plan))
        self._make_queues()
        self.runner = ModelRunner(
            loaded.model,
            self.kv,
            Sampler(),
            device=loaded.device,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
        )
        self.step_records: list[StepRecord] = []
        self._ordinals = itertools.count()
        self._num_steps = 0

    def make_requests(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str
    ) -> list[Request]:
        """The `params.n` requests of one prompt, checked against the model.

        Text is tokenized with the tokenizer's own special tokens. Raises RequestError.
        """
        token_ids = self._encode(prompt)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.loaded.vocab_size:
            self._check_token_ids("prompt token id", token_ids)  # finds which one it is
        self._check_token_ids("stop token id", params.stop_token_ids)
        self._check_token_ids("logit_bias token id", params.logit_bias)
        self._check_token_ids("logprob_token_ids token id", params.logprob_token_ids)
        if params.prompt_logprobs_start > len(token_ids):
            raise RequestError(
                f"prompt_logprobs_start must be at most the prompt's {len(token_ids)} tokens, "
                f"not {params.prompt_logprobs_start}"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model has none")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.loaded.vocab_size:
                raise RequestError(
                    f"{name} must be at most the vocabulary's {self.loaded.vocab_size} tokens, "
                    f"not {count}"
                )
        ordinal = next(self._ordinals)
        requests = []
        for index in range(params.n):
            detokenizer = None
            if params.detokenize and self.tokenizer is not None:
                detokenizer = Detokenizer(self.tokenizer, token_ids, params)
            requests.append(
                Request(
                    request_id=request_id if params.n == 1 else f"{request_id}-{index}",
                    parent_id=request_id,
                    answer_index=index,
                    prompt_token_ids=token_ids,
                    sampling_params=params if params.n == 1 else replace(params, n=1),
                    eos_token_ids=self.loaded.eos_token_ids,
                    rng_seed=request_seed(self.config.seed, params.seed, ordinal, index),
                    detokenizer=detokenizer,
                    arrival_s=time.perf_counter(),
                )
            )
        return requests

    def add_request(self, request: Request) -> None:
        """Queue a request; raises RequestError where it can never run."""
        self.add_requests([request])

    def add_requests(self, requests: Sequence[Request], *, share_across: bool = False) -> None:
        """Queue requests, all or none; raises RequestError as `add_request`.

        Where the prefix cache allows it, what their prompts have in common is computed once: the
        n answers to one prompt, or several prompts behind one context. With `share_across` they
        also wait for a prefix that any other request queued so is about to compute.
        """
        for request in requests:
            if request.request_id in self._requests:
                raise RequestError(
                    f"a request with the id {request.request_id!r} is already running"
                )
        self._prompts.add(requests, share_across=share_across)
        self._requests.update((request.request_id, request) for request in requests)

    def abort(self, request_id: str) -> None:
        """End a request, or all answers to a prompt, in whatever state they are.

        An unknown or finished one is left alone.
        """
        for request in list(self._requests.values()):
            if request_id in (request.request_id, request.parent_id):
                self._prompts.abort(request)
                self._forget(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_unfinished

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no live request holds; returns the blocks forgotten."""
        return self.kv.reset_prefix_cache()

    def step(self) -> list[RequestOutput]:
        """Advance the scheduled requests; returns what is new for each of them.

        Whatever it raises, an interrupt included, has ended all requests with an error.
        """
        try:
            return self._step()
        except BaseException as error:
            self._start_over(f"the step failed: {error!r}")
            raise

    def _step(self) -> list[RequestOutput]:
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        for request in scheduled.preempted:
            self.runner.forget(request)
        after_schedule = time.perf_counter()
        prefill = sum(n for request, n in scheduled.scheduled if _is_prefill(request))
        total = sum(n for _, n in scheduled.scheduled)
        sampled = self.runner.execute(scheduled) if scheduled.scheduled else {}
        after_forward = time.perf_counter()
        # Before `update`: what ends in this step still holds its blocks. The step's own tokens are
        # written by now, and counted as computed only in `update`.
        usage = self.kv.usage()
        outputs = self.scheduler.update(scheduled, sampled)
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(self._requests[output.request_id])
        self._prompts.release()
        if self.config.check_integrity:
            self.scheduler.check_integrity()
        self.step_records.append(
            StepRecord(
                step=self._num_steps,
                start_s=start,
                schedule_s=after_schedule - start,
                forward_s=after_forward - after_schedule,
                update_s=time.perf_counter() - after_forward,
                num_waiting=len(self.scheduler.waiting) + self._prompts.num_held,
                num_running=len(self.scheduler.running),
                num_seqs=len(scheduled.scheduled),
                num_prefill_tokens=prefill,
                num_decode_tokens=total - prefill,
                num_preempted=len(scheduled.preempted),
                num_prefix_queried_tokens=scheduled.num_prefix_queried_tokens,
                num_prefix_hit_tokens=scheduled.num_prefix_hit_tokens,
                kv_num_blocks=usage.num_blocks,
                kv_free_blocks=usage.num_free_blocks,
                kv_cached_blocks=usage.num_cached_blocks,
                kv_reserved_slots=usage.num_reserved_slots,
                kv_used_slots=usage.num_used_slots + total,
                kernel=self.loaded.model.kernel,
            )
        )
        self._num_steps += 1
        return outputs

    def _make_queues(self) -> None:
        """An empty pool and empty queues."""
        self.kv = make_kv_manager(self.config, self.memory_plan.num_kv_blocks, self.max_model_len)
        self.scheduler = Scheduler(self.config, self.kv, self.max_model_len)
        self._prompts = SharedPrompts(self.scheduler)
        self._requests: dict[str, Request] = {}

    def _start_over(self, reason: str) -> None:
        for request in self._requests.values():
            request.status = RequestStatus.FINISHED
            if request.finish_reason is None:
                request.finish_reason, request.error = "error", reason
        self._make_queues()
        self.runner.reset(self.kv)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer, and the model has none")
            try:
                token_ids: list[int] = self.tokenizer.encode(prompt, verbose=False)
            except (TypeError, ValueError) as error:  # half of a surrogate pair, for one
                raise RequestError(f"the tokenizer cannot read the prompt: {error}") from error
            return token_ids
        try:
            return list(map(operator.index, prompt))
        except TypeError as error:
            raise RequestError(f"a prompt must be text or token ids: {error}") from None

    def _forget(self, request: Request) -> None:
        self.runner.forget(request)
        del self._requests[request.request_id]

    def _check_token_ids(self, what: str, token_ids: Iterable[int]) -> None:
        size = self.loaded.vocab_size
        for token_id in token_ids:
            if not hasattr(token_id, "__index__") or not 0 <= token_id < size:
                raise RequestError(
                    f"{what} {token_id!r} is outside the vocabulary of {size} tokens"
                )


def _is_prefill(request: Request) -> bool:
    """Whether a scheduled request works on its prompt, or recomputes after a preemption."""
    return (
        request.num_computed_tokens + 1 < len(request.token_ids) or request.num_output_tokens == 0
    )
