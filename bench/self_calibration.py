"""Calibration text that the model writes itself, for whoever gives none.

A method needs inputs like those that the model will meet. Sampled from the model at temperature 1,
behind nothing but its start token, texts follow the distribution that it has learned, need no
download and carry nobody's licence; for calibrating they come near curated texts (Williams et
al. 2024, "Self-calibration for language model quantization and pruning"). Texts like those of the
use at hand are still better where the user has them.

Every text has its own seed, and the engine's sampling does not depend on neighbours, so the same
model and seed give the same tokens.
"""

from collections.abc import Callable
from pathlib import Path

from llmbench.engine.engine_core import EngineCore
from llmbench.engine.llm import LLM
from llmbench.engine.request import SamplingParams
from llmbench.quant.calibration import CalibrationSet, calibration_from_ids

MAX_AT_ONCE = 64


def write_calibration(
    folder: Path,
    *,
    num_samples: int,
    max_seq_length: int,
    seed: int = 0,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> CalibrationSet:
    """Let a model write `num_samples` texts of `max_seq_length` tokens, or of its own longest.

    `on_progress` hears texts finished and texts in all.
    """
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
    return calibration_from_ids(
        [[start, *result.answers[0].token_ids][:length] for result in results],
        source="the model itself",
        protocol=f"{num_samples} texts of {length} tokens sampled from the model, seed {seed}",
        max_seq_length=max_seq_length,
    )


def _start_token(core: EngineCore) -> int:
    """The token that begins a text; where there is none, one that ends the text before."""
    bos = getattr(core.loaded.hf_config.get_text_config(), "bos_token_id", None)
    if isinstance(bos, int):
        return bos
    return min(core.loaded.eos_token_ids, default=0)
