"""A model's tokenizer, by transformers, and the tokens that end its answers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.engine.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
GENERATION_CONFIG = "generation_config.json"


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer of any kind."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(
    folder: Path, hf_config: Any, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder; `hf_config` spares reading the config again.

    Raises:
        CheckpointError: there is none, or it is broken.
    """
    if not has_tokenizer(folder):
        raise CheckpointError(f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])})")
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder),
            config=hf_config,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    # The tokenizers library raises plain Exception, transformers any of a dozen kinds.
    except Exception as error:
        raise CheckpointError(f"the tokenizer in {folder} is broken: {error}") from error
    return tokenizer


def end_of_text_ids(
    folder: Path, hf_config: Any, tokenizer: "PreTrainedTokenizerBase | None"
) -> frozenset[int]:
    """All tokens that end an answer: of generation_config.json, the config and the tokenizer.

    Each of the three may know one that the others lack (Llama 3's `<|eot_id|>` stands only in
    the first), and a model that honours one alone talks on past its answer. An id outside the
    vocabulary, a default that some config never changed, cannot come and is left out.
    """
    text = hf_config.get_text_config(decoder=True)
    found: list[Any] = [getattr(part, "eos_token_id", None) for part in (hf_config, text)]
    path = folder / GENERATION_CONFIG
    if path.exists():
        try:
            found.append(json.loads(path.read_bytes()).get("eos_token_id"))
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a JSON object: {error}") from error
    if tokenizer is not None:
        found.append(tokenizer.eos_token_id)
    ids = [one for entry in found for one in (entry if isinstance(entry, list) else [entry])]
    return frozenset(i for i in ids if type(i) is int and 0 <= i < text.vocab_size)
