"""The `sonnet` dataset: bounded lengths, a shared opening, and an end to every loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbench.bench.errors import WorkloadError
from llmbench.bench.workloads.sonnet import OPENING
from llmbench.bench.workloads.workload import Workload, WorkloadConfig, build_workload

Build = Callable[..., Workload]


@pytest.fixture
def build(byte_tokenizer: Callable[..., Any], tmp_path: Path) -> Build:
    """Build a workload from a poem with a tokenizer of one id a byte."""

    def run(poem: str, max_model_len: int = 4096, **settings: Any) -> Workload:
        path = tmp_path / "poem.txt"
        path.write_text(poem, encoding="utf-8")
        defaults = {"num_prompts": 30, "sonnet_input_len": 160, "sonnet_prefix_len": 100}
        config = WorkloadConfig(
            dataset_name="sonnet", dataset_path=str(path), **(defaults | settings)
        )
        return build_workload(config, byte_tokenizer(), max_model_len)

    return run


# Forty lines of 5 to 10 letters, each of its own.
POEM = "\n".join(chr(0x41 + index) * (5 + index % 6) for index in range(40))


def test_prompts_hold_no_more_than_the_tokens_asked_for(build: Build) -> None:
    lengths = [len(request.prompt_token_ids) for request in build(POEM).requests]
    assert len(lengths) == 30
    assert max(lengths) <= 160
    assert min(lengths) > 120


def test_prompts_share_the_first_lines_only(build: Build) -> None:
    workload = build(POEM)
    num_shared = workload.notes["num_shared_lines"]
    assert 0 < num_shared < workload.notes["num_lines_per_prompt"]
    shared = OPENING + "".join(line + "\n" for line in POEM.split("\n")[:num_shared])
    texts = [str(request.text) for request in workload.requests]
    assert all(text.startswith(shared) for text in texts)
    assert len({text[len(shared)] for text in texts}) > 1


def test_lines_that_never_fit_are_taken_off_one_by_one(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    # Lines of 10 bytes, room for 96: 9.6 lines round to 10, and no draw of 10 fits.
    poem = "\n".join(["x" * 9, "y" * 9])
    workload = build(poem, sonnet_input_len=len(OPENING) + 96, sonnet_prefix_len=0)
    assert workload.notes["num_lines_per_prompt"] == 9
    assert "cut to 9 lines" in caplog.text
    lengths = {len(request.prompt_token_ids) for request in workload.requests}
    assert lengths == {len(OPENING) + 90}


def test_blank_lines_are_no_lines(build: Build) -> None:
    assert build("a\n\n \nb\n").notes["num_rows"] == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sonnet_input_len": 20}, "no room for a line"),
        ({"sonnet_input_len": 4000}, "exceed the model's 4096"),
    ],
)
def test_impossible_lengths_are_refused(build: Build, settings: dict[str, int], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        build(POEM, **settings)


def test_a_prefix_longer_than_the_prompt_is_refused(build: Build) -> None:
    poem = "\n".join(["x" * 90] * 2 + ["y"] * 100)
    with pytest.raises(WorkloadError, match="shared prefix of"):
        build(poem, sonnet_prefix_len=140)


def test_shakespeare_fills_the_prompt(byte_tokenizer: Callable[..., Any], data_dir: Path) -> None:
    config = WorkloadConfig(
        dataset_name="sonnet",
        dataset_path=str(data_dir / "sonnet" / "sonnet.txt"),
        num_prompts=20,
        sonnet_input_len=2000,
        sonnet_prefix_len=800,
    )
    workload = build_workload(config, byte_tokenizer(), 4096)
    lengths = [len(request.prompt_token_ids) for request in workload.requests]
    assert min(lengths) > 1800
    assert max(lengths) <= 2000
