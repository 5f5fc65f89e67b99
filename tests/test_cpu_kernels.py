"""The fused CPU kernels against their specification in torch, and their build."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.errors import KernelBuildError
from llmbench.engine.kernels import cpu_build
from llmbench.engine.kernels.cpu_ops import CpuOps
from llmbench.engine.kernels.reference import TorchOps
from llmbench.engine.models.architecture import Activation

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1.6e-2, 1e-2)}  # relative, absolute


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def kernels() -> Callable[[torch.dtype], CpuOps]:
    try:
        cpu_build.find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    cpu_build.load_library()
    return CpuOps


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def assert_close(actual: Tensor, expected: Tensor) -> None:
    relative, absolute = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


def make_batch(
    lengths: list[tuple[int, int]], block_size: int, *, extra_blocks: int = 3
) -> ForwardBatch:
    """Sequences of (context, query) lengths over shuffled blocks; block 0 is the null block."""
    widths = [-(-context // block_size) for context, _ in lengths]
    ids = (torch.randperm(sum(widths) + extra_blocks) + 1).tolist()
    table = torch.zeros(len(lengths), max(widths) + 1, dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    for row, (context, query) in enumerate(lengths):
        blocks = [ids.pop() for _ in range(widths[row])]
        table[row, : widths[row]] = torch.tensor(blocks)
        positions += range(context - query, context)
        slots += [
            blocks[i // block_size] * block_size + i % block_size
            for i in range(context - query, context)
        ]
    queries = [query for _, query in lengths]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return ForwardBatch(
        input_ids=torch.zeros(sum(queries), dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start_loc=starts,
        seq_lens=torch.tensor([context for context, _ in lengths], dtype=torch.int32),
        block_table=table,
        logits_indices=starts[1:].long() - 1,
        block_size=block_size,
        num_decodes=sum(query == 1 for query in queries),
        query_lens=queries,
        context_lens=[context for context, _ in lengths],
    )


def fill_cache(
    ops: TorchOps, batch: ForwardBatch, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """A cache with the same random K/V for every `ops` in the slots that sequences hold.

    All others hold not-a-number: nobody may let it into a result.
    """
    size = batch.block_size
    num_slots = (sum(-(-c // size) for c in batch.context_lens) + 4) * size
    cache = ops.make_kv_cache(
        num_slots, num_kv_heads, head_dim, dtype=dtype, device=torch.device("cpu")
    )
    slots = torch.tensor(
        [
            int(batch.block_table[row, i // size]) * size + i % size
            for row, context in enumerate(batch.context_lens)
            for i in range(context)
        ]
    )
    generator = torch.Generator().manual_seed(1)
    width = 2 * num_kv_heads * head_dim
    rows = torch.randn(slots.numel(), width, generator=generator).to(dtype)
    for qkv, where in (
        (torch.full((num_slots, width), float("nan"), dtype=dtype), torch.arange(num_slots)),
        (rows, slots),
    ):
        ops.rope_and_store(
            qkv,
            None,
            None,
            where,
            cache,
            num_heads=0,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=0,
            q_norm_weight=None,
            k_norm_weight=None,
            eps=1e-6,
        )
    return cache


def stored_values(cache: Tensor) -> Tensor:
    """All elements that are not zero, in order of size."""
    elements = torch.tensor([], dtype=cache.dtype).set_(cache.untyped_storage())
    return elements[elements != 0].sort().values


@pytest.mark.parametrize("shape", [(1, 576), (3, 20), (70, 576), (2, 7)])
def test_norms_equal_reference(
    kernels: Callable[[torch.dtype], CpuOps], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    ops, reference = kernels(dtype), TorchOps()
    x = torch.randn(shape, dtype=dtype) + 1
    weight, bias = torch.randn(shape[1]), torch.randn(shape[1])
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    assert_close(ops.layer_norm(x, None, None, 1e-5), reference.layer_norm(x, None, None, 1e-5))


def test_layer_norm_keeps_small_differences_beside_a_large_mean(
    kernels: Callable[[torch.dtype], CpuOps],
) -> None:
    x = torch.randn(4, 100, dtype=torch.float32) + 1000
    actual = kernels(torch.float32).layer_norm(x, None, None, 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (100,), eps=1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("shape", [(1, 1536), (5, 18), (64, 96)])
def test_activations_equal_reference(
    kernels: Callable[[torch.dtype], CpuOps],
    dtype: torch.dtype,
    activation: Activation,
    shape: tuple[int, int],
) -> None:
    ops, reference = kernels(dtype), TorchOps()
    x = torch.randn(shape, dtype=dtype) * 4
    assert_close(ops.act(x, activation), reference.act(x, activation))
    assert_close(ops.act_and_mul(x, activation), reference.act_and_mul(x, activation))


def test_activations_saturate_without_overflow(
    kernels: Callable[[torch.dtype], CpuOps],
) -> None:
    x = torch.tensor([[-1e4, -100.0, -88.5, 0.0, 88.5, 1e4, float("inf"), float("nan")]])
    for activation in ("silu", "gelu", "gelu_tanh"):
        actual = kernels(torch.float32).act(x, activation)
        expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 88.5, 1e4, float("inf"), float("nan")]])
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "norm"),
    [
        (9, 3, 64, 64, "none"),
        (4, 2, 128, 128, "head"),
        (4, 4, 80, 32, "none"),
        (4, 2, 16, 16, "full"),
        (2, 1, 10, 4, "head"),
        (2, 2, 64, 0, "none"),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_rope_and_store_equals_reference(
    kernels: Callable[[torch.dtype], CpuOps],
    dtype: torch.dtype,
    num_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norm: str,
) -> None:
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.randn(num_tokens, rotary_dim // 2)
    slots = torch.randperm(num_tokens + 4)[:num_tokens]
    slots[num_tokens // 2] = -1
    sizes = {
        "none": None,
        "head": (head_dim, head_dim),
        "full": (heads * head_dim, kv_heads * head_dim),
    }[norm]
    weights = None if sizes is None else (torch.randn(sizes[0]), torch.randn(sizes[1]))
    results = []
    for ops in (kernels(dtype), TorchOps()):
        mine = qkv.clone()
        cache = ops.make_kv_cache(
            num_tokens + 4, kv_heads, head_dim, dtype=dtype, device=torch.device("cpu")
        )
        ops.rope_and_store(
            mine,
            angles.cos() if rotary_dim else None,
            angles.sin() if rotary_dim else None,
            slots,
            cache,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            q_norm_weight=weights and weights[0],
            k_norm_weight=weights and weights[1],
            eps=1e-6,
        )
        results.append((mine, cache))
    assert_close(results[0][0], results[1][0])
    # The layouts differ, what they hold does not.
    assert_close(*(stored_values(cache) for _, cache in results))


LENGTHS = {
    "decodes": [(1, 1), (64, 1), (65, 1), (200, 1)],
    "prompt": [(150, 150)],
    "chunk": [(200, 37)],
    "mixed": [(5, 1), (130, 1), (40, 40), (100, 3)],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 1, 6), (2, 2, 96)]
)
def test_attention_equals_reference(
    kernels: Callable[[torch.dtype], CpuOps],
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    block_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    batch = make_batch(lengths, block_size)
    q = torch.randn(batch.positions.numel(), heads * head_dim, dtype=dtype)
    results = [
        ops.attention(
            q,
            fill_cache(ops, batch, kv_heads, head_dim, dtype),
            batch,
            scale=0.2,
            sliding_window=None,
            softcap=None,
        )
        for ops in (kernels(dtype), TorchOps())
    ]
    assert_close(*results)


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, None), (100, 5.0), (None, 30.0)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attention_limits_equal_reference(
    kernels: Callable[[torch.dtype], CpuOps],
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
) -> None:
    batch = make_batch(lengths, 16)
    q = torch.randn(batch.positions.numel(), 6 * 32, dtype=dtype)
    results = [
        ops.attention(
            q,
            fill_cache(ops, batch, 2, 32, dtype),
            batch,
            scale=0.3,
            sliding_window=window,
            softcap=softcap,
        )
        for ops in (kernels(dtype), TorchOps())
    ]
    assert_close(*results)


def test_attention_takes_queries_inside_a_wider_row(
    kernels: Callable[[torch.dtype], CpuOps], dtype: torch.dtype
) -> None:
    batch = make_batch([(30, 1), (40, 8)], 16)
    qkv = torch.randn(9, 6 * 32, dtype=dtype)
    q = qkv[:, : 2 * 32]
    ops = kernels(dtype)
    cache = fill_cache(ops, batch, 2, 32, dtype)
    limits = {"scale": 0.2, "sliding_window": None, "softcap": None}
    assert torch.equal(
        ops.attention(q, cache, batch, **limits),  # type: ignore[arg-type]
        ops.attention(q.contiguous(), cache, batch, **limits),  # type: ignore[arg-type]
    )


def test_attention_of_a_sequence_has_the_same_bits_in_any_company(
    kernels: Callable[[torch.dtype], CpuOps], dtype: torch.dtype
) -> None:
    """Whole prompt, chunks, single tokens, among others, on one thread and on four."""
    context = 700
    batch = make_batch([(context, context), (300, 1), (90, 50)], 16)
    ops = kernels(dtype)
    cache = fill_cache(ops, batch, 1, 64, dtype)
    rows = torch.randn(context + 51, 3 * 64, dtype=dtype)
    table = batch.block_table

    def part(start: int, stop: int, threads: int) -> Tensor:
        alone = make_batch([(stop, stop - start)], 16)
        alone.block_table = table[:1]
        torch.set_num_threads(threads)
        return ops.attention(
            rows[start:stop], cache, alone, scale=0.1, sliding_window=None, softcap=None
        )

    before = torch.get_num_threads()
    try:
        together = ops.attention(rows, cache, batch, scale=0.1, sliding_window=None, softcap=None)[
            :context
        ]
        for threads in (1, 4):
            assert torch.equal(part(0, context, threads), together)
            assert torch.equal(part(650, context, threads), together[650:])
            for i in (0, 63, 64, 640, context - 1):
                assert torch.equal(part(i, i + 1, threads), together[i : i + 1])
    finally:
        torch.set_num_threads(before)


def _call_with_short_table(ops: CpuOps, x: Tensor, weight: Tensor) -> Tensor:
    batch = make_batch([(4, 4)], 16)
    batch.block_table = batch.block_table[:, :0]
    cache = ops.make_kv_cache(16, 1, 4, dtype=x.dtype, device=x.device)
    return ops.attention(x, cache, batch, scale=1.0, sliding_window=None, softcap=None)


@pytest.mark.parametrize(
    "call",
    [
        lambda ops, x, weight: ops.rms_norm(x.bfloat16(), weight, 1e-5),
        lambda ops, x, weight: ops.act(x.t(), "silu"),
        lambda ops, x, weight: ops.rms_norm(x, weight[:4], 1e-5),
        _call_with_short_table,
    ],
    ids=["dtype", "stride", "weight", "table"],
)
def test_kernels_refuse_memory_of_another_shape(
    kernels: Callable[[torch.dtype], CpuOps],
    call: Callable[[CpuOps, Tensor, Tensor], Tensor],
) -> None:
    ops, x, weight = kernels(torch.float32), torch.zeros(4, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="CPU kernel cannot take"):
        call(ops, x, weight)


def test_kernels_start_no_threads_beside_those_of_torch(
    kernels: Callable[[torch.dtype], CpuOps],
) -> None:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("threads are counted through /proc")
    ops = kernels(torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        x = torch.randn(512, 512)
        for _ in range(3):
            torch.mm(x, x).exp_()
        threads = set(tasks.iterdir())
        for _ in range(3):
            ops.act(x, "silu")
            torch.mm(x, x).exp_()
        assert set(tasks.iterdir()) <= threads  # one of an earlier test may end meanwhile
    finally:
        torch.set_num_threads(before)


def test_no_compiler_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="no-such-compiler") as raised:
        cpu_build.find_compiler()
    assert any("install" in note for note in raised.value.__notes__)


def test_failing_compiler_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: bad luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LLMBENCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KernelBuildError, match="bad luck"):
        cpu_build.load_library.__wrapped__()
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_second_start_does_not_compile(
    kernels: Callable[[torch.dtype], CpuOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(torch.float32)  # the first start
    code = (
        "import llmbench.engine.kernels.cpu_build as build\n"
        "def fail(*_): raise SystemExit('compiled again')\n"
        "build._build = fail\n"
        "build.load_library()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
