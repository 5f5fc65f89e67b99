"""Calibration text that the model writes itself, for whoever gives none.

A method needs inputs like those that the model will meet. Sampled from the model at temperature 1,
behind nothing but its start token, texts follow the distribution that it has learned, need no
download and carry nobody's licence; for calibrating they come near curated texts (Williams et
al. 2024, "Self-calibration for language model quantization and pruning"). Texts like those of the
use at hand are still better where the user has them.

Every text has its own seed, and the engine's sampling does not depend on neighbours, so the same
model and seed give the same tokens.
"""

import json
from collections.abc import Callable
from pathlib import Path

from llmbench.engine.engine_core import EngineCore
from llmbench.engine.llm import LLM
from llmbench.engine.request import SamplingParams
from llmbench.quant.calibration import CalibrationSet, calibration_from_ids
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.json_files import write_json

MAX_AT_ONCE = 64
KEPT = "self-calibration.json"


def write_calibration(
    folder: Path,
    *,
    num_samples: int,
    max_seq_length: int,
    seed: int = 0,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
    keep_in: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> CalibrationSet:
    """Let a model write `num_samples` texts of `max_seq_length` tokens, or of its own longest.

    With `keep_in` the tokens are kept in that folder, and taken from it the next time.
    `on_progress` hears texts finished and texts in all.
    """
    protocol = f"{num_samples} texts of at most {max_seq_length} tokens, sampled with seed {seed}"
    kept = None if keep_in is None else keep_in / KEPT
    key = {"base_digest": Checkpoint.open(folder).digest, "protocol": protocol}
    samples = None if kept is None else _read(kept, key)
    if samples is None:
        samples = _sample(
            folder, num_samples, max_seq_length, seed, num_threads, trust_remote_code, on_progress
        )
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, {**key, "samples": samples})
    return calibration_from_ids(
        samples, source="the model itself", protocol=protocol, max_seq_length=max_seq_length
    )


def _read(kept: Path, key: dict[str, str]) -> list[list[int]] | None:
    """Samples that an earlier run kept; None where there are none of this model and protocol."""
    if not kept.exists():
        return None
    record = json.loads(kept.read_text(encoding="utf-8"))
    samples: list[list[int]] = record.pop("samples")
    return samples if record == key else None


def _sample(
    folder: Path,
    num_samples: int,
    max_seq_length: int,
    seed: int,
    num_threads: int | None,
    trust_remote_code: bool,
    on_progress: Callable[[int, int], None] | None,
) -> list[list[int]]:
    llm = LLM(
        str(folder),
        max_num_seqs=min(MAX_AT_ONCE, num_samples),
        prefix_cache="none",
        num_threads=num_threads,
        trust_remote_code=trust_remote_code,
        seed=seed,
    )
    length = min(max_seq_length, llm.core.loaded.max_model_len)
    start = _start_token(llm.core)
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=max(1, length - 1),
            seed=(seed << 20) + index,
            ignore_eos=True,
            detokenize=False,
        )
        for index in range(num_samples)
    ]
    results = llm.generate([[start]] * num_samples, params, on_progress=on_progress)
    return [[start, *result.answers[0].token_ids][:length] for result in results]


def _start_token(core: EngineCore) -> int:
    """The token that begins a text; where there is none, one that ends the text before."""
    bos = getattr(core.loaded.hf_config.get_text_config(), "bos_token_id", None)
    if isinstance(bos, int):
        return bos
    return min(core.loaded.eos_token_ids, default=0)
