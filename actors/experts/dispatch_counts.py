"""What a rank's dispatch has done so far: copies of tokens, pairs by rank and by expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from actors.experts.dispatch import RankSlice
from actors.telemetry.rank_metrics import growth
from actors.telemetry.telemetry import Telemetry
from contracts import metrics
from planner.placement.slots import LayerSlots

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
