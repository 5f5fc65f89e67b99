"""Settings, digest and determinism of workloads."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.workload import (
    RequestSpec,
    WorkloadConfig,
    build_workload,
    workload_digest,
)

# What a dataset drawn as ids asks of a tokenizer; loads in no time.
STUB = """
class Tokenizer:
    all_special_ids = [0]
    added_tokens_decoder = {0: "<s>"}
    def get_vocab(self):
        return {f"t{i}": i for i in range(1000)}
"""


def stub_tokenizer() -> Any:
    scope: dict[str, Any] = {}
    exec(STUB, scope)
    return scope["Tokenizer"]()


SMALL = WorkloadConfig(num_prompts=6, random_input_len=12, random_range_ratio=0.5)


@given(
    seed=st.integers(0, 2**63),
    num_prompts=st.integers(1, 20),
    law=st.sampled_from(["uniform", "normal", "lognormal"]),
    prefix_len=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.7]),
)
@settings(max_examples=40, deadline=None)
def test_same_settings_give_identical_requests(
    seed: int, num_prompts: int, law: Any, prefix_len: int, temperature: float
) -> None:
    config = replace(
        SMALL,
        seed=seed,
        num_prompts=num_prompts,
        random_length_distribution=law,
        random_prefix_len=prefix_len,
        temperature=temperature,
    )
    first, again = (build_workload(config, stub_tokenizer(), 4096) for _ in range(2))
    assert first == again
    other = build_workload(replace(config, seed=seed + 1), stub_tokenizer(), 4096)
    assert other.digest != first.digest


def test_requests_depend_on_neither_process_nor_hash_seed() -> None:
    program = STUB + (
        "from llmbench.bench.workloads.workload import WorkloadConfig, build_workload\n"
        "config = WorkloadConfig(num_prompts=6, random_input_len=12, random_range_ratio=0.5)\n"
        "print(build_workload(config, Tokenizer(), 4096).digest)\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert digests == {build_workload(SMALL, stub_tokenizer(), 4096).digest}


def test_digest_of_a_known_workload_has_not_moved() -> None:
    # If it has, numpy draws otherwise, and workloads no longer compare across versions.
    assert build_workload(SMALL, stub_tokenizer(), 4096).digest == (
        "f3581b2eb3a679095e2dfd09740c35c747fa6868aecdd78e19573045df0e71c1"
    )


def test_a_longer_answer_leaves_the_prompts_alone() -> None:
    short, long = (
        build_workload(replace(SMALL, random_output_len=length), stub_tokenizer(), 4096)
        for length in (10, 11)
    )
    assert [request.prompt_token_ids for request in short.requests] == [
        request.prompt_token_ids for request in long.requests
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": (1, 2)},
        {"prompt_token_ids": (1, 2, 4)},
        {"max_tokens": 6},
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 4},
        {"ignore_eos": True},
        {"seed": 0},
        {"stop": ("x",)},
    ],
)
def test_digest_covers_all_that_the_engine_is_asked(change: dict[str, Any]) -> None:
    request = RequestSpec(index=0, prompt_token_ids=(1, 2, 3), max_tokens=5)
    assert workload_digest([request]) != workload_digest([replace(request, **change)])


def test_digest_tells_where_one_request_ends() -> None:
    def spec(*ids: int) -> RequestSpec:
        return RequestSpec(index=0, prompt_token_ids=ids, max_tokens=5)

    assert workload_digest([spec(1, 2), spec(3)]) != workload_digest([spec(1), spec(2, 3)])


def test_sampled_requests_carry_seeds_of_their_own() -> None:
    workload = build_workload(replace(SMALL, temperature=0.8), stub_tokenizer(), 4096)
    assert len({request.seed for request in workload.requests} - {None}) == 6
    greedy = build_workload(SMALL, stub_tokenizer(), 4096)
    assert {request.seed for request in greedy.requests} == {None}


@pytest.mark.parametrize(("asked", "got"), [(None, True), (False, False), (True, True)])
def test_noise_prompts_ignore_end_of_text_unless_told_otherwise(
    asked: bool | None, got: bool
) -> None:
    workload = build_workload(replace(SMALL, ignore_eos=asked), stub_tokenizer(), 4096)
    assert {request.ignore_eos for request in workload.requests} == {got}


def test_sampling_settings_reach_every_request() -> None:
    config = replace(SMALL, temperature=0.5, top_p=0.9, top_k=7, stop=("\n",))
    for request in build_workload(config, stub_tokenizer(), 4096).requests:
        assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 7)
        assert request.stop == ("\n",)


@pytest.mark.parametrize(
    ("settings", "words", "hint"),
    [
        ({"dataset_name": "sharegt"}, "dataset_name must be one of", "did you mean sharegpt"),
        ({"dataset_name": "sharegpt"}, "needs a file", "--dataset-path"),
        ({"dataset_path": "x.json"}, "would not be read", "--dataset-name"),
        ({"num_prompts": 0}, "num_prompts must be at least 1", ""),
        ({"random_input_len": 0}, "random_input_len must be at least 1", ""),
        ({"seed": -1}, "seed must not be negative", ""),
        ({"random_range_ratio": 1.0}, r"must be in \[0, 1\), not 1", ""),
        ({"random_range_ratio": float("nan")}, r"must be in \[0, 1\)", ""),
        (
            {"random_length_distribution": "fixed", "random_range_ratio": 0.5},
            "fixed lengths have no spread",
            "--random-length-distribution",
        ),
        ({"random_length_distribution": "normal"}, "need a spread", "--random-range-ratio"),
        (
            {"random_length_distribution": "lognormal", "random_range_ratio": float("inf")},
            r"must be in \[0, inf\)",
            "",
        ),
        ({"random_length_distribution": "zipf"}, "must be one of fixed", ""),
        ({"temperature": float("nan")}, "temperature", ""),
        ({"top_p": 0.0}, "top_p", ""),
        ({"top_k": -2}, "top_k", ""),
        ({"stop": "x"}, "tuple of non-empty strings", ""),
        ({"stop": ("",)}, "tuple of non-empty strings", ""),
    ],
)
def test_settings_that_cannot_hold_are_refused(
    settings: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(WorkloadError, match=words) as caught:
        WorkloadConfig(**settings)
    assert hint in "".join(getattr(caught.value, "__notes__", []))


def test_settings_import_neither_torch_nor_numpy_nor_transformers() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'transformers'): sys.modules[name] = None\n"
        "from llmbench.bench.workloads.workload import WorkloadConfig\n"
        "WorkloadConfig()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_text_workloads_are_built_without_torch(
    byte_tokenizer: Callable[..., Any], tmp_path: Any
) -> None:
    byte_tokenizer(chat_template="{{ messages[0]['content'] }}").save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    program = (
        "import sys\n"
        "from llmbench.bench.workloads.tokenizer import load_tokenizer\n"
        "from llmbench.bench.workloads.workload import WorkloadConfig, build_workload\n"
        f"folder = {str(tmp_path)!r}\n"
        "config = WorkloadConfig(dataset_name='custom', num_prompts=1,\n"
        "    dataset_path=folder + '/rows.jsonl')\n"
        "(request,) = build_workload(config, load_tokenizer(folder), 999).requests\n"
        "assert request.text == 'hi', request\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
