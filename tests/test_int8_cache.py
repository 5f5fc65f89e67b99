"""A KV cache of 8 bits: its numbers, its size, and what stays the same with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.bench.model_facts import read_model_facts
from llmbench.engine.batch import ForwardBatch
from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import ConfigError, KernelBuildError
from llmbench.engine.kernels.eager import EagerOps
from llmbench.engine.kernels.int8_cache_ops import Int8CacheOps
from llmbench.engine.kernels.reference import TorchOps
from llmbench.engine.layers.attention.int8_cache import dequantize_rows, quantize_rows
from llmbench.engine.llm import LLM
from llmbench.engine.models.loader import LoadedModel, load_model
from llmbench.engine.request import SamplingParams

PROMPT = [5, 77, 3, 120, 42, 9, 64, 31, 8, 99, 14, 27, 56, 2, 101, 70, 33, 88, 6, 45, 90, 17, 61, 4]
PROMPTS = [PROMPT[:9], PROMPT[3:20], PROMPT, PROMPT[:2], PROMPT[:9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)

Tiny = Callable[[str], tuple[Path, Any]]


def load(folder: Path, **settings: Any) -> LoadedModel:
    defaults: dict[str, Any] = {"dtype": "float32", "compile": False, "kv_cache_dtype": "int8"}
    return load_model(EngineConfig(model=str(folder), **(defaults | settings)))


@pytest.mark.parametrize("head_dim", [2, 24, 30, 64])
def test_row_is_each_heads_own_rounding(head_dim: int) -> None:
    heads = torch.randn(5, 6, head_dim)
    heads[1, 2] = 0.0
    heads[3] *= 100.0
    found = dequantize_rows(quantize_rows(heads), head_dim, torch.float32)
    steps = heads.abs().amax(-1, keepdim=True) / 127
    assert bool(((found - heads).abs() <= steps * 0.5001).all())
    assert torch.equal(found[1, 2], torch.zeros(head_dim))


def test_zeroed_rows_read_as_zeros() -> None:
    rows = torch.zeros_like(quantize_rows(torch.randn(3, 4, 32)))
    assert torch.equal(dequantize_rows(rows, 32, torch.float32), torch.zeros(3, 4, 32))


def test_overflow_is_not_hidden() -> None:
    heads = torch.randn(1, 2, 8)
    heads[0, 0, 3] = float("nan")
    assert bool(dequantize_rows(quantize_rows(heads), 8, torch.float32)[0, 0].isnan().any())


SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rotary_dim": 16}


@pytest.mark.parametrize("inner", [TorchOps(), EagerOps()], ids=lambda ops: ops.name)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 10.0])
def test_attention_equals_the_reference_over_the_rounded_keys_and_values(
    inner: TorchOps, window: int | None, softcap: float | None
) -> None:
    ops = Int8CacheOps(inner)
    batch = two_sequences()
    num_slots = 8 * batch.block_size
    qkv = torch.randn(len(batch.slot_mapping), 8 * 16)
    angles = torch.randn(len(qkv), 8)
    rounded = ops.make_kv_cache(num_slots, 2, 16, dtype=qkv.dtype, device=qkv.device)
    plain = TorchOps().make_kv_cache(num_slots, 2, 16, dtype=qkv.dtype, device=qkv.device)
    outputs = []
    for these, cache in ((ops, rounded), (TorchOps(), plain)):
        own = qkv.clone()
        cos, sin = these.rope_factors(angles.cos(), angles.sin(), qkv.dtype)
        these.rope_and_store(
            own,
            cos,
            sin,
            batch.slot_mapping,
            cache,
            **SHAPE,
            q_norm_weight=None,
            k_norm_weight=None,
            eps=1e-6,
        )
        if cache is plain:
            torch.testing.assert_close(
                dequantize_rows(rounded, 16, qkv.dtype), plain, atol=0.03, rtol=0
            )
            plain.copy_(dequantize_rows(rounded, 16, qkv.dtype))
        options: dict[str, Any] = {"scale": 0.25, "sliding_window": window, "softcap": softcap}
        outputs.append(these.attention(own[:, : 4 * 16], cache, batch, **options))
        batch.derived.clear()
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def two_sequences() -> ForwardBatch:
    """One token after nothing and a prompt of nine, in blocks of four out of order."""
    slots = [20, *range(12, 16), *range(4, 8), 24]
    return ForwardBatch(
        input_ids=torch.zeros(10, dtype=torch.int64),
        positions=torch.tensor([0, *range(9)]),
        slot_mapping=torch.tensor(slots),
        query_start_loc=torch.tensor([0, 1, 10], dtype=torch.int32),
        seq_lens=torch.tensor([1, 9], dtype=torch.int32),
        block_table=torch.tensor([[5, 0, 0], [3, 1, 6]], dtype=torch.int32),
        logits_indices=torch.tensor([0, 9]),
        block_size=4,
        num_decodes=1,
        query_lens=[1, 9],
        context_lens=[1, 9],
    )


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("variant_", ["llama", "gemma2", "gpt2", "qwen3", "phi3"])
def test_logits_stay_close_and_do_not_depend_on_chunks(
    variant_: str, backend: str, tiny_model: Tiny, logits_in_pieces: Callable[..., Tensor]
) -> None:
    folder, _ = tiny_model(variant_)
    loaded = load(folder, model_backend=backend)
    exact = logits_in_pieces(
        load(folder, model_backend=backend, kv_cache_dtype="auto").model, PROMPT, [24]
    )
    whole = logits_in_pieces(loaded.model, PROMPT, [24])
    error = float((whole - exact).norm() / exact.norm())
    assert 0.0 < error < 0.05
    pieces = logits_in_pieces(loaded.model, PROMPT, [5, 1, 18])
    # A key's last bit may carry over to the next code: close, and far below the rounding itself.
    assert float((pieces - whole).norm() / whole.norm()) < 0.1 * error
    assert loaded.model.kernel.endswith("int8-kv-torch")


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_greedy_tokens_do_not_depend_on_the_manager(backend: str, tiny_model: Tiny) -> None:
    loaded = load(tiny_model("llama")[0], model_backend=backend, max_model_len=64)
    answers = {}
    for manager in ("paged", "contiguous", "uncached"):
        llm = LLM(
            "",
            loaded=loaded,
            kv_manager=manager,
            kv_cache_dtype="int8",
            block_size=4,
            max_num_batched_tokens=8 if manager == "paged" else 64,
            max_model_len=64,
            check_integrity=True,
        )
        answers[manager] = tokens(llm, PROMPTS)
        answers[f"{manager}, alone"] = [tokens(llm, [prompt])[0] for prompt in PROMPTS]
    first = answers["uncached, alone"]
    assert all(found == first for found in answers.values())
    assert len({tuple(row) for row in first}) > 1


def test_cached_prefix_gives_the_same_answer(tiny_model: Tiny) -> None:
    loaded = load(tiny_model("llama")[0], max_model_len=64)
    llm = LLM("", loaded=loaded, kv_cache_dtype="int8", block_size=4, max_model_len=64)
    first, second = (llm.generate([PROMPT], GREEDY)[0] for _ in range(2))
    assert second.num_cached_tokens > 0
    assert second.answers[0].token_ids == first.answers[0].token_ids


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [result.answers[0].token_ids for result in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_are_counted_as_they_are_held(
    backend: str, dtype: Any, itemsize: int, tiny_model: Tiny
) -> None:
    folder, _ = tiny_model("qwen3")  # 2 layers, 2 heads of 32
    loaded = load(folder, dtype=dtype, model_backend=backend)
    assert loaded.kv_bytes_per_token == 2 * 2 * 2 * (32 + 4)
    caches = loaded.model.make_kv_cache(16)
    assert sum(cache.nbytes for cache in caches) == 16 * loaded.kv_bytes_per_token
    config = EngineConfig(model=str(folder), dtype=dtype, kv_cache_dtype="int8")
    assert read_model_facts(folder, config).kv_bytes_per_token == loaded.kv_bytes_per_token
    plain = load(folder, dtype=dtype, model_backend=backend, kv_cache_dtype="auto")
    assert plain.kv_bytes_per_token == 2 * 2 * 2 * 32 * itemsize


def test_compiled_kernels_say_whose_attention_runs(
    tiny_model: Tiny, caplog: pytest.LogCaptureFixture, logits_in_pieces: Callable[..., Tensor]
) -> None:
    folder, _ = tiny_model("llama")
    try:
        loaded = load(folder, compile=True)
    except KernelBuildError as error:
        pytest.skip(str(error))
    assert loaded.model.kernel.endswith("+cpu+int8-kv-torch")
    assert "torch's attention in place of the compiled one" in caplog.text
    expected = logits_in_pieces(load(folder).model, PROMPT, [5, 1, 18])
    found = logits_in_pieces(loaded.model, PROMPT, [5, 1, 18])
    assert float((found - expected).norm() / expected.norm()) < 5e-3


def test_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, int8, not 'fp8'"):
        EngineConfig(**json.loads('{"model": "x", "kv_cache_dtype": "fp8"}'))
