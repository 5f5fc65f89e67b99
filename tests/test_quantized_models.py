"""Quantized checkpoints in the engine against transformers with the dequantized weights.

The checkpoints are made here: a tiny random model of each family, its linear layers rounded to
nearest and written through the formats. transformers then runs the same model with the weights
that the codes stand for, so that names, fusion, orientation, zeros, groups out of order and
activations are all held against code that knows nothing of ours.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.engine.config import EngineConfig
from llmbench.engine.errors import CheckpointError, KernelBuildError, UnsupportedModelError
from llmbench.engine.llm import LLM
from llmbench.engine.models.loader import LoadedModel, load_model
from llmbench.engine.request import SamplingParams
from llmbench.quant.affine import affine_params, grouped, quantize
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Format, Scheme
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.linear import quantized_linear
from llmbench.quant.linear_layers import find_linears
from llmbench.quant.quantized_weight import QuantizedWeight

PROMPT = [5, 77, 3, 120, 42, 9, 64, 31, 8, 99, 14, 27, 56, 2, 101, 70, 33, 88, 6, 45, 90, 17, 61, 4]
W4A16 = Scheme(bits=4, group_size=16)
W4A16_ASYM = Scheme(bits=4, group_size=16, sym=False)
W8A8 = Scheme(bits=8, group_size=-1, activations="int8")

Rule = Callable[[str], Scheme | None]
Tiny = Callable[[str], tuple[Path, Any]]


class Quantized:
    """A quantized checkpoint, and transformers' model of the weights that it stands for."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder, self.model = folder, model

    def logits(self, token_ids: list[int] = PROMPT) -> Tensor:
        """transformers' logits of a prompt."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., Quantized]:
    """Quantize a tiny model by a rule from layer names to schemes, into a file format."""

    def build(
        tiny: tuple[Path, Any],
        rule: Rule | Scheme,
        file_format: Format = "compressed-tensors",
        *,
        permuted: bool = False,
    ) -> Quantized:
        checkpoint = Checkpoint.open(tiny[0])
        writer = FORMATS[file_format]
        reference = copy.deepcopy(tiny[1])
        modules = dict(reference.named_modules())
        schemes: dict[str, Scheme | None] = {}
        tensors = {name: checkpoint.get(name) for name in checkpoint}
        for layer in find_linears(checkpoint):
            of_layer = (rule if layer.block else None) if isinstance(rule, Scheme) else None
            scheme = of_layer if isinstance(rule, Scheme) else rule(layer.name)
            schemes[layer.name] = scheme
            if scheme is None:
                continue
            stored = tensors.pop(f"{layer.name}.weight")
            plain = stored.t() if layer.is_transposed else stored
            weight = rounded(plain, scheme, file_format, permuted=permuted)
            tensors |= writer.tensors(layer.name, weight)
            # A head of its own where transformers ties one: the module is no longer the table.
            module = modules[layer.name]
            module.forward = forward_of(weight, module.bias)
        config = writer.quantization_config(schemes, None, desc_act=permuted)
        save(tmp_path, tensors, checkpoint.config | {"quantization_config": config})
        return Quantized(tmp_path, reference)

    return build


def rounded(
    weight: Tensor, scheme: Scheme, file_format: Format, *, permuted: bool
) -> QuantizedWeight:
    """A weight rounded to nearest, its groups in random order if asked for."""
    dtype = torch.float32 if file_format in ("compressed-tensors", "bitsandbytes") else torch.half
    order = torch.arange(weight.shape[1])
    if permuted:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
    groups = grouped(weight[:, order], scheme.group_size)
    has_small_range = file_format in ("bitsandbytes", "qqq")
    params = affine_params(
        groups, scheme, dtype=dtype, code_range="restricted" if has_small_range else "full"
    )
    if file_format == "gptq" and not scheme.sym:
        params = replace(params, zeros=params.zeros.clamp(min=1))  # all that the file can hold
    found = quantize(weight[:, order], scheme, params)
    if file_format == "bitsandbytes":
        return replace(found, outlier_threshold=6.0)
    if not permuted:
        return found
    codes = torch.empty_like(found.codes)
    codes[:, order] = found.codes
    g_idx = torch.empty(len(order), dtype=torch.int32)
    g_idx[order] = torch.arange(len(order), dtype=torch.int32) // scheme.group_size
    return replace(found, codes=codes, g_idx=g_idx)


def forward_of(weight: QuantizedWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """What the layer computes, by the definition; a dequantized product without rounded inputs."""
    dense = weight.dequantize()

    def forward(x: Tensor) -> Tensor:
        if weight.activations == "none":
            return torch.nn.functional.linear(x, dense, bias)
        rows = x.reshape(-1, x.shape[-1])
        return quantized_linear(rows, weight, bias).view(*x.shape[:-1], -1)

    return forward


def save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a checkpoint of one file."""
    from safetensors.torch import save_file

    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path, **settings: Any) -> LoadedModel:
    defaults: dict[str, Any] = {"dtype": "float32", "compile": False}
    return load_model(EngineConfig(model=str(folder), **(defaults | settings)))


def check_rounded(made: Quantized, model: Any, logits_in_pieces: Callable[..., Tensor]) -> None:
    """Hold logits against transformers' where activations are rounded.

    A difference in the last bit of a float may carry an activation over to the next code, which
    every later token then sees: short prompts, and most of them are met to the last digits.
    """
    errors = []
    for start in range(0, len(PROMPT), 3):
        token_ids = PROMPT[start : start + 3]
        expected = made.logits(token_ids)
        found = logits_in_pieces(model, token_ids, [2, 1])
        errors += ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()
    assert sorted(errors)[len(errors) // 2] < 1e-5
    assert max(errors) < 0.1


def test_every_family_equals_transformers_with_dequantized_weights(
    variant: str,
    tiny_model: Tiny,
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    made = quantized(tiny_model(variant), W4A16_ASYM)
    loaded = load(made.folder)
    assert loaded.architecture is not None
    assert "reference" in loaded.model.kernel
    found = logits_in_pieces(loaded.model, PROMPT, [5, 1, 18])
    torch.testing.assert_close(found, made.logits(), atol=1e-4, rtol=1e-4)


EXACT_CASES: dict[str, tuple[str, Format, Scheme, bool]] = {
    "gptq": ("llama", "gptq", replace(W4A16, group_size=32), False),
    "gptq, zeros of its first version": (
        "qwen2",
        "gptq",
        replace(W4A16_ASYM, group_size=32),
        False,
    ),
    "gptq of 3 bits, a group a row": ("llama", "gptq_v2", Scheme(bits=3, group_size=-1), False),
    "gptq of 2 bits": ("llama", "gptq_v2", Scheme(bits=2, group_size=16, sym=False), False),
    "gptq of 8 bits": ("phi3", "gptq", Scheme(bits=8, group_size=32), False),
    "gptq with groups out of order": ("llama", "gptq", replace(W4A16, group_size=32), True),
    "gpt2 with groups out of order": (
        "gpt2",
        "gptq_v2",
        replace(W4A16_ASYM, group_size=32),
        True,
    ),
    "awq": ("gemma2", "awq", replace(W4A16_ASYM, group_size=32), False),
    "awq, all middle zeros": ("opt", "awq", replace(W4A16_ASYM, group_size=32), False),
    "compressed-tensors": ("gemma3", "compressed-tensors", W4A16, False),
    "compressed-tensors, a group a row": (
        "phi3",
        "compressed-tensors",
        Scheme(bits=4, group_size=-1),
        False,
    ),
}


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("case", EXACT_CASES)
def test_every_format_equals_transformers_with_dequantized_weights(
    case: str,
    backend: str,
    tiny_model: Tiny,
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    variant, file_format, scheme, permuted = EXACT_CASES[case]
    made = quantized(tiny_model(variant), scheme, file_format, permuted=permuted)
    loaded = load(made.folder, model_backend=backend)
    found = logits_in_pieces(loaded.model, PROMPT, [5, 1, 18])
    torch.testing.assert_close(found, made.logits(), atol=1e-4, rtol=1e-4)
    assert loaded.quantization is not None
    assert loaded.quantization["bits"] == scheme.bits
    assert loaded.quantization["format"] == file_format


ROUNDED_CASES: dict[str, tuple[str, Format, Scheme]] = {
    "W8A8": ("llama", "compressed-tensors", W8A8),
    "W8A8 of gpt2": ("gpt2", "compressed-tensors", W8A8),
    "W4A8 in groups": (
        "qwen3",
        "compressed-tensors",
        Scheme(bits=4, group_size=16, activations="int8"),
    ),
    "W4A8, a group a row": (
        "opt",
        "compressed-tensors",
        Scheme(bits=4, group_size=-1, activations="int8"),
    ),
    "LLM.int8": ("llama-biases-tied", "bitsandbytes", W8A8),
}


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("case", ROUNDED_CASES)
def test_rounded_activations_equal_their_definition_inside_transformers(
    case: str,
    backend: str,
    tiny_model: Tiny,
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    variant, file_format, scheme = ROUNDED_CASES[case]
    made = quantized(tiny_model(variant), scheme, file_format)
    check_rounded(made, load(made.folder, model_backend=backend).model, logits_in_pieces)


def test_two_level_weights_of_qqq_run(
    tmp_path_factory: pytest.TempPathFactory,
    random_model: Callable[..., Any],
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    settings = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    model = random_model("llama", deviation=0.1, **settings)
    folder = tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    scheme = Scheme(bits=4, group_size=-1, activations="int8")
    made = quantized((folder, model), scheme, "qqq")
    check_rounded(made, load(made.folder).model, logits_in_pieces)


def test_layers_left_in_full_precision_stay_ordinary(
    tiny_model: Tiny, quantized: Callable[..., Quantized], logits_in_pieces: Callable[..., Tensor]
) -> None:
    made = quantized(tiny_model("llama"), lambda name: None if "mlp" in name else W4A16)
    loaded = load(made.folder)
    assert loaded.model.kernel == "reference,torch+eager"
    found = logits_in_pieces(loaded.model, PROMPT, [24])
    torch.testing.assert_close(found, made.logits(), atol=1e-4, rtol=1e-4)


MIXTURES: dict[str, Rule] = {
    "value of 8 bits": lambda name: Scheme(bits=8, group_size=16) if "v_proj" in name else W4A16,
    "value in full precision": lambda name: None if "v_proj" in name else W4A16,
    "up in other groups": lambda name: replace(W4A16, group_size=32 if "up" in name else 16),
    "up in full precision": lambda name: None if "up_proj" in name else W4A16,
    "gate asymmetric": lambda name: W4A16_ASYM if "gate" in name else W4A16,
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_fused_layers_whose_parts_differ_run_apart(
    mixture: str,
    tiny_model: Tiny,
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    def rule(name: str) -> Scheme | None:
        return None if name == "lm_head" else MIXTURES[mixture](name)

    made = quantized(tiny_model("qwen2"), rule)  # with biases on query, key and value
    loaded = load(made.folder)
    assert "split(" in loaded.model.kernel
    found = logits_in_pieces(loaded.model, PROMPT, [24])
    torch.testing.assert_close(found, made.logits(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_quantized_head_runs(
    backend: str,
    tiny_model: Tiny,
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    made = quantized(tiny_model("llama"), lambda name: W4A16)
    found = logits_in_pieces(load(made.folder, model_backend=backend).model, PROMPT, [24])
    torch.testing.assert_close(found, made.logits(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant_tied", ["llama-biases-tied", "qwen3-tied-bias", "gemma"])
def test_tied_embeddings_stay_tied(
    variant_tied: str,
    tiny_model: Tiny,
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    made = quantized(tiny_model(variant_tied), W4A16)
    loaded = load(made.folder)
    assert loaded.architecture is not None
    assert loaded.architecture.tie_embeddings
    found = logits_in_pieces(loaded.model, PROMPT, [24])
    torch.testing.assert_close(found, made.logits(), atol=1e-4, rtol=1e-4)


def test_quantized_head_of_a_config_that_ties_it_is_used(
    tiny_model: Tiny, quantized: Callable[..., Quantized], logits_in_pieces: Callable[..., Tensor]
) -> None:
    made = quantized(tiny_model("llama"), lambda name: W4A16)
    config = json.loads((made.folder / "config.json").read_text())
    (made.folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = logits_in_pieces(load(made.folder).model, PROMPT, [24])
    torch.testing.assert_close(found, made.logits(), atol=1e-4, rtol=1e-4)


def test_head_dim_of_its_own_is_followed(
    cases_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    random_model: Callable[..., Any],
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    settings = json.loads((cases_dir / "C12_config_qwen3_headdim.json").read_text())
    settings = {k: v for k, v in settings.items() if k not in ("model_type", "architectures")}
    model = random_model("qwen3", **settings)
    folder = tmp_path_factory.mktemp("head-dim")
    model.save_pretrained(folder)
    made = quantized((folder, model), W4A16)
    prompt = [token_id % settings["vocab_size"] for token_id in PROMPT]
    found = logits_in_pieces(load(made.folder).model, prompt, [5, 19])
    torch.testing.assert_close(found, made.logits(prompt), atol=1e-4, rtol=1e-4)
    assert load(made.folder, dtype="bfloat16").kv_bytes_per_token == 512


def test_bias_of_zeros_that_a_quantizer_adds_is_ignored(
    tiny_model: Tiny, quantized: Callable[..., Quantized], logits_in_pieces: Callable[..., Tensor]
) -> None:
    made = quantized(tiny_model("llama"), replace(W4A16, group_size=32), "gptq")
    tensors, config = contents(made.folder)
    name = "model.layers.0.mlp.down_proj.bias"
    save(made.folder, tensors | {name: torch.zeros(64)}, config)
    found = logits_in_pieces(load(made.folder).model, PROMPT, [24])
    torch.testing.assert_close(found, made.logits(), atol=1e-4, rtol=1e-4)
    save(made.folder, tensors | {name: torch.ones(64)}, config)
    with pytest.raises(CheckpointError, match=r"down_proj\.bias"):
        load(made.folder)


def contents(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.get(name) for name in checkpoint}, checkpoint.config


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("lost", ["scales", "qweight", "qzeros"])
def test_missing_tensor_of_a_quantized_layer_is_named(
    lost: str, backend: str, tiny_model: Tiny, quantized: Callable[..., Quantized]
) -> None:
    made = quantized(tiny_model("llama"), replace(W4A16, group_size=32), "gptq")
    tensors, config = contents(made.folder)
    del tensors[f"model.layers.1.self_attn.k_proj.{lost}"]
    save(made.folder, tensors, config)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj"):
        load(made.folder, model_backend=backend)


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_missing_layer_is_named(
    backend: str, tiny_model: Tiny, quantized: Callable[..., Quantized]
) -> None:
    made = quantized(tiny_model("llama"), replace(W4A16, group_size=32), "gptq")
    tensors, config = contents(made.folder)
    kept = {name: x for name, x in tensors.items() if "layers.1.self_attn.k_proj" not in name}
    save(made.folder, kept, config)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        load(made.folder, model_backend=backend)


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_layer_of_another_shape_is_named(
    backend: str, tiny_model: Tiny, quantized: Callable[..., Quantized]
) -> None:
    made = quantized(tiny_model("llama"), replace(W4A16, group_size=32), "gptq")
    tensors, config = contents(made.folder)
    for kind in ("qweight", "qzeros", "scales", "g_idx"):
        source = tensors[f"model.layers.0.self_attn.q_proj.{kind}"]
        tensors[f"model.layers.0.self_attn.k_proj.{kind}"] = source.clone()
    save(made.folder, tensors, config)
    with pytest.raises(CheckpointError, match=r"k_proj.*should.*\[32, 64\].*\[64, 64\]"):
        load(made.folder, model_backend=backend)


def test_dummy_weights_of_a_quantized_config_are_refused(
    tiny_model: Tiny, quantized: Callable[..., Quantized]
) -> None:
    made = quantized(tiny_model("llama"), W4A16)
    with pytest.raises(UnsupportedModelError, match="full-precision weights"):
        load(made.folder, load_format="dummy")


def test_float16_checkpoint_runs_in_bfloat16_on_cpu(
    tiny_model: Tiny, quantized: Callable[..., Quantized]
) -> None:
    made = quantized(tiny_model("llama"), W4A16)
    tensors, config = contents(made.folder)
    halved = {name: x.half() if x.is_floating_point() else x for name, x in tensors.items()}
    del config["dtype"]
    save(made.folder, halved, config)
    assert load(made.folder, dtype="auto").dtype is torch.bfloat16


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS = [PROMPT[:9], PROMPT[3:20], PROMPT, PROMPT[:2], PROMPT[:9]]


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("case", ["W4A16", "W8A8", "LLM.int8"])
def test_greedy_tokens_do_not_depend_on_cache_or_company(
    case: str, backend: str, tiny_model: Tiny, quantized: Callable[..., Quantized]
) -> None:
    schemes: dict[str, tuple[Scheme, Format]] = {
        "W4A16": (W4A16_ASYM, "compressed-tensors"),
        "W8A8": (W8A8, "compressed-tensors"),
        "LLM.int8": (W8A8, "bitsandbytes"),
    }
    made = quantized(tiny_model("llama"), *schemes[case])
    loaded = load(made.folder, model_backend=backend, max_model_len=64)
    answers = {}
    for manager in ("paged", "contiguous", "uncached"):
        llm = LLM(
            str(made.folder),
            loaded=loaded,
            kv_manager=manager,
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


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [result.answers[0].token_ids for result in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("case", ["W4A16", "W8A8", "W4A8 in groups"])
def test_compiled_kernels_stay_within_the_rounding_of_bfloat16(
    case: str,
    tiny_model: Tiny,
    quantized: Callable[..., Quantized],
    logits_in_pieces: Callable[..., Tensor],
) -> None:
    schemes = {
        "W4A16": Scheme(bits=4, group_size=32, sym=False),
        "W8A8": W8A8,
        "W4A8 in groups": Scheme(bits=4, group_size=32, activations="int8"),
    }
    made = quantized(tiny_model("llama"), schemes[case])
    try:
        loaded = load(made.folder, dtype="bfloat16", compile=True)
    except KernelBuildError as error:
        pytest.skip(str(error))
    expected = made.logits()

    def error_of(model: Any) -> float:
        found = logits_in_pieces(model, PROMPT, [5, 1, 18])
        return float((found - expected).norm() / expected.norm())

    # Rounded activations multiply what bfloat16 loses, in torch's kernels as in ours.
    plain = error_of(load(made.folder, dtype="bfloat16").model)
    assert error_of(loaded.model) < 1.5 * plain + 0.01
    assert plain < 0.2
