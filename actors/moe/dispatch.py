"""Which rows of a micro-batch go to which expert rank, and how their answers come back.

Routing becomes packets in one sort. For T tokens with K experts each, the T*K (token, expert) pairs
are sorted by (token group, expert slot); the pairs of one token group and one expert rank are then
one contiguous range, in the order in which that rank's grouped GEMM wants them:

    pairs, sorted   | group 0: slots of rank 0 | slots of rank 1 | group 1: slots of rank 0 | ...

A token that several experts of a rank want travels once (Speculative MoE, Section 4: deduplicated).
Index arithmetic is numpy on the CPU: sizes must be known there before a packet can be cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.channels.base import Endpoint, Header, TensorSpec
from actors.telemetry.rank_metrics import growth
from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from kernels.steps import Steps, add_tiled, row_tiles
from planner.placement.slots import LayerSlots

Rows = tuple[NDArray[np.int64] | None, NDArray[np.int32]]  # rows_U and index_N


class RankSlice(NamedTuple):
    """What one token group sends to one expert rank; `combine` needs it again for the answer.

    rows_U: rows of the micro-batch, ascending, each once. None: every row of the group.
    index_N, weights_N: per pair, its position in rows_U and its weight. counts_e: pairs per local
    expert.
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


# A packet to be cut: rank, token group, its start and stop, its slots of all token groups' slots,
# its pairs of the sorted ones.
_Piece = tuple[int, int, int, int, slice, slice]


def plan_dispatch(
    topk_ids_TK: NDArray[np.int64],
    topk_weights_TK: NDArray[np.float32],
    token_groups: Sequence[tuple[int, int]],
    placed: LayerSlots,
    *,
    free_rank: int | None = None,
) -> list[RankSlice]:
    """The packets of one micro-batch, token group by token group, rank by rank; none is empty.
    token_groups: [start, stop) of each, one after the other. placed: the layer's experts.
    free_rank: one that a token goes to at no cost."""
    key_N = _sort_keys(placed.of_pairs(topk_ids_TK, free_rank), token_groups, placed.count)
    order_N = key_N.argsort(kind="stable")
    pieces, pairs = _pieces(key_N.take(order_N), token_groups, placed)
    if not pieces:
        return []
    counts_S = np.bincount(key_N, minlength=len(token_groups) * placed.count).astype(np.int32)
    tokens, top_k = topk_ids_TK.shape
    token_N = _token_of_pair(top_k, tokens.bit_length()).take(order_N)
    weights_N = topk_weights_TK.take(order_N)
    only_one = len(placed.bounds) == 1  # its pairs hold every token of a group
    found = _every_row(token_N, pieces) if only_one else _rows(token_N, pieces, pairs)
    return [
        RankSlice(rank, group, start, stop, rows_U, index_N, weights_N[its], counts_S[slots])
        for (rank, group, start, stop, slots, its), (rows_U, index_N) in zip(
            pieces, found, strict=True
        )
    ]


@functools.lru_cache(maxsize=32)
def _token_of_pair(top_k: int, bits: int) -> NDArray[np.int64]:
    """For as many tokens as so many bits count: looked up sooner than divided."""
    return np.arange(1 << bits).repeat(top_k)


def _sort_keys(
    slot_TK: NDArray[Any], token_groups: Sequence[tuple[int, int]], slots: int
) -> NDArray[Any]:
    """Of each pair: its token group * slots + its slot."""
    if len(token_groups) > 1:
        group_T = np.zeros(len(slot_TK), np.int64)
        group_T[[start for start, _ in token_groups[1:]]] = slots
        if len(token_groups) * slots < 1 << 15:  # narrow ones are sorted sooner
            group_T = group_T.astype(np.int16)
        slot_TK = slot_TK + group_T.cumsum(dtype=group_T.dtype)[:, None]
    return slot_TK.ravel()


def _pieces(
    key_N: NDArray[Any], token_groups: Sequence[tuple[int, int]], placed: LayerSlots
) -> tuple[list[_Piece], list[int]]:
    """And how many pairs each has. key_N: sorted."""
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
    """`rows_U` and `index_N` of each piece, from a line of its token group's tokens for each:

    tokens that go there      - 1 . 1 1 | - . 1 1 .      rank 0 | rank 1
    how many up to each       0 1 1 2 3 | 0 0 1 2 2      before it: its position
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


def slice_parts(piece: RankSlice, x_TD: Tensor) -> list[TensorSpec]:
    """Return the parts of an A2E packet: x_UD, index_N, weights_N, counts_e."""
    pairs = len(piece.index_N)
    return [
        TensorSpec(str(x_TD.dtype).removeprefix("torch."), (piece.num_rows, x_TD.shape[1])),
        TensorSpec("int32", (pairs,)),
        TensorSpec("float32", (pairs,)),
        TensorSpec("int32", (len(piece.counts_e),)),
    ]


def fill_slice(piece: RankSlice, x_TD: Tensor, out: Sequence[Tensor]) -> None:
    """Write the packet of `piece` to `out`, laid out as `slice_parts`."""
    x_UD, index_N, weights_N, counts_e = out
    if piece.rows_U is None:
        x_UD.copy_(x_TD[piece.start : piece.stop])
    else:
        rows_U = torch.from_numpy(piece.rows_U).to(x_TD.device)
        torch.index_select(x_TD, 0, rows_U, out=x_UD)
    index_N.copy_(torch.from_numpy(piece.index_N))
    weights_N.copy_(torch.from_numpy(piece.weights_N))
    counts_e.copy_(torch.from_numpy(piece.counts_e))


def send_slice(
    endpoint: Endpoint, peer: str, header: Header, piece: RankSlice, x_TD: Tensor
) -> None:
    """Send the rows and pairs of `piece` to `peer`. Raises as `Endpoint.reserve`."""
    reservation = endpoint.reserve(peer, slice_parts(piece, x_TD))
    fill_slice(piece, x_TD, reservation.tensors)
    endpoint.commit(reservation, header)


def add_slice(total_TD: Tensor, piece: RankSlice, y_UD: Tensor) -> Steps[None]:
    """Add the answer to `piece` to the rows that it came from, tile by tile."""
    if piece.rows_U is None:
        yield from add_tiled(total_TD[piece.start : piece.stop], y_UD)
        return
    rows_U = torch.from_numpy(piece.rows_U).to(total_TD.device)
    for tile in row_tiles(y_UD):
        total_TD.index_add_(0, rows_U[tile], y_UD[tile].to(total_TD.dtype))
        yield


TOP_EXPERTS = 8  # looked for at each scrape
MAX_SHOWN = 64  # (layer, expert) that ever have a line of their own


class _LayerPairs:
    """Of one layer, by rank and local expert, since it was `placed` so; and by expert before."""

    def __init__(self, placed: LayerSlots, before: _LayerPairs | None) -> None:
        experts = len(placed.slots_of_expert)
        self.placed = placed
        self._before_E = np.zeros(experts, np.int64) if before is None else before.totals()
        self._pairs_S = np.zeros(placed.count, np.int64)
        self.pairs_of_ranks = [self._pairs_S[low:high] for low, high in placed.bounds]

    def totals(self) -> NDArray[np.int64]:
        """[E] pairs of each expert, all so far."""
        pairs_E = self._before_E.copy()
        np.add.at(pairs_E, self.placed.expert_of_slot, self._pairs_S)
        return pairs_E


class DispatchCounts:
    """Owned by the thread that dispatches; read at scrapes. tokens: at each layer anew; copies: how
    many ranks they were sent to; pairs_R: (token, expert) that each rank had, those that are not
    there any more too."""

    def __init__(self, ranks: int, own_rank: int | None = None) -> None:
        """own_rank: this one has experts itself; what it keeps is no copy."""
        self.tokens = self.copies = 0
        self.pairs_R, self._ranks = [0] * ranks, ranks
        self._own_rank = own_rank
        self._layers: dict[int, _LayerPairs] = {}
        self._shown: list[tuple[int, int]] = []  # (layer, expert)

    def add(self, layer: int, tokens: int, slices: Sequence[RankSlice], placed: LayerSlots) -> None:
        """The packets of a micro-batch at a layer."""
        self.tokens += tokens
        known = self._layers.get(layer)
        if known is None or known.placed is not placed:
            known = self._layers[layer] = _LayerPairs(placed, known)
            self._ranks = len(placed.bounds)
            self.pairs_R += [0] * (self._ranks - len(self.pairs_R))
        for piece in slices:
            if piece.rank != self._own_rank:
                self.copies += piece.num_rows
            self.pairs_R[piece.rank] += len(piece.index_N)
            known.pairs_of_ranks[piece.rank] += piece.counts_e

    def show(self, telemetry: Telemetry, rank: str) -> None:
        """Has it read at each scrape."""
        telemetry.read(metrics.DISPATCHED_TOKENS, rank, of=growth(lambda: self.tokens))
        telemetry.read(metrics.TOKEN_COPIES, rank, of=growth(lambda: self.copies))
        telemetry.read(metrics.EXPERT_LOAD, rank, of=self._load())
        telemetry.read_each(metrics.EXPERT_TOKENS, self._most_used)
        if self._own_rank is not None:
            telemetry.read(metrics.LOCAL_ACTIVATION, rank, of=self._local(self._own_rank))

    def _load(self) -> Callable[[], float]:
        grown: list[Callable[[], float]] = []

        def load() -> float:
            """1 where nothing has run. Of the ranks that there are now."""
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
        """Pairs of the most used experts, and of those that were shown once."""
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
