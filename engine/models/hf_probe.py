"""Does a transformers model run rightly over our attention? Ask it, before it serves anyone.

Two short made-up prompts are run twice: whole and alone through transformers' own eager
attention, and in three pieces, side by side, through ours. A model whose only path from token to
token is causal attention gives the same logits. One with recurrent layers, convolutions, or
positions that it counts by itself does not, and is refused instead of answering wrongly.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.errors import EngineError, UnsupportedModelError
from llmbench.engine.models.hf_attention import ATTENTION, Step

if TYPE_CHECKING:
    from llmbench.engine.models.transformers_backend import TransformersModel

BLOCK_SIZE = 4
BLOCK_TABLES = ([3, 1], [2, 4])
LENGTHS = (7, 5)
# Tokens of each prompt in each step. One-token pieces come first in a batch, so the second prompt
# leads the second step.
STEPS = (((0, 4), (1, 3)), ((1, 1), (0, 2)), ((0, 1), (1, 1)))
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Median relative error of a row of logits: rounding stays far below, a lost state gives ~1."""


@torch.inference_mode()
def probe(model: "TransformersModel", *, vocab_size: int) -> dict[int, tuple[int, int]]:
    """Check a model; returns layer index → (2 * KV heads, width) of its K/V.

    Raises:
        UnsupportedModelError: a layer does not call our attention, or the logits differ.
    """
    kind = model.causal_lm.config.model_type
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(vocab_size, (length,), generator=generator).to(model.causal_lm.device)
        for length in LENGTHS
    ]
    try:
        found, caches = _in_pieces(model, prompts)
        silent = model.num_layers - len(caches)
        if silent:
            raise UnsupportedModelError(
                f"{kind} has {silent} of {model.num_layers} layers that do not call attention"
            )
        expected = _alone(model, prompts)
    except EngineError:
        raise
    # Foreign code in a situation that it was not written for may fail in any way.
    except Exception as error:
        raise UnsupportedModelError(
            f"{kind} cannot run over this engine's attention: {type(error).__name__}: {error}"
        ) from error
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    median = float(errors.median())
    if not median <= TOLERANCE[model.causal_lm.dtype]:  # a NaN is refused too
        raise UnsupportedModelError(
            f"{kind} computes something else in pieces than as a whole (relative error "
            f"{median:.2g}): it carries state outside attention"
        )
    return {layer: (caches[layer].shape[1], caches[layer].shape[2]) for layer in sorted(caches)}


def _in_pieces(
    model: "TransformersModel", prompts: list[Tensor]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits of all but the first pieces' tokens, and the caches that came to be."""
    caches: dict[int, Tensor] = {}
    done = [0] * len(prompts)
    rows: dict[tuple[int, int], Tensor] = {}
    num_slots = (1 + sum(len(table) for table in BLOCK_TABLES)) * BLOCK_SIZE
    for pieces in STEPS:
        batch = _batch(prompts, pieces, done)
        logits = model.compute_logits(model.run(Step(batch, caches, num_new_slots=num_slots)))
        row = 0
        for prompt, count in pieces:
            for position in range(done[prompt], done[prompt] + count):
                rows[prompt, position] = logits[row].float()
                row += 1
            done[prompt] += count
    first = dict(STEPS[0])
    kept = [rows[key] for key in sorted(rows) if key[1] >= first[key[0]]]
    return torch.stack(kept), caches


def _alone(model: "TransformersModel", prompts: list[Tensor]) -> Tensor:
    """The same logits by transformers' eager attention, a prompt at a time."""
    causal_lm = model.causal_lm
    causal_lm.set_attn_implementation("eager")
    try:
        rows = []
        for prompt, start in zip(prompts, dict(sorted(STEPS[0])).values(), strict=True):
            logits = causal_lm(input_ids=prompt[None], use_cache=False).logits[0]
            rows.append(logits[start:].float())
        return torch.cat(rows)
    finally:
        causal_lm.set_attn_implementation(ATTENTION)


def _batch(
    prompts: list[Tensor], pieces: tuple[tuple[int, int], ...], done: list[int]
) -> ForwardBatch:
    device = prompts[0].device
    ids, positions, slots = [], [], []
    for prompt, count in pieces:
        for position in range(done[prompt], done[prompt] + count):
            ids.append(int(prompts[prompt][position]))
            positions.append(position)
            block = BLOCK_TABLES[prompt][position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
    query_lens = [count for _, count in pieces]
    context_lens = [done[prompt] + count for prompt, count in pieces]
    starts = [sum(query_lens[:i]) for i in range(len(pieces) + 1)]

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        input_ids=tensor(ids),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        query_start_loc=tensor(starts, torch.int32),
        seq_lens=tensor(context_lens, torch.int32),
        block_table=tensor([BLOCK_TABLES[prompt] for prompt, _ in pieces], torch.int32),
        logits_indices=tensor(list(range(len(ids)))),
        block_size=BLOCK_SIZE,
        num_decodes=sum(count == 1 for count in query_lens),
        query_lens=query_lens,
        context_lens=context_lens,
    )
