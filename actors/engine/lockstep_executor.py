"""The executor of the DP+EP baseline: layers of all workers in lockstep
(actors/experts/all_to_all.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.batching.scheduled_batch import ScheduledBatch
from actors.engine.prefill_executor import PrefillExecutor, PrefillParts, PrefillRun
from actors.experts.all_to_all import AllToAll
from contracts.errors import ChannelError
from contracts.events import Stage
from models.decoder.batch import SequenceSlice
from models.experts.router import Routed


class LockstepExecutor(PrefillExecutor):
    """One batch at a time; when others have one and this worker has none, it sits in."""

    def __init__(self, parts: PrefillParts, all_to_all: AllToAll) -> None:
        super().__init__(parts)
        self._all_to_all = all_to_all
        self._layers = parts.half.spec.moe_layers
        size = (0, parts.half.spec.hidden_size)
        self._nothing = torch.empty(size, dtype=parts.half.dtype, device=parts.half.device)
        self._sitting: int | None = None  # at which of `_layers`

    @property
    def in_flight(self) -> int:
        return super().in_flight + (self._sitting is not None)

    def wake(self) -> None:
        self._all_to_all.wake()

    def step(self, timeout_s: float) -> list[ScheduledBatch]:
        """Runs or sits in at one layer; waits if nobody has a batch."""
        if super().in_flight or self.failure is not None:
            done = super().step(timeout_s)
            if done:
                self._all_to_all.end_pass()
            return done
        try:
            if self._sitting is None:
                self._sitting = 0 if self._all_to_all.is_wanted(timeout_s) else None
            else:
                self._sit_in(self._sitting)
        except ChannelError as error:
            self.failure = error
        return []

    def fail_all(self) -> list[ScheduledBatch]:
        self._sitting = None
        return super().fail_all()

    def time_layers(self, slices: Sequence[SequenceSlice]) -> list[float]:
        times_l = super().time_layers(slices)
        self._all_to_all.end_pass()
        return times_l

    def _sit_in(self, at: int) -> None:
        self._all_to_all.sit_in(self._layers[at], self._nothing)
        self._sitting = at + 1
        if self._sitting == len(self._layers):
            self._sitting = None
            self._all_to_all.end_pass()

    def _add_experts(self, run: PrefillRun, routed: Routed) -> None:
        start_s = self._clock()
        run.hidden_TD.add_(self._all_to_all.sums(run.layer, routed))
        self._span(run, Stage.EXPERT, start_s)
        self._add_shared(run, routed)
