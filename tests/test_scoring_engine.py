"""ScoringEngine: the numbers are transformers' own, however the engine gets to them."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from llmbench.engine.config import EngineConfig, Policy
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.errors import RequestError
from llmbench.engine.llm import LLM
from llmbench.engine.models.head import head_of
from llmbench.engine.models.loader import load_model
from llmbench.engine.request import SamplingParams
from llmbench.engine.scoring import ContinuationScore, ScoreRequest, ScoringEngine
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Scheme
from llmbench.quant.linear_layers import find_linears

MAX_MODEL_LEN = 256
SHOTS = tuple((11 * i) % 119 + 3 for i in range(40))


def ids(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 128, (length,), generator=generator).tolist())


def item(context: Sequence[int], *continuations: Sequence[int]) -> ScoreRequest:
    return ScoreRequest(context=tuple(context), continuations=tuple(map(tuple, continuations)))


ITEMS = [
    item(ids(1, 1), [5]),
    item(SHOTS + ids(9, 2), [5], [6], [7], [8]),  # four letters
    item(SHOTS + ids(5, 3), ids(3, 4), ids(7, 5), ids(3, 4), [9]),  # one of them twice
    item(ids(37, 6), ids(1, 7), (*ids(6, 8), 20), (*ids(6, 8), 21)),  # two merged, one apart
    item(SHOTS + ids(9, 2), ids(2, 9)),  # the context of another item
    item(ids(3, 10), ids(120, 11), ids(64, 12)),
    item(ids(16, 13), ids(2, 14), ids(16, 15)),  # whole blocks
    item(SHOTS, SHOTS),  # a continuation that repeats its context
]


def reference(model: Any, request: ScoreRequest) -> list[tuple[list[float], bool]]:
    """Log-probabilities of each continuation, and whether greedy decoding gives it."""
    found = []
    for continuation in request.continuations:
        token_ids = torch.tensor([request.context + continuation])
        with torch.inference_mode():
            logits = model(token_ids).logits[0, len(request.context) - 1 : -1]
        rows = torch.log_softmax(logits.double(), -1)
        chosen = rows.gather(-1, torch.tensor(continuation)[:, None])[:, 0]
        greedy = logits.argmax(-1).tolist() == list(continuation)
        found.append((chosen.tolist(), greedy))
    return found


def greedy_continuation(model: Any, context: Sequence[int], length: int) -> tuple[int, ...]:
    token_ids = list(context)
    for _ in range(length):
        with torch.inference_mode():
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return tuple(token_ids[len(context) :])


Scores = list[tuple[ContinuationScore, ...]]


def in_order(scored: Iterator[tuple[int, tuple[ContinuationScore, ...]]]) -> Scores:
    found = dict(scored)
    return [found[index] for index in range(len(found))]


def assert_scores(
    scores: Scores, items: Sequence[ScoreRequest], model: Any, *, tolerance: float = 1e-5
) -> None:
    assert len(scores) == len(items)
    for request, found in zip(items, scores, strict=True):
        want = reference(model, request)
        assert len(found) == len(want)
        for score, (logprobs, is_greedy) in zip(found, want, strict=True):
            assert score.logprobs == pytest.approx(logprobs, abs=tolerance)
            assert score.loglikelihood == pytest.approx(sum(logprobs), abs=1e-4)
            assert score.is_greedy == is_greedy


@pytest.fixture(scope="module")
def calm_llama(
    tmp_path_factory: pytest.TempPathFactory, random_model: Callable[..., Any]
) -> tuple[Any, Any]:
    """A model as the engine and as transformers has it, with logits small enough for 1e-5."""
    model = random_model("llama", deviation=0.15, max_position_embeddings=MAX_MODEL_LEN)
    folder = tmp_path_factory.mktemp("calm")
    model.save_pretrained(folder)
    config = EngineConfig(model=str(folder), dtype="float32", compile=False)
    return load_model(config), model


@pytest.fixture
def make_engine(calm_llama: tuple[Any, Any]) -> Callable[..., ScoringEngine]:
    def make(*, loaded: Any = None, **config: Any) -> ScoringEngine:
        settings: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 8, "max_num_seqs": 4}
        made = EngineConfig(model="tiny", check_integrity=True, **(settings | config))
        return ScoringEngine(EngineCore(made, loaded=loaded or calm_llama[0]))

    return make


class TestNumbers:
    @pytest.mark.parametrize(
        "config",
        [
            {"max_num_batched_tokens": 7},
            {"max_num_batched_tokens": 64},
            {"max_num_batched_tokens": 512},
            {"max_num_seqs": 1},
            {"max_num_seqs": 32},
            {"block_size": 1, "num_kv_blocks": 512},
            {"block_size": 16},
            {"prefix_cache": "none"},
            {"kv_manager": "contiguous"},
            {"kv_manager": "uncached"},
            {"num_kv_blocks": 17, "max_num_batched_tokens": 32},
        ]
        + [{"policy": policy, "max_num_batched_tokens": 24} for policy in get_args(Policy)],
        ids=str,
    )
    def test_scores_are_those_of_transformers(
        self,
        config: dict[str, Any],
        calm_llama: tuple[Any, Any],
        make_engine: Callable[..., ScoringEngine],
    ) -> None:
        engine = make_engine(**config)
        for _ in range(2):  # the second time over a warm prefix cache
            assert_scores(in_order(engine.score(ITEMS)), ITEMS, calm_llama[1])
        assert not engine.core.has_unfinished
        assert engine.core.kv.usage().num_reserved_slots == 0

    def test_order_of_the_items_does_not_matter(
        self, calm_llama: tuple[Any, Any], make_engine: Callable[..., ScoringEngine]
    ) -> None:
        items = ITEMS[::-1]
        assert_scores(in_order(make_engine().score(items)), items, calm_llama[1])

    def test_preempted_items_report_each_token_once(
        self, calm_llama: tuple[Any, Any], make_engine: Callable[..., ScoringEngine]
    ) -> None:
        # Generation beside it grows, and takes the blocks of what is scored.
        engine = make_engine(num_kv_blocks=12, max_num_batched_tokens=9, prefix_cache="none")
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        for index in range(2):
            engine.core.add_requests(engine.core.make_requests([7, 8, 9], params, f"text-{index}"))
            engine.core.step()
        items = [item(ids(6, seed), ids(40, seed + 50)) for seed in range(4)]
        scores = in_order(engine.score(items, with_hidden=True))
        assert sum(record.num_preempted for record in engine.core.step_records) > 0
        assert_scores(scores, items, calm_llama[1])
        assert [score[0].hidden.shape[0] for score in scores if score[0].hidden is not None] == (
            [40] * 4
        )
        assert_reproduces(scores, items, engine)

    def test_greedy_continuations_are_told_from_others(
        self, calm_llama: tuple[Any, Any], make_engine: Callable[..., ScoringEngine]
    ) -> None:
        context = ids(20, 1)
        greedy = greedy_continuation(calm_llama[1], context, 5)
        other = (*greedy[:2], (greedy[2] + 1) % 128, *greedy[3:])
        (scores,) = in_order(
            make_engine().score([item(context, greedy, other, greedy[:1], other[-1:])])
        )
        assert [score.is_greedy for score in scores] == [True, False, True, False]

    def test_item_that_fills_the_model_to_its_last_position_is_scored(
        self, calm_llama: tuple[Any, Any], make_engine: Callable[..., ScoringEngine]
    ) -> None:
        # The last token of a continuation is never read.
        items = [item(ids(MAX_MODEL_LEN - 29, 1), ids(30, 2)), item(ids(MAX_MODEL_LEN, 3), [4])]
        assert_scores(in_order(make_engine().score(items)), items, calm_llama[1])

    @pytest.mark.parametrize("variant_name", ["gemma2", "qwen3-tied-bias", "opt", "gpt2"])
    def test_scores_of_other_families(
        self, variant_name: str, tiny_model: Callable[[str], tuple[Path, Any]]
    ) -> None:
        folder, model = tiny_model(variant_name)
        core = LLM(str(folder), dtype="float32", num_kv_blocks=40, max_num_batched_tokens=20).core
        items = ITEMS[:4]
        assert_scores(in_order(ScoringEngine(core).score(items)), items, model, tolerance=5e-5)

    def test_scores_of_the_transformers_back_end(
        self, tiny_model: Callable[[str], tuple[Path, Any]]
    ) -> None:
        folder, model = tiny_model("llama")
        core = LLM(
            str(folder), dtype="float32", model_backend="transformers", num_kv_blocks=40
        ).core
        scores = in_order(ScoringEngine(core).score(ITEMS[:4], with_hidden=True))
        assert_scores(scores, ITEMS[:4], model, tolerance=5e-5)
        assert_reproduces(scores, ITEMS[:4], ScoringEngine(core))

    def test_scores_of_a_quantized_checkpoint(
        self,
        tiny_model: Callable[[str], tuple[Path, Any]],
        random_weight: Callable[..., Any],
        quantized_file: Callable[..., Path],
        logits_in_pieces: Callable[..., Tensor],
    ) -> None:
        checkpoint = Checkpoint.open(tiny_model("llama")[0])
        names = [layer.name for layer in find_linears(checkpoint) if layer.block]
        scheme = Scheme(bits=4, group_size=16)
        folder = quantized_file(
            "compressed-tensors",
            {n: random_weight(scheme, *checkpoint.shape(f"{n}.weight")) for n in names},
            plain={
                name: checkpoint.get(name)
                for name in checkpoint
                if name.removesuffix(".weight") not in names
            },
            config=checkpoint.config,
        )
        core = LLM(str(folder), dtype="float32", num_kv_blocks=40, max_num_batched_tokens=20).core
        assert core.loaded.quantization is not None
        request = ITEMS[2]
        (scores,) = in_order(ScoringEngine(core).score([request], with_hidden=True))
        for continuation, score in zip(request.continuations, scores, strict=True):
            token_ids = [*request.context, *continuation]
            logits = logits_in_pieces(core.loaded.model, token_ids, [len(token_ids)])
            rows = torch.log_softmax(logits[len(request.context) - 1 : -1].double(), -1)
            want = rows.gather(-1, torch.tensor(continuation)[:, None])[:, 0]
            assert score.logprobs == pytest.approx(want.tolist(), abs=5e-5)
        assert_reproduces([scores], [request], ScoringEngine(core))

    def test_eight_bit_cache_changes_scores_a_little(
        self, tiny_model: Callable[[str], tuple[Path, Any]]
    ) -> None:
        folder, model = tiny_model("llama")
        core = LLM(str(folder), dtype="float32", kv_cache_dtype="int8", num_kv_blocks=40).core
        (scores,) = in_order(ScoringEngine(core).score([ITEMS[2]]))
        for score, (logprobs, _) in zip(scores, reference(model, ITEMS[2]), strict=True):
            assert score.logprobs == pytest.approx(logprobs, abs=0.5)
            assert score.logprobs != pytest.approx(logprobs, abs=1e-5)


def assert_reproduces(scores: Scores, items: Sequence[ScoreRequest], engine: ScoringEngine) -> None:
    """The hidden states and the head give the same log-probabilities."""
    head = head_of(engine.core.loaded)
    for request, found in zip(items, scores, strict=True):
        for continuation, score in zip(request.continuations, found, strict=True):
            hidden = score.hidden
            assert hidden is not None
            assert hidden.shape == (len(continuation), engine.core.loaded.hidden_size)
            rows = torch.log_softmax(head.logits(hidden).double(), -1)
            chosen = rows.gather(-1, torch.tensor(continuation)[:, None])[:, 0]
            assert score.logprobs == pytest.approx(chosen.tolist(), abs=1e-5)


class TestHiddenStates:
    @pytest.mark.parametrize("chunk", [7, 512])
    @pytest.mark.parametrize("prefix_cache", ["hash", "none"])
    def test_head_reproduces_the_scores(
        self, chunk: int, prefix_cache: str, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        engine = make_engine(max_num_batched_tokens=chunk, prefix_cache=prefix_cache)
        assert_reproduces(in_order(engine.score(ITEMS, with_hidden=True)), ITEMS, engine)

    def test_they_are_those_of_transformers_behind_the_last_norm(
        self, calm_llama: tuple[Any, Any], make_engine: Callable[..., ScoringEngine]
    ) -> None:
        request = ITEMS[2]
        (scores,) = in_order(make_engine().score([request], with_hidden=True))
        for continuation, score in zip(request.continuations, scores, strict=True):
            token_ids = torch.tensor([request.context + continuation])
            with torch.inference_mode():
                want = calm_llama[1].model(token_ids).last_hidden_state[0]
            assert score.hidden is not None
            torch.testing.assert_close(
                score.hidden, want[len(request.context) - 1 : -1].clone(), atol=1e-4, rtol=1e-4
            )

    def test_they_own_their_memory(self, make_engine: Callable[..., ScoringEngine]) -> None:
        for scores in in_order(make_engine().score(ITEMS, with_hidden=True)):
            for score in scores:
                assert isinstance(score.hidden, Tensor)
                assert score.hidden.untyped_storage().nbytes() == score.hidden.nbytes
                score.hidden.add_(1)  # nobody's but the caller's

    def test_none_without_being_asked_for(self, make_engine: Callable[..., ScoringEngine]) -> None:
        scores = in_order(make_engine().score(ITEMS))
        assert all(score.hidden is None for found in scores for score in found)


class TestSharing:
    """How many tokens are computed, by the engine's own records."""

    BLOCK = 8

    def computed(self, engine: ScoringEngine, items: Sequence[ScoreRequest]) -> int:
        before = len(engine.core.step_records)
        in_order(engine.score(items))
        records = engine.core.step_records[before:]
        return sum(record.num_prefill_tokens + record.num_decode_tokens for record in records)

    @pytest.mark.parametrize("chunk", [12, 512])
    def test_context_is_computed_once_an_item(
        self, chunk: int, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        context, lengths = ids(45, 1), (3, 9, 5)
        request = item(context, *(ids(length, length) for length in lengths))
        engine = make_engine(max_num_batched_tokens=chunk)
        open_block = len(context) - 40  # five whole blocks are shared
        first, *others = lengths
        want = len(context) + first - 1 + sum(open_block + length - 1 for length in others)
        assert self.computed(engine, [request]) == want

    def test_continuations_of_one_token_are_one_row(
        self, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        context = ids(45, 1)
        engine = make_engine()
        assert self.computed(engine, [item(context, *([i] for i in range(100)))]) == len(context)
        assert sum(record.num_seqs for record in engine.core.step_records) == 1

    @pytest.mark.parametrize("max_num_seqs", [1, 4, 16])
    def test_examples_are_computed_once_for_all_items(
        self, max_num_seqs: int, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        tails = [ids(6, seed) for seed in range(30)]
        items = [item(SHOTS + tail, [5], [6]) for tail in tails]
        engine = make_engine(max_num_seqs=max_num_seqs)
        assert len(SHOTS) % self.BLOCK == 0
        assert self.computed(engine, items) == len(SHOTS) + sum(len(tail) for tail in tails)

    def test_without_a_prefix_cache_everything_is_computed(
        self, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        items = [item(SHOTS + ids(6, seed), ids(2, 1), ids(2, 2)) for seed in range(3)]
        assert self.computed(make_engine(prefix_cache="none"), items) == 6 * (len(SHOTS) + 7)

    def test_items_without_a_common_beginning_run_together(
        self, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        engine = make_engine(max_num_seqs=8)
        in_order(engine.score([item(ids(20, seed), [5]) for seed in range(8)]))
        assert [record.num_seqs for record in engine.core.step_records] == [8]


class TestFeed:
    def test_few_requests_are_live_at_a_time(
        self, make_engine: Callable[..., ScoringEngine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine(max_num_seqs=2)
        core = engine.core
        most = 0
        step = core.step

        def watched() -> Any:
            nonlocal most
            most = max(most, len(core._requests))
            return step()

        monkeypatch.setattr(core, "step", watched)
        items = [item(ids(10, seed), ids(2, 1), ids(2, 2)) for seed in range(40)]
        assert len(in_order(engine.score(items))) == 40
        assert 2 < most <= 4 * 2 + 1

    def test_items_come_as_they_are_done(self, make_engine: Callable[..., ScoringEngine]) -> None:
        engine = make_engine(max_num_batched_tokens=16, policy="splitfuse")
        items = [item(ids(8, 1), ids(100, 2)), item(ids(8, 3), [5])]
        assert [index for index, _ in engine.score(items)] == [1, 0]

    def test_nothing_is_scored_of_no_items(self, make_engine: Callable[..., ScoringEngine]) -> None:
        assert list(make_engine().score([])) == []

    def test_closed_iterator_leaves_an_engine_that_can_be_used(
        self, calm_llama: tuple[Any, Any], make_engine: Callable[..., ScoringEngine]
    ) -> None:
        engine = make_engine(max_num_batched_tokens=16)
        scored = engine.score(ITEMS)
        next(scored)
        assert engine.core.has_unfinished
        scored.close()
        assert not engine.core.has_unfinished
        assert engine.core.kv.usage().num_reserved_slots == 0
        assert_scores(in_order(engine.score(ITEMS)), ITEMS, calm_llama[1])

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no")])
    def test_interrupted_step_leaves_an_engine_that_can_be_used(
        self,
        error: BaseException,
        calm_llama: tuple[Any, Any],
        make_engine: Callable[..., ScoringEngine],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        engine = make_engine(max_num_batched_tokens=16)
        scored = engine.score(ITEMS)
        next(scored)

        def fail(*args: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(engine.core.runner, "execute", fail)
            with pytest.raises(type(error)):
                list(scored)
        assert_scores(in_order(engine.score(ITEMS)), ITEMS, calm_llama[1])

    def test_request_aborted_from_elsewhere_is_an_error(
        self, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        engine = make_engine(max_num_batched_tokens=16)
        scored = engine.score([item(ids(8, 3), [5]), item(ids(8, 1), ids(100, 2))])
        next(scored)
        for request_id in list(engine.core._requests):
            engine.core.abort(request_id)
        with pytest.raises(RequestError, match="item 1 was aborted"):
            list(scored)


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "config", "message"),
        [
            (item([], [5]), {}, "item 1: the context must have at least 1 token"),
            (item([5]), {}, "item 1: there must be at least 1 continuation"),
            (item([5], [6], []), {}, "item 1, continuation 1: the continuation must have"),
            (
                item(ids(250, 1), [5], ids(8, 1)),
                {},
                r"item 1, continuation 1: prompt of 257 tokens .* model length of 256 tokens",
            ),
            (
                item(ids(60, 1), ids(6, 1)),
                {"num_kv_blocks": 8},
                "item 1, continuation 0: prompt of 65 tokens .* KV pool of 64 tokens",
            ),
        ],
    )
    def test_nothing_runs_where_one_item_can_never_be_scored(
        self,
        request_: ScoreRequest,
        config: dict[str, Any],
        message: str,
        make_engine: Callable[..., ScoringEngine],
    ) -> None:
        engine = make_engine(**config)
        with pytest.raises(RequestError, match=message):
            engine.score([item([5], [6]), request_])
        assert not engine.core.step_records

    @pytest.mark.parametrize("wrong", [item([5, 128], [6]), item([5], [6, 128])])
    def test_token_outside_the_vocabulary_names_its_item(
        self, wrong: ScoreRequest, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        engine = make_engine()
        with pytest.raises(RequestError, match=r"item 1: .*128 is outside the vocabulary"):
            list(engine.score([item([5], [6]), wrong]))
        assert not engine.core.has_unfinished


class TestBrokenNumbers:
    """NaN is reported as NaN, by the item that it belongs to."""

    POISON = 99

    @pytest.fixture(scope="class")
    @classmethod
    def poisoned(
        cls, tmp_path_factory: pytest.TempPathFactory, random_model: Callable[..., Any]
    ) -> Any:
        model = random_model("llama")
        model.model.embed_tokens.weight[cls.POISON] = float("nan")
        folder = tmp_path_factory.mktemp("poisoned")
        model.save_pretrained(folder)
        return LLM(str(folder), dtype="float32", compile=False, num_kv_blocks=8).core.loaded

    def test_tokens_from_the_broken_one_on_are_nan(
        self, poisoned: Any, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        items = [item([7, 8], (4, self.POISON, 5, 6)), item([7, 8], (4, self.POISON))]
        broken, sound = in_order(make_engine(loaded=poisoned).score(items, with_hidden=True))
        assert all(map(math.isnan, broken[0].logprobs[2:]))
        assert math.isnan(broken[0].loglikelihood)
        assert not broken[0].is_greedy
        assert broken[0].hidden is not None
        assert broken[0].hidden[2:].isnan().all()
        assert not any(map(math.isnan, sound[0].logprobs))

    def test_one_token_behind_a_broken_context(
        self, poisoned: Any, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        context = (self.POISON, *range(3, 30))
        engine = make_engine(loaded=poisoned)
        (scores,) = in_order(engine.score([item(context, [4], [5, 6], [7, 8])], with_hidden=True))
        for score in scores:
            assert all(map(math.isnan, score.logprobs))
            assert not score.is_greedy
            assert score.hidden is not None
            assert score.hidden.shape == (len(score.logprobs), 64)


class TestGenerate:
    def test_answers_are_those_of_llm_in_order_of_completion(
        self, calm_llama: tuple[Any, Any], make_engine: Callable[..., ScoringEngine]
    ) -> None:
        prompts = [list(SHOTS + ids(5, seed)) for seed in range(9)]
        params = [
            SamplingParams(temperature=0.0, max_tokens=20 - 2 * i, ignore_eos=True)
            for i in range(9)
        ]
        found = list(make_engine(max_num_seqs=3).generate(prompts, params))
        want = LLM("tiny", loaded=calm_llama[0], num_kv_blocks=64).generate(prompts, params)
        by_index = dict(found)
        assert [by_index[i].answers[0].token_ids for i in range(9)] == [
            result.answers[0].token_ids for result in want
        ]
        assert [index for index, _ in found] != sorted(by_index)

    def test_prompt_that_can_never_run_is_named(
        self, make_engine: Callable[..., ScoringEngine]
    ) -> None:
        engine = make_engine()
        with pytest.raises(RequestError, match="prompt 1: prompt of 300 tokens"):
            engine.generate([[5], [6] * 300], [SamplingParams()] * 2)
        with pytest.raises(RequestError, match="2 prompts have 1"):
            engine.generate([[5], [6]], [SamplingParams()])
        with pytest.raises(RequestError, match="prompt 1: prompt token id 400"):
            list(engine.generate([[5], [400]], [SamplingParams()] * 2))
        assert not engine.core.has_unfinished
