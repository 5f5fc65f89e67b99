"""GPTQ: rounding column by column, with every error made up for by the columns still to come.

A layer's error over the calibration tokens is ||(W - Q) X||^2 = tr((W - Q) H (W - Q)^T) with
H = X X^T. When column q of W is rounded, the best change of the remaining columns is known in
closed form from the inverse of H (Frantar et al. 2022, eq. 2 and 3), and the Cholesky factor of
H^-1 holds all the rows of it that are ever needed (alg. 1). All rows of W go together.

Beyond the paper's algorithm 1, in the order in which they matter:

- columns in descending order of H's diagonal (`act_order`), so that what matters most is rounded
  while most columns can still make up for it. Groups stay where they are in the file (static
  groups), unless `desc_act` lets them follow the order too;
- each group's range chosen for the smallest error (`scale_search.py`);
- sweeps that choose scales and codes again once all columns are known (`refinement.py`).

Columns whose input was never active have no say in a group's range and are rounded to nearest.

Letters as in the paper. Shapes: `N` out features · `C` in features · `G` groups of a row ·
`B` columns of a block.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmbench.quant.affine import (
    MIN_SCALE,
    AffineParams,
    Range,
    affine_params,
    grouped,
    quantized_weight,
    to_codes,
)
from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.config import PER_CHANNEL, QuantConfig, Scheme
from llmbench.quant.errors import CalibrationError
from llmbench.quant.hessian import InverseFactor, inverse_factor
from llmbench.quant.layer_report import LayerReport, LayerResult
from llmbench.quant.quantized_weight import QuantizedWeight
from llmbench.quant.refinement import dequantized, descend, refit_scales, row_errors
from llmbench.quant.rtn import RTN
from llmbench.quant.scale_search import search_params
from llmbench.quant.statistics import InputStatistics

logger = logging.getLogger(__name__)

B = 64
"""Columns of a block (lazy batch updates, section 3.3, step 2); half the paper's 128, since a
block of all rows then stays in a CPU core's cache."""
SWEEPS = 2
"""Refinements after the last column; the first lowers a layer's error by 4 %, the second by 1.6 %,
a third by 0.9 %."""
EMPTY_SCALE = 2.0**15
"""Of a group of zeros while others are quantized: float16 holds it, no weight comes near it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GPTQResult:
    """A weight that GPTQ quantized.

    Attributes:
        errors: [N] float64, each row's (w - q) H (w - q)^T over the calibration tokens.
        energies: [N] float64, each row's w H w^T, what the errors are measured against.
        damp: Share of H's mean diagonal that was added to it.
        is_diagonal: H could not be factored; only its diagonal was used.
    """

    weight: QuantizedWeight
    errors: Tensor
    energies: Tensor
    damp: float
    is_diagonal: bool


def gptq_quantize(
    W: Tensor,
    H: Tensor,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype = torch.float16,
    damp_percent: float = 0.01,
    act_order: bool = True,
    desc_act: bool = False,
    scale_search: bool = True,
    code_range: Range = "full",
    sweeps: int = SWEEPS,
) -> GPTQResult:
    """Quantize W [N, C] for inputs with the Hessian H [C, C], the sum over tokens of x x^T.

    Both must be finite; neither is changed. H may have any positive factor.
    """
    W, H = W.float(), H.float()
    by_place = torch.arange(len(H), device=H.device)
    # desc_act: groups are runs of columns in their new order, so everything happens in that order.
    columns = _by_activity(H) if desc_act else by_place
    W, H = W[:, columns], H[columns][:, columns]
    order = _by_activity(H) if act_order or desc_act else by_place

    dead = _dead_columns(H, scheme)
    live = W.masked_fill(dead, 0.0)

    factor = inverse_factor(H[order][:, order], damp_percent)
    groups = grouped(live, scheme.group_size)
    if scale_search:
        importance = torch.empty_like(H.diagonal())
        importance[order] = factor.U.diagonal().square().reciprocal()
        params = search_params(
            groups,
            scheme,
            dtype=scale_dtype,
            importance=importance.reshape(groups.shape[1:]),
            code_range=code_range,
        )
    else:
        params = affine_params(groups, scheme, dtype=scale_dtype, code_range=code_range)
    # A group of zeros stays zero: with so large a scale nothing that other columns pass on to it
    # comes near a step.
    is_empty = (groups == 0).all(dim=-1)  # [N, G]
    params = _with_scales(params, is_empty, EMPTY_SCALE)
    codes = _walk(live, order, factor, params)

    damped = H + factor.added * torch.eye(len(H), device=H.device)
    for _ in range(0 if factor.is_diagonal else sweeps):
        if scale_search:
            params = refit_scales(live, damped, codes, params)
        codes = descend(live, damped, codes, params)

    group = by_place // groups.shape[2]
    nearest = to_codes(W, params.scales[:, group], params.zeros[:, group], params)
    codes = torch.where(dead, nearest, codes)
    params = _with_scales(params, is_empty, MIN_SCALE)
    has_g_idx = desc_act and scheme.group_size != PER_CHANNEL
    place = columns.argsort()
    return GPTQResult(
        weight=quantized_weight(
            codes[:, place], scheme, params, group[place].to(torch.int32) if has_g_idx else None
        ),
        errors=row_errors(W - dequantized(codes, params), H),
        energies=row_errors(W, H),
        damp=factor.damp,
        is_diagonal=factor.is_diagonal,
    )


def _by_activity(H: Tensor) -> Tensor:
    """[C] int64, columns in descending order of H's diagonal; equal ones as they stand."""
    return H.diagonal().argsort(descending=True, stable=True)


def _dead_columns(H: Tensor, scheme: Scheme) -> Tensor:
    """[C] bool, columns without input whose group has others that decide its range."""
    dead = grouped((H.diagonal() == 0)[None], scheme.group_size)  # [1, G, S]
    return (dead & ~dead.all(dim=-1, keepdim=True)).reshape(-1)


def _with_scales(params: AffineParams, mask: Tensor, scale: float) -> AffineParams:
    return replace(params, scales=params.scales.masked_fill(mask, scale))


def _walk(W: Tensor, order: Tensor, factor: InverseFactor, params: AffineParams) -> Tensor:
    """Algorithm 1: the codes of W [N, C], whole float32 numbers, columns taken in `order`."""
    c, U = len(order), factor.U
    size = c // params.scales.shape[1]
    scales, zeros = params.scales.float().t().contiguous(), params.zeros.t().contiguous()  # [G, N]
    group = (order // size).tolist()
    d = U.diagonal().tolist()
    W = W.t()[order]  # [C, N] from here on, a copy: a column is contiguous
    codes = torch.empty_like(W)
    for i in range(0, c, B):
        end = min(i + B, c)
        Err = torch.empty_like(W[i:end])
        for j in range(i, end):
            scale, zero = scales[group[j]], zeros[group[j]]
            codes[j] = to_codes(W[j], scale, zero, params)
            q = (codes[j] - zero) * scale
            torch.sub(W[j], q, out=Err[j - i]).div_(d[j])
            W[j:end].addr_(U[j, j:end], Err[j - i], alpha=-1)
        W[end:].addmm_(U[i:end, end:].t(), Err, alpha=-1)
    return codes[order.argsort()].t().contiguous()


class GPTQ:
    """Quantizes a block's layers group by group, each on the inputs it will see."""

    def __init__(
        self,
        config: QuantConfig,
        scale_dtype: torch.dtype,
        *,
        code_range: Callable[[Scheme], Range] = lambda scheme: "full",
        finish: Callable[[QuantizedWeight], QuantizedWeight] | None = None,
    ) -> None:
        """`finish` brings a weight into the form that is stored, where that is another."""
        self._config = config
        self._scale_dtype = scale_dtype
        self._code_range = code_range
        self._finish = finish
        forms = {} if finish is None else {"finish": finish}
        self._rtn = RTN(config, scale_dtype, code_range=code_range, **forms)

    def quantize_block(
        self, block: Block, calibration: BlockCalibration | None, schemes: Mapping[str, Scheme]
    ) -> dict[str, LayerResult]:
        """Quantize the layers that `schemes` names.

        Layers without usable statistics are rounded to nearest, which is logged and reported.
        """
        if calibration is None:
            raise CalibrationError("GPTQ needs calibration tokens, none were given")
        results: dict[str, LayerResult] = {}
        groups = calibration.sequential(is_true_sequential=self._config.true_sequential)
        for group, statistics in groups:
            for names in _of_one_scheme(group.names, schemes):
                results |= self._quantize(block, names, schemes[names[0]], statistics)
        for name in schemes.keys() - results.keys():
            results[name] = self._fall_back(block, name, schemes[name], "no calibration tokens")
        return results

    def _quantize(
        self, block: Block, names: Sequence[str], scheme: Scheme, statistics: InputStatistics
    ) -> dict[str, LayerResult]:
        """Quantize layers that share input and scheme, as one matrix with all their rows."""
        H = statistics.hessian
        reason = None
        if statistics.num_tokens == 0:
            reason = "no calibration tokens"
        elif not torch.isfinite(H).all():
            reason = "calibration inputs that are not finite"
        if reason is not None:
            return {name: self._fall_back(block, name, scheme, reason) for name in names}
        weights = [block.weight(name) for name in names]
        found = gptq_quantize(
            torch.cat(weights),
            H,
            scheme,
            scale_dtype=self._scale_dtype,
            damp_percent=self._config.damp_percent,
            act_order=self._config.act_order,
            desc_act=self._config.desc_act,
            scale_search=self._config.searches_scales,
            code_range=self._code_range(scheme),
        )
        if self._finish is not None:
            stored = self._finish(found.weight)
            errors = row_errors(torch.cat(weights) - stored.dequantize(), H)
            found = replace(found, weight=stored, errors=errors)
        if found.is_diagonal:
            logger.warning("%s: no damping made the Hessian invertible", ", ".join(names))
        results, start = {}, 0
        for name, W in zip(names, weights, strict=True):
            stop = start + len(W)
            weight = found.weight.rows(start, stop)
            block.set_weight(name, weight.dequantize())
            results[name] = LayerResult(
                weight=weight, report=_report(found, start, stop, statistics.num_tokens)
            )
            start = stop
        return results

    def _fall_back(self, block: Block, name: str, scheme: Scheme, reason: str) -> LayerResult:
        logger.warning("%s: rounded to nearest, it has %s", name, reason)
        return self._rtn.quantize_layer(block, name, scheme, fallback=f"rtn: {reason}")


def _of_one_scheme(
    names: Sequence[str], schemes: Mapping[str, Scheme]
) -> Iterator[tuple[str, ...]]:
    """The layers that are to be quantized, those of one scheme together."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name in names:
        if name in schemes:
            by_scheme.setdefault(schemes[name], []).append(name)
    yield from map(tuple, by_scheme.values())


def _report(found: GPTQResult, start: int, stop: int, num_tokens: int) -> LayerReport:
    error = float(found.errors[start:stop].sum())
    energy = float(found.energies[start:stop].sum())
    return LayerReport(
        relative_mse=max(error, 0.0) / energy if energy > 0 else 0.0,
        loss=error / num_tokens,
        damp=found.damp,
        fallback="diagonal: the Hessian could not be factored" if found.is_diagonal else None,
        num_tokens=num_tokens,
    )
