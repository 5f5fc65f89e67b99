"""From scheduled requests to tokens: the batch that is built, and the numbers that come back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.config import EngineConfig, KVManagerName
from llmbench.engine.engine_core import EngineCore
from llmbench.engine.llm import LLM
from llmbench.engine.models.null_model import NullModel
from llmbench.engine.request import RequestStatus, SamplingParams

BLOCK_SIZE = 4


def greedy(max_tokens: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


class WatchedModel(NullModel):
    """The null model, keeping the batches that it was given."""

    def __init__(self) -> None:
        super().__init__(vocab_size=64, token_id=7)
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        self.batches.append(batch)
        return super().forward(batch, kv_caches)


@pytest.fixture
def watched(as_loaded: Callable[..., Any]) -> tuple[EngineCore, WatchedModel]:
    model = WatchedModel()
    config = EngineConfig(
        model="watched",
        num_kv_blocks=32,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=12,
        check_integrity=True,
    )
    return EngineCore(config, loaded=as_loaded(model)), model


def add(core: EngineCore, request_id: str, prompt: list[int], params: SamplingParams) -> Any:
    (request,) = core.make_requests(prompt, params, request_id)
    core.add_request(request)
    return request


class TestBatch:
    """One step of a long decode, a short one, and a prompt that is cut to what is left."""

    @pytest.fixture
    def batch(self, watched: tuple[EngineCore, WatchedModel]) -> tuple[EngineCore, ForwardBatch]:
        core, model = watched
        add(core, "long", [1, 2, 3, 4, 5, 6, 7], greedy())
        add(core, "short", [8], greedy())
        core.step()
        add(core, "prompt", list(range(20, 40)), greedy())
        core.step()
        return core, model.batches[-1]

    def test_sequences_of_one_token_come_first_and_by_length(
        self, batch: tuple[EngineCore, ForwardBatch]
    ) -> None:
        built = batch[1]
        assert built.num_decodes == 2
        assert built.query_lens == [1, 1, 10]
        assert built.context_lens == [2, 8, 10]
        assert built.num_seqs == 3
        assert built.query_start_loc.tolist() == [0, 1, 2, 12]
        assert built.seq_lens.tolist() == built.context_lens

    def test_tokens_stand_at_their_positions(self, batch: tuple[EngineCore, ForwardBatch]) -> None:
        built = batch[1]
        assert built.input_ids.tolist() == [7, 7, *range(20, 30)]
        assert built.positions.tolist() == [1, 7, *range(10)]

    def test_slots_are_those_of_each_sequences_blocks(
        self, batch: tuple[EngineCore, ForwardBatch]
    ) -> None:
        core, built = batch
        by_id = {request.request_id: request for request in core.scheduler.running}
        want: list[int] = []
        for row, (request_id, positions) in enumerate(
            [("short", [1]), ("long", [7]), ("prompt", range(10))]
        ):
            blocks = core.kv.block_ids(by_id[request_id])
            num_seen = -(-built.context_lens[row] // BLOCK_SIZE)
            assert built.block_table[row, :num_seen].tolist() == list(blocks)[:num_seen]
            want += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
        assert built.slot_mapping.tolist() == want
        assert len(set(want)) == len(want)
        assert min(want) >= BLOCK_SIZE  # the null block is nobody's

    def test_logits_are_asked_of_completed_sequences_alone(
        self, batch: tuple[EngineCore, ForwardBatch]
    ) -> None:
        core, built = batch
        assert built.logits_indices.tolist() == [0, 1]  # the prompt is still under way
        core.step()
        prompt = next(r for r in core.scheduler.running if r.request_id == "prompt")
        assert prompt.num_output_tokens == 1


def test_types_are_those_that_models_expect(watched: tuple[EngineCore, WatchedModel]) -> None:
    core, model = watched
    add(core, "one", [1, 2, 3], greedy())
    core.step()
    batch = model.batches[0]
    for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
        assert getattr(batch, name).dtype is torch.int64
    for name in ("query_start_loc", "seq_lens", "block_table"):
        assert getattr(batch, name).dtype is torch.int32


def test_a_step_without_a_finished_prompt_asks_for_no_logits(
    watched: tuple[EngineCore, WatchedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, model = watched
    add(core, "long", list(range(30)), greedy(1))

    def refuse(hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("logits that nobody asked for")

    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", refuse)
        assert core.step() == core.step() == []
    assert [output.new_token_ids for output in core.step()] == [[7]]


@pytest.mark.parametrize("chunk", [5, 64, 512])
def test_prompt_logprobs_are_those_of_transformers_over_chunks_and_row_groups(
    chunk: int, random_llama: tuple[Path, Any], loaded_llama: Any
) -> None:
    prompt = [(7 * i) % 120 + 3 for i in range(150)]
    llm = LLM("tiny", loaded=loaded_llama, num_kv_blocks=64, max_num_batched_tokens=chunk)
    (result,) = llm.generate([prompt], greedy(1, prompt_logprobs=2))
    with torch.inference_mode():
        want = torch.log_softmax(random_llama[1](torch.tensor([prompt])).logits[0].double(), -1)
    assert [entry.token_id for entry in result.prompt_logprobs] == prompt[1:]
    got = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    expected = want[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (got - expected).abs().max() < 1e-4
    top = torch.tensor([[logprob for _, logprob in e.top] for e in result.prompt_logprobs])
    assert (top - want[:-1].topk(2).values).abs().max() < 1e-4


def test_prompt_logprobs_come_once_though_the_prompt_is_computed_again(loaded_llama: Any) -> None:
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "prefix_cache": "none"}
    roomy = LLM("tiny", loaded=loaded_llama, num_kv_blocks=64, **settings)
    params = greedy(20, prompt_logprobs=1)
    prompt = list(range(30, 42))
    want = roomy.generate([prompt], params)[0]
    core = EngineCore(
        EngineConfig(model="tiny", num_kv_blocks=10, max_num_batched_tokens=6, **settings),
        loaded=loaded_llama,
    )
    add(core, "older", prompt, greedy(20))
    younger = add(core, "younger", prompt, params)
    was_preempted = False
    while core.has_unfinished:
        core.step()
        was_preempted |= younger.status is RequestStatus.PREEMPTED
    assert was_preempted
    assert [e.token_id for e in younger.prompt_logprobs] == prompt[1:]
    assert younger.output_token_ids == want.answers[0].token_ids


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("start", [0, 1, 7, 40, 41])
def test_hidden_states_stand_beside_what_is_reported(
    chunk: int, start: int, random_llama: tuple[Path, Any], loaded_llama: Any
) -> None:
    prompt = [(7 * i) % 120 + 3 for i in range(41)]
    llm = LLM("tiny", loaded=loaded_llama, num_kv_blocks=64, max_num_batched_tokens=chunk)
    params = greedy(
        3, prompt_logprobs=0, prompt_logprobs_start=start, return_hidden_states=True, n=2
    )
    for _ in range(2):  # the second time over a warm prefix cache
        (result,) = llm.generate([prompt], params)
        ids = prompt + result.answers[0].token_ids
        with torch.inference_mode():
            want = random_llama[1].model(torch.tensor([ids])).last_hidden_state[0].clone()
        first = max(start, 1)
        if first < len(prompt):
            assert result.prompt_hidden_states is not None
            torch.testing.assert_close(
                result.prompt_hidden_states, want[first - 1 : len(prompt) - 1], atol=1e-3, rtol=0
            )
        else:
            assert result.prompt_hidden_states is None
        for answer in result.answers:
            assert answer.hidden_states is not None
            torch.testing.assert_close(
                answer.hidden_states, want[len(prompt) - 1 : -1], atol=1e-3, rtol=0
            )


def test_hidden_states_and_reports_survive_preemption(loaded_llama: Any) -> None:
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "prefix_cache": "none"}
    params = greedy(20, prompt_logprobs=0, prompt_logprobs_start=5, return_hidden_states=True)
    prompt = list(range(30, 42))
    roomy = LLM("tiny", loaded=loaded_llama, num_kv_blocks=64, **settings)
    want = roomy.generate([prompt], params)[0]
    core = EngineCore(
        EngineConfig(
            model="tiny",
            num_kv_blocks=10,
            max_num_batched_tokens=6,
            check_integrity=True,
            **settings,
        ),
        loaded=loaded_llama,
    )
    add(core, "older", prompt, greedy(20))
    younger = add(core, "younger", prompt, params)
    num_outputs = set()
    while core.has_unfinished:
        core.step()
        if younger.status is RequestStatus.PREEMPTED:
            num_outputs.add(younger.num_output_tokens)
    assert num_outputs  # preempted, and with tokens that are not computed again
    assert want.prompt_hidden_states is not None
    assert want.answers[0].hidden_states is not None
    assert [e.token_id for e in younger.prompt_logprobs] == prompt[5:]
    torch.testing.assert_close(
        torch.cat(younger.prompt_hidden_states), want.prompt_hidden_states, atol=1e-4, rtol=0
    )
    torch.testing.assert_close(
        torch.cat(younger.hidden_states), want.answers[0].hidden_states, atol=1e-4, rtol=0
    )


def test_rows_of_several_prompts_go_through_the_head_together(
    loaded_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(EngineConfig(model="tiny", num_kv_blocks=64), loaded=loaded_llama)
    for index in range(20):
        add(core, f"r-{index}", [7 + index, 8, 9], greedy(1, prompt_logprobs=0))
    calls: list[int] = []
    compute_logits = loaded_llama.model.compute_logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[0])
        logits: torch.Tensor = compute_logits(hidden)
        return logits

    monkeypatch.setattr(loaded_llama.model, "compute_logits", watched)
    core.step()
    assert calls == [20, 40]  # sampled ones, and two of each prompt


def test_asked_tokens_are_reported_at_each_output_position(loaded_llama: Any) -> None:
    llm = LLM("tiny", loaded=loaded_llama, num_kv_blocks=64)
    asked = (5, 77, 5)
    (result,) = llm.generate([[7, 8, 9]], greedy(4, logprob_token_ids=asked))
    (want,) = llm.generate([[7, 8, 9]], greedy(4, logprobs=128))
    for entry, whole in zip(result.answers[0].logprobs, want.answers[0].logprobs, strict=True):
        assert entry.token_id == whole.token_id
        assert entry.top == ()
        order = [token_id for token_id, _ in whole.top]
        by_id = dict(whole.top)
        assert [(i, rank) for i, _, rank in entry.asked] == [(i, order.index(i) + 1) for i in asked]
        assert [p for _, p, _ in entry.asked] == pytest.approx([by_id[i] for i in asked], abs=1e-5)


class TestHeadDimension:
    """Case C12: a head is wider than hidden / heads."""

    CONFIG = (
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, '
        '"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, '
        '"rms_norm_eps": 1e-06, "hidden_act": "silu", "tie_word_embeddings": false, '
        '"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "bfloat16", '
        '"head_dim": 32, "attention_bias": false, "rope_theta": 1000000.0}'
    )

    def folder(self, tmp_path: Path) -> tuple[Path, Any]:
        from transformers import AutoConfig, Qwen3ForCausalLM

        (tmp_path / "given").mkdir()
        (tmp_path / "given" / "config.json").write_text(self.CONFIG)
        config = AutoConfig.from_pretrained(tmp_path / "given")
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(config)
        model.float().eval().save_pretrained(tmp_path / "model")
        return tmp_path / "model", model

    def test_config_is_that_of_the_reported_case(self, cases_dir: Path) -> None:
        reported = json.loads((cases_dir / "C12_config_qwen3_headdim.json").read_text())
        assert json.loads(self.CONFIG) == reported

    def test_logits_equal_those_of_transformers(self, tmp_path: Path) -> None:
        folder, model = self.folder(tmp_path)
        prompt = [(5 * i) % 60 + 3 for i in range(40)]
        llm = LLM(str(folder), dtype="float32", num_kv_blocks=16, max_num_batched_tokens=16)
        # With all 64 likeliest tokens, log-probabilities are the logits up to a constant a row.
        (result,) = llm.generate([prompt], greedy(8, prompt_logprobs=64, logprobs=64))
        ids = prompt + result.answers[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        want = torch.log_softmax(logits.double(), dim=-1)
        entries = [*result.prompt_logprobs, *result.answers[0].logprobs]
        got = torch.zeros_like(want)
        for row, entry in enumerate(entries):
            for token_id, logprob in entry.top:
                got[row, token_id] = logprob
        assert (got - want).abs().max() < 1e-4
        assert result.answers[0].token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()

    def test_kv_bytes_of_a_token_count_the_whole_head(self, tmp_path: Path) -> None:
        folder, _ = self.folder(tmp_path)
        llm = LLM(str(folder), dtype="bfloat16", num_kv_blocks=8)
        plan = llm.core.memory_plan
        assert llm.core.loaded.kv_bytes_per_token == 512
        assert plan.block_bytes == 512 * plan.block_size
        assert "x 512 bytes" in str(plan)
        held = sum(cache.nbytes for cache in llm.core.runner.kv_caches)
        assert held == 512 * 16 * (8 + 1)  # and the null block


class TestBrokenNumbers:
    """A sequence whose numbers break ends with an error; nobody else reads a NaN of its."""

    POISON = 99  # the token whose embedding is NaN

    @pytest.fixture(scope="class")
    @classmethod
    def poisoned(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.3,
        )
        model: Any = LlamaForCausalLM(config)
        with torch.no_grad():
            model.model.embed_tokens.weight[cls.POISON] = float("nan")
        folder = tmp_path_factory.mktemp("poisoned")
        model.save_pretrained(folder)
        return folder

    def make(self, folder: Path, **config: Any) -> EngineCore:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "num_kv_blocks": 24,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 4,
            "check_integrity": True,
        } | config
        return EngineCore(EngineConfig(model=str(folder), **settings))

    SOUND = ([5] * 3, [6] * 9, [7] * 5)

    def sound(self, core: EngineCore) -> list[Any]:
        return [
            add(core, f"sound-{index}", prompt, greedy(12))
            for index, prompt in enumerate(self.SOUND)
        ]

    def finish(self, core: EngineCore) -> None:
        while core.has_unfinished:
            core.step()

    @pytest.mark.parametrize("compile_kernels", [False, None])
    @pytest.mark.parametrize("prefix_cache", ["hash", "none"])
    def test_sequences_that_take_over_its_blocks_are_unharmed(
        self, prefix_cache: str, compile_kernels: bool | None, poisoned: Path
    ) -> None:
        core = self.make(
            poisoned, num_kv_blocks=12, prefix_cache=prefix_cache, compile=compile_kernels
        )
        poison = add(core, "poison", [5, self.POISON, *[6] * 30], greedy())
        self.finish(core)
        assert poison.finish_reason == "error"
        assert poison.error == "the model's logits hold NaN"
        got = self.sound(core)
        self.finish(core)
        fresh = self.make(poisoned, compile=compile_kernels)
        want = self.sound(fresh)
        self.finish(fresh)
        assert [r.output_token_ids for r in got] == [r.output_token_ids for r in want]

    @pytest.mark.parametrize("compile_kernels", [False, None])
    @pytest.mark.parametrize("kv_manager", get_args(KVManagerName))
    def test_sequences_beside_it_are_unharmed(
        self, kv_manager: str, compile_kernels: bool | None, poisoned: Path
    ) -> None:
        settings = {"kv_manager": kv_manager, "compile": compile_kernels}
        core = self.make(poisoned, max_num_batched_tokens=6, **settings)
        got = self.sound(core)
        core.step()
        poison = add(core, "poison", [5, self.POISON, *[6] * 20], greedy())
        self.finish(core)
        assert poison.finish_reason == "error"
        fresh = self.make(poisoned, max_num_batched_tokens=6, **settings)
        want = self.sound(fresh)
        self.finish(fresh)
        assert [r.output_token_ids for r in got] == [r.output_token_ids for r in want]
