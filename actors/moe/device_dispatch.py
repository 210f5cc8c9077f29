"""Dispatch without host reads: packets of a device (kernels/device_dispatch.py) and their sums.

A packet has the rows x_CD, pairs_CM and counts_e, and the same size whatever the routing, so every
expert rank receives one per token group. Numbers for metrics and the routing sample follow by
copies that the host does not wait for. Only the loss of an expert rank makes the host read packets,
to cut them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.channels.base import TensorSpec
from actors.moe.backend import TaskKey
from actors.moe.dispatch import DispatchCounts, RankSlice
from actors.moe.routing_sample import MicroBatchId, RoutingSample
from contracts.clock import Clock
from kernels.device_dispatch import DevicePlan, PlacementTables, plan_on_device
from kernels.fused_ops import add_rows, pack_rows
from kernels.steps import Steps
from models.experts.device_lanes import Arrival, device_lane
from models.experts.expert_half import RoutedTokens
from planner.placement.slots import LayerSlots

PACKET_PARTS: Final = 3
COUNTS_PERIOD_S: Final = 1.0


class DeviceSlice(NamedTuple):
    """A packet of one token group for one expert rank; its tensors are on the device."""

    rank: int
    token_group: int
    start: int
    stop: int
    rows_C: Tensor
    pairs_CM: Tensor
    counts_e: Tensor

    def parts(self, x_TD: Tensor) -> list[TensorSpec]:
        rows, width = self.pairs_CM.shape
        return [
            TensorSpec(str(x_TD.dtype).removeprefix("torch."), (rows, x_TD.shape[1])),
            TensorSpec("int32", (rows, width)),
            TensorSpec("int32", tuple(self.counts_e.shape)),
        ]

    def fill(self, x_TD: Tensor, out: Sequence[Tensor]) -> None:
        """Write the packet to `out`, laid out as `parts`."""
        pack_rows(x_TD, self.rows_C, (self.pairs_CM, self.counts_e), out, len(self.counts_e))

    def add_to(self, total_TD: Tensor, y_CD: Tensor) -> Steps[None]:
        """Add the reply. Rows of tokens that the rank did not serve are zeros."""
        add_rows(total_TD, self.rows_C, y_CD)
        return
        yield

    def recut(self, before: LayerSlots, placed: LayerSlots, first_group: int) -> list[DeviceSlice]:
        """Cut by another placement, on the host. Waits for the device."""
        top_k, device = self.pairs_CM.shape[1] // 2, self.pairs_CM.device
        slices = self.on_host().recut(before, placed, first_group)
        return [_uploaded(piece, top_k, device) for piece in slices]

    def on_host(self) -> RankSlice:
        """Return it as `plan_dispatch` does. Waits for the device."""
        rows_C, pairs_CM, counts_e = (
            tensor.cpu().numpy() for tensor in (self.rows_C, self.pairs_CM, self.counts_e)
        )
        local_CK, weights_CK = np.split(pairs_CM, 2, axis=1)
        row_N, choice_N = np.nonzero(local_CK < len(counts_e))
        order_N = local_CK[row_N, choice_N].argsort(kind="stable")
        row_N, choice_N = row_N[order_N], choice_N[order_N]
        weights_N = weights_CK[row_N, choice_N].view(np.float32)
        rows = len(np.unique(row_N))
        rows_U = None if rows == self.stop - self.start else rows_C[:rows]
        return RankSlice(
            *self[:4], rows_U, row_N.astype(np.int32), weights_N, counts_e.astype(np.int32)
        )


def empty_slice(rank: int, experts: int, top_k: int, device: torch.device) -> DeviceSlice:
    """Return a slice without rows for a rank with that number of experts."""
    rows_C = torch.empty(0, dtype=torch.int64, device=device)
    pairs_CM = torch.empty((0, 2 * top_k), dtype=torch.int32, device=device)
    counts_e = torch.zeros(experts, dtype=torch.int32, device=device)
    return DeviceSlice(rank, 0, 0, 0, rows_C, pairs_CM, counts_e)


def _uploaded(piece: RankSlice, top_k: int, device: torch.device) -> DeviceSlice:
    """Return a slice of the host as one of the device."""
    experts = len(piece.counts_e)
    local_N = np.repeat(np.arange(experts, dtype=np.int32), piece.counts_e)
    order_N = piece.index_N.argsort(kind="stable")
    row_N = piece.index_N[order_N]
    choice_N = np.arange(len(row_N)) - np.searchsorted(row_N, row_N)
    pairs_CM = np.full((piece.num_rows, 2 * top_k), experts, np.int32)
    pairs_CM[row_N, choice_N] = local_N[order_N]
    pairs_CM[row_N, top_k + choice_N] = piece.weights_N[order_N].view(np.int32)
    rows_C = np.arange(piece.start, piece.stop) if piece.rows_U is None else piece.rows_U
    return DeviceSlice(
        *piece[:4],
        *(torch.from_numpy(each).to(device) for each in (rows_C, pairs_CM, piece.counts_e)),
    )


class _Sampled(NamedTuple):
    owner: MicroBatchId
    ids: Arrival


class _Counted(NamedTuple):
    layer: int
    placed: LayerSlots
    totals: Arrival


class DeviceDispatch:
    """Plans packets on one device; owned by the thread of its backend."""

    def __init__(
        self,
        device: torch.device,
        counts: DispatchCounts,
        sample: RoutingSample | None,
        clock: Clock,
    ) -> None:
        self._device, self._counts, self._sample, self._clock = device, counts, sample, clock
        self._lane = device_lane(device)
        self._tables: dict[LayerSlots, PlacementTables] = {}
        self._sampled: deque[_Sampled] = deque()
        self._totals: dict[tuple[int, LayerSlots], Tensor] = {}  # since they were copied last
        self._counted: deque[_Counted] = deque()
        self._counted_s = clock()

    def forget_placements(self) -> None:
        """Free the tables of earlier generations."""
        self._tables.clear()

    def plan(
        self,
        key: TaskKey,
        routed: RoutedTokens,
        token_groups: Sequence[tuple[int, int]],
        placed: LayerSlots,
    ) -> list[DeviceSlice]:
        """Return a packet for each token group and each rank with experts of the layer."""
        ids_TK = routed.topk_ids_TK
        if self._sample is not None and self._sample.follows(key.owner):
            self._sampled.append(_Sampled(key.owner, self._lane.fetch(ids_TK)))
        tables = self._tables.get(placed)
        if tables is None:
            own_rank = self._counts.own_rank
            tables = self._tables[placed] = placement_tables(placed, ids_TK.device, own_rank)
        plan = plan_on_device(ids_TK, routed.topk_weights_TK, token_groups, tables)
        self._count(key.layer, plan, placed)
        return [
            DeviceSlice(
                rank,
                group,
                start,
                stop,
                plan.rows_RT[rank, start:stop],
                plan.pairs_RTM[rank, start:stop],
                plan.counts_GS[group, low:high],
            )
            for group, (start, stop) in enumerate(token_groups)
            for rank, (low, high) in enumerate(placed.bounds)
            if low < high
        ]

    def poll(self) -> None:
        """Pass on what has been copied to the host, without waiting."""
        while self._sampled and self._sampled[0].ids.is_ready:
            owner, ids = self._sampled.popleft()
            assert self._sample is not None
            self._sample.routed(owner, ids.tensor.numpy())
        while self._counted and self._counted[0].totals.is_ready:
            layer, placed, totals = self._counted.popleft()
            rows_R, pairs_S = np.split(totals.tensor.numpy(), [len(placed.bounds)])
            self._counts.add_totals(layer, rows_R, pairs_S, placed)

    def _count(self, layer: int, plan: DevicePlan, placed: LayerSlots) -> None:
        """Add to the totals on the device; copy them from time to time."""
        self._counts.tokens += plan.goes_RT.shape[1]
        line = torch.cat([plan.goes_RT.sum(1, dtype=torch.int32), plan.counts_GS.sum(0)])
        known = self._totals.get((layer, placed))
        if known is None:
            self._totals[layer, placed] = line.long()
        else:
            known.add_(line)
        if self._clock() - self._counted_s < COUNTS_PERIOD_S:
            return
        self._counted_s = self._clock()
        for (number, slots), totals in self._totals.items():
            self._counted.append(_Counted(number, slots, self._lane.fetch(totals)))
        self._totals.clear()


def placement_tables(
    placed: LayerSlots, device: torch.device, own_rank: int | None = None
) -> PlacementTables:
    """Return a placement's tables.

    Replicas are used in turn (`RoundRobinChooser`), but own_rank serves all experts that it has.
    """
    own = range(*placed.bounds[own_rank]) if own_rank is not None else range(0)
    slots_of_expert = [
        [slot for slot in slots if slot in own] or slots for slots in placed.slots_of_expert
    ]
    replicas = [len(slots) for slots in slots_of_expert]
    slots_EP = torch.zeros((len(replicas), max(replicas, default=1)), dtype=torch.int32)
    for expert, slots in enumerate(slots_of_expert):
        by_rank = sorted(slots, reverse=True)  # as RoundRobinChooser
        slots_EP[expert, : len(slots)] = torch.tensor(by_rank, dtype=torch.int32)
    lows, highs = torch.tensor(placed.bounds, dtype=torch.int32).T
    ranks = torch.arange(len(lows), dtype=torch.int32)
    several = torch.tensor(replicas) if max(replicas, default=1) > 1 else None
    return PlacementTables(
        slots_EP.to(device),
        None if several is None else several.to(device),
        ranks.long().repeat_interleave((highs - lows).long()).to(device),
        *(each.view(-1, 1, 1).to(device) for each in (ranks, lows, highs - lows)),
    )
