r"""Where a text may be cut so that the ids of its pieces are the ids of the whole.

Few-shot prompts repeat: 25 solved examples before each of 1,172 questions, out of the same 1,119.
Tokenized piece by piece, each example is worked on once. That is exact where the tokenizer itself
starts afresh, and only there, so the tokenizer's own description is read, and anything not known
below has no such place (`None`).

Byte-level BPE first splits a text with a regular expression and merges within a piece only. The
expression is matched from left to right and looks at most one piece ahead, so two facts are enough:
the last piece in front of the cut ends there whether or not more text follows, and no piece spans
the cut. For GPT-2's expression both hold between a visible character and a newline, since only
blanks are ever looked at ahead. The later ones (GPT-4, Llama 3, Qwen) let newlines join the
punctuation before them, but never what follows; there the cut is behind the newlines, before a
letter. NFC changes neither, as nothing composes with a newline.
"""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LETTERS = "A-Za-z\uac00-\ud7a3"  # Latin and Hangul; others are not cut at, which costs only time
_BEFORE_NEWLINES = re.compile(rf"(?<=[!-~{_LETTERS}])(?=\n)")
_BEHIND_NEWLINES = re.compile(rf"(?<=\n)(?=[{_LETTERS}])")

_LATER_PATTERNS = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)


def segment_border(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """Return a pattern of no width that is found where a text may be cut; None for nowhere."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules = json.loads(backend.to_str())
    model = rules["model"]
    if model["type"] != "BPE" or model.get("dropout") or model.get("continuing_subword_prefix"):
        return None
    if rules["normalizer"] not in (None, {"type": "NFC"}):
        return None
    for token in rules["added_tokens"]:
        if "\n" in token["content"] or token["lstrip"] or token["rstrip"]:
            return None
    return _border_of(rules["pre_tokenizer"])


def _border_of(rules: dict[str, Any] | None) -> re.Pattern[str] | None:
    if rules is None:
        return None
    steps = rules["pretokenizers"] if rules["type"] == "Sequence" else [rules]
    *before, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if last["use_regex"]:
        are_local = all(step["type"] == "Digits" for step in before)
        return _BEFORE_NEWLINES if are_local else None
    if len(before) != 1 or before[0]["type"] != "Split":
        return None
    (split,) = before
    is_known = split["pattern"].get("Regex") in _LATER_PATTERNS
    is_plain = split["behavior"] == "Isolated" and not split["invert"]
    return _BEHIND_NEWLINES if is_known and is_plain else None
