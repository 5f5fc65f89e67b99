"""Attention in plain torch operations: the reference on every device, and the CPU path.

Sequences with one query token are gathered together by blocks, padded to the longest of a group
of similar length, and go through one scaled_dot_product_attention with the queries of a KV head
folded into the query length (on CPU 7 times faster than repeating K/V). A sequence with more
query tokens (a prompt or a chunk of one) goes alone.

Padding is masked, but it must also be finite: 0 x NaN is NaN, and a sequence whose numbers have
overflowed leaves NaN in its blocks. So padded blocks are the null block, which is zero, and the
rest of a block is zeroed when a sequence begins it.

Legend: B sequences of a group · Q query tokens · S context length · G query heads per KV head.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.kv.block_pool import NULL_BLOCK
from llmbench.engine.layers.attention.int8_cache import dequantize_rows, is_int8, quantize_rows

# A group's shortest context may be padded to this many times its length: below it, one larger
# operation costs less than two.
MAX_PADDING_RATIO = 1.5


@dataclass(slots=True)
class _DecodeGroup:
    """Sequences of similar length with one query token each."""

    rows: slice
    """Of the batch's sequences; the same rows of its tokens."""
    blocks: torch.Tensor  # [B * W] int64, flattened block ids
    num_padded: int  # W * block_size
    context_lens: list[int]
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class _PromptSequence:
    """A sequence with more than one query token."""

    tokens: slice
    blocks: torch.Tensor  # [W] int64
    query_len: int
    context_len: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Metadata:
    groups: list[_DecodeGroup]
    prompts: list[_PromptSequence]
    unwritten: torch.Tensor | None
    """Slots [N] behind the last token in blocks that this step begins."""


class TorchAttention:
    """Paged attention by gathering blocks and calling scaled_dot_product_attention."""

    name = "torch"

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch
    ) -> None:
        """Put `key` and `value` [T, Hkv, D] at the batch's slots."""
        heads = torch.cat((key, value), dim=1)
        rows = quantize_rows(heads) if is_int8(kv_cache) else heads
        kv_cache.index_copy_(0, batch.slot_mapping, rows)

    def attend(
        self,
        query: torch.Tensor,  # [T, H, D]
        kv_cache: torch.Tensor,  # [num_slots, 2 * Hkv, D]
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of each query token over its own sequence; returns [T, H, D]."""
        metadata = batch.derived.get("torch_attention")
        if metadata is None:
            metadata = batch.derived["torch_attention"] = _build(batch)
        if metadata.unwritten is not None:
            kv_cache.index_fill_(0, metadata.unwritten, 0)
        num_heads, head_dim = query.shape[1:]
        is_single = len(metadata.groups) == 1 and not metadata.prompts  # spare a copy
        out = torch.empty(
            0 if is_single else query.shape, dtype=query.dtype, device=query.device
        )  # [T, H, D]
        num_kv_heads = kv_cache.shape[1] // 2
        for group in metadata.groups:
            num_seqs = len(group.context_lens)
            kv = _gather(kv_cache, group.blocks, batch.block_size, query).view(
                num_seqs, group.num_padded, 2, num_kv_heads, head_dim
            )
            if group.masks.get(sliding_window, False) is False:
                group.masks[sliding_window] = _decode_mask(group, sliding_window, query)
            mask = group.masks[sliding_window]
            if mask is None:  # one length: cutting off the padding replaces a mask
                kv = kv[:, : group.context_lens[0]]
            attended = _attention(
                query[group.rows].view(num_seqs, num_kv_heads, -1, head_dim),  # [B, Hkv, G, D]
                kv[:, :, 0].transpose(1, 2),  # [B, Hkv, S, D]
                kv[:, :, 1].transpose(1, 2),
                mask,
                scale,
                softcap,
            )
            if is_single:
                return attended.reshape(num_seqs, num_heads, head_dim)
            out[group.rows] = attended.reshape(num_seqs, num_heads, head_dim)
        for prompt in metadata.prompts:
            kv = _gather(kv_cache, prompt.blocks, batch.block_size, query)
            kv = kv.view(-1, 2, num_kv_heads, head_dim)
            key, value = kv[: prompt.context_len].permute(1, 2, 0, 3)  # [Hkv, S, D] each
            group_size = num_heads // num_kv_heads
            if group_size > 1:
                key = key.repeat_interleave(group_size, dim=0)
                value = value.repeat_interleave(group_size, dim=0)
            queries = query[prompt.tokens].transpose(0, 1)  # [H, Q, D]
            is_whole = prompt.query_len == prompt.context_len
            if (
                is_whole
                and softcap is None
                and (sliding_window is None or sliding_window >= prompt.context_len)
            ):
                attended = F.scaled_dot_product_attention(
                    queries[None], key[None], value[None], is_causal=True, scale=scale
                )
            else:
                if sliding_window not in prompt.masks:
                    prompt.masks[sliding_window] = _prompt_mask(prompt, sliding_window, query)
                attended = _attention(
                    queries[None],
                    key[None],
                    value[None],
                    prompt.masks[sliding_window],
                    scale,
                    softcap,
                )
            out[prompt.tokens] = attended[0].transpose(0, 1)
        return out


def _gather(
    kv_cache: torch.Tensor, blocks: torch.Tensor, block_size: int, query: torch.Tensor
) -> torch.Tensor:
    """K/V [blocks * block_size, 2 * Hkv, D] of some blocks, in the query's type."""
    _, heads, width = kv_cache.shape
    rows = kv_cache.view(-1, block_size * heads * width).index_select(0, blocks)
    rows = rows.view(-1, heads, width)
    return dequantize_rows(rows, query.shape[-1], query.dtype) if is_int8(kv_cache) else rows


def _build(batch: ForwardBatch) -> _Metadata:
    """Group the decodes by length and take the prompts one by one."""
    block_table = batch.block_table.long()
    lens, size = batch.context_lens, batch.block_size
    groups: list[_DecodeGroup] = []
    start = 0
    while start < batch.num_decodes:
        low = high = lens[start]
        end = start + 1
        while end < batch.num_decodes:
            low, high = min(low, lens[end]), max(high, lens[end])
            if high > MAX_PADDING_RATIO * low + 2 * size:
                break
            end += 1
        rows = slice(start, end)
        held = [-(-length // size) for length in lens[rows]]
        num_blocks = max(held)
        blocks = block_table[rows, :num_blocks]
        if min(held) < num_blocks:
            places = torch.arange(num_blocks, device=blocks.device)
            is_padding = places >= torch.tensor(held, device=blocks.device)[:, None]
            blocks = blocks.masked_fill(is_padding, NULL_BLOCK)
        groups.append(
            _DecodeGroup(
                rows=rows,
                blocks=blocks.reshape(-1),
                num_padded=num_blocks * size,
                context_lens=lens[rows],
            )
        )
        start = end
    prompts: list[_PromptSequence] = []
    token = batch.num_decodes
    for row in range(batch.num_decodes, batch.num_seqs):
        query_len = batch.query_lens[row]
        prompts.append(
            _PromptSequence(
                tokens=slice(token, token + query_len),
                blocks=block_table[row, : -(-lens[row] // size)],
                query_len=query_len,
                context_len=lens[row],
            )
        )
        token += query_len
    return _Metadata(groups, prompts, _unwritten_slots(batch))


def _unwritten_slots(batch: ForwardBatch) -> torch.Tensor | None:
    last_tokens: list[int] = []
    behind: list[int] = []
    end = 0
    for query_len, context_len in zip(batch.query_lens, batch.context_lens, strict=True):
        end += query_len
        num_in_block = context_len % batch.block_size
        if 0 < num_in_block <= query_len:
            num_left = batch.block_size - num_in_block
            last_tokens += [end - 1] * num_left
            behind += range(1, num_left + 1)
    if not behind:
        return None
    device = batch.slot_mapping.device
    slots = batch.slot_mapping[torch.tensor(last_tokens, device=device)]
    return slots + torch.tensor(behind, device=device)


def _decode_mask(
    group: _DecodeGroup, sliding_window: int | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Additive mask [B, 1, 1, W * block_size]; None where one cut serves all sequences."""
    shortest, longest = min(group.context_lens), max(group.context_lens)
    if shortest == longest and (sliding_window is None or sliding_window >= longest):
        return None
    lens = torch.tensor(group.context_lens, device=like.device)[:, None]  # [B, 1]
    key_positions = torch.arange(group.num_padded, device=like.device)[None, :]
    hidden = key_positions >= lens
    if sliding_window is not None:
        hidden |= key_positions < lens - sliding_window
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]


def _prompt_mask(
    prompt: _PromptSequence, sliding_window: int | None, like: torch.Tensor
) -> torch.Tensor:
    """Additive mask [Q, S]: causal from the sequence's end, and within the window."""
    first = prompt.context_len - prompt.query_len
    query_positions = torch.arange(first, prompt.context_len, device=like.device)[:, None]
    key_positions = torch.arange(prompt.context_len, device=like.device)[None, :]
    hidden = key_positions > query_positions
    if sliding_window is not None:
        hidden |= key_positions <= query_positions - sliding_window
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _attention(
    query: torch.Tensor,  # [B, H, Q, D]
    key: torch.Tensor,  # [B, H, S, D]
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention with an optional soft cap, which scaled_dot_product_attention does not know."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1).to(query.dtype) @ value
