"""Holding a prefill worker's batch back while it is below the saturation threshold
(planner/policies/filling.py), with times as the worker measures them."""

from __future__ import annotations

from contracts.clock import Clock
from contracts.config import PrefillConfig
from models.experts.copying_store import CopyingStore
from planner.policies.filling import Filling, FillLimits, PassTimes

_NEW_FRACTION = 0.2  # of a new measurement in what is kept


class BatchFilling:
    """Used by the worker's loop. Work is in the worker's unit: FLOPs, or tokens."""

    def __init__(
        self, config: PrefillConfig, layers: int, store: CopyingStore, max_flops: int, clock: Clock
    ) -> None:
        """layers: with experts. max_flops: about the largest batch."""
        self._fill, self._clock, self._store = config.fill, clock, store
        self._max_wait_s = config.max_wait_s
        limits = FillLimits(max_wait_s=config.max_wait_s, max_flops=max_flops)
        resident = min(config.resident_layers, layers)
        self._filling = Filling(limits, PassTimes(layers, resident, 0.0, 1.0))
        self._copied_layers = layers - resident
        self._measured = False
        self._oldest_s: float | None = None  # of those that wait
        self._begun_s = self._waited_s = 0.0
        self._copied_s = store.copied_s

    def accepted(self, flops: int) -> None:
        """A request has joined the queue."""
        now_s = self._clock()
        if self._oldest_s is None:
            self._oldest_s = now_s
        if self._measured:
            self._filling.arrived(now_s, flops)

    def wait_s(self, flops: int) -> float:
        """For how long to hold the batch of what waits, `flops` in all; 0: run it."""
        if self._oldest_s is None or not self._measured or self._fill == "never":
            return 0.0
        now_s = self._clock()
        if self._fill == "always":
            full = flops >= self._filling.times.full_flops
            return 0.0 if full else max(0.0, self._oldest_s + self._max_wait_s - now_s)
        return max(0.0, self._filling.due_s(now_s, self._oldest_s, flops) - now_s)

    def formed(self, *, left: bool) -> None:
        """A batch begins; `left`: some requests still wait."""
        self._begun_s, self._waited_s = self._clock(), self._store.waited_s
        self._oldest_s = self._begun_s if left else None

    def completed(self, flops: int) -> None:
        """The batch is through."""
        took_s = self._clock() - self._begun_s
        computed_s = max(took_s - (self._store.waited_s - self._waited_s), 1e-6)
        copied_s, self._copied_s = self._store.copied_s - self._copied_s, self._store.copied_s
        transfer_s = copied_s / max(1, self._copied_layers)
        times, new = self._filling.times, _NEW_FRACTION if self._measured else 1.0
        self._measured = True
        self._filling.times = times._replace(
            transfer_s=(1 - new) * times.transfer_s + new * transfer_s,
            flops_per_s=(1 - new) * times.flops_per_s + new * max(flops, 1) / computed_s,
        )
