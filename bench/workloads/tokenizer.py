"""A tokenizer without torch: what a workload needs of a model, in a fraction of the time.

`tokenizer.json` holds the whole pipeline of a fast tokenizer, and `PreTrainedTokenizerFast` reads
it as it is, with the chat template beside it. `AutoTokenizer` does the same for most models but
imports torch on the way (seconds, and 200 MB), so it is left for checkpoints without that file or
with code of their own.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from llmbench.bench.errors import WorkloadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a checkpoint folder or a hub id."""
    tokenizer: PreTrainedTokenizerBase
    try:
        if _is_plain(Path(model)):
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    # A broken tokenizer.json surfaces as a bare Exception of the Rust library.
    except Exception as cause:
        first_line = next(iter(str(cause).splitlines()), type(cause).__name__)
        error = WorkloadError(f"cannot load a tokenizer from {model}: {first_line}")
        error.add_note("name another with --tokenizer")
        raise error from cause
    return tokenizer


def _is_plain(folder: Path) -> bool:
    """Whether tokenizer.json says it all: no code of the checkpoint's own."""
    if not (folder / "tokenizer.json").is_file():
        return False
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        return True
    try:
        config = json.loads(settings.read_text(encoding="utf-8"))
    except ValueError:
        return True  # unreadable settings are for transformers to report
    return not (isinstance(config, dict) and "auto_map" in config)
