"""When traffic turned from one kind to another, by the experts that tokens go to.

    A A A A A A B B B      one turn, where B begins: B is what is coming
    A A B B A A B B        several: the kinds are one mixture
    A A A A A A A A        none

A turn is where runs of traffic differ much more between the two sides than within them (the ratio
of variances), and each is more like its own side: one run that is unlike all others is no turn.
Texts of one kind differ as well: they say themselves by how much. Pure.

Shapes: B runs of traffic, one after the other, N (layer, expert).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.placement.routing import LayerRouting, TokenCounts

Floats = NDArray[np.float64]

RATIO = 8.0
"""Of the variance between two sides to that within them. Runs of one kind have 1, the greatest over
all places 2 or 3."""
LEAST_RUNS = 6  # of fewer nothing is said
_SIDE = 3  # runs, at least


def find_shift(counts_BN: Floats) -> int | None:
    """The first run of the newer kind, where traffic turned once; None where it did not, or more
    than once. counts_BN: pairs; every run has some."""
    shares_BN = counts_BN / counts_BN.sum(1, keepdims=True)
    found = _place(shares_BN)
    if found is None or any(_place(side) for side in (shares_BN[:found], shares_BN[found:])):
        return None
    return found


def _place(shares_BN: Floats) -> int | None:
    """Where the two sides differ most, if they differ."""
    B = len(shares_BN)
    if B < LEAST_RUNS:
        return None
    left_B = np.arange(1, B)[:, None]
    sums_BN = np.cumsum(shares_BN, 0)
    apart_BN = sums_BN[:-1] / left_B - (sums_BN[-1] - sums_BN[:-1]) / (B - left_B)
    between_B = (apart_BN**2).sum(1) * (left_B * (B - left_B) / B)[:, 0]
    whole = float(((shares_BN - shares_BN.mean(0)) ** 2).sum())
    between_B[: _SIDE - 1] = between_B[B - _SIDE :] = 0.0
    at = int(between_B.argmax())
    within = max(whole - between_B[at], 1e-9 * whole) / (B - 2)
    if between_B[at] <= RATIO * within:
        return None
    return at + 1 if _is_clean(shares_BN, at + 1) else None


def _is_clean(shares_BN: Floats, at: int) -> bool:
    """Whether all runs are more like their own side, but the two where the sides meet: traffic may
    turn in the midst of one."""
    before_N, after_N = shares_BN[:at].mean(0), shares_BN[at:].mean(0)
    nearer_B = ((shares_BN - before_N) ** 2).sum(1) < ((shares_BN - after_N) ** 2).sum(1)
    return bool(nearer_B[: at - 1].all() and not nearer_B[at + 1 :].any())


WINDOW_S = 16.0
"""Kinds of traffic that come in turns faster than that are one kind: their mixture."""
SETTLED_S = 8.0
"""For so long must a new kind of traffic last. Kinds in quicker turns are no turn but a mixture."""
MOST_TOKENS = 8192
RUN_S = 1.0
_RUN_TOKENS = 32  # sampled: of fewer, shares of experts say nothing


class TokenSample(NamedTuple):
    """ids_P: token ids. paths_PLK: their experts. tokens: that the sample stands for. at_s: when it
    came. pairs_N: of each layer and expert."""

    at_s: float
    tokens: int
    ids_P: NDArray[np.int32]
    paths_PLK: NDArray[np.int16]
    pairs_N: NDArray[np.int32]


class WindowRouting(NamedTuple):
    """What a window holds at one time, oldest token first. tokens_per_s: that ran, of all ranks.
    turned_s: when traffic turned last. is_turning: it has, but not for long: what is held is of
    both kinds."""

    num_experts: int
    tokens_per_s: float
    ids_P: NDArray[np.int32]
    paths_PLK: NDArray[np.int16]
    shifted_s: float = -math.inf
    is_shifting: bool = False

    @property
    def sampled(self) -> int:
        return len(self.ids_P)

    def layer(self, position: int) -> LayerRouting:
        """Of the position-th layer with experts."""
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
    """At most MOST_TOKENS sampled tokens of the last WINDOW_S."""

    def __init__(self, num_experts: int, layers: int, top_k: int, vocab_size: int) -> None:
        self._num_experts, self._vocab_size = num_experts, vocab_size
        self._shape = (layers, top_k)
        self._samples: deque[TokenSample] = deque()
        self._held = 0
        self._shifted_s = -math.inf

    def add(
        self, now_s: float, tokens: int, ids: bytes, paths: bytes
    ) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
        """Takes what a `RoutingReport` has; returns it as arrays [P, 2], [P, L, K]. Raises
        ValueError for what no rank of this model sends."""
        ids_P2, paths_PLK = self._arrays(ids, paths)
        if len(ids_P2) > tokens:
            raise ValueError(f"routing report: {len(ids_P2)} tokens are sampled of {tokens}")
        kept = slice(max(0, len(ids_P2) - MOST_TOKENS), None)
        pairs_N = self._pairs(paths_PLK[kept])
        self._samples.append(TokenSample(now_s, tokens, ids_P2[kept, 0], paths_PLK[kept], pairs_N))
        self._held += len(ids_P2[kept])
        self._forget(now_s - WINDOW_S)
        return ids_P2, paths_PLK

    def routing(self, now_s: float) -> WindowRouting:
        self._forget(now_s - WINDOW_S)
        shifted_s = self._find_shift_s()
        if shifted_s is not None and now_s - shifted_s >= SETTLED_S:
            self._shifted_s = shifted_s
            self._forget(shifted_s)
        is_shifting = shifted_s is not None and shifted_s > self._shifted_s
        layers, top_k = self._shape
        ids = [np.zeros(0, np.int32), *(each.ids_P for each in self._samples)]
        paths = [np.zeros((0, layers, top_k), np.int16), *(e.paths_PLK for e in self._samples)]
        ran = sum(each.tokens for each in self._samples)
        # A sample stands for the time before it came: without the first, the rest fills the span.
        first = self._samples[0] if self._samples else None
        per_s = 0.0
        if first is not None and now_s - first.at_s > 0:
            per_s = (ran - first.tokens) / (now_s - first.at_s)
        return WindowRouting(
            self._num_experts,
            per_s,
            np.concatenate(ids),
            np.concatenate(paths),
            self._shifted_s,
            is_shifting,
        )

    def clear(self) -> None:
        self._samples.clear()
        self._held = 0

    def _forget(self, before_s: float) -> None:
        while self._samples and (self._held > MOST_TOKENS or self._samples[0].at_s < before_s):
            self._held -= len(self._samples.popleft().ids_P)

    def _pairs(self, paths_PLK: NDArray[np.int16]) -> NDArray[np.int32]:
        layers, _ = self._shape
        at_PLK = paths_PLK + (np.arange(layers) * self._num_experts)[:, None]
        pairs_N = np.bincount(at_PLK.ravel(), minlength=layers * self._num_experts)
        return pairs_N.astype(np.int32)

    def _find_shift_s(self) -> float | None:
        """When traffic turned, if it did so once in what is held."""
        starts_B, runs = list[float](), list[NDArray[np.int32]]()
        for second, samples in itertools.groupby(self._samples, lambda s: s.at_s // RUN_S):
            pairs_N = np.sum([each.pairs_N for each in samples], 0)
            if pairs_N.sum() >= _RUN_TOKENS * math.prod(self._shape):
                starts_B.append(second * RUN_S)
                runs.append(pairs_N)
        found = find_shift(np.array(runs, np.float64)) if runs else None
        return None if found is None else starts_B[found]

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
