"""Routing samples: the experts of tokens, a sliding window of them, and ranks of token ids. Pure.

Shapes: P sampled tokens, K experts of each, R ranks, L layers with experts, N entries of a table of
token ids, V token ids, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arrays import Array, Bools, Floats, Ints
from planner.placement.layout import Objective, PlacementCosts, totals
from planner.placement.slots import LayerSlots, Line, layer_slots

BATCH_TOKENS = 2048  # of a batch


class TokenCounts(NamedTuple):
    """Number of times that each token id was routed to each expert, by ascending id, then expert.

    The rarest entries may be missing."""

    ids_N: Ints
    experts_N: Ints
    times_N: Ints


class LayerRouting(NamedTuple):
    """Sample of a layer: experts of each token in the router's order, and token ids."""

    num_experts: int
    sets_PK: Ints
    ids_P: Ints
    counts: TokenCounts

    def load(self) -> Ints:
        """Return the pairs of each expert in the sample [E]."""
        return np.bincount(self.sets_PK.ravel(), minlength=self.num_experts)


class Measured(NamedTuple):
    """Figures of a placement on a sample.

    copies: mean number of ranks that a token is sent to. load: pairs of the busiest rank over the
    mean."""

    copies: float
    load: float


def batches_of_ranks(routing: LayerRouting, placed: LayerSlots) -> Iterator[Array]:
    """Yield the rank that serves each pair [T, K], for BATCH_TOKENS tokens at a time."""
    for start in range(0, len(routing.sets_PK), BATCH_TOKENS):
        yield placed.ranks_of(placed.of_pairs(routing.sets_PK[start : start + BATCH_TOKENS]))


def measure(routing: LayerRouting, placed: LayerSlots) -> Measured:
    """Return the figures of a placement on the sample."""
    ranks, tokens = len(placed.bounds), len(routing.sets_PK)
    copies, pairs_R = 0, np.zeros(ranks, np.int64)
    for ranks_TK in batches_of_ranks(routing, placed):
        ordered_TK = np.sort(ranks_TK, axis=1)
        copies += len(ordered_TK) + int((ordered_TK[:, 1:] != ordered_TK[:, :-1]).sum())
        pairs_R += np.bincount(ranks_TK.ravel(), minlength=ranks)
    load = float(pairs_R.max() / pairs_R.mean()) if tokens else 1.0
    return Measured(copies / max(1, tokens), load)


def line_price(
    routing: LayerRouting, line: Line, slots_per_rank: Sequence[int], costs: PlacementCosts
) -> float:
    """Return the time of a layer under a placement on the sample, per token."""
    ranks, top_k = len(slots_per_rank), routing.sets_PK.shape[1]
    measured = measure(routing, layer_slots(line, slots_per_rank))
    objective = Objective(costs, 1.0, float(top_k), ranks)
    return float(objective.price(measured.copies, measured.load * top_k / ranks))


def local_fraction(routing: LayerRouting, placed: LayerSlots, rank_of_id_V: Ints) -> float:
    """Return the share of pairs whose expert is on the rank of their token's id (LAR).

    Replicas count on every rank.
    """
    held_ER = placed.held(routing.num_experts)
    here_PK = held_ER[routing.sets_PK, rank_of_id_V[routing.ids_P][:, None]]
    return float(here_PK.mean()) if here_PK.size else 0.0


WINDOW_S = 16.0  # traffic that alternates faster counts as one mixture
MOST_TOKENS = 8192


class TokenSample(NamedTuple):
    """One report. ids_P: token ids. paths_PLK: their experts. tokens: all tokens of the period."""

    at_s: float
    tokens: int
    ids_P: NDArray[np.int32]
    paths_PLK: NDArray[np.int16]


class WindowRouting(NamedTuple):
    """Content of a window, oldest token first. tokens_per_s: of all ranks."""

    num_experts: int
    tokens_per_s: float
    ids_P: NDArray[np.int32]
    paths_PLK: NDArray[np.int16]

    @property
    def sampled(self) -> int:
        return len(self.ids_P)

    def layer(self, position: int) -> LayerRouting:
        """Return the routing of the position-th layer with experts."""
        E = self.num_experts
        ids_P = self.ids_P.astype(np.int64)
        sets_PK = self.paths_PLK[:, position].astype(np.int64)
        keys, times_N = np.unique((ids_P[:, None] * E + sets_PK).ravel(), return_counts=True)
        return LayerRouting(E, sets_PK, ids_P, TokenCounts(keys // E, keys % E, times_N))

    def half(self, *, newer: bool) -> WindowRouting:
        middle = self.sampled // 2
        part = slice(middle, None) if newer else slice(None, middle)
        return self._replace(ids_P=self.ids_P[part], paths_PLK=self.paths_PLK[part])


class RoutingWindow:
    """Sampled tokens of the last WINDOW_S seconds, at most MOST_TOKENS."""

    def __init__(self, num_experts: int, layers: int, top_k: int, vocab_size: int) -> None:
        self._num_experts, self._vocab_size = num_experts, vocab_size
        self._shape = (layers, top_k)
        self._samples: deque[TokenSample] = deque()
        self._held = 0

    def add(
        self, now_s: float, tokens: int, ids: bytes, paths: bytes
    ) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
        """Add the content of a `RoutingReport`, and return its arrays [P, 2] and [P, L, K].

        Raises ValueError for a report that does not fit the model."""
        ids_P2, paths_PLK = self._arrays(ids, paths)
        if len(ids_P2) > tokens:
            raise ValueError(f"routing report: {len(ids_P2)} tokens are sampled of {tokens}")
        kept = slice(max(0, len(ids_P2) - MOST_TOKENS), None)
        self._samples.append(TokenSample(now_s, tokens, ids_P2[kept, 0], paths_PLK[kept]))
        self._held += len(ids_P2[kept])
        self._forget(now_s - WINDOW_S)
        return ids_P2, paths_PLK

    def routing(self, now_s: float) -> WindowRouting:
        self._forget(now_s - WINDOW_S)
        layers, top_k = self._shape
        ids = [np.zeros(0, np.int32), *(each.ids_P for each in self._samples)]
        paths = [np.zeros((0, layers, top_k), np.int16), *(e.paths_PLK for e in self._samples)]
        ran = sum(each.tokens for each in self._samples)
        # A sample covers the time before its arrival: all but the first cover the span.
        first = self._samples[0] if self._samples else None
        per_s = 0.0
        if first is not None and now_s - first.at_s > 0:
            per_s = (ran - first.tokens) / (now_s - first.at_s)
        return WindowRouting(self._num_experts, per_s, np.concatenate(ids), np.concatenate(paths))

    def clear(self) -> None:
        self._samples.clear()
        self._held = 0

    def _forget(self, before_s: float) -> None:
        while self._samples and (self._held > MOST_TOKENS or self._samples[0].at_s < before_s):
            self._held -= len(self._samples.popleft().ids_P)

    def _arrays(self, ids: bytes, paths: bytes) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
        layers, top_k = self._shape
        count, row_bytes = len(ids) // 8, 2 * layers * top_k
        if len(ids) != 8 * count or len(paths) != count * row_bytes:
            raise ValueError(
                f"routing report: {len(ids)} bytes of ids and {len(paths)} of paths: this model "
                f"has 8 and {row_bytes} for each token"
            )
        ids_P2 = np.frombuffer(ids, "<i4").reshape(count, 2).astype(np.int32)
        paths_PLK = np.frombuffer(paths, "<i2").reshape(count, layers, top_k).astype(np.int16)
        if count:
            self._check(ids_P2, paths_PLK)
        return ids_P2, paths_PLK

    def _check(self, ids_P2: NDArray[np.int32], paths_PLK: NDArray[np.int16]) -> None:
        low, high = int(paths_PLK.min()), int(paths_PLK.max())
        if low < 0 or high >= self._num_experts:
            raise ValueError(f"routing report: experts {low} to {high} of {self._num_experts}")
        ordered_PLK = np.sort(paths_PLK, axis=2)
        if (ordered_PLK[:, :, 1:] == ordered_PLK[:, :, :-1]).any():
            raise ValueError("routing report: a token has an expert twice")
        if ids_P2[:, 0].min() < 0 or ids_P2.min() < -1 or ids_P2.max() >= self._vocab_size:
            raise ValueError(
                f"routing report: token ids {ids_P2.min()} to {ids_P2.max()}, of a vocabulary of "
                f"{self._vocab_size}"
            )


ID_LOAD = 1.1  # limit of a rank's pairs over the mean, as in the paper


def shares(ids_N: Ints, experts_N: Ints, times_N: Ints, holds_ER: Bools) -> Floats:
    """Return each id's pairs per rank with the expert [V, R], and their total in a last column."""
    V, R = int(ids_N.max()) + 1 if len(ids_N) else 0, holds_ER.shape[1]
    here_NR = holds_ER[experts_N] * times_N[:, None]
    columns = [totals(ids_N, column_N, V) for column_N in (*here_NR.T, times_N)]
    return np.stack(columns, 1).reshape(V, R + 1)


PRIOR_TOKENS = 1.0  # of mean routing, added to the counts of each condition


def share_table(layers: Sequence[tuple[TokenCounts, Bools]], top_k: int) -> Floats:
    """Return the smoothed share of each id's pairs on each rank, the mean over layers [V + 1, R].

    layers: counted pairs, and the experts of each rank. The last row is the mean of all ids."""
    ids = max(int(counts.ids_N.max(initial=-1)) + 1 for counts, _ in layers)
    pairs_VR1 = np.zeros((ids + 1, layers[0][1].shape[1] + 1))
    for counts, holds_ER in layers:
        found_VR1 = shares(*counts, holds_ER)
        pairs_VR1[: len(found_VR1)] += found_VR1
    all_R1 = pairs_VR1.sum(0)
    mean_R = all_R1[:-1] / max(1.0, all_R1[-1])
    prior = PRIOR_TOKENS * top_k * len(layers)
    table_VR: Floats = (pairs_VR1[:, :-1] + prior * mean_R) / (pairs_VR1[:, -1:] + prior)
    return table_VR


MAX_LOOKED_UP = 256  # tokens of a prompt, evenly spaced


class LocalShares:
    """Predicted share of a prompt's experts on each worker: the mean over layers, by token id.

    Speculative MoE, Section 3.3, for whole requests: with experts divided among workers, pairs
    whose expert is on the request's worker need no transfer. Ids without counts have the mean.
    """

    def __init__(self, layers: Sequence[tuple[TokenCounts, Bools]], top_k: int) -> None:
        """layers: for each, counted pairs and the experts of each worker [E, W]."""
        self._table_VR = share_table(layers, top_k).astype(np.float32)

    def of_tokens(self, token_ids: Sequence[int], start: int = 0) -> list[float]:
        """Return the share of the pairs of tokens [start, end) on each worker; zeros for none.

        The time is bounded by MAX_LOOKED_UP."""
        count = len(token_ids) - start
        if count <= 0:
            return [0.0] * self._table_VR.shape[1]
        step = -(-count // MAX_LOOKED_UP) | 1  # odd, against prompts of pairs
        ids_T = np.array(token_ids[start::step], np.int64)
        rows_T = np.minimum(ids_T, len(self._table_VR) - 1)
        means: list[float] = self._table_VR.take(rows_T, axis=0).mean(0).tolist()
        return means


def rank_of_ids(shares_VR1: Floats) -> Ints:
    """Return the rank of each id [V]: ids with the least regret leave overloaded ranks.

    Ids without a pair are distributed in turn."""
    local_VR, times_V = shares_VR1[:, :-1].copy(), shares_VR1[:, -1]
    V, R = local_VR.shape
    room = ID_LOAD * times_V.sum() / R
    label_V: Ints = np.where(times_V > 0, local_VR.argmax(1), np.arange(V) % R)
    for _ in range(R):
        load_R = totals(label_V, times_V, R)
        over = int(load_R.argmax())
        if load_R[over] <= room:
            break
        open_R = load_R < room
        open_R[over] = False
        if not open_R.any():
            break
        _give_away(label_V, local_VR, times_V, over, load_R, room)
    return label_V


def _give_away(
    label_V: Ints, local_VR: Floats, times_V: Floats, over: int, load_R: Floats, room: float
) -> None:
    """Move ids from an overloaded rank to others in order of regret per pair, in place."""
    ids = np.flatnonzero((label_V == over) & (times_V > 0))
    other_VR = local_VR[ids].copy()
    other_VR[:, over] = -1.0
    regret_V = (local_VR[ids, over] - other_VR.max(1)) / times_V[ids]
    for n in np.argsort(regret_V, kind="stable"):
        if load_R[over] <= room:
            return
        times = times_V[ids[n]]
        fits_R = load_R + times <= room
        fits_R[over] = False
        if not fits_R.any():
            continue
        rank = int(np.where(fits_R, other_VR[n], -1.0).argmax())
        label_V[ids[n]] = rank
        load_R[over] -= times
        load_R[rank] += times


def token_ranks(counts: TokenCounts, holds_ER: Bools) -> Ints:
    """Return the rank of each token id up to the largest counted [V]."""
    return rank_of_ids(shares(counts.ids_N, counts.experts_N, counts.times_N, holds_ER))


def local_share(counts: TokenCounts, holds_ER: Bools) -> float:
    """Return the local activation rate of the counted pairs under that assignment."""
    shares_VR1 = shares(counts.ids_N, counts.experts_N, counts.times_N, holds_ER)
    if not len(shares_VR1):
        return 0.0
    label_V = rank_of_ids(shares_VR1)
    local_V = shares_VR1[np.arange(len(label_V)), label_V]
    return float(local_V.sum() / max(1.0, shares_VR1[:, -1].sum()))
