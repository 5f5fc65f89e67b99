"""The runner: from what was scheduled to tokens, through one forward pass.

It flattens the scheduled requests into a ForwardBatch, runs the model, takes logits for the asked
rows only, and samples. Block tables stay in one array between steps and receive only the blocks
that are new, so that a step's cost on the host does not grow with the context.

Legend: T tokens · B sequences · W blocks of the longest sequence · L rows with logits.
"""

from dataclasses import dataclass

import numpy as np
import torch

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.kv.manager import KVCacheManager
from llmbench.engine.models.registry import Model
from llmbench.engine.request import Request, TokenLogprobs
from llmbench.engine.sampling.logprobs import row_logprobs
from llmbench.engine.sampling.sampler import Sampler
from llmbench.engine.scheduler import SampledTokens, SchedulerOutput

# Rows of prompt log-probabilities whose full-vocabulary logits are held at once.
PROMPT_LOGPROB_ROWS = 64


@dataclass(slots=True)
class _TableRow:
    """A request's row in the block table, and how much of it is up to date."""

    index: int
    num_blocks: int = 0


@dataclass(slots=True)
class _ReportedRows:
    """Where a step's hidden states predict prompt tokens of a request that asks for them."""

    request: Request
    num_top: int
    rows: range
    targets: list[int]
    """The token that stands behind each row's."""


class ModelRunner:
    """Runs a model over scheduled requests; owns the KV tensors and the block table."""

    def __init__(
        self,
        model: Model,
        kv: KVCacheManager,
        sampler: Sampler,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.model, self.sampler, self.device = model, sampler, device
        self.kv_caches = model.make_kv_cache((kv.num_blocks + 1) * kv.block_size)
        width = -(-max_model_len // kv.block_size)
        self._table = np.zeros((max_num_seqs, width), dtype=np.int32)
        self.reset(kv)

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> dict[str, SampledTokens]:
        """One forward pass; a request whose catch-up this completes gets its next token."""
        # One token each first; among them by length, so that attention pads little.
        order = sorted(scheduled.scheduled, key=_row_order)
        batch = self._build(order)
        hidden = self.model.forward(batch, self.kv_caches)
        results = {request.request_id: SampledTokens([], [], []) for request, _ in order}
        samplers = [
            request for request, n in order if request.num_computed_tokens + n == request.num_tokens
        ]
        if samplers:
            logits = self.model.compute_logits(hidden.index_select(0, batch.logits_indices))
            for request, row in zip(samplers, self.sampler(logits, samplers), strict=True):
                result = results[request.request_id]
                if row.error is not None:
                    result.error = row.error
                    continue
                result.token_ids.append(row.token_id)
                if row.logprobs is not None:
                    result.logprobs.append(row.logprobs)
        reported = _reported_rows(order)
        self._report_logprobs(reported, hidden, results)
        self._report_hidden(reported, samplers, hidden, batch.logits_indices, results)
        return results

    def reset(self, kv: KVCacheManager) -> None:
        """Start over with no requests, and a manager of as many blocks of the same size."""
        self.kv = kv
        self._rows: dict[str, _TableRow] = {}
        self._free_rows = list(range(len(self._table) - 1, -1, -1))

    def forget(self, request: Request) -> None:
        """Give back the block-table row of a request that has ended."""
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._free_rows.append(row.index)

    def _build(self, order: list[tuple[Request, int]]) -> ForwardBatch:
        size = self.kv.block_size
        query_lens = [n for _, n in order]
        computed = [request.num_computed_tokens for request, _ in order]
        context_lens = [start + n for start, n in zip(computed, query_lens, strict=True)]
        num_decodes = sum(1 for n in query_lens if n == 1)
        token_ids: list[int] = []
        for (request, n), start in zip(order, computed, strict=True):
            if n == 1:
                token_ids.append(_token_at(request, start))
            else:
                known = request.token_ids[start : start + n]
                token_ids += known
                token_ids += request.spec_token_ids[: n - len(known)]
        rows = np.array([self._row(request) for request, _ in order], dtype=np.int64)
        width = -(-max(context_lens) // size)
        table = self._table[rows, :width]  # [B, W], a copy
        lens = np.array(query_lens, dtype=np.int64)
        starts = np.zeros(len(order) + 1, dtype=np.int32)
        np.cumsum(lens, out=starts[1:])
        if num_decodes == len(order):
            positions = np.array(computed, dtype=np.int64)
            sequence = np.arange(len(order))
        else:
            sequence = np.repeat(np.arange(len(order)), lens)  # [T]
            first = np.array(computed, dtype=np.int64) - starts[:-1]
            positions = np.arange(len(token_ids), dtype=np.int64) + first[sequence]
        slots = table[sequence, positions // size].astype(np.int64) * size + positions % size
        sampled = [
            starts[i + 1] - 1
            for i, (request, n) in enumerate(order)
            if computed[i] + n == request.num_tokens
        ]
        return ForwardBatch(
            input_ids=self._tensor(np.array(token_ids, dtype=np.int64)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            query_start_loc=self._tensor(starts),
            seq_lens=self._tensor(np.array(context_lens, dtype=np.int32)),
            block_table=self._tensor(table),
            logits_indices=self._tensor(np.array(sampled, dtype=np.int64)),
            block_size=size,
            num_decodes=num_decodes,
            query_lens=query_lens,
            context_lens=context_lens,
        )

    def _row(self, request: Request) -> int:
        """Index of the request's row in the block table, brought up to date."""
        row = self._rows.get(request.request_id)
        if row is None:
            row = self._rows[request.request_id] = _TableRow(self._free_rows.pop())
        if not self.kv.keeps_kv:
            row.num_blocks = 0
        block_ids = self.kv.block_ids(request)
        if len(block_ids) > row.num_blocks:
            self._table[row.index, row.num_blocks : len(block_ids)] = block_ids[row.num_blocks :]
            row.num_blocks = len(block_ids)
        return row.index

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def _report_logprobs(
        self,
        reported: list[_ReportedRows],
        hidden: torch.Tensor,  # [T, H]
        results: dict[str, SampledTokens],
    ) -> None:
        """Log-probabilities of prompt tokens, the rows of all requests together.

        A request may report a few rows only, and the head's matrix is read once a call.
        """
        rows = [row for one in reported for row in one.rows]
        targets = [token_id for one in reported for token_id in one.targets]
        tops = [one.num_top for one in reported for _ in one.rows]
        found: list[TokenLogprobs] = []
        for low in range(0, len(rows), PROMPT_LOGPROB_ROWS):
            chunk = slice(low, low + PROMPT_LOGPROB_ROWS)
            logits = self.model.compute_logits(hidden[rows[chunk]])
            found += row_logprobs(logits, targets[chunk], tops[chunk])
        start = 0
        for one in reported:
            stop = start + len(one.rows)
            results[one.request.request_id].prompt_logprobs = found[start:stop]
            start = stop

    def _report_hidden(
        self,
        reported: list[_ReportedRows],
        samplers: list[Request],
        hidden: torch.Tensor,  # [T, H]
        sampled_rows: torch.Tensor,  # [L], rows of `samplers`
        results: dict[str, SampledTokens],
    ) -> None:
        """Final hidden states of reported prompt tokens and of sampled ones, on the CPU."""
        asking = [one for one in reported if one.request.sampling_params.return_hidden_states]
        places = [
            place
            for place, request in enumerate(samplers)
            if request.sampling_params.return_hidden_states
        ]
        if not asking and not places:
            return
        rows = [row for one in asking for row in one.rows]
        rows += sampled_rows[places].tolist()
        final = self.model.final_hidden(hidden[rows]).cpu()  # [rows, H]
        # Copies: a part of one tensor would keep the rows of all requests in memory.
        start = 0
        for one in asking:
            stop = start + len(one.rows)
            results[one.request.request_id].prompt_hidden_states.append(final[start:stop].clone())
            start = stop
        for row, place in enumerate(places, start):
            results[samplers[place].request_id].hidden_states.append(final[row : row + 1].clone())


def _reported_rows(order: list[tuple[Request, int]]) -> list[_ReportedRows]:
    """Prompt tokens that the step predicts and that were not reported before."""
    found = []
    offset = 0
    for request, n in order:
        num_top = request.sampling_params.prompt_logprobs
        if num_top is not None:
            computed = request.num_computed_tokens
            # Position p predicts the token at p + 1.
            start = request.first_prompt_logprob - 1 + len(request.prompt_logprobs)
            stop = min(computed + n, request.num_prompt_tokens - 1)
            if start < stop:
                assert start >= computed, f"{request.request_id}: position {start} is not computed"
                found.append(
                    _ReportedRows(
                        request,
                        num_top,
                        range(offset + start - computed, offset + stop - computed),
                        request.prompt_token_ids[start + 1 : stop + 1],
                    )
                )
        offset += n
    return found


def _row_order(scheduled: tuple[Request, int]) -> tuple[int, int]:
    request, n = scheduled
    return (0, request.num_computed_tokens) if n == 1 else (1, 0)


def _token_at(request: Request, position: int) -> int:
    known = len(request.token_ids)
    if position < known:
        return request.token_ids[position]
    return request.spec_token_ids[position - known]
