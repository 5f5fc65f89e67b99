"""From tokens to characters: a text that only ever grows.

A token is a piece of bytes, not of text: a character may be cut across tokens, across the end of
the prompt, or never be completed at all. So each token is turned into its bytes, and a character
is handed out when its last byte is there; bytes that can no longer become a character turn into
one U+FFFD per broken sequence, the rest of a character at the very end into one. What is streamed
is therefore what is returned at once. Where the prompt ends inside a character, the whole
character belongs to the answer.

The bytes of a token are asked of its tokenizer, behind a token known to be plain text, since
decoders drop the blank in front of the first token. They are kept: the second time a token costs
one look-up. Tokenizers whose decoders do not put pieces together (a word-end mark that becomes a
blank only if a word follows; tokenizers written in Python) are decoded a window at a time, as in
text-generation-inference.
"""

import codecs
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4  # of UTF-8
_PIECEWISE_DECODERS = frozenset(
    {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece"}
)
_WINDOW_TOKENS = 6  # context; text-generation-inference takes 5 tokens of the prompt


class TokenText(Protocol):
    """Text that grows by whole characters."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""

    def rest(self) -> str:
        """Return the text of what is not certain yet, should nothing follow."""


def make_token_text(
    tokenizer: "PreTrainedTokenizerBase", prompt_token_ids: Sequence[int], skip_special_tokens: bool
) -> TokenText:
    """Start the text that follows a prompt, of which it repeats nothing."""
    tables = _TABLES.setdefault(tokenizer, {})
    if skip_special_tokens not in tables:
        table = _PieceTable.of(tokenizer, skip_special_tokens)
        tables[skip_special_tokens] = table or frozenset(tokenizer.get_vocab().values())
    known = tables[skip_special_tokens]
    if isinstance(known, _PieceTable):
        return _PieceText(known, prompt_token_ids)
    return _WindowText(tokenizer, known, prompt_token_ids, skip_special_tokens)


class _PieceTable:
    """The bytes that each token of one tokenizer adds to a text; filled as tokens are met."""

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool, anchor: int) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._anchor = anchor
        self._anchor_text = self._decode([anchor])
        self._pieces: dict[int, bytes | None] = {}
        added = backend.get_added_tokens_decoder()
        self._specials = {token_id for token_id, token in added.items() if token.special}

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool
    ) -> "_PieceTable | None":
        """Return the table, or None if this tokenizer's text is not its pieces put together."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer) or not _is_piecewise(backend):
            return None
        for text in ("a", "A", "0", "."):
            for anchor in backend.encode(text, add_special_tokens=False).ids:
                found = backend.decode([anchor], skip_special_tokens=skip_special_tokens)
                if found.isascii() and found.strip():
                    return cls(backend, skip_special_tokens, anchor)
        return None

    def piece(self, token_id: int) -> bytes | None:
        """Return the token's bytes behind other text; None if it never shows (or is none)."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._pieces[token_id] = self._find_piece(token_id)
            return piece

    def first_piece(self, token_id: int) -> bytes:
        """Return the bytes of a token that shows, as the first one of a text."""
        text = self._decode([token_id])
        return (self.piece(token_id) or b"") if _REPLACEMENT in text else text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _find_piece(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return None
        if self._skip_special_tokens and token_id in self._specials:
            return None
        text = self._decode([self._anchor, token_id])[len(self._anchor_text) :]
        if _REPLACEMENT not in text:
            return text.encode()
        if len(token) == len("<0xFF>") and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])  # byte fallback
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return text.encode()


def _is_piecewise(backend: Tokenizer) -> bool:
    """Whether a token's text, behind another token, does not depend on what surrounds it."""
    decoder = backend.decoder
    if decoder is None:
        return True
    if type(decoder) is Decoder:
        return False  # written in Python: there is no telling
    description = json.loads(decoder.__getstate__())
    parts = description.get("decoders", [description])
    return all(
        part["type"] in _PIECEWISE_DECODERS and not (part["type"] == "Strip" and part["stop"])
        for part in parts
    )


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2).

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_of_character()


class _PieceText:
    """Puts the bytes of tokens together to characters."""

    def __init__(self, table: _PieceTable, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._is_first = True
        self._pending = b""  # the bytes of a character that lacks some
        tail = b""
        for token_id in reversed(prompt_token_ids):
            piece = table.piece(token_id)
            if piece is not None:
                self._is_first = False
                tail = piece + tail
            if len(tail) >= _MAX_CHARACTER_BYTES - 1:
                break
        tail = tail[1 - _MAX_CHARACTER_BYTES :]
        self._prompt_pending = tail[codecs.utf_8_decode(tail, "replace", False)[1] :]

    def push(self, token_id: int) -> str:
        piece = self._table.piece(token_id)
        if piece is None:
            return ""
        if self._is_first:
            self._is_first = False
            piece = self._table.first_piece(token_id)
        if not piece:
            return ""
        if self._prompt_pending:
            begun, self._prompt_pending = self._prompt_pending, b""
            # Bytes of the prompt enter the answer only as part of a character that it goes on.
            try:
                codecs.utf_8_decode(begun + piece[:1], "strict", False)
                self._pending = begun
            except UnicodeDecodeError:
                pass
        data = self._pending + piece
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def rest(self) -> str:
        return self._pending.decode("utf-8", "replace")


class _WindowText:
    """Decodes the last few tokens again and again and takes what is new."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        known: frozenset[int],
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._known = known
        self._skip_special_tokens = skip_special_tokens
        self._window = [i for i in prompt_token_ids[-_WINDOW_TOKENS:] if i in known]
        self._num_certain = len(self._window)
        self._certain = self._decode().rstrip(_REPLACEMENT)

    def push(self, token_id: int) -> str:
        if token_id not in self._known:
            return ""
        self._window.append(token_id)
        text = self._decode()
        num_waiting = len(self._window) - self._num_certain
        if text.endswith(_REPLACEMENT) and num_waiting < _MAX_CHARACTER_BYTES:
            return ""
        added = self._behind_certain(text)
        self._window = self._window[-_WINDOW_TOKENS:]
        self._num_certain = len(self._window)
        self._certain = self._decode()
        return added

    def rest(self) -> str:
        return self._behind_certain(self._decode())

    def _behind_certain(self, text: str) -> str:
        if text.startswith(self._certain):
            return text[len(self._certain) :]
        pairs = enumerate(zip(text, self._certain, strict=False))
        return text[next((place for place, (a, b) in pairs if a != b), len(text)) :]

    def _decode(self) -> str:
        text = self._tokenizer.decode(
            self._window,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text


_TABLES: WeakKeyDictionary["PreTrainedTokenizerBase", dict[bool, _PieceTable | frozenset[int]]] = (
    WeakKeyDictionary()
)
