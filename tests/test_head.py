"""A head loaded alone computes what the whole model does, bit for bit, without its layers."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import CheckpointError
from llmbench.engine.kernels.eager import EagerOps
from llmbench.engine.layers import output_head
from llmbench.engine.llm import LLM
from llmbench.engine.models.head import Head, head_of, load_float32_head, load_head
from llmbench.engine.models.loader import LoadedModel, load_model
from llmbench.engine.request import SamplingParams
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Scheme
from llmbench.quant.linear import quantized_linear
from llmbench.quant.linear_layers import find_linears

W4A16 = Scheme(bits=4, group_size=16)
W8A8 = Scheme(bits=8, group_size=-1, activations="int8")

Tiny = Callable[[str], tuple[Path, Any]]


def states(loaded: LoadedModel, num_rows: int = 40) -> Tensor:
    """Hidden states as `forward` gives them, of no text."""
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(num_rows, loaded.hidden_size, generator=generator)).to(loaded.dtype)


def assert_equals_the_model(config: EngineConfig) -> None:
    loaded, head = load_model(config), load_head(config)
    hidden = states(loaded)
    with torch.inference_mode():
        want = loaded.model.compute_logits(hidden)
        final = loaded.model.final_hidden(hidden)
    assert head.device == loaded.device
    for own in (head, head_of(loaded)):
        got = own.logits(final)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert not want.isnan().any()


# Untied and tied, a soft cap, scaled embeddings, layer norms, and no last norm at all.
@pytest.mark.parametrize(
    "name",
    ["llama", "llama-biases-tied", "gemma", "gemma2", "gemma3", "opt-no-bias-gelu", "gpt2", "phi3"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_the_whole_model(name: str, dtype: Any, tiny_model: Tiny) -> None:
    assert_equals_the_model(EngineConfig(model=str(tiny_model(name)[0]), dtype=dtype))


def test_cap_is_applied(tiny_model: Tiny) -> None:
    config = EngineConfig(model=str(tiny_model("gemma3")[0]), dtype="float32")
    logits = load_head(config).logits(1000 * states(load_model(config)))
    assert logits.abs().max() == 3.0  # its cap, met by float32's tanh


def float32_heads(config: EngineConfig) -> tuple[LoadedModel, list[Head]]:
    """A model, and its head in float32: read alone, and beside the model."""
    loaded = load_model(config)
    return loaded, [load_float32_head(config), load_float32_head(config, loaded)]


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "gemma3", "opt-no-bias-gelu"])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_float32_head_of_a_float32_model_computes_what_the_model_does(
    name: str, backend: Any, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "SLICE_ENTRIES", 64 * 50)  # 50, 50 and 28 rows of 64
    config = EngineConfig(
        model=str(tiny_model(name)[0]), dtype="float32", model_backend=backend, compile=False
    )
    loaded, heads = float32_heads(config)
    with torch.inference_mode():
        final = loaded.model.final_hidden(states(loaded))
        want = head_of(loaded).logits(final)
    for head in heads:
        assert head.device == loaded.device
        torch.testing.assert_close(head.logits(final), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "gemma3"])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_float32_head_of_a_bfloat16_model_multiplies_its_very_weights(
    name: str, backend: Any, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "SLICE_ENTRIES", 64 * 50)
    folder, reference = tiny_model(name)
    config = EngineConfig(model=str(folder), dtype="bfloat16", model_backend=backend)
    loaded, heads = float32_heads(config)
    hidden = states(loaded)
    want = hidden.double() @ reference.lm_head.weight.detach().bfloat16().double().T
    if name == "gemma3":
        want = 3 * torch.tanh(want / 3)
    for head in heads:
        got = head.logits(hidden)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, want.float(), atol=5e-6, rtol=5e-6)


def test_float32_head_shares_a_tied_matrix(tiny_model: Tiny) -> None:
    config = EngineConfig(model=str(tiny_model("llama-biases-tied")[0]), dtype="bfloat16")
    loaded = load_model(config)
    head = load_float32_head(config, loaded)
    (part,) = head.head.linear.parts  # type: ignore[attr-defined]
    assert part is loaded.model.embed_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied"])
def test_dummy_weights_are_those_of_the_whole_model(name: str, tiny_model: Tiny) -> None:
    folder = str(tiny_model(name)[0])
    assert_equals_the_model(
        EngineConfig(model=folder, dtype="float32", load_format="dummy", seed=3)
    )


@pytest.mark.parametrize("scheme", [W4A16, W8A8], ids=["W4A16", "W8A8"])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_float32_head_of_a_quantized_head(
    scheme: Scheme,
    backend: Any,
    tiny_model: Tiny,
    random_weight: Callable[..., Any],
    quantized_file: Callable[..., Path],
) -> None:
    checkpoint = Checkpoint.open(tiny_model("llama")[0])
    names = [layer.name for layer in find_linears(checkpoint)]
    weights = {name: random_weight(scheme, *checkpoint.shape(f"{name}.weight")) for name in names}
    folder = quantized_file(
        "compressed-tensors",
        weights,
        plain={
            name: checkpoint.get(name)
            for name in checkpoint
            if name.removesuffix(".weight") not in weights
        },
        config=checkpoint.config,
    )
    config = EngineConfig(model=str(folder), dtype="bfloat16", model_backend=backend, compile=False)
    loaded, heads = float32_heads(config)
    hidden = states(loaded)
    want = quantized_linear(hidden.float(), weights["lm_head"])
    for head in heads:
        got = head.logits(hidden)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_head_quantized", [False, True])
def test_head_of_a_quantized_checkpoint(
    is_head_quantized: bool,
    tiny_model: Tiny,
    random_weight: Callable[..., Any],
    quantized_file: Callable[..., Path],
) -> None:
    checkpoint = Checkpoint.open(tiny_model("llama")[0])
    names = [layer.name for layer in find_linears(checkpoint) if layer.block or is_head_quantized]
    shapes = {name: checkpoint.shape(f"{name}.weight") for name in names}
    folder = quantized_file(
        "compressed-tensors",
        {name: random_weight(W4A16, *shape) for name, shape in shapes.items()},
        plain={
            name: checkpoint.get(name)
            for name in checkpoint
            if name.removesuffix(".weight") not in shapes
        },
        config=checkpoint.config,
    )
    config = EngineConfig(model=str(folder), dtype="float32")
    assert_equals_the_model(config)
    quantization = load_model(config).quantization
    assert quantization is not None
    assert quantization["num_layers"] == 14 + is_head_quantized


def test_head_that_differs_from_tied_embeddings_is_used(
    tiny_model: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_model("llama-biases-tied")[0]
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_equals_the_model(EngineConfig(model=str(tmp_path), dtype="float32"))
    assert caplog.text.count("a head of its own") == 2


def test_model_that_only_transformers_runs_is_loaded_whole(
    tiny_model: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model("gemma2")[0]
    config = EngineConfig(model=str(folder), dtype="float32", model_backend="transformers")
    with caplog.at_level(logging.WARNING):
        assert_equals_the_model(config)
    assert caplog.text.count("loading it whole") == 1


def test_layers_are_not_read(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    get = Checkpoint.get

    def watched(self: Checkpoint, name: str) -> Tensor:
        read.append(name)
        return get(self, name)

    monkeypatch.setattr(Checkpoint, "get", watched)
    load_head(EngineConfig(model=str(tiny_model("llama")[0]), dtype="float32"))
    assert read == ["lm_head.weight"]


def test_checkpoint_without_its_head_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_model("llama")[0]
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load_head(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt-no-bias-gelu"])
def test_stored_hidden_states_give_the_whole_distribution(name: str, tiny_model: Tiny) -> None:
    config: dict[str, Any] = {"dtype": "float32", "compile": False}
    folder = str(tiny_model(name)[0])
    llm = LLM(folder, num_kv_blocks=8, max_num_batched_tokens=10, **config)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=3,
        ignore_eos=True,
        logprobs=128,
        prompt_logprobs=128,
        return_hidden_states=True,
    )
    (result,) = llm.generate([list(range(30, 55))], params)
    hidden = torch.cat([result.prompt_hidden_states, result.answers[0].hidden_states])  # type: ignore[list-item]
    entries = [*result.prompt_logprobs, *result.answers[0].logprobs]
    assert hidden.shape == (len(entries), 64)
    rows = torch.log_softmax(load_head(EngineConfig(model=folder, **config)).logits(hidden), -1)
    for row, entry in zip(rows, entries, strict=True):
        got = torch.full((128,), float("nan"))
        for token_id, logprob in entry.top:
            got[token_id] = logprob
        torch.testing.assert_close(got, row.clone(), atol=1e-4, rtol=1e-5)


def test_kernels_of_the_head_are_those_of_the_model(tiny_model: Tiny) -> None:
    config = EngineConfig(model=str(tiny_model("llama")[0]), dtype="bfloat16", compile=False)
    linear = load_head(config).head.linear  # type: ignore[attr-defined]
    weight = torch.zeros(128, 64, dtype=torch.bfloat16)
    assert type(linear) is type(EagerOps(torch.bfloat16).make_linear(weight, None))


@pytest.mark.parametrize("columns", [48, 36], ids=["whole groups", "a short last group"])
@pytest.mark.parametrize("sym", [True, False])
def test_quantized_rows_in_float32_are_the_numbers_that_codes_stand_for(
    columns: int, sym: bool, random_weight: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "SLICE_ENTRIES", columns * 9)
    weight = random_weight(Scheme(bits=4, group_size=16, sym=sym), 30, 48)
    weight = replace(weight, codes=weight.codes[:, :columns].contiguous())
    found = output_head.Float32Linear([weight])(torch.eye(columns))
    assert torch.equal(found.T, weight.dequantize())


def test_float32_linear_puts_parts_and_bias_in_their_places() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 8, generator=generator).bfloat16() for n in (5, 3)]
    bias = torch.randn(8, generator=generator).bfloat16()
    x = torch.randn(4, 8, generator=generator).bfloat16()
    linear = output_head.Float32Linear(parts, bias)
    want = x.float() @ torch.cat(parts).float().T + bias.float()
    torch.testing.assert_close(linear(x), want)
    torch.testing.assert_close(linear.add_to(torch.ones(4, 8), x), want + 1)
