"""The engine over models whose every next token is known: stops, caps, characters, temperatures.

The likeliest token leads by 64 or more, so that what comes out is exact in any number type, and
each expectation can be written down by hand (cases C15, C34 and C48).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import RequestError
from llmbench.engine.llm import LLM, Completion
from llmbench.engine.request import RequestOutput, SamplingParams

EOS = 1
NUM_BYTE_TOKENS = 258


def successors_of(chain: Sequence[int]) -> dict[int, int]:
    return dict(itertools.pairwise(chain))


def make_llm(folder: Path, **config: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 32, "block_size": 4} | config
    return LLM(str(folder), check_integrity=True, **settings)


def stream(
    core: EngineCore, prompt: str | Sequence[int], params: SamplingParams
) -> list[RequestOutput]:
    (request,) = core.make_requests(prompt, params, "streamed")
    core.add_request(request)
    return list(outputs_of(core))


def outputs_of(core: EngineCore) -> Iterator[RequestOutput]:
    while core.has_unfinished:
        yield from core.step()


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Callable[..., Any]) -> Any:
    return byte_tokenizer()


class TestRecipe:
    """The scripted checkpoints do what they promise, also by transformers' own code."""

    def generate(self, folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        generated: list[int] = out[0, len(prompt) :].tolist()
        return generated

    def test_llama_follows_its_table(self, scripted_llama: Callable[..., Path]) -> None:
        folder = scripted_llama(successors_of([5, 9, 7, 30, 5]))
        want = [9, 7, 30, 5, 9]
        assert self.generate(folder, [3, 5], 5) == want
        params = SamplingParams(temperature=0.0, max_tokens=5)
        assert make_llm(folder).generate([[3, 5]], params)[0].answers[0].token_ids == want

    def test_opt_follows_its_positions(self, scripted_opt: Callable[..., Path]) -> None:
        folder = scripted_opt([50, 51, 8, 8, 9, 8])
        want = [51, 8, 8, 9, 8]
        assert self.generate(folder, [3, 5], 5) == want
        params = SamplingParams(temperature=0.0, max_tokens=5)
        assert make_llm(folder).generate([[3, 5]], params)[0].answers[0].token_ids == want


CHAIN = [10, 11, 12, 13, 14, 15, 16, 17]
TEMPERATURES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-45, 0.0)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def chain_llm(request: pytest.FixtureRequest, scripted_llama: Callable[..., Path]) -> LLM:
    return make_llm(scripted_llama(successors_of(CHAIN)), dtype=request.param)


class TestTinyTemperatures:
    """Case C15: a temperature near zero is greedy, in any company."""

    def test_every_temperature_gives_the_greedy_ids(self, chain_llm: LLM) -> None:
        params = [SamplingParams(temperature=t, max_tokens=6) for t in TEMPERATURES]
        results = chain_llm.generate([[CHAIN[0]]] * len(params), params)
        assert [r.answers[0].token_ids for r in results] == [CHAIN[1:7]] * len(params)
        assert {r.answers[0].finish_reason for r in results} == {"length"}

    def test_they_do_in_a_batch_with_temperature_1_and_a_forbidden_token(
        self, chain_llm: LLM
    ) -> None:
        # Token 11 forbidden, every other logit is 0 and the answer is anything else.
        forbidding = SamplingParams(
            temperature=1.0, max_tokens=6, seed=1, logit_bias={11: -float("inf")}, logprobs=2
        )
        params = [
            forbidding,
            *(SamplingParams(temperature=t, max_tokens=6, logprobs=2) for t in TEMPERATURES),
            SamplingParams(temperature=1.0, max_tokens=6, seed=2, logprobs=2),
        ]
        results = chain_llm.generate([[CHAIN[0]]] * len(params), params)
        answers = [result.answers[0] for result in results]
        assert answers[0].token_ids[0] != 11
        assert [a.token_ids for a in answers[1:]] == [CHAIN[1:7]] * (len(params) - 1)
        for answer in answers:
            assert answer.error is None
            for entry in answer.logprobs:
                reported = [entry.logprob, *(logprob for _, logprob in entry.top)]
                assert torch.tensor(reported).isfinite().all()

    def test_top_k_beyond_the_vocabulary_keeps_all(self, chain_llm: LLM) -> None:
        params = [
            SamplingParams(temperature=1.0, top_k=top_k, seed=3, max_tokens=6)
            for top_k in (0, -1, 64, 65, 10**12)
        ]
        results = chain_llm.generate([[CHAIN[0]]] * len(params), params)
        assert [r.answers[0].token_ids for r in results] == [CHAIN[1:7]] * len(params)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("temperature", -0.1, "temperature must be finite and not negative, not -0.1"),
            ("temperature", float("nan"), "temperature must be finite and not negative, not nan"),
            ("top_p", 0.0, r"top_p must be in \(0, 1\], not 0.0"),
            ("top_k", -2, "top_k must be -1 or 0 .* not -2"),
        ],
    )
    def test_values_without_a_meaning_are_refused(
        self, name: str, value: float, message: str
    ) -> None:
        with pytest.raises(RequestError, match=message):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


STOP = 40


@pytest.fixture(scope="module")
def alphabet(scripted_llama: Callable[..., Path], tokenizer: Any) -> LLM:
    """Says the alphabet, and ends behind z."""
    chain = [*tokenizer.encode("abcdefghijklmnopqrstuvwxyz"), EOS]
    folder = scripted_llama(successors_of(chain), vocab_size=NUM_BYTE_TOKENS, tokenizer=tokenizer)
    return make_llm(folder)


class TestStopBeforeCap:
    """Case C34 without drafts: text, ids, log-probabilities and counts end at the same token."""

    @pytest.mark.parametrize(
        ("run", "reason", "num_kept"),
        [
            ([10, 11, STOP, 20, 21, 22], "stop", 3),
            ([10, 11, 20, 21, 22, STOP], "length", 5),
            ([10, 11, 20, 21, STOP, 22], "stop", 5),
            ([EOS, 20, 21], "stop", 1),
        ],
    )
    def test_reported_rows_end_as_expected(
        self, run: list[int], reason: str, num_kept: int, scripted_opt: Callable[..., Path]
    ) -> None:
        llm = make_llm(scripted_opt([0, 0, *run]))
        params = SamplingParams(
            temperature=0.0, max_tokens=5, stop_token_ids=(STOP,), logprobs=1, detokenize=False
        )
        outputs = stream(llm.core, [3, 4, 5], params)
        assert [t for output in outputs for t in output.new_token_ids] == run[:num_kept]
        assert [e.token_id for o in outputs for e in o.new_logprobs] == run[:num_kept]
        last = outputs[-1]
        assert (last.finish_reason, last.num_output_tokens) == (reason, num_kept)
        assert last.stop_reason == (STOP if STOP in run[:num_kept] else None)
        assert all(output.finish_reason is None for output in outputs[:-1])

    def answer(self, llm: LLM, prompt: str, **params: Any) -> Completion:
        settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "logprobs": 0} | params
        asked = SamplingParams(**settings)
        answer = llm.generate([prompt], asked)[0].answers[0]
        outputs = stream(llm.core, prompt, asked)
        assert "".join(output.text_delta for output in outputs) == answer.text
        assert [t for output in outputs for t in output.new_token_ids] == answer.token_ids
        assert [e.token_id for e in answer.logprobs] == answer.token_ids
        assert outputs[-1].num_output_tokens == len(answer.token_ids)
        assert outputs[-1].finish_reason == answer.finish_reason
        assert outputs[-1].stop_reason == answer.stop_reason
        return answer

    @pytest.mark.parametrize(
        ("params", "text", "num_tokens", "reason", "stop_reason"),
        [
            ({}, "bcdefghijklmnopqrstuvwxyz", 26, "stop", None),
            ({"max_tokens": 5}, "bcdef", 5, "length", None),
            ({"max_tokens": 25}, "bcdefghijklmnopqrstuvwxyz", 25, "length", None),
            ({"stop": ("ghi",)}, "bcdef", 8, "stop", "ghi"),
            ({"stop": ("hi", "ghi", "jk")}, "bcdef", 8, "stop", "ghi"),
            ({"stop": ("ef",), "max_tokens": 5}, "bcd", 5, "stop", "ef"),
            ({"stop": ("fg",), "max_tokens": 5}, "bcdef", 5, "length", None),
            ({"stop": ("zz",)}, "bcdefghijklmnopqrstuvwxyz", 26, "stop", None),
            ({"stop": ("ab",), "max_tokens": 4}, "bcde", 4, "length", None),
            ({"stop": ("cd",), "min_tokens": 4, "max_tokens": 6}, "bcdefg", 6, "length", None),
            ({"stop": ("cd",), "min_tokens": 3}, "b", 3, "stop", "cd"),
        ],
    )
    def test_text_ids_and_logprobs_end_together(
        self,
        params: dict[str, Any],
        text: str,
        num_tokens: int,
        reason: str,
        stop_reason: str | None,
        alphabet: LLM,
    ) -> None:
        answer = self.answer(alphabet, "a", **params)
        assert answer.text == text
        assert len(answer.token_ids) == num_tokens
        assert (answer.finish_reason, answer.stop_reason) == (reason, stop_reason)

    def test_stop_token_is_in_the_ids_and_not_in_the_text(
        self, alphabet: LLM, tokenizer: Any
    ) -> None:
        (stop,) = tokenizer.encode("f")
        answer = self.answer(alphabet, "a", stop_token_ids=(stop,))
        assert (answer.text, answer.token_ids[-1]) == ("bcde", stop)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)

    def test_ignored_end_of_text_is_passed_over(self, alphabet: LLM) -> None:
        answer = self.answer(alphabet, "y", ignore_eos=True, max_tokens=4)
        assert answer.token_ids[1:] == [EOS] * 3  # it is its own successor
        assert (answer.text, answer.finish_reason) == ("z", "length")

    @pytest.mark.parametrize("kind", ["eos", "stop_token"])
    def test_ends_are_not_even_sampled_before_min_tokens(
        self, kind: str, alphabet: LLM, tokenizer: Any
    ) -> None:
        (z,) = tokenizer.encode("z")
        params: dict[str, Any] = {"min_tokens": 4, "max_tokens": 4}
        if kind == "stop_token":
            params["stop_token_ids"] = (z,)
        answer = self.answer(alphabet, "x", **params)
        assert len(answer.token_ids) == 4
        assert EOS not in answer.token_ids[:3]
        assert (z in answer.token_ids[:3]) == (kind == "eos")

    def test_bias_forces_and_forbids_tokens(self, alphabet: LLM, tokenizer: Any) -> None:
        q, c = tokenizer.encode("qc")
        assert self.answer(alphabet, "a", logit_bias={q: 1e4}, max_tokens=3).text == "qqq"
        forbidden = self.answer(alphabet, "a", logit_bias={c: -float("inf")}, max_tokens=3)
        assert c not in forbidden.token_ids
        assert forbidden.text[0] == "b"


CHARACTERS = {
    "han_emoji": "한🙂",
    "zwj": "👩\u200d👩\u200d👧\u200d👦",
    "nfd": "\u1112\u1161\u11ab",
    "nfc": "한",
    "flag": "🇰🇷",
    "mix": "a한b🙂c",
}


class TestCharactersCutAcrossTokens:
    """Case C48: the model emits one byte a step; what is shown is whole characters."""

    def check(
        self,
        script: list[int],
        prompt: list[int],
        num_tokens: int,
        scripted_opt: Callable[..., Path],
        tokenizer: Any,
    ) -> list[str]:
        """The deltas of a streamed answer, which join to the text of one at once."""
        folder = scripted_opt(
            [0] * (len(prompt) - 1) + script, vocab_size=NUM_BYTE_TOKENS, tokenizer=tokenizer
        )
        llm = make_llm(folder)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        deltas = [output.text_delta for output in stream(llm.core, prompt, params)]
        assert "".join(deltas) == llm.generate([prompt], params)[0].answers[0].text
        return deltas

    @pytest.mark.parametrize("prompt", ["x", "Hi 한"])
    @pytest.mark.parametrize("name", CHARACTERS)
    def test_characters_come_whole_and_none_is_lost(
        self, name: str, prompt: str, scripted_opt: Callable[..., Path], tokenizer: Any
    ) -> None:
        text = CHARACTERS[name]
        script = tokenizer.encode(text)
        assert len(script) == len(text.encode())
        deltas = self.check(script, tokenizer.encode(prompt), len(script), scripted_opt, tokenizer)
        assert "".join(deltas) == text
        assert all(len(delta) <= 1 for delta in deltas)
        assert len(deltas) == len(script)

    def test_prompt_that_ends_inside_a_character_is_not_repeated(
        self, scripted_opt: Callable[..., Path], tokenizer: Any
    ) -> None:
        ids = tokenizer.encode("Hello 🌶!")
        num_prompt = len(b"Hello ") + 2
        deltas = self.check(ids[num_prompt:], ids[:num_prompt], 3, scripted_opt, tokenizer)
        assert not set("".join(deltas)) & set("Hello ")
        assert "".join(deltas).count("\N{REPLACEMENT CHARACTER}") <= 1
        assert deltas[-1] == "!"

    def test_character_cut_by_the_cap_is_one_mark_at_the_very_end(
        self, scripted_opt: Callable[..., Path], tokenizer: Any
    ) -> None:
        script = tokenizer.encode("한")
        deltas = self.check(script, tokenizer.encode("x"), 2, scripted_opt, tokenizer)
        assert deltas == ["", "\N{REPLACEMENT CHARACTER}"]

    def test_character_cut_by_end_of_text_is_one_mark_at_the_very_end(
        self, scripted_opt: Callable[..., Path], tokenizer: Any
    ) -> None:
        script = [*tokenizer.encode("a🙂")[:3], EOS]
        deltas = self.check(script, tokenizer.encode("x"), 9, scripted_opt, tokenizer)
        assert deltas == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]
