"""Weighted sums over experts that arrive one by one, in any order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.experts import RUN_PAIRS, ClampedGate, weighted_run
from models.experts.cache_requests import AcquiredExpert, ExpertRequest
from models.experts.expert_cache import ExpertCache


class CachedSum:
    """Bit-equal to `kernels.experts.expert_steps`: outputs are added in the order of the pairs.

    Shapes: U tokens, D model dim, N (token, expert) pairs, sorted by expert.
    """

    def __init__(
        self,
        x_UD: Tensor,
        rows_N: Tensor,
        weights_N: Tensor,
        pairs: Mapping[int, int],
        clamped: ClampedGate | None,
    ) -> None:
        """pairs: number of pairs of each expert, in the order of the rows."""
        self.out_UD = torch.zeros(x_UD.shape, dtype=torch.float32)
        self.pairs = pairs
        self._x_UD, self._rows_N, self._weights_N = x_UD, rows_N, weights_N
        self._clamped = clamped
        self._first_of: dict[int, int] = {}
        first = 0
        for expert, count in pairs.items():
            self._first_of[expert] = first
            first += count
        self._pending: dict[int, Tensor] = {}  # outputs by first pair, waiting for earlier ones
        self._added = 0  # number of pairs
        self._computed: dict[int, int] = {}  # pairs of experts with more than a run

    def advance(self, cache: ExpertCache, request: ExpertRequest) -> bool:
        """Compute a run of available experts, or some pairs of one with many.

        Returns False if no expert was available. Raises ChannelError if one cannot be read.
        """
        acquired = cache.acquire(request, self.pairs, RUN_PAIRS)
        if not acquired:
            return False
        expert, counts = acquired[0].expert, [self.pairs[each] for each, _ in acquired]
        computed = self._computed.get(expert, 0)
        left = counts[0] - computed
        if len(acquired) == 1:
            counts[0] = min(RUN_PAIRS, left)
        self._run(cache, acquired, self._first_of[expert] + computed, counts)
        if counts[0] < left:
            self._computed[expert] = computed + counts[0]
            cache.release(request, acquired)
        else:
            cache.complete(request, acquired)
        return True

    def result(self) -> Tensor:
        """Return [U, D] float32, after all experts are computed."""
        return self.out_UD

    def _run(
        self, cache: ExpertCache, acquired: list[AcquiredExpert], first: int, counts: list[int]
    ) -> None:
        pairs = slice(first, first + sum(counts))
        products = [cache.products(slot) for _, slot in acquired]
        self._pending[first] = weighted_run(
            self._x_UD.index_select(0, self._rows_N[pairs]),
            [gate_up for gate_up, _ in products],
            [down for _, down in products],
            counts,
            self._weights_N[pairs],
            self._clamped,
        )
        while (ready_ND := self._pending.pop(self._added, None)) is not None:
            last = self._added + len(ready_ND)
            self.out_UD.index_add_(0, self._rows_N[self._added : last], ready_ND)
            self._added = last
