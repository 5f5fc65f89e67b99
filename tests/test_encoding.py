"""Texts become the ids that the reference harness scores, with one BOS, and nothing is lost."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmbench.bench.accuracy.encoding import EncodedPair, Encoder
from llmbench.bench.accuracy.text_segments import segment_border
from llmbench.bench.accuracy.tokenization import TextIds
from llmbench.bench.errors import BenchConfigError, WorkloadError

BOS, EOS = 0, 1
Build = Callable[..., Any]

# Merges across the join: "Ans" + "wer" is one token, and so is ": C". "_" is a blank.
MERGES = ["A n", "An s", "w e", "we r", "Ans wer", ": _", ":_ C", "l d", "r ld", "o rld"]
SINGLES = ["<pad>", "<s>", "</s>", "<unk>", *" :\nABCDansweroldhQNW?"]


@pytest.fixture(scope="module")
def spanning() -> Any:
    """The tokenizer of case C16: no pre-tokenizer, so a token may span context and answer."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    halves = [merge.split(" ") for merge in MERGES]
    merges = [(a.replace("_", " "), b.replace("_", " ")) for a, b in halves]
    tokens = list(dict.fromkeys([*SINGLES, *(a + b for a, b in merges)]))
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in SINGLES[:4]])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def metaspace() -> Any:
    """A tokenizer of the SentencePiece kind: blanks are letters, and each text begins with one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefgh:.", "\u2581a", "\u2581b", "ab"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("\u2581", "a"), ("\u2581", "b"), ("a", "b")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def in_bytes(text: str, tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(list(ids)))


class TestJoin:
    """What is left of a joint tokenization for the continuation."""

    def test_continuation_is_what_joint_ids_have_beyond_the_contexts(self, spanning: Any) -> None:
        pair = Encoder(spanning, 64).pair("Q?", " A")
        assert text_of(spanning, pair.context_ids) == "Q?"
        assert text_of(spanning, pair.continuation_ids) == " A"
        assert pair.join == "clean"

    @pytest.mark.parametrize(
        ("context", "continuation", "num_tokens"), [("Ans", "wer", 1), ("Answer:", " C", 2)]
    )
    def test_token_across_join_leaves_the_continuation_its_own_ids(
        self, spanning: Any, context: str, continuation: str, num_tokens: int
    ) -> None:
        pair = Encoder(spanning, 64).pair(context, continuation)
        assert len(pair.continuation_ids) == num_tokens
        assert text_of(spanning, pair.continuation_ids) == continuation
        assert pair.join == "separate"

    def test_token_across_join_with_ids_left_is_sliced_by_length_as_in_the_harness(
        self, spanning: Any
    ) -> None:
        pair = Encoder(spanning, 64).pair("Ans", "werold")
        assert text_of(spanning, pair.context_ids) == "Ans"
        assert text_of(spanning, pair.continuation_ids) == "old"  # "Answer" took the place of "Ans"
        assert pair.join == "spanned"

    def test_case_file_holds(self, cases_dir: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_file=str(cases_dir / "C16_tokenizer.json"),
            bos_token="<s>",
            eos_token="</s>",
        )
        lines = (cases_dir / "C16_requests.jsonl").read_text(encoding="utf-8").splitlines()
        cases = [json.loads(line) for line in lines]
        pairs = [(case["context"], case["continuation"]) for case in cases]
        item = Encoder(tokenizer, 64).item(pairs)
        sizes = [len(pair.continuation_ids) for pair in item.pairs]
        assert sizes[0] == cases[0]["expect_scored_tokens"] == 1
        assert sizes[1] >= cases[1]["expect_scored_tokens_min"]
        scored = [text_of(tokenizer, pair.continuation_ids) for pair in item.pairs]
        assert scored == ["wer", " C", " A", "world"]
        assert item.pairs[3].context_ids == (tokenizer.bos_token_id,)

    def test_trailing_blanks_of_the_context_are_scored(self, spanning: Any) -> None:
        encoder = Encoder(spanning, 64)
        assert encoder.pair("Q? ", "A") == encoder.pair("Q?", " A")
        assert text_of(spanning, encoder.pair("Q? \n ", "A").continuation_ids) == " \n A"

    def test_separate_continuations_are_counted(self, spanning: Any) -> None:
        item = Encoder(spanning, 64).item([("Ans", "wer"), ("Ans", "A"), ("Answer:", " C")])
        assert item.num_separate == 2

    @pytest.mark.parametrize("context", ["", "  ", "\n"])
    def test_empty_context_is_the_prefix_token(self, spanning: Any, context: str) -> None:
        pair = Encoder(spanning, 64).pair(context, "world")
        assert pair.context_ids == (spanning.bos_token_id,)
        assert text_of(spanning, pair.continuation_ids) == context + "world"

    def test_prefix_token_is_eos_without_bos(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.bos_token = None
        pair = Encoder(tokenizer, 64).pair("", "ab")
        assert pair.context_ids == (EOS,)
        assert pair.continuation_ids == in_bytes("ab", tokenizer)

    def test_continuation_that_begins_with_the_prefix_token_gives_it_to_the_context(
        self, byte_tokenizer: Build
    ) -> None:
        tokenizer = byte_tokenizer()
        pair = Encoder(tokenizer, 64).pair("", "<s>ab")
        assert pair.context_ids == (BOS,)
        assert pair.continuation_ids == in_bytes("ab", tokenizer)

    def test_empty_continuation_is_refused_by_name(self, byte_tokenizer: Build) -> None:
        with pytest.raises(WorkloadError, match=r"found 0 \(document 3 of x\)"):
            Encoder(byte_tokenizer(), 8).pair("a", "", where="document 3 of x")

    def test_sentencepiece_continuation_keeps_the_blank_of_its_word(self, metaspace: Any) -> None:
        pair = Encoder(metaspace, 64).pair("ab:", " a")
        assert text_of(metaspace, pair.context_ids) == "<s>\u2581ab:"
        assert text_of(metaspace, pair.continuation_ids) == "\u2581a"


class TestBos:
    """Exactly one BOS, whoever puts it there."""

    @pytest.mark.parametrize("adds_bos", [False, True])
    @pytest.mark.parametrize("add_bos", [None, False, True])
    @pytest.mark.parametrize("context", ["", "a", "<s>a", "<s>"])
    def test_no_path_gives_two(
        self, byte_tokenizer: Build, adds_bos: bool, add_bos: bool | None, context: str
    ) -> None:
        encoder = Encoder(byte_tokenizer(adds_bos=adds_bos), 64, add_bos=add_bos)
        pair = encoder.pair(context, "b")
        ids = pair.context_ids + pair.continuation_ids
        has_own = context.startswith("<s>") or context == ""
        wanted = has_own or (adds_bos if add_bos is None else add_bos)
        assert ids.count(BOS) == int(wanted)
        assert (ids[0] == BOS) == wanted
        assert encoder.prompt(context, 8).ids.count(BOS) == int(wanted)

    @pytest.mark.parametrize("adds_bos", [False, True])
    @pytest.mark.parametrize("text", ["abc", "<s>abc"])
    def test_whole_text_has_one_and_does_not_score_it(
        self, byte_tokenizer: Build, adds_bos: bool, text: str
    ) -> None:
        tokenizer = byte_tokenizer(adds_bos=adds_bos)
        (window,) = Encoder(tokenizer, 64).rolling(text)
        assert window.context_ids == (BOS,)
        assert window.continuation_ids == in_bytes("abc", tokenizer)

    def test_tokenizer_that_ends_texts_with_eos_does_not_split_context_and_answer(
        self, byte_tokenizer: Build
    ) -> None:
        from tokenizers import processors

        tokenizer = byte_tokenizer()
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
        encoder = Encoder(tokenizer, 64)
        pair = encoder.pair("ab", "c")
        assert pair.context_ids == (BOS, *in_bytes("ab", tokenizer))
        assert pair.continuation_ids == in_bytes("c", tokenizer)
        assert encoder.prompt("ab", 4).ids == pair.context_ids
        assert "'</s>'" in encoder.notices[0]

    def test_tokenizer_without_bos_and_eos_is_refused(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.bos_token = tokenizer.eos_token = None
        with pytest.raises(BenchConfigError, match="neither a BOS nor an EOS"):
            Encoder(tokenizer, 8)

    def test_bos_that_is_wanted_and_not_there_is_refused(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.bos_token = None
        with pytest.raises(BenchConfigError, match="no BOS"):
            Encoder(tokenizer, 8, add_bos=True)


class TestOverflow:
    """Texts longer than the model reads."""

    def test_last_ids_are_kept_and_the_lost_ones_counted(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer(adds_bos=True)
        pair = Encoder(tokenizer, 4).pair("abcdef", "xy")
        assert pair.context_ids == in_bytes("def", tokenizer)  # read: d e f x
        assert pair.num_dropped == 4  # BOS a b c

    def test_all_that_fits_is_kept(self, byte_tokenizer: Build) -> None:
        pair = Encoder(byte_tokenizer(), 4).pair("abc", "xy")
        assert (len(pair.context_ids), pair.num_dropped) == (3, 0)

    def test_longest_continuation_keeps_one_token_of_context(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer()
        pair = Encoder(tokenizer, 4).pair("abc", "wxyz")
        assert pair.context_ids == in_bytes("c", tokenizer)

    @pytest.mark.parametrize("on_overflow", ["truncate", "error"])
    def test_continuation_longer_than_the_model_reads_is_refused(
        self, byte_tokenizer: Build, on_overflow: Any
    ) -> None:
        encoder = Encoder(byte_tokenizer(), 4, on_overflow=on_overflow)
        with pytest.raises(WorkloadError, match=r"1 to 4 tokens, found 5 \(document 2 of t\)"):
            encoder.pair("a", "vwxyz", where="document 2 of t")

    def test_error_names_the_document_and_the_excess(self, byte_tokenizer: Build) -> None:
        encoder = Encoder(byte_tokenizer(), 4, on_overflow="error")
        with pytest.raises(WorkloadError, match=r"document 7 of t\) exceed 4 by 3") as caught:
            encoder.pair("abcdef", "xy", where="document 7 of t")
        assert "fewer shots" in caught.value.__notes__[0]

    def test_whole_shots_are_dropped_first(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer(adds_bos=True)
        shots = ["11", "22", "33"]

        def shorter(index: int, n: int) -> list[tuple[str, str]] | None:
            return [("".join(shots[n:]) + "q", "x")] if n <= len(shots) else None

        (item,) = Encoder(tokenizer, 5).items([[("112233q", "x")]], shorter=shorter)
        assert item.num_dropped_shots == 2
        assert item.pairs[0].context_ids == (BOS, *in_bytes("33q", tokenizer))
        assert item.num_dropped == 0

    def test_what_is_too_long_without_shots_keeps_its_bos(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer(adds_bos=True)
        items = Encoder(tokenizer, 3).items([[("abcdef", "x")]], shorter=lambda index, n: None)
        assert next(items).pairs[0].context_ids == (BOS, *in_bytes("ef", tokenizer))

    def test_length_that_holds_nothing_is_refused(self, byte_tokenizer: Build) -> None:
        with pytest.raises(BenchConfigError, match="max_length 0"):
            Encoder(byte_tokenizer(), 0)


class TestRolling:
    """A whole text in windows."""

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(text=st.text(alphabet="abcd", max_size=70), max_length=st.integers(1, 20))
    def test_each_token_is_scored_once_behind_what_precedes_it(
        self, byte_tokenizer: Build, text: str, max_length: int
    ) -> None:
        tokenizer = byte_tokenizer()
        ids = in_bytes(text, tokenizer)
        encoder = Encoder(tokenizer, max_length)
        done = 0
        for window in encoder.rolling(text):
            read = window.context_ids + window.continuation_ids[:-1]
            assert len(read) <= max_length
            assert window.continuation_ids == ids[done : done + len(window.continuation_ids)]
            seen = window.context_ids
            if done == 0:
                assert seen[0] == BOS
                seen = seen[1:]
            assert seen == ids[done - len(seen) : done]
            done += len(window.continuation_ids)
        assert done == len(ids)

    def test_windows_are_those_of_the_harness(self, byte_tokenizer: Build) -> None:
        # lm_eval 0.4.13: get_rolling_token_windows(range(11), prefix, 4, 1), made disjoint.
        tokenizer = byte_tokenizer()
        ids = in_bytes("bcdefghijk", tokenizer)
        found = [
            (
                tuple(ids.index(i) + 1 if i in ids else -1 for i in window.context_ids),
                len(window.continuation_ids),
            )
            for window in Encoder(tokenizer, 4).rolling("abcdefghijk")
        ]
        assert found == [((-1,), 4), ((3,), 4), ((6, 7), 3)]

    def test_text_without_tokens_has_no_windows(self, byte_tokenizer: Build) -> None:
        encoder = Encoder(byte_tokenizer(), 8)
        assert encoder.rolling("") == encoder.rolling("<s>") == []

    def test_single_token_is_scored_behind_the_prefix(self, byte_tokenizer: Build) -> None:
        (window,) = Encoder(byte_tokenizer(), 1).rolling("a")
        assert window.context_ids == (BOS,)
        assert len(window.continuation_ids) == 1


class TestPrompt:
    """Room for a prompt and its answer."""

    def test_answer_longer_than_the_context_is_cut_and_said(self, byte_tokenizer: Build) -> None:
        prompt = Encoder(byte_tokenizer(), 32).prompt("p" * 20, 256)
        assert (len(prompt.ids), prompt.max_tokens) == (20, 12)
        assert prompt.is_cut
        assert prompt.num_dropped == 0

    def test_long_prompt_keeps_its_last_ids(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer()
        text = "".join(chr(ord("A") + index) for index in range(40))
        prompt = Encoder(tokenizer, 32).prompt(text, 8)
        assert prompt.ids == in_bytes(text[-24:], tokenizer)
        assert (prompt.max_tokens, prompt.num_dropped, prompt.is_cut) == (8, 16, False)

    def test_prompt_that_fills_the_context_beside_a_larger_answer_is_refused(
        self, byte_tokenizer: Build
    ) -> None:
        with pytest.raises(WorkloadError, match=r"\(document 1 of g\) leave each other no room"):
            Encoder(byte_tokenizer(), 32).prompt("p" * 32, 256, where="document 1 of g")

    @pytest.mark.parametrize(("size", "budget"), [(20, 256), (40, 8)])
    def test_error_mode_refuses_either_cut(
        self, byte_tokenizer: Build, size: int, budget: int
    ) -> None:
        encoder = Encoder(byte_tokenizer(), 32, on_overflow="error")
        with pytest.raises(WorkloadError, match="do not fit in 32"):
            encoder.prompt("p" * size, budget)

    def test_empty_prompt_is_the_prefix_token(self, byte_tokenizer: Build) -> None:
        assert Encoder(byte_tokenizer(), 32).prompt("", 8).ids == (BOS,)

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(size=st.integers(0, 50), budget=st.integers(1, 60), max_length=st.integers(2, 40))
    def test_prompt_and_answer_fit_and_neither_is_empty(
        self, byte_tokenizer: Build, size: int, budget: int, max_length: int
    ) -> None:
        try:
            prompt = Encoder(byte_tokenizer(), max_length).prompt("p" * size, budget)
        except WorkloadError:
            assert budget >= max_length
            assert size >= max_length
        else:
            assert len(prompt.ids) >= 1
            assert 1 <= prompt.max_tokens <= budget
            assert len(prompt.ids) + prompt.max_tokens <= max_length

    def test_shots_are_dropped_before_ids(self, byte_tokenizer: Build) -> None:
        texts = ["11112222q", "2222q", "q"]
        (prompt,) = Encoder(byte_tokenizer(), 10).prompts(
            [texts[0]], 4, shorter=lambda index, n: texts[n] if n < len(texts) else None
        )
        assert (len(prompt.ids), prompt.num_dropped_shots, prompt.num_dropped) == (5, 1, 0)


class TestItems:
    """Many documents at a time."""

    PAIRS = st.lists(
        st.lists(
            st.tuples(st.text("AnswerQ? :", max_size=8), st.text("wer CAold", min_size=1)),
            min_size=1,
            max_size=4,
        ),
        max_size=12,
    )

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(items=PAIRS)
    def test_ids_are_those_of_one_text_at_a_time(
        self, spanning: Any, items: list[list[tuple[str, str]]]
    ) -> None:
        encoder = Encoder(spanning, 512)
        together = list(encoder.items(items))
        assert [item.pairs for item in together] == [
            tuple(by_the_rules(spanning, *pair) for pair in pairs) for pairs in items
        ]

    def test_documents_come_in_order_across_chunks(
        self, byte_tokenizer: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llmbench.bench.accuracy.encoding.CHUNK_TEXTS", 3)
        tokenizer = byte_tokenizer()
        items = [[("q", str(index))] * (1 + index % 4) for index in range(9)]
        found = Encoder(tokenizer, 8).items(items)
        for pairs, item in zip(items, found, strict=True):
            assert [pair.continuation_ids for pair in item.pairs] == [
                in_bytes(text, tokenizer) for _, text in pairs
            ]

    def test_choices_of_one_context_are_one_request(self, byte_tokenizer: Build) -> None:
        tokenizer = byte_tokenizer()
        item = Encoder(tokenizer, 32).item([("a", "x"), ("b", "y"), ("a", "zz"), ("b", "y")])
        requests, places = item.requests()
        assert [len(request.continuations) for request in requests] == [2, 2]
        assert places == [(0, 0), (1, 0), (0, 1), (1, 1)]
        for (row, column), pair in zip(places, item.pairs, strict=True):
            assert requests[row].context == pair.context_ids
            assert requests[row].continuations[column] == pair.continuation_ids

    def test_prompts_are_those_of_one_at_a_time(self, byte_tokenizer: Build) -> None:
        encoder = Encoder(byte_tokenizer(adds_bos=True), 32)
        texts = ["", "<s>a", "abc " * 12, "질문: "]
        assert encoder.prompts(texts, 8) == [encoder.prompt(text, 8) for text in texts]


LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module", params=["gpt2", "digits", "later"])
def trained(request: pytest.FixtureRequest) -> Any:
    """A byte-level BPE with merges over blanks, newlines and punctuation, as real ones have."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=request.param != "later"
    )
    split = {
        "gpt2": byte_level,
        "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level]),
        "later": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LATER), "isolated"), byte_level]
        ),
    }
    backend.pre_tokenizer = split[request.param]
    if request.param == "later":
        backend.normalizer = normalizers.NFC()
    text = ["a B.\n\nQ: it's 12\n\n\n 가 나\r\n\t b?\n\nA: !\n\n", "  \n\n  a\n \n..\n\n"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )


class TestSegments:
    """Pieces of repeated texts are tokenized once, with the ids of the whole."""

    @settings(
        max_examples=300,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        texts=st.lists(
            st.lists(
                st.sampled_from(
                    [
                        "\n\n",
                        "\n",
                        " ",
                        "a",
                        "B",
                        "12",
                        ".",
                        "'s",
                        "?",
                        "\t",
                        "\r\n",
                        "가",
                        "\u0301",
                        "\xa0",
                        "<s>",
                        "\x1c",
                        "Q:",
                    ]
                ),
                max_size=14,
            ).map("".join),
            max_size=4,
        )
    )
    def test_ids_are_those_of_the_whole_text(self, trained: Any, texts: list[str]) -> None:
        ids = TextIds(trained, add_bos=False)
        for special in (True, False):
            assert ids.encode(texts, special=special) == [in_bytes(text, trained) for text in texts]

    def test_repeated_examples_are_tokenized_once(
        self, trained: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        ids = TextIds(trained, add_bos=None)
        call = ids._call

        def heard(texts: list[str], adds: bool | None) -> list[tuple[int, ...]]:
            asked.extend(texts)
            return call(texts, adds)

        monkeypatch.setattr(ids, "_call", heard)
        shots = "Q: a 1\n\nQ: b 2\n\n"
        ids.encode([shots + "Q: c", shots + "Q: d"], special=True)
        ids.encode([shots + "Q: e"], special=True)
        assert sum("b 2" in text for text in asked) == 1

    def test_memory_of_pieces_is_bounded(
        self, trained: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llmbench.bench.accuracy.tokenization._MAX_KNOWN_IDS", 20)
        ids = TextIds(trained, add_bos=None)
        for index in range(50):
            text = f"Q: {index}\n\nA: b\n\nQ: c"
            assert ids.encode([text], special=True) == [in_bytes(text, trained)]
            assert sum(map(len, ids._known.values())) <= 20

    def test_tokenizer_that_is_not_known_is_given_whole_texts(
        self, spanning: Any, metaspace: Any
    ) -> None:
        assert segment_border(spanning) is None
        assert segment_border(metaspace) is None

    def test_token_that_swallows_blanks_forbids_cuts(self, byte_tokenizer: Build) -> None:
        from tokenizers import AddedToken, pre_tokenizers

        tokenizer = byte_tokenizer()
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert segment_border(tokenizer) is not None
        tokenizer.add_tokens([AddedToken("<mask>", rstrip=True)])
        assert segment_border(tokenizer) is None


@pytest.mark.real
@pytest.mark.parametrize("task", ["hellaswag", "kobest_boolq", "mmlu_sociology", "truthfulqa_mc1"])
def test_demo_tokenizer_encodes_golden_requests_by_the_rules(
    demo_model: Path, data_dir: Path, task: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(demo_model))
    golden = json.loads((data_dir / "lmeval_golden" / f"{task}.json").read_text(encoding="utf-8"))
    items = [[(pair[0], pair[1]) for pair in doc["arguments"]] for doc in golden["docs"]]
    found = Encoder(tokenizer, 8192).items(items)
    for pairs, item in zip(items, found, strict=True):
        assert item.pairs == tuple(by_the_rules(tokenizer, *pair) for pair in pairs)


def by_the_rules(tokenizer: Any, context: str, continuation: str) -> EncodedPair:
    """B3 of the harness, one text at a time, written again."""

    def encode(text: str, special: bool = True) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=special))

    blanks = len(context) - len(context.rstrip())
    if blanks:
        continuation = context[-blanks:] + continuation
        context = context[:-blanks]
    if not context:
        ids = encode(continuation, special=False)
        return EncodedPair(context_ids=(tokenizer.bos_token_id,), continuation_ids=ids)
    head, whole = encode(context), encode(context + continuation)
    tail = whole[len(head) :]
    if not tail:
        tail = encode(continuation, special=False)
        return EncodedPair(context_ids=head, continuation_ids=tail, join="separate")
    clean = whole[: len(head)] == head
    return EncodedPair(
        context_ids=head, continuation_ids=tail, join="clean" if clean else "spanned"
    )
