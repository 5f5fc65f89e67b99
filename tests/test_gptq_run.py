"""Whole GPTQ runs on calibration and weights that broke other tools."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.quant.calibration import calibration_from_ids
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Method, QuantConfig, Scheme
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.pipeline import QuantResult, quantize
from llmbench.quant.plan import plan_run
from llmbench.quant.quantized_weight import QuantizedWeight

SAVED = Callable[..., Path]
DEAD = slice(8, 16)


@pytest.fixture
def saved(random_model: Callable[..., Any], tmp_path: Path) -> SAVED:
    """Save a random Llama, changed by a function, in a type."""

    def save(change: Callable[[Any], None], dtype: torch.dtype = torch.float32) -> Path:
        model = random_model("llama", deviation=0.1)
        with torch.no_grad():
            change(model)
        folder = tmp_path / "base"
        model.to(dtype).save_pretrained(folder)
        return folder

    return save


def run(
    folder: Path, output: Path, samples: Sequence[Sequence[int]], method: Method = "gptq"
) -> tuple[QuantResult, dict[str, QuantizedWeight]]:
    """Quantize to W4 g32; the weights are those of the written files."""
    config = QuantConfig(method=method, scheme=Scheme(bits=4, group_size=32))
    plan = plan_run(Checkpoint.open(folder), config, output=output)
    calibration = calibration_from_ids(samples, max_seq_length=64)
    result = quantize(folder, output, plan=plan, calibration=calibration)
    written = QuantizedCheckpoint.of(Checkpoint.open(output))
    assert written is not None
    return result, {name: written.weight(name) for name in plan.schemes}


def logits(folder: Path, weights: dict[str, QuantizedWeight], token_ids: list[int]) -> Any:
    """Of the base model with the dequantized weights."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight.dequantize()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("has_dead_inputs", [False, True])
def test_one_short_text_is_enough_for_a_sound_model(
    has_dead_inputs: bool, saved: SAVED, tmp_path: Path
) -> None:
    """Four tokens: Hessians of rank 4 at most, of 64 (AutoGPTQ#708)."""

    def kill(model: Any) -> None:
        if has_dead_inputs:
            model.model.embed_tokens.weight[:, DEAD] = 0.0

    folder = saved(kill)
    result, weights = run(folder, tmp_path / "gptq", [[3, 77, 20, 6]])
    for name, weight in weights.items():
        assert torch.isfinite(weight.scales).all()
        assert (weight.scales > 0).all()
        report = result.layers[name]
        assert report.damp is not None
        assert report.num_tokens == 4
    assert torch.isfinite(logits(folder, weights, list(range(30)))).all()

    _, nearest = run(folder, tmp_path / "rtn", [[3, 77, 20, 6]], "rtn")
    base = logits(folder, {}, [3, 77, 20, 6])
    lost = [float((logits(folder, w, [3, 77, 20, 6]) - base).norm()) for w in (weights, nearest)]
    assert lost[0] <= 1.05 * lost[1]


def test_every_token_of_texts_of_unequal_length_counts(saved: SAVED, tmp_path: Path) -> None:
    """Other tools kept the last text only, or cared for the texts' order (GPTQModel#3035)."""
    folder = saved(lambda model: None)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, 128, (n,), generator=generator).tolist() for n in (40, 6, 23, 1)]
    result, weights = run(folder, tmp_path / "forward", texts)
    assert {report.num_tokens for report in result.layers.values()} == {70}
    _, reversed_weights = run(folder, tmp_path / "reversed", texts[::-1])
    _, last_alone = run(folder, tmp_path / "last", texts[-1:])
    for name, weight in weights.items():
        torch.testing.assert_close(weight.scales, reversed_weights[name].scales, rtol=1e-5, atol=0)
        assert torch.equal(weight.codes, reversed_weights[name].codes)
    assert any(
        not torch.equal(weight.codes, last_alone[name].codes) for name, weight in weights.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pruned_groups_and_rows_stay_zero(dtype: torch.dtype, saved: SAVED, tmp_path: Path) -> None:
    """A largest value of 0 makes a scale of 0 and 0 / 0 (AutoAWQ#519)."""

    def prune(model: Any) -> None:
        weight = model.model.layers[0].mlp.up_proj.weight
        weight[0, :32] = 0.0
        weight[1, 32:] = 0.0
        weight[2] = 0.0

    folder = saved(prune, dtype)
    _, weights = run(folder, tmp_path / "out", [list(range(2, 42))])
    for weight in weights.values():
        assert torch.isfinite(weight.dequantize()).all()
        assert (weight.scales > 0).all()
    pruned = weights["model.layers.0.mlp.up_proj"].dequantize()
    for zeros in (pruned[0, :32], pruned[1, 32:], pruned[2]):
        assert (zeros == 0.0).all()
    assert torch.isfinite(logits(folder, weights, list(range(30)))).all()
