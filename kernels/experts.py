"""SwiGLU feed-forward: one, and a group of experts over pairs sorted by expert; and gpt-oss's
clamped variant with biases.

Shapes: U tokens, D model dim, F FFN dim, e local experts, N pairs. Gate and up are one matrix
[2F, D] (gate rows first), so that each expert costs two matrix products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK_PAIRS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class ClampedGate:
    """gate_up_bias_e [e, 2F] and down_bias_e [e, D] of the experts; gate is clamped from above, up
    to both sides, at `limit`: (up + 1) * gate * sigmoid(alpha * gate)."""

    gate_up_bias_e: Tensor
    down_bias_e: Tensor
    alpha: float
    limit: float


def swiglu(x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down @ (silu(gate @ x) * (up @ x)), [T, D] in x's dtype."""
    return functional.linear(_gated(functional.linear(x_TD, gate_up)), down)


def grouped_experts(
    x_UD: Tensor,
    gate_up_e: Tensor,
    down_e: Tensor,
    rows_N: Tensor,
    weights_N: Tensor,
    counts_e: Sequence[int],
    clamped: ClampedGate | None = None,
) -> Tensor:
    """[U, D] float32: each token's weighted sum over its pairs, zero where it has none.

    gate_up_e [e, 2F, D], down_e [e, D, F]. Pairs are sorted by expert: the first counts_e[0] belong
    to expert 0, and so on. Sums are float32, added in that order.
    """
    out_UD = torch.zeros(x_UD.shape, dtype=torch.float32, device=x_UD.device)
    up_bias_e = None if clamped is None else clamped.gate_up_bias_e
    down_bias_e = None if clamped is None else clamped.down_bias_e
    first = 0
    for experts, count in _chunks(counts_e):
        pairs = slice(first, first + count)
        rows = rows_N[pairs]
        x_ND = x_UD.index_select(0, rows)
        h_NF2 = x_ND.new_empty(count, gate_up_e.shape[1])
        _per_expert_mm(x_ND, gate_up_e, up_bias_e, h_NF2, counts_e, experts)
        y_ND = x_ND  # its rows are not needed again: the products go there
        h_NF = _gated(h_NF2) if clamped is None else _clamped(h_NF2, clamped)
        _per_expert_mm(h_NF, down_e, down_bias_e, y_ND, counts_e, experts)
        weights_N1 = weights_N[pairs].unsqueeze(1)
        weighted_ND = y_ND.mul_(weights_N1) if y_ND.dtype is torch.float32 else y_ND * weights_N1
        out_UD.index_add_(0, rows, weighted_ND)
        first += count
    return out_UD


def _chunks(counts_e: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Runs of experts, with their number of pairs: enough pairs to be worth an operation, few
    enough that the temporaries stay in the cache (and malloc need not map fresh pages)."""
    first, pairs = 0, 0
    for expert, count in enumerate(counts_e):
        if pairs and pairs + count > _CHUNK_PAIRS:
            yield range(first, expert), pairs
            first, pairs = expert, 0
        pairs += count
    if pairs:
        yield range(first, len(counts_e)), pairs


def _per_expert_mm(
    x_ND: Tensor,
    weight_e: Tensor,
    bias_e: Tensor | None,
    out: Tensor,
    counts_e: Sequence[int],
    experts: range,
) -> None:
    first = 0
    for expert in experts:
        count = counts_e[expert]
        if count:
            rows = slice(first, first + count)
            if bias_e is None:
                torch.mm(x_ND[rows], weight_e[expert].t(), out=out[rows])
            else:
                torch.addmm(bias_e[expert], x_ND[rows], weight_e[expert].t(), out=out[rows])
            first += count


def _gated(h_NF2: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2F], as a fresh [N, F]."""
    gate, up = h_NF2.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _clamped(h_NF2: Tensor, clamped: ClampedGate) -> Tensor:
    gate, up = h_NF2.chunk(2, dim=-1)
    gate = gate.clamp(max=clamped.limit)
    up = up.clamp(min=-clamped.limit, max=clamped.limit)
    return torch.sigmoid(gate * clamped.alpha).mul_(gate).mul_(up.add_(1))
