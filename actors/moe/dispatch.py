"""Split routed tokens into packets per expert rank, and count what is dispatched.

One sort does it. The T*K (token, expert) pairs are sorted by (token group, expert slot); the pairs
of one token group and one expert rank are then contiguous, in the order that the rank's grouped
GEMM expects:

    pairs, sorted   | group 0: slots of rank 0 | slots of rank 1 | group 1: slots of rank 0 | ...

A token is sent once to each rank, however many of its experts are there (Speculative MoE,
Section 4). Index arithmetic is numpy on the CPU, where packet sizes must be known.

Packets of a device (kernels/device_dispatch.py) need no host reads. They have the rows x_CD,
pairs_CM and counts_e, and the same size whatever the routing, so every expert rank receives one per
token group. Numbers for metrics and the routing sample follow by copies that the host does not wait
for. Only the loss of an expert rank makes the host read packets, to cut them again.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.channels.base import Header, TensorSpec
from actors.channels.endpoint import Endpoint
from actors.moe.backend import MicroBatchId, TaskKey
from actors.moe.routing_sample import RoutingSample
from actors.telemetry.telemetry import Telemetry, growth
from contracts import metrics
from contracts.clock import Clock
from kernels.device import runs_on_device
from kernels.device_dispatch import DevicePlan, PlacementTables, plan_on_device
from kernels.fused_ops import add_rows, pack_rows
from kernels.steps import Steps, add_tiled, row_tiles
from models.experts.device_lanes import Arrival, DeviceLane, device_lane
from models.experts.expert_half import RoutedTokens
from planner.placement.slots import LayerSlots

Rows = tuple[NDArray[np.int64] | None, NDArray[np.int32]]  # rows_U and index_N


class RankSlice(NamedTuple):
    """Rows and pairs that one token group sends to one expert rank.

    rows_U: rows of the micro-batch, ascending and distinct; None: all rows of the group.
    index_N, weights_N: each pair's position in rows_U and weight. counts_e: pairs per local expert.
    """

    rank: int
    token_group: int
    start: int
    stop: int
    rows_U: NDArray[np.int64] | None
    index_N: NDArray[np.int32]
    weights_N: NDArray[np.float32]
    counts_e: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return self.stop - self.start if self.rows_U is None else len(self.rows_U)

    def parts(self, x_TD: Tensor) -> list[TensorSpec]:
        """Return the parts of an A2E packet: x_UD, index_N, weights_N, counts_e."""
        pairs = len(self.index_N)
        return [
            TensorSpec(str(x_TD.dtype).removeprefix("torch."), (self.num_rows, x_TD.shape[1])),
            TensorSpec("int32", (pairs,)),
            TensorSpec("float32", (pairs,)),
            TensorSpec("int32", (len(self.counts_e),)),
        ]

    def fill(self, x_TD: Tensor, out: Sequence[Tensor]) -> None:
        """Write the packet to `out`, laid out as `parts`."""
        x_UD, index_N, weights_N, counts_e = out
        if self.rows_U is None:
            x_UD.copy_(x_TD[self.start : self.stop])
        else:
            rows_U = torch.from_numpy(self.rows_U).to(x_TD.device)
            torch.index_select(x_TD, 0, rows_U, out=x_UD)
        index_N.copy_(torch.from_numpy(self.index_N))
        weights_N.copy_(torch.from_numpy(self.weights_N))
        counts_e.copy_(torch.from_numpy(self.counts_e))

    def add_to(self, total_TD: Tensor, y_UD: Tensor) -> Steps[None]:
        """Add the reply to the rows it came from, tile by tile."""
        if self.rows_U is None:
            yield from add_tiled(total_TD[self.start : self.stop], y_UD)
            return
        rows_U = torch.from_numpy(self.rows_U).to(total_TD.device)
        for tile in row_tiles(y_UD):
            total_TD.index_add_(0, rows_U[tile], y_UD[tile].to(total_TD.dtype))
            yield

    def recut(self, before: LayerSlots, placed: LayerSlots, first_group: int) -> list[RankSlice]:
        """Cut the pairs, placed by `before`, into slices of `placed`, rank by rank.

        The new slices are token groups of their own, numbered from first_group.
        """
        low, high = before.bounds[self.rank]
        expert_N = np.repeat(before.expert_of_slot[low:high], self.counts_e)
        row_N = self.index_N + self.start if self.rows_U is None else self.rows_U[self.index_N]
        pairs = expert_N[:, None], self.weights_N[:, None], [(0, len(row_N))]
        slices: list[RankSlice] = []
        for number, piece in enumerate(plan_dispatch(*pairs, placed), first_group):
            pair_N = piece.index_N if piece.rows_U is None else piece.rows_U[piece.index_N]
            rows_U, index_N = np.unique(row_N[pair_N], return_inverse=True)
            group = number, self.start, self.stop, rows_U.astype(np.int64)
            line_N = index_N.astype(np.int32).ravel()
            slices.append(RankSlice(piece.rank, *group, line_N, piece.weights_N, piece.counts_e))
        return slices


# Rank, token group, its start and stop, slots among those of all token groups, sorted pairs.
_Piece = tuple[int, int, int, int, slice, slice]


def plan_dispatch(
    topk_ids_TK: NDArray[np.int64],
    topk_weights_TK: NDArray[np.float32],
    token_groups: Sequence[tuple[int, int]],
    placed: LayerSlots,
    *,
    free_rank: int | None = None,
) -> list[RankSlice]:
    """Return the packets of one micro-batch by token group and rank, without empty ones.

    token_groups: consecutive [start, stop). free_rank: a rank that receives tokens at no cost.
    """
    key_N = _sort_keys(placed.of_pairs(topk_ids_TK, free_rank), token_groups, placed.count)
    order_N = key_N.argsort(kind="stable")
    pieces, pairs = _pieces(key_N.take(order_N), token_groups, placed)
    if not pieces:
        return []
    counts_S = np.bincount(key_N, minlength=len(token_groups) * placed.count).astype(np.int32)
    tokens, top_k = topk_ids_TK.shape
    token_N = _token_of_pair(top_k, tokens.bit_length()).take(order_N)
    weights_N = topk_weights_TK.take(order_N)
    only_one = len(placed.bounds) == 1  # each group's pairs cover all of its tokens
    found = _every_row(token_N, pieces) if only_one else _rows(token_N, pieces, pairs)
    return [
        RankSlice(rank, group, start, stop, rows_U, index_N, weights_N[its], counts_S[slots])
        for (rank, group, start, stop, slots, its), (rows_U, index_N) in zip(
            pieces, found, strict=True
        )
    ]


@functools.lru_cache(maxsize=32)
def _token_of_pair(top_k: int, bits: int) -> NDArray[np.int64]:
    """Return the token of each pair; a table is faster than a division."""
    return np.arange(1 << bits).repeat(top_k)


def _sort_keys(
    slot_TK: NDArray[Any], token_groups: Sequence[tuple[int, int]], slots: int
) -> NDArray[Any]:
    """Return token group * slots + slot of each pair."""
    if len(token_groups) > 1:
        group_T = np.zeros(len(slot_TK), np.int64)
        group_T[[start for start, _ in token_groups[1:]]] = slots
        if len(token_groups) * slots < 1 << 15:  # int16 sorts faster
            group_T = group_T.astype(np.int16)
        slot_TK = slot_TK + group_T.cumsum(dtype=group_T.dtype)[:, None]
    return slot_TK.ravel()


def _pieces(
    key_N: NDArray[Any], token_groups: Sequence[tuple[int, int]], placed: LayerSlots
) -> tuple[list[_Piece], list[int]]:
    """Return the pieces and their numbers of pairs. key_N: sorted."""
    lows_R = placed.lows_R.astype(key_N.dtype, copy=False)
    if len(token_groups) > 1:
        firsts_G = (np.arange(len(token_groups)) * placed.count).astype(key_N.dtype)
        lows_R = (firsts_G[:, None] + lows_R).ravel()
    begins: list[int] = key_N.searchsorted(lows_R).tolist()
    begins.append(len(key_N))
    pieces: list[_Piece] = []
    pairs: list[int] = []
    line = first = 0
    for group, (start, stop) in enumerate(token_groups):
        for rank, (low, high) in enumerate(placed.bounds):
            begin, line = begins[line], line + 1
            end = begins[line]
            if begin < end:
                slots = slice(first + low, first + high)
                pieces.append((rank, group, start, stop, slots, slice(begin, end)))
                pairs.append(end - begin)
        first += placed.count
    return pieces, pairs


def _every_row(token_N: NDArray[np.int64], pieces: Sequence[_Piece]) -> list[Rows]:
    return [(None, (token_N[p[5]] - p[2]).astype(np.int32)) for p in pieces]


def _rows(token_N: NDArray[np.int64], pieces: Sequence[_Piece], pairs: Sequence[int]) -> list[Rows]:
    """Return rows_U and index_N of each piece, from one line of tokens per piece.

    token is sent there       - 1 . 1 1 | - . 1 1 .      rank 0 | rank 1
    running count             0 1 1 2 3 | 0 0 1 2 2      the position of the next token
    """
    width = 1 + max([stop - start for _, _, start, stop, _, _ in pieces])
    shifts = [line * width - piece[2] for line, piece in enumerate(pieces)]
    at_N = np.array(shifts).repeat(pairs)
    at_N += token_N
    goes_PW = np.zeros((len(pieces), width), np.int32)
    goes_W = goes_PW.ravel()[1:]
    goes_W[at_N] = 1
    upto_PW = goes_PW.cumsum(1, np.int32)
    index_N = upto_PW.take(at_N)
    rows_N = goes_W.nonzero()[0]
    found: list[Rows] = []
    first = 0
    for piece, shift, rows in zip(pieces, shifts, upto_PW[:, -1].tolist(), strict=True):
        rows_U = None
        if rows < piece[3] - piece[2]:
            rows_U = rows_N[first : first + rows]
            if shift:
                rows_U = rows_U - shift
        found.append((rows_U, index_N[piece[5]]))
        first += rows
    return found


PACKET_PARTS: Final = 3  # of a device


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


Piece = RankSlice | DeviceSlice


def send_slice(endpoint: Endpoint, peer: str, header: Header, piece: Piece, x_TD: Tensor) -> None:
    """Send the rows and pairs of `piece` to `peer`. Raises as `Endpoint.reserve`."""
    reservation = endpoint.reserve(peer, piece.parts(x_TD))
    piece.fill(x_TD, reservation.tensors)
    endpoint.commit(reservation, header)


TOP_EXPERTS = 8  # added at each scrape
COUNTS_PERIOD_S: Final = 1.0  # between copies of a device's counts
MAX_SHOWN = 64  # (layer, expert) series


class _LayerPairs:
    """Pairs of one layer by slot under `placed`, and by expert before it."""

    def __init__(self, placed: LayerSlots, before: _LayerPairs | None) -> None:
        experts = len(placed.slots_of_expert)
        self.placed = placed
        self._before_E = np.zeros(experts, np.int64) if before is None else before.totals()
        self.pairs_S = np.zeros(placed.count, np.int64)
        self.pairs_of_ranks = [self.pairs_S[low:high] for low, high in placed.bounds]

    def totals(self) -> NDArray[np.int64]:
        """Return the pairs of each expert so far, [E]."""
        pairs_E = self._before_E.copy()
        np.add.at(pairs_E, self.placed.expert_of_slot, self.pairs_S)
        return pairs_E


class DispatchCounts:
    """Dispatch counters of one rank, owned by the dispatching thread and read at scrapes.

    tokens: summed over layers. copies: (token, rank) pairs sent. pairs_R: (token, expert) pairs of
    each rank, including ranks that no longer exist.
    """

    def __init__(self, ranks: int, own_rank: int | None = None) -> None:
        """own_rank: the rank of this process, if it has experts; its tokens are not copies."""
        self.tokens = self.copies = 0
        self.pairs_R, self._ranks = [0] * ranks, ranks
        self.own_rank = own_rank
        self._layers: dict[int, _LayerPairs] = {}
        self._shown: list[tuple[int, int]] = []  # (layer, expert)

    def add(self, layer: int, tokens: int, slices: Sequence[RankSlice], placed: LayerSlots) -> None:
        self.tokens += tokens
        known = self._pairs_of(layer, placed)
        for piece in slices:
            if piece.rank != self.own_rank:
                self.copies += piece.num_rows
            self.pairs_R[piece.rank] += len(piece.index_N)
            known.pairs_of_ranks[piece.rank] += piece.counts_e

    def add_direct(self, tokens: int, sent_R2: NDArray[np.int64]) -> None:
        """Count direct calls, which count `pairs_of` themselves: rows and pairs of each rank."""
        self.tokens += tokens
        for rank, (rows, pairs) in enumerate(sent_R2.tolist()):
            self.copies += rows
            self.pairs_R[rank] += pairs

    def pairs_of(self, layer: int, placed: LayerSlots) -> NDArray[np.int64]:
        """Return the pairs of each slot under a placement so far, to which direct calls add."""
        return self._pairs_of(layer, placed).pairs_S

    def add_totals(
        self, layer: int, rows_R: NDArray[np.int64], pairs_S: NDArray[np.int64], placed: LayerSlots
    ) -> None:
        """Count the rows of each rank and the pairs of each slot, of tokens that are counted."""
        own = 0 if self.own_rank is None else rows_R[self.own_rank]
        self.copies += int(rows_R.sum() - own)
        known = self._pairs_of(layer, placed)
        for rank, (low, high) in enumerate(placed.bounds):
            self.pairs_R[rank] += int(pairs_S[low:high].sum())
            known.pairs_of_ranks[rank] += pairs_S[low:high]

    def _pairs_of(self, layer: int, placed: LayerSlots) -> _LayerPairs:
        known = self._layers.get(layer)
        if known is None or known.placed is not placed:
            known = self._layers[layer] = _LayerPairs(placed, known)
            self._ranks = len(placed.bounds)
            self.pairs_R += [0] * (self._ranks - len(self.pairs_R))
        return known

    def show(self, telemetry: Telemetry, rank: str) -> None:
        telemetry.read(metrics.DISPATCHED_TOKENS, rank, of=lambda: self.tokens)
        telemetry.read(metrics.TOKEN_COPIES, rank, of=lambda: self.copies)
        telemetry.read(metrics.EXPERT_LOAD, rank, of=self._load())
        telemetry.read_each(metrics.EXPERT_TOKENS, self._most_used)
        if self.own_rank is not None:
            telemetry.read(metrics.LOCAL_ACTIVATION, rank, of=self._local(self.own_rank))

    def _load(self) -> Callable[[], float]:
        grown: list[Callable[[], float]] = []

        def load() -> float:
            """Largest share over mean share of the current ranks; 1 if there was no work."""
            for rank in range(len(grown), len(self.pairs_R)):
                grown.append(growth(partial(self.pairs_R.__getitem__, rank)))
            pairs = [by() for by in grown][: self._ranks]
            return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0

        return load

    def _local(self, own_rank: int) -> Callable[[], float]:
        own, every = growth(lambda: self.pairs_R[own_rank]), growth(lambda: sum(self.pairs_R))

        def fraction() -> float:
            pairs = every()
            return own() / pairs if pairs else 0.0

        return fraction

    def _most_used(self) -> dict[tuple[str, ...], float]:
        """Return the pairs of the most used experts, and of those reported before."""
        layers = {layer: known.totals() for layer, known in list(self._layers.items())}
        pairs = [
            (int(pairs_E[expert]), (layer, int(expert)))
            for layer, pairs_E in layers.items()
            for expert in np.argsort(pairs_E)[-TOP_EXPERTS:]
        ]
        for _, place in sorted(pairs, reverse=True)[:TOP_EXPERTS]:
            if place not in self._shown and len(self._shown) < MAX_SHOWN:
                self._shown.append(place)
        return {
            (str(layer), str(expert)): float(layers[layer][expert]) for layer, expert in self._shown
        }


class PacketPlanner:
    """Plans the packets of layers where their rows are, and counts them. Owned by one thread."""

    def __init__(self, counts: DispatchCounts, sample: RoutingSample | None, clock: Clock) -> None:
        self._counts, self._sample, self._clock = counts, sample, clock
        self._lane: DeviceLane | None = None  # made for the first rows on a device
        self._tables: dict[LayerSlots, PlacementTables] = {}
        self._sampled: deque[tuple[MicroBatchId, Arrival]] = deque()
        self._totals: dict[tuple[int, LayerSlots], Tensor] = {}  # since they were copied last
        self._counted: deque[tuple[int, LayerSlots, Arrival]] = deque()
        self._counted_s = clock()

    def plan(
        self,
        key: TaskKey,
        routed: RoutedTokens,
        token_groups: Sequence[tuple[int, int]],
        placed: LayerSlots,
    ) -> Sequence[Piece]:
        """Return the packets of a layer by token group and rank."""
        if runs_on_device(routed.x_TD.device):
            return self.plan_on_device(key, routed, token_groups, placed)
        ids_TK, weights_TK = routed.topk_ids_TK.numpy(), routed.topk_weights_TK.numpy()
        if self._sample is not None:
            self._sample.routed(key.owner, ids_TK)
        own_rank = self._counts.own_rank
        slices = plan_dispatch(ids_TK, weights_TK, token_groups, placed, free_rank=own_rank)
        self._counts.add(key.layer, len(ids_TK), slices, placed)
        return slices

    def plan_on_device(
        self,
        key: TaskKey,
        routed: RoutedTokens,
        token_groups: Sequence[tuple[int, int]],
        placed: LayerSlots,
    ) -> list[DeviceSlice]:
        """Return a packet for each token group and each rank with experts of the layer."""
        ids_TK = routed.topk_ids_TK
        lane = self._lane = self._lane or device_lane(ids_TK.device)
        if self._sample is not None and self._sample.follows(key.owner):
            self._sampled.append((key.owner, lane.fetch(ids_TK)))
        tables = self._tables.get(placed)
        if tables is None:
            own_rank = self._counts.own_rank
            tables = self._tables[placed] = _placement_tables(placed, ids_TK.device, own_rank)
        plan = plan_on_device(ids_TK, routed.topk_weights_TK, token_groups, tables)
        self._count(key.layer, plan, placed, lane)
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
        """Pass on what has been copied from a device, without waiting."""
        while self._sampled and self._sampled[0][1].is_ready:
            owner, ids = self._sampled.popleft()
            assert self._sample is not None
            self._sample.routed(owner, ids.tensor.numpy())
        while self._counted and self._counted[0][2].is_ready:
            layer, placed, totals = self._counted.popleft()
            rows_R, pairs_S = np.split(totals.tensor.numpy(), [len(placed.bounds)])
            self._counts.add_totals(layer, rows_R, pairs_S, placed)

    def forget_placements(self) -> None:
        """Free the tables of earlier generations."""
        self._tables.clear()

    def _count(self, layer: int, plan: DevicePlan, placed: LayerSlots, lane: DeviceLane) -> None:
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
            self._counted.append((number, slots, lane.fetch(totals)))
        self._totals.clear()


def _placement_tables(
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
