"""Experts that stand in any slots, for few tokens: no sorting, and no host that must know more than
what stands where.

    slots_TK    5 -1    7  5      a pair's expert stands in that slot; -1: it is left out
    y_ND       y0  .   y2 y3      a row of each pair, in that order; those left out stay as they are

So what is there is computed before what is not, and a token's sum is taken when all of it has come.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from kernels import passes
from kernels.experts import ClampedGate, gated
from kernels.linear import Linears

FEW_PAIRS: Final = 64  # beyond, tokens share experts, and each is read once for all of them


def takes_slots(
    x_TD: Tensor, ids_TK: Tensor, gate_up_S: Linears, clamped: ClampedGate | None
) -> bool:
    """Whether `slot_experts` is for these pairs: by their number, never by what is in which slot.
    On a GPU it needs the triton kernels."""
    if ids_TK.numel() > FEW_PAIRS or clamped is not None or gate_up_S.weight_eNK is None:
        return False
    return not x_TD.is_cuda or passes.fused(x_TD) is not None


def slot_experts(
    x_TD: Tensor, slots_TK: Tensor, gate_up_S: Linears, down_S: Linears, y_ND: Tensor
) -> None:
    """Fills the rows of y whose slot (int32) is not negative: what the expert there gives for the
    pair's token, not weighted."""
    own = passes.fused(x_TD)
    if own is not None:
        own.slot_experts(x_TD.contiguous(), slots_TK, gate_up_S.weight_eNK, down_S.weight_eNK, y_ND)
        return
    slots_N, K = slots_TK.flatten(), slots_TK.shape[1]
    for slot in sorted(set(slots_N.tolist())):
        if slot >= 0:
            at_n = (slots_N == slot).nonzero().flatten()
            h_nF2 = gate_up_S[slot](x_TD.index_select(0, at_n // K))
            y_ND[at_n] = down_S[slot](gated(h_nF2))
