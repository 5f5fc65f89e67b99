"""A workload: the requests of a run, fixed before the first is sent.

Everything that chance decides (which rows, which lengths, which tokens) is decided here, from one
seed, and summed up in a digest: two runs with the same digest were asked the same questions.
Prompts are token ids, because ids → text → ids is no identity for most tokenizers, and a prompt of
1,024 tokens has to be one (vllm#10847, sglang#15732: 92 % of prompts off their length).

Names and defaults of the settings are those of `vllm bench serve`, but for three: temperature is 0
unless set, as it was in vLLM, so that a repeated run repeats its texts; short ShareGPT prompts are
kept; and lengths may follow a normal or log-normal law.

Imports neither torch nor numpy, so the command line can read defaults from here at no cost.
"""

import difflib
import hashlib
import json
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from llmbench.bench.errors import WorkloadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DatasetName = Literal["random", "sharegpt", "prefix_repetition", "custom", "sonnet"]
LengthDistribution = Literal["fixed", "uniform", "normal", "lognormal"]

FILE_DATASETS = ("sharegpt", "custom", "sonnet")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What is asked of the engine, and how many times.

    Attributes:
        dataset_name: Where prompts come from.
        dataset_path: File of a `sharegpt`, `custom` or `sonnet` dataset.
        num_prompts: Requests to send.
        seed: Same seed, same requests.
        random_input_len: Tokens of a `random` prompt after its prefix: the middle of `uniform`,
            the mean of `normal` and `lognormal`.
        random_output_len: The same for tokens to generate.
        random_range_ratio: r of `uniform` lengths between L(1 - r) and L(1 + r), as in vLLM
            (SGLang's r means [rL, L]); standard deviation / mean of the other two laws.
        random_length_distribution: Law of `random` lengths; `uniform` with ratio 0 is `fixed`.
        random_prefix_len: Tokens that open every `random` prompt, before `random_input_len`.
        sharegpt_output_len: Tokens to generate; None takes the length of the reply in the data.
        prefix_repetition_prefix_len: Tokens of a shared prefix.
        prefix_repetition_suffix_len: Tokens of a prompt after its prefix.
        prefix_repetition_num_prefixes: Different prefixes, used in turn.
        prefix_repetition_output_len: Tokens to generate.
        custom_output_len: Tokens to generate for a row that does not say.
        sonnet_input_len: Most tokens of a prompt, template included.
        sonnet_output_len: Tokens to generate.
        sonnet_prefix_len: Tokens, roughly, that open every prompt.
        skip_chat_template: Send text as it stands, though the tokenizer has a chat template.
        ignore_eos: Generate to the full length; None does so for `random` and
            `prefix_repetition`, where the end-of-text token is noise.
        temperature: 0 is greedy; above it each request carries a seed of its own.
        top_p: Smallest set of likeliest tokens with this mass.
        top_k: This many likeliest tokens; 0 keeps all.
        stop: Strings that end an answer.
        disable_shuffle: Keep the order of the file.
        no_oversample: Refuse, where a file has fewer usable rows than `num_prompts`, in place of
            sending rows again.
    """

    dataset_name: DatasetName = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_length_distribution: LengthDistribution = "uniform"
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    custom_output_len: int = 256
    sonnet_input_len: int = 550
    sonnet_output_len: int = 150
    sonnet_prefix_len: int = 200
    skip_chat_template: bool = False
    ignore_eos: bool | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    disable_shuffle: bool = False
    no_oversample: bool = False

    def __post_init__(self) -> None:
        require_choice("dataset_name", self.dataset_name, get_args(DatasetName))
        require_choice(
            "random_length_distribution",
            self.random_length_distribution,
            get_args(LengthDistribution),
        )
        for name in (
            "num_prompts",
            "random_input_len",
            "random_output_len",
            "sharegpt_output_len",
            "prefix_repetition_prefix_len",
            "prefix_repetition_suffix_len",
            "prefix_repetition_num_prefixes",
            "prefix_repetition_output_len",
            "custom_output_len",
            "sonnet_input_len",
            "sonnet_output_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise WorkloadError(f"{name} must be at least 1, not {value}")
        for name in ("seed", "random_prefix_len", "sonnet_prefix_len"):
            if getattr(self, name) < 0:
                raise WorkloadError(f"{name} must not be negative, not {getattr(self, name)}")
        self._check_spread()
        self._check_sampling()
        reads_file = self.dataset_name in FILE_DATASETS
        if reads_file and not self.dataset_path:
            error = WorkloadError(f"dataset {self.dataset_name} needs a file")
            error.add_note("name it with --dataset-path")
            raise error
        if not reads_file and self.dataset_path:
            error = WorkloadError(
                f"dataset {self.dataset_name} is made up, so {self.dataset_path} would not be read"
            )
            error.add_note(f"choose --dataset-name {' | '.join(FILE_DATASETS)} for a file")
            raise error

    def _check_spread(self) -> None:
        ratio, law = self.random_range_ratio, self.random_length_distribution
        limit = float("inf") if law == "lognormal" else 1.0
        if not 0.0 <= ratio < limit:
            raise WorkloadError(
                f"random_range_ratio of {law} lengths must be in [0, {limit:g}), not {ratio}"
            )
        if law == "fixed" and ratio > 0:
            error = WorkloadError(
                f"fixed lengths have no spread, but random_range_ratio is {ratio}"
            )
            error.add_note("choose --random-length-distribution uniform, normal or lognormal")
            raise error
        if law in ("normal", "lognormal") and ratio == 0:
            error = WorkloadError(f"{law} lengths need a spread, but random_range_ratio is 0")
            error.add_note("--random-range-ratio 0.3 is a standard deviation of 0.3 times the mean")
            raise error

    def _check_sampling(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise WorkloadError(
                f"temperature must be finite and not negative, not {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise WorkloadError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < -1:
            raise WorkloadError(f"top_k must be -1 or 0 (all tokens) or a count, not {self.top_k}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise WorkloadError(f"stop must be a tuple of non-empty strings, not {self.stop!r}")


def require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is none of `allowed`, with the nearest one as the hint."""
    if value in allowed:
        return
    error = WorkloadError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    for match in difflib.get_close_matches(value, allowed, n=1):
        error.add_note(f"did you mean {match}?")
    raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request as it will be sent; picklable, and the same for every target.

    Attributes:
        index: Place in the workload, from 0.
        prompt_token_ids: The whole prompt; nothing is to be added to it.
        max_tokens: Most tokens to generate.
        text: The prompt before tokenization, special tokens and all; None where it was drawn as
            ids and never was a text.
        seed: Of the sampling; None where the answer is greedy.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    text: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of a run in the order of their arrival.

    Attributes:
        digest: SHA-256 over what the engine is asked: ids, lengths and sampling.
        notes: Facts for the reader and the record, all of them JSON: rows read, usable and
            skipped by reason, how often rows are repeated, and the rule for special tokens.
    """

    requests: tuple[RequestSpec, ...]
    digest: str
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Most tokens that all requests together may generate."""
        return sum(request.max_tokens for request in self.requests)


def workload_digest(requests: Iterable[RequestSpec]) -> str:
    """Hash what the engine is asked, as hexadecimal SHA-256; texts are not part of it."""
    digest = hashlib.sha256()
    for request in requests:
        head = [
            len(request.prompt_token_ids),
            request.max_tokens,
            float(request.temperature),
            float(request.top_p),
            request.top_k,
            request.ignore_eos,
            request.seed,
            request.stop,
        ]
        digest.update(json.dumps(head).encode())
        ids = array("I", request.prompt_token_ids)
        if sys.byteorder == "big":
            ids.byteswap()
        digest.update(ids.tobytes())
    return digest.hexdigest()


def build_workload(
    config: WorkloadConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_model_len: int,
    *,
    vocab_size: int | None = None,
) -> Workload:
    """Draw the requests of `config`; each fits prompt and answer into `max_model_len` tokens.

    `vocab_size` is the model's, where it may be smaller than the tokenizer's.
    """
    # The datasets need numpy; whoever only reads the settings does not.
    from llmbench.bench.workloads.datasets import draw_prompts, sampling_seeds

    prompts, notes = draw_prompts(config, tokenizer, max_model_len, vocab_size)
    ignore_eos = config.ignore_eos
    if ignore_eos is None:
        ignore_eos = config.dataset_name not in FILE_DATASETS
    requests = tuple(
        RequestSpec(
            index=index,
            prompt_token_ids=prompt.token_ids,
            max_tokens=prompt.max_tokens,
            text=prompt.text,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            ignore_eos=ignore_eos,
            seed=seed,
            stop=config.stop,
        )
        for index, (prompt, seed) in enumerate(
            zip(prompts, sampling_seeds(config, len(prompts)), strict=True)
        )
    )
    notes["ignore_eos"] = ignore_eos
    return Workload(requests=requests, digest=workload_digest(requests), notes=notes)
