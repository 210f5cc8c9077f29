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


class DispatchCounts:
    """Owned by the thread that dispatches; read at scrapes. tokens: at each layer anew; copies: how
    many ranks they were sent to; pairs_R: (token, expert) that each rank had."""

    def __init__(self, ranks: int, own_rank: int | None = None) -> None:
        """own_rank: this one has experts itself; what it keeps is no copy."""
        self.tokens = self.copies = 0
        self.pairs_R = [0] * ranks
        self._own_rank = own_rank
        self._pairs_E: dict[int, NDArray[np.int64]] = {}  # by layer
        self._shown: list[tuple[int, int]] = []  # (layer, expert)

    def add(self, layer: int, tokens: int, slices: Sequence[RankSlice], placed: LayerSlots) -> None:
        """The packets of a micro-batch at a layer."""
        self.tokens += tokens
        pairs_E = self._pairs_E.get(layer)
        if pairs_E is None:
            pairs_E = self._pairs_E[layer] = np.zeros(len(placed.slots_of_expert), np.int64)
        for piece in slices:
            if piece.rank != self._own_rank:
                self.copies += piece.num_rows
            self.pairs_R[piece.rank] += len(piece.index_N)
            low, high = placed.bounds[piece.rank]
            pairs_E[placed.expert_of_slot[low:high]] += piece.counts_e  # a rank has each once

    def show(self, telemetry: Telemetry, rank: str) -> None:
        """Has it read at each scrape."""
        telemetry.read(metrics.DISPATCHED_TOKENS, rank, of=growth(lambda: self.tokens))
        telemetry.read(metrics.TOKEN_COPIES, rank, of=growth(lambda: self.copies))
        telemetry.read(metrics.EXPERT_LOAD, rank, of=self._load())
        telemetry.read_each(metrics.EXPERT_TOKENS, self._most_used)
        if self._own_rank is not None:
            telemetry.read(metrics.LOCAL_ACTIVATION, rank, of=self._local(self._own_rank))

    def _load(self) -> Callable[[], float]:
        grown = [
            growth(partial(self.pairs_R.__getitem__, rank)) for rank in range(len(self.pairs_R))
        ]

        def load() -> float:
            """1 where nothing has run."""
            pairs = [by() for by in grown]
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
        pairs = [
            (int(pairs_E[expert]), (layer, int(expert)))
            for layer, pairs_E in list(self._pairs_E.items())
            for expert in np.argsort(pairs_E)[-TOP_EXPERTS:]
        ]
        for _, place in sorted(pairs, reverse=True)[:TOP_EXPERTS]:
            if place not in self._shown and len(self._shown) < MAX_SHOWN:
                self._shown.append(place)
        return {
            (str(layer), str(expert)): float(self._pairs_E[layer][expert])
            for layer, expert in self._shown
        }
