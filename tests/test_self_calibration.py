"""Text that a model writes for its own calibration is the same for the same seed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmbench.bench.self_calibration import write_calibration


def test_texts_begin_with_the_start_token_and_repeat_with_the_seed(
    tmp_path: Path, random_model: Callable[..., Any]
) -> None:
    random_model("llama", bos_token_id=7).save_pretrained(tmp_path)

    def write(seed: int) -> Any:
        return write_calibration(tmp_path, num_samples=5, max_seq_length=30, seed=seed)

    first = write(0)
    assert [len(sample) for sample in first.samples] == [30] * 5
    assert {sample[0] for sample in first.samples} == {7}
    assert len(set(first.samples)) == 5
    assert write(0).samples == first.samples
    assert write(1).digest != first.digest
    assert "sampled with seed 0" in first.protocol


def test_texts_are_no_longer_than_the_model_reads(
    tmp_path: Path, random_model: Callable[..., Any]
) -> None:
    random_model("llama", max_position_embeddings=16).save_pretrained(tmp_path)
    (sample,) = write_calibration(tmp_path, num_samples=1, max_seq_length=30).samples
    assert len(sample) == 16
