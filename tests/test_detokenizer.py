"""Streamed text is the text: characters stay whole, stop strings never leak, nothing is lost."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llmbench.engine.detokenizer import Detokenizer
from llmbench.engine.request import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
EOS_TEXT = "</s>"
BYTE_LEVEL_EXTRAS = ["안녕", "🙂", " the", "ing", "\n\n", "STOP", "한a", "abc"]
LLAMA_WORDS = ["▁", "▁the", "▁cat", "s", "a", "▁▁", "!", "한", "\n", "é", "a▁b"]


def byte_characters() -> list[str]:
    """The character of each byte in a byte-level vocabulary, found without the product's table."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_CHARACTERS = byte_characters()


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([EOS_TEXT, "<s>"])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token=EOS_TEXT, clean_up_tokenization_spaces=False
    )


def byte_level() -> PreTrainedTokenizerFast:
    """Token i is byte i for i < 256; whole and cut characters and words behind."""
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [text.encode() for text in BYTE_LEVEL_EXTRAS]
    pieces += [text.encode()[:2] for text in ("🙂", "한")] + ["🙂".encode()[2:], b"\xff\xfe"]
    pieces += [REPLACEMENT.encode(), "🙂".encode()[3:] + b" a"]
    vocab = {"".join(BYTE_CHARACTERS[b] for b in piece): i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


def byte_fallback(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """As SentencePiece checkpoints: token i is byte i for i < 256, words behind."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + [*LLAMA_WORDS, "<unk>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoder
    return wrapped(backend)


def llama() -> PreTrainedTokenizerFast:
    return byte_fallback(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


def gemma() -> PreTrainedTokenizerFast:
    return byte_fallback(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def metaspace() -> PreTrainedTokenizerFast:
    return byte_fallback(decoders.Metaspace())


def words(decoder: decoders.Decoder | None, tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        models.WordLevel(vocab={t: i for i, t in enumerate(tokens)}, unk_token=tokens[0])
    )
    if decoder is not None:
        backend.decoder = decoder
    return wrapped(backend)


BYTE_LEVEL = byte_level()
LLAMA = llama()
TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {
    "byte level": BYTE_LEVEL,
    "llama": LLAMA,
    "gemma": gemma(),
    "metaspace": metaspace(),
    "wordpiece": words(decoders.WordPiece(), ["a", "##b", "c", "##한", "!"]),
    "no decoder": words(None, ["a", "b", "c", "한"]),
    "word ends": words(decoders.BPEDecoder(), ["a</w>", "b</w>", "c", "한</w>"]),
    "python": ByT5Tokenizer(),
}
# Those whose own decoding only ever grows with the tokens, so that it is what text must equal.
EXACT = ["byte level", "gemma", "metaspace", "wordpiece", "no decoder"]


def stream(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    prompt: Sequence[int] = (),
    *,
    take_every: int = 1,
    stop_token: int | None = None,
    **params: Any,
) -> tuple[list[str], str | None, Detokenizer]:
    """Deltas, the stop string that ended them, and the detokenizer."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    deltas = []
    stop = None
    for count, token_id in enumerate(token_ids, start=1):
        stop = detokenizer.append(token_id, is_stop_token=token_id == stop_token)
        if stop is not None:
            break
        if count % take_every == 0:
            deltas.append(detokenizer.take_delta(finished=False))
    deltas.append(detokenizer.take_delta(finished=True))
    return deltas, stop, detokenizer


def ids_of(tokenizer: PreTrainedTokenizerBase, *tokens: str) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    assert isinstance(ids, list)
    return ids


def any_tokens(tokenizer: PreTrainedTokenizerBase, max_size: int = 12) -> st.SearchStrategy[Any]:
    return st.lists(st.integers(0, len(tokenizer) - 1), max_size=max_size)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_joined_deltas_are_the_text_however_often_they_are_taken(
    name: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = data.draw(any_tokens(tokenizer, 5))
    token_ids = data.draw(any_tokens(tokenizer))
    whole, _, _ = stream(tokenizer, token_ids, prompt, take_every=99, skip_special_tokens=skip)
    for take_every in (1, 2, 3):
        deltas, _, detokenizer = stream(
            tokenizer, token_ids, prompt, take_every=take_every, skip_special_tokens=skip
        )
        assert "".join(deltas) == detokenizer.text == "".join(whole)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_text_without_a_prompt_is_what_the_tokenizer_decodes(
    name: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(any_tokens(tokenizer))
    decoded = tokenizer.decode(token_ids, skip_special_tokens=skip)
    if name in ("gemma", "metaspace") and REPLACEMENT in str(decoded):
        return  # a broken run of byte tokens becomes one mark a byte there
    deltas, _, _ = stream(tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(deltas) == decoded


@pytest.mark.parametrize("name", [*EXACT, "llama"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_text_continues_the_prompt_as_the_tokenizer_would(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = data.draw(any_tokens(tokenizer, 6))
    token_ids = data.draw(any_tokens(tokenizer))
    before = str(tokenizer.decode(prompt, skip_special_tokens=True))
    both = str(tokenizer.decode([*prompt, *token_ids], skip_special_tokens=True))
    if before.endswith(REPLACEMENT) or (REPLACEMENT in both and name != "byte level"):
        return
    if name == "llama" and not before:
        return  # its first blank is dropped: not an addition to the prompt's text
    deltas, _, _ = stream(tokenizer, token_ids, prompt)
    assert before + "".join(deltas) == both


@given(text=st.text(), data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA], ids=["byte level", "byte fallback"])
def test_valid_bytes_never_show_a_half_character(
    tokenizer: PreTrainedTokenizerBase, text: str, data: st.DataObject
) -> None:
    """Token i is byte i in both."""
    text = "x" + text.replace(REPLACEMENT, "")
    deltas, _, _ = stream(tokenizer, list(text.encode()))
    assert "".join(deltas) == text
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert deltas[-1] == ""  # each character came with its last byte


# Case C48: a byte-level model that emits one byte a step.
C48_TEXTS = {
    "han_emoji": "한🙂",
    "zwj": "👩\u200d👩\u200d👧\u200d👦",
    "nfd": "\u1112\u1161\u11ab",
    "nfc": "한",
    "flag": "🇰🇷",
    "mix": "a한b🙂c",
}


@pytest.mark.parametrize("text", C48_TEXTS.values(), ids=C48_TEXTS)
@pytest.mark.parametrize("prompt", ["", "Hello "])
def test_characters_cut_across_tokens_come_whole(text: str, prompt: str) -> None:
    deltas, _, _ = stream(BYTE_LEVEL, list(text.encode()), list(prompt.encode()))
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)


def test_every_row_of_the_reported_case_holds(cases_dir: Path) -> None:
    for row in json.loads((cases_dir / "C48_utf8.json").read_text()):
        prompt = row.get("prompt_bytes", [])
        token_ids = row.get("bytes", row.get("completion_bytes"))
        deltas, _, detokenizer = stream(BYTE_LEVEL, token_ids, prompt)
        text = "".join(deltas)
        assert text == detokenizer.text
        if "text" in row:
            assert text == row["text"]
        else:
            assert "Hello" not in text
            assert text.count(REPLACEMENT) <= 1


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA], ids=["byte level", "byte fallback"])
@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        pytest.param(b"Hello \xf0\x9f", b"\x8c\xb6!", "🌶!", id="character is completed"),
        pytest.param(b"Hello \xf0\x9f", b"!", "!", id="the prompt's orphan stays the prompt's"),
        pytest.param(b"Hello \xf0", b"\x9f!", "\ufffd!", id="an orphan of both"),
        pytest.param(b"Hello \xf0\x9f", b"", "", id="no answer"),
        pytest.param(b"Hello \xf0\x9f", b"\x8c", "\ufffd", id="never completed"),
        pytest.param(b"\xed\x95\x9c", b"\xed\x95\x9c", "한", id="a whole character"),
        pytest.param(b"\x9f\x98\x80", b"\x80", "\ufffd", id="continuation bytes only"),
        pytest.param(b"ab\xef\xbf", b"\xbda", "\ufffda", id="completed to the mark itself"),
    ],
)
def test_prompt_that_ends_inside_a_character(
    tokenizer: PreTrainedTokenizerBase, prompt: bytes, answer: bytes, text: str
) -> None:
    deltas, _, detokenizer = stream(tokenizer, list(answer), list(prompt))
    assert "".join(deltas) == detokenizer.text == text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA], ids=["byte level", "byte fallback"])
def test_character_cut_by_the_length_cap_is_one_mark_at_the_very_end(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    deltas, _, _ = stream(tokenizer, list(b"a\xed\x95"))
    assert deltas == ["a", "", "", REPLACEMENT]


def test_text_is_complete_before_the_last_delta_is_taken() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams(stop=("ab",)))
    for token_id in b"xa\xed":
        detokenizer.append(token_id)
    assert detokenizer.text == "xa" + REPLACEMENT


def test_orphan_bytes_do_not_hold_back_what_follows() -> None:
    deltas, _, _ = stream(BYTE_LEVEL, list(b"\xff\xff\xffab"))
    assert deltas == [REPLACEMENT] * 3 + ["a", "b", ""]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32, 2**70])
def test_ids_outside_the_vocabulary_add_no_text(name: str, token_id: int) -> None:
    tokenizer = TOKENIZERS[name]
    known = len(tokenizer) - 1
    deltas, _, _ = stream(
        tokenizer, [known, token_id, known], [token_id], skip_special_tokens=False
    )
    expected, _, _ = stream(tokenizer, [known, known], [], skip_special_tokens=False)
    assert "".join(deltas) == "".join(expected)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        pytest.param([], "the cat", id="no prompt"),
        pytest.param(["<s>"], "the cat", id="a prompt that does not show"),
        pytest.param(["<s>", "s"], " the cat", id="a word before"),
    ],
)
def test_leading_blank_goes_only_where_the_text_begins(prompt: list[str], text: str) -> None:
    token_ids = ids_of(LLAMA, "▁the", "▁cat")
    assert "".join(stream(LLAMA, token_ids, ids_of(LLAMA, *prompt))[0]) == text


@pytest.mark.parametrize(("skip", "text"), [(True, "a<tool>b"), (False, "a<s><tool>b")])
def test_only_special_tokens_are_skipped(skip: bool, text: str) -> None:
    special, plain = ids_of(BYTE_LEVEL, "<s>", "<tool>")
    token_ids = [ord("a"), special, plain, ord("b")]
    assert "".join(stream(BYTE_LEVEL, token_ids, skip_special_tokens=skip)[0]) == text


@pytest.mark.parametrize("skip", [True, False])
def test_stop_token_adds_no_text(skip: bool) -> None:
    eos = BYTE_LEVEL.eos_token_id
    for token_id in (eos, ord("z")):
        deltas, _, _ = stream(
            BYTE_LEVEL,
            [ord("a"), 0xED, token_id],
            stop_token=token_id,
            skip_special_tokens=skip,
        )
        assert deltas == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stop"),
    [
        pytest.param("one STOP two", ("STOP",), "one ", "STOP", id="across tokens"),
        pytest.param("one STO", ("STOP",), "one STO", None, id="held tail comes at the end"),
        pytest.param("SSTOP", ("STOP",), "S", "STOP", id="false start"),
        pytest.param("xabcd", ("bcd", "abc"), "x", "abc", id="the one that ends first"),
        pytest.param("xabc", ("c", "abc"), "x", "abc", id="the longest of those that end there"),
        pytest.param("xabab!", ("abab",), "x", "abab", id="overlapping itself"),
        pytest.param("STOP", ("STOP",), "", "STOP", id="nothing before"),
        pytest.param("a한🙂b", ("한🙂",), "a", "한🙂", id="of many bytes"),
        pytest.param("a\n\nb", ("\n\n",), "a", "\n\n", id="line feeds"),
        pytest.param("abc", ("\ufffd",), "abc", None, id="the mark itself"),
    ],
)
def test_stop_string_ends_the_text_in_front_of_it(
    text: str, stops: tuple[str, ...], expected: str, stop: str | None
) -> None:
    deltas, found, detokenizer = stream(BYTE_LEVEL, list(text.encode()), stop=stops)
    assert "".join(deltas) == detokenizer.text == expected
    assert found == stop


def test_token_may_hold_text_behind_the_stop_string() -> None:
    token_ids = [ord("a"), 256 + BYTE_LEVEL_EXTRAS.index("abc"), ord("z")]
    deltas, stop, detokenizer = stream(BYTE_LEVEL, token_ids, stop=("ab",))
    assert (stop, "".join(deltas), detokenizer.text) == ("ab", "a", "a")


def test_tail_is_held_only_while_it_can_become_a_stop_string() -> None:
    deltas, _, _ = stream(BYTE_LEVEL, list(b"xSTxSTOy"), stop=("STOP",))
    assert deltas == ["x", "", "", "STx", "", "", "", "STOy", ""]


def test_stop_string_in_the_prompt_does_not_count() -> None:
    deltas, stop, _ = stream(BYTE_LEVEL, list(b"P!"), list(b"STO"), stop=("STOP",))
    assert (stop, "".join(deltas)) == (None, "P!")


@pytest.mark.parametrize(
    ("min_tokens", "expected", "stop"),
    [(0, "", "ab"), (2, "", "ab"), (3, "abx", "ab"), (5, "abx", "ab"), (6, "abxab", None)],
)
def test_stop_string_before_min_tokens_is_ordinary_text(
    min_tokens: int, expected: str, stop: str | None
) -> None:
    deltas, found, _ = stream(BYTE_LEVEL, list(b"abxab"), stop=("ab",), min_tokens=min_tokens)
    assert ("".join(deltas), found) == (expected, stop)


def test_stop_string_that_was_passed_over_is_not_found_later() -> None:
    deltas, stop, _ = stream(BYTE_LEVEL, list(b"abxyab"), stop=("abxyz", "ab"), min_tokens=4)
    assert ("".join(deltas), stop) == ("abxy", "ab")


def reference_stop(text: str, stops: Sequence[str]) -> str:
    """The text in front of the stop string that is complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(
    pieces=st.lists(st.sampled_from(["a", "b", "abc", " the", "한a", "🙂", " "]), max_size=12),
    stops=st.lists(st.text("ab 한ca🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    take_every=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_stops_are_found_as_if_text_came_character_by_character(
    pieces: list[str], stops: list[str], take_every: int
) -> None:
    vocabulary = {text: 256 + place for place, text in enumerate(BYTE_LEVEL_EXTRAS)}
    expected = reference_stop("".join(pieces), stops)
    by_word = [vocabulary.get(piece, ord(piece[0])) for piece in pieces]
    by_byte = list("".join(pieces).encode())
    for token_ids in (by_word, by_byte):
        deltas, _, detokenizer = stream(
            BYTE_LEVEL, token_ids, stop=tuple(stops), take_every=take_every
        )
        assert "".join(deltas) == detokenizer.text == expected


@pytest.mark.parametrize(
    ("name", "tokens", "text"),
    [
        ("word ends", ["a</w>", "c", "b</w>", "한</w>"], "a cb 한"),
        ("wordpiece", ["a", "##b", "!", "c"], "ab! c"),
        ("no decoder", ["a", "한"], "a 한"),
    ],
)
def test_word_tokenizers_put_blanks_where_they_belong(
    name: str, tokens: list[str], text: str
) -> None:
    tokenizer = TOKENIZERS[name]
    deltas, _, _ = stream(tokenizer, ids_of(tokenizer, *tokens))
    assert "".join(deltas) == text


def test_tokenizer_written_in_python_completes_characters() -> None:
    tokenizer = TOKENIZERS["python"]
    token_ids = tokenizer.encode("a한🙂!", add_special_tokens=False)
    deltas, _, _ = stream(tokenizer, token_ids, tokenizer.encode("Hi ", add_special_tokens=False))
    assert "".join(deltas) == "a한🙂!"
