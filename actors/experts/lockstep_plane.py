"""Experts on all workers at once, layer by layer in lockstep: the DP+EP baseline
(actors/experts/all_to_all.py).

One batch of one micro-batch at a time; when others have one and this worker has none, it sits in.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from actors.experts.all_to_all import AllToAll
from actors.experts.plane import TaskKey
from contracts.errors import ChannelError
from contracts.events import Stage
from contracts.plan import Plan
from kernels.steps import Steps
from models.decoder.decoder import AttentionHalf
from models.experts.router import Routed


class LockstepPending(NamedTuple):
    """Rows that go out when all have come to their layer."""

    layer: int
    routed: Routed
    is_complete: bool = True


class LockstepPlane:
    """The loss of a worker ends it."""

    fatal = ChannelError
    stage = Stage.EXPERT
    yields = overtakes = False  # all come to a layer together
    copy_s = 0.0

    def __init__(self, half: AttentionHalf, all_to_all: AllToAll) -> None:
        self._all_to_all = all_to_all
        self._layers = half.spec.moe_layers
        size = (0, half.spec.hidden_size)
        self._nothing = torch.empty(size, dtype=half.dtype, device=half.device)
        self._sitting: int | None = None  # at which of `_layers`
        self._failed = False
        self._woken = threading.Event()

    @property
    def is_engaged(self) -> bool:
        return self._sitting is not None

    def wake(self) -> None:
        self._woken.set()
        self._all_to_all.wake()

    def starts(self, key: TaskKey, token_ids_T: Tensor) -> None:
        """Nothing depends on which tokens they are."""

    def begin(self, key: TaskKey, hidden_TD: Tensor, routed: Routed, plan: Plan) -> LockstepPending:
        return LockstepPending(key.layer, routed)

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        """Without a batch: sits in at one layer, if others have one."""
        if self._failed:
            self._woken.wait(timeout_s)
            self._woken.clear()
        elif idle:
            try:
                self._sit_in(timeout_s)
            except ChannelError:
                self._sitting, self._failed = None, True
                raise
        return False

    def steps(
        self, hidden_TD: Tensor, pending: LockstepPending, shared_TD: Tensor | None
    ) -> Steps[None]:
        yield from ()
        try:
            hidden_TD.add_(self._all_to_all.sums(pending.layer, pending.routed))
        except ChannelError:
            self._failed = True
            raise
        if shared_TD is not None:
            hidden_TD.add_(shared_TD)
        if pending.layer == self._layers[-1]:
            self._all_to_all.end_pass()

    def drop(self, pending: LockstepPending) -> None:
        """It holds nothing."""

    def _sit_in(self, timeout_s: float) -> None:
        if self._sitting is None:
            self._sitting = 0 if self._all_to_all.is_wanted(timeout_s) else None
            return
        self._all_to_all.sit_in(self._layers[self._sitting], self._nothing)
        self._sitting += 1
        if self._sitting == len(self._layers):
            self._sitting = None
            self._all_to_all.end_pass()
