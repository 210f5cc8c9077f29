"""Dispatch of tokens to expert ranks as device operations: the host reads nothing.

The host knows no sizes, so a packet has a row for each token of its token group: first those that
use the rank's experts, in order, then the others, whose experts are all marked absent. Counts
travel in the packet.

    tokens of a group     0 1 2 3 4
    use rank r            1 0 1 1 0
    rows_RT[r]            0 2 3 | 1 4     (absent)

The pairs of a token are sorted by slot: expert ranks then add in the order of `plan_dispatch`
(actors/moe/dispatch.py), with equal bits.

Shapes: T tokens, K experts of each, R ranks, G token groups, S slots, E experts, C tokens of a
group, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PlacementTables(NamedTuple):
    """A layer's placement on the device, int32 unless noted.

    slots_EP: slots of each expert's replicas; replicas_E int64: their number, None if all are 1.
    rank_S int64: rank of each slot. ranks_R11, lows_R11, sizes_R11: [R, 1, 1] number, first slot
    and number of slots of each rank.
    """

    slots_EP: Tensor
    replicas_E: Tensor | None
    rank_S: Tensor
    ranks_R11: Tensor
    lows_R11: Tensor
    sizes_R11: Tensor

    def slots(self, ids_TK: Tensor) -> Tensor:
        """Return the slot of each pair [T, K]: token t uses replica t modulo their number."""
        if self.replicas_E is None:
            return self.slots_EP[:, 0][ids_TK]
        token_T1 = torch.arange(len(ids_TK), device=ids_TK.device).unsqueeze(1)
        return self.slots_EP[ids_TK, token_T1 % self.replicas_E[ids_TK]]


class DevicePlan(NamedTuple):
    """All packets of a micro-batch.

    rows_RT int64: rows of each rank's packets, group by group. pairs_RTM int32 [R, T, 2K]: local
    experts of these rows (the rank's number of slots: absent), then the bits of their weights.
    counts_GS int32: pairs of each slot. goes_RT int16: 1 if the rank has experts of the token.
    """

    rows_RT: Tensor
    pairs_RTM: Tensor
    counts_GS: Tensor
    goes_RT: Tensor


def plan_on_device(
    ids_TK: Tensor,
    weights_TK: Tensor,
    token_groups: Sequence[tuple[int, int]],
    tables: PlacementTables,
) -> DevicePlan:
    """Return the packets. token_groups: consecutive [start, stop)."""
    (T, K), R, S, G = ids_TK.shape, len(tables.lows_R11), len(tables.rank_S), len(token_groups)
    slot_TK, order_TK = tables.slots(ids_TK).sort(1)
    weights_TK = weights_TK.gather(1, order_TK)
    rank_TK = tables.rank_S[slot_TK]
    goes_RT = ids_TK.new_zeros((R, T), dtype=torch.int16).scatter_(0, rank_TK.t(), 1)
    sorted_RT, key_TK = goes_RT, slot_TK
    if G > 1:
        sorted_RT, key_TK = goes_RT.clone(), slot_TK.clone()
    for group, (start, stop) in enumerate(token_groups[1:], 1):
        sorted_RT[:, start:stop] -= 2 * group
        key_TK[start:stop] += S * group
    rows_RT = sorted_RT.sort(dim=1, descending=True, stable=True).indices
    here_RTK = rank_TK == tables.ranks_R11
    local_RTK = torch.where(here_RTK, slot_TK - tables.lows_R11, tables.sizes_R11)
    local_RTK = local_RTK.gather(1, rows_RT.unsqueeze(2).expand(R, T, K))
    pairs_RTM = torch.cat([local_RTK, weights_TK[rows_RT].view(torch.int32)], 2)
    counts_S = ids_TK.new_zeros((G * S,), dtype=torch.int32)
    key_N = key_TK.flatten()
    counts_S.index_add_(0, key_N, torch.ones_like(key_N))
    return DevicePlan(rows_RT, pairs_RTM, counts_S.view(G, S), goes_RT)
