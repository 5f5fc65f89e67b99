"""Texts to token ids with exactly one BOS, whoever puts it there.

A tokenizer may add BOS by itself or not, a chat template may write it into the text, and a caller
may ask for it or for none. A text that begins with the text of the prefix token (BOS, or EOS where
there is no BOS) has it already, and nothing is added to it. Tokenizers that also end every text
with EOS would put it between a context and its continuation; what they append is left out.

Texts go to the tokenizer many at a time, for it works on all cores then, and where a text may be
cut (`text_segments`) its pieces are remembered. Neither changes any id.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from llmbench.bench.accuracy.text_segments import segment_border
from llmbench.bench.errors import BenchConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]

CHUNK_TEXTS = 512
"""Texts tokenized at a time: enough for all cores, few enough to hold."""

_MAX_KNOWN_IDS = 1_000_000  # remembered ids, some 36 bytes each; MMLU's shots are 50,000


class TextIds:
    """The ids of texts for one tokenizer and one rule of BOS.

    Attributes:
        prefix_id: BOS, or EOS in a vocabulary that has none.
        notices: What the tokenizer does that a reader of the scores should know.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, add_bos: bool | None) -> None:
        """`add_bos` None leaves it to the tokenizer.

        Raises:
            BenchConfigError: a tokenizer without BOS and EOS, or without the BOS that is wanted.
        """
        if add_bos and tokenizer.bos_token_id is None:
            raise BenchConfigError("add_bos is set, and the tokenizer has no BOS token")
        prefix_id = tokenizer.bos_token_id
        if prefix_id is None:
            prefix_id = tokenizer.eos_token_id
        if prefix_id is None:
            raise BenchConfigError("the tokenizer has neither a BOS nor an EOS token")
        self._tokenizer = tokenizer
        self._add_bos = add_bos
        self.prefix_id = int(prefix_id)
        self._prefix_text = str(tokenizer.decode([self.prefix_id]))
        self._appended = self._appended_ids()
        self._border = segment_border(tokenizer)
        self._known: dict[tuple[str, bool], Ids] = {}
        self._num_known_ids = 0
        self.notices: tuple[str, ...] = ()
        if self._appended:
            text = tokenizer.decode(list(self._appended))
            self.notices = (f"the tokenizer ends texts with {text!r}; it is left out",)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[Ids]:
        """Return the ids of each text, with what the tokenizer puts in front of it if `special`."""
        if self._border is None:
            return self._encode_whole(texts, special)
        split = []  # of each text, its pieces, and whether a piece is the beginning of a text
        wanted: dict[tuple[str, bool], None] = {}
        for text in texts:
            first, *others = self._border.split(text)
            pieces = [(first, special), *((piece, False) for piece in others)]
            wanted |= dict.fromkeys(piece for piece in pieces if piece not in self._known)
            split.append(pieces)
        found: dict[tuple[str, bool], Ids] = {}
        for begins in (True, False):
            missing = [piece for piece in wanted if piece[1] == begins]
            rows = self._encode_whole([text for text, _ in missing], begins)
            found |= zip(missing, rows, strict=True)
        known = self._known
        ids = [
            tuple(chain.from_iterable(found.get(piece) or known.get(piece, ()) for piece in pieces))
            for pieces in split
        ]
        for pieces in split:
            self._remember({piece: found[piece] for piece in pieces[:-1] if piece in found})
        return ids

    def _remember(self, pieces: dict[tuple[str, bool], Ids]) -> None:
        for piece, ids in pieces.items():
            if piece in self._known:
                continue
            self._num_known_ids += len(ids)
            if self._num_known_ids > _MAX_KNOWN_IDS:
                self._known.clear()
                self._num_known_ids = len(ids)
            self._known[piece] = ids

    def _encode_whole(self, texts: Sequence[str], special: bool) -> list[Ids]:
        found: list[Ids] = [()] * len(texts)
        with_bos: list[int] = []
        without: list[int] = []
        for index, text in enumerate(texts):
            has_bos = bool(self._prefix_text) and text.startswith(self._prefix_text)
            (with_bos if special and not has_bos else without).append(index)
        for chosen, adds in ((with_bos, self._add_bos), (without, False)):
            for start in range(0, len(chosen), CHUNK_TEXTS):
                part = chosen[start : start + CHUNK_TEXTS]
                rows = self._call([texts[index] for index in part], adds)
                for index, ids in zip(part, rows, strict=True):
                    if adds is not False and self._appended:
                        ids = ids[: -len(self._appended)]
                    if adds and ids[:1] != (self.prefix_id,):
                        ids = (self.prefix_id, *ids)  # a tokenizer that never adds it by itself
                    found[index] = ids
        return found

    def _call(self, texts: list[str], adds_special: bool | None) -> list[Ids]:
        settings = {} if adds_special is None else {"add_special_tokens": adds_special}
        ids = self._tokenizer(texts, verbose=False, return_attention_mask=False, **settings)
        return [tuple(row) for row in ids["input_ids"]]

    def _appended_ids(self) -> Ids:
        """Return what the tokenizer puts behind every text, such as EOS."""
        (bare,), (whole,) = self._call(["a"], False), self._call(["a"], True)
        for end in range(len(whole), len(bare) - 1, -1):
            if whole[end - len(bare) : end] == bare:
                return whole[end:]
        return ()
