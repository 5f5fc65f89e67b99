"""Batches led block by block compute what the whole model computes, for every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbench.quant.block_calibration import CalibrationPasses, batches_of_equal_length
from llmbench.quant.block_model import BlockModel, CheckpointSource
from llmbench.quant.checkpoint import Checkpoint

SAMPLES = [[5, 9, 3, 77, 20, 6], [8, 8, 1], [100, 2, 64, 9, 31, 7], [11]]


def block_model(folder: Path, dtype: torch.dtype = torch.float32) -> BlockModel:
    from transformers import AutoConfig

    checkpoint = Checkpoint.open(folder)
    config = AutoConfig.from_pretrained(folder)
    return BlockModel(checkpoint, config, CheckpointSource(checkpoint), dtype=dtype)


def finish(model: BlockModel, passes: CalibrationPasses, first: int = 0) -> list[torch.Tensor]:
    for index in range(first, model.num_blocks):
        model.load_block(index)
        passes.advance()
        model.drop_block(index)
    return passes.hidden_states()


def expected_hidden(model: Any, samples: list[list[int]]) -> list[torch.Tensor]:
    decoder = model.get_decoder()
    return [
        decoder(input_ids=torch.tensor(batch), use_cache=False).last_hidden_state
        for batch in batches_of_equal_length(samples)
    ]


def test_paused_batches_end_in_the_models_own_hidden_states(
    variant: str, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = tiny_model(variant)
    blocks = block_model(folder)
    passes = CalibrationPasses(blocks, SAMPLES)
    passes.start()
    for found, expected in zip(
        finish(blocks, passes), expected_hidden(model, SAMPLES), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_groups_are_the_layers_that_read_one_tensor(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, _ = tiny_model("llama")
    blocks = block_model(folder)
    passes = CalibrationPasses(blocks, SAMPLES)
    passes.start()
    block = blocks.load_block(0)
    groups = [[name.rpartition(".")[2] for name in g.names] for g in passes.groups_of(block)]
    assert groups == [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]
    passes.close()


def test_later_groups_see_the_weights_set_before(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    """With the values turned to zero, the output projection's inputs are zero."""
    folder, _ = tiny_model("llama")
    blocks = block_model(folder)
    passes = CalibrationPasses(blocks, SAMPLES)
    passes.start()
    block = blocks.load_block(0)
    seen = {}
    with passes.at(block) as calibration:
        for group, statistics in calibration.sequential():
            last = group.names[0].rpartition(".")[2]
            seen[last] = statistics.hessian
            if last == "q_proj":
                value = f"{block.name}.self_attn.v_proj"
                block.set_weight(value, torch.zeros_like(block.weight(value)))
    passes.close()
    assert seen["q_proj"].abs().max() > 0
    assert seen["o_proj"].abs().max() == 0
    assert seen["down_proj"].abs().max() > 0


def test_observing_changes_nothing_and_sees_what_sequential_sees(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, model = tiny_model("llama")
    blocks = block_model(folder)
    passes = CalibrationPasses(blocks, SAMPLES)
    passes.start()
    block = blocks.load_block(0)
    with passes.at(block) as calibration:
        observed = calibration.observe(hessian=True)
        for group, statistics in calibration.sequential():
            assert statistics.num_tokens == observed[group].num_tokens == 16
            torch.testing.assert_close(statistics.hessian, observed[group].hessian)
        passes.advance()
    found = finish(blocks, passes, first=1)
    for hidden, expected in zip(found, expected_hidden(model, SAMPLES), strict=True):
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_inputs_of_int8_layers_are_rounded_on_the_way_and_not_when_observed(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, _ = tiny_model("llama")
    blocks = block_model(folder)
    passes = CalibrationPasses(blocks, SAMPLES)
    passes.start()
    block = blocks.load_block(0)
    name = f"{block.name}.self_attn.q_proj"
    with passes.at(block, frozenset([name])) as calibration:
        exact = next(iter(calibration.observe(sample_rows=16).values())).sample
        rounded = next(calibration.sequential(sample_rows=16))[1].sample
    passes.close()
    steps = exact.abs().amax(dim=1, keepdim=True) / 127
    assert not torch.equal(exact, rounded)
    assert ((exact - rounded).abs() <= steps * 0.501).all()


def test_a_run_goes_on_from_stored_hidden_states(
    variant: str, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = tiny_model(variant)
    first = block_model(folder)
    passes = CalibrationPasses(first, SAMPLES)
    passes.start()
    first.load_block(0)
    passes.advance()
    stored = [hidden.clone() for hidden in passes.hidden_states()]
    undisturbed = finish(first, passes, first=1)

    again = block_model(folder)
    resumed = CalibrationPasses(again, SAMPLES)
    resumed.start(stored, at_block=1)
    for found, expected in zip(finish(again, resumed, first=1), undisturbed, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_order_of_samples_has_no_effect_on_batches(order: list[int]) -> None:
    batches = batches_of_equal_length([SAMPLES[i] for i in order])
    assert batches == [[SAMPLES[0], SAMPLES[2]], [SAMPLES[1]], [SAMPLES[3]]]


def test_blocks_outside_their_turn_take_no_memory(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, _ = tiny_model("llama")
    blocks = block_model(folder)
    assert {p.device.type for p in blocks.module(0).parameters()} == {"meta"}
    blocks.load_block(0)
    assert {p.device.type for p in blocks.module(0).parameters()} == {"cpu"}
    blocks.drop_block(0)
    assert {p.device.type for p in blocks.module(0).parameters()} == {"meta"}
