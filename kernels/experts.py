"""SwiGLU feed-forward: one, and a group of experts over pairs sorted by expert.

Shapes: U tokens, D model dim, F FFN dim, e local experts, N pairs. Gate and up are one matrix
[2F, D] (gate rows first), so that each expert costs two matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


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
) -> Tensor:
    """[U, D] float32: each token's weighted sum over its pairs, zero where it has none.

    gate_up_e [e, 2F, D], down_e [e, D, F]. Pairs are sorted by expert: the first counts_e[0] belong
    to expert 0, and so on. Sums are float32, added in that order.
    """
    U, D = x_UD.shape
    out_UD = torch.zeros(U, D, dtype=torch.float32, device=x_UD.device)
    N = rows_N.shape[0]
    if N == 0:
        return out_UD
    x_ND = x_UD.index_select(0, rows_N)
    h_NF2 = torch.empty(N, gate_up_e.shape[1], dtype=x_UD.dtype, device=x_UD.device)
    _per_expert_mm(x_ND, gate_up_e, h_NF2, counts_e)
    y_ND = x_ND  # its rows are not needed again: the products go there
    _per_expert_mm(_gated(h_NF2), down_e, y_ND, counts_e)
    weights_N1 = weights_N.unsqueeze(1)
    weighted_ND = y_ND.mul_(weights_N1) if y_ND.dtype is torch.float32 else y_ND * weights_N1
    return out_UD.index_add_(0, rows_N, weighted_ND)


def _per_expert_mm(x: Tensor, weight_e: Tensor, out: Tensor, counts_e: Sequence[int]) -> None:
    first = 0
    for expert, count in enumerate(counts_e):
        if count:
            rows = slice(first, first + count)
            torch.mm(x[rows], weight_e[expert].t(), out=out[rows])
            first += count


def _gated(h_NF2: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2F], as a fresh [N, F]."""
    gate, up = h_NF2.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
