"""Below the saturation threshold: run a small batch at once, or hold it until more has come?

A pass over a batch of W FLOPs takes, layer by layer, as long as its compute or its transfer:

    pass_s(W) = resident * W / (L * P) + (L - resident) * max(W / (L * P), T_x)

so that below the threshold a pass costs about as much for one request as for many. To run at once
(*now*) serves the first request soonest and lets those behind it wait for a pass of their own. To
hold the batch until it is full or its oldest request has waited `max_wait_s` (*hold*) serves them
together, and is in vain if nobody comes. Which is better depends on how requests come. So both are
replayed here, on the requests that did come, and the one with the shorter mean turnaround over the
latest of them is followed.

Works on given times only: seconds of one clock.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import NamedTuple

import msgspec

WINDOW_REQUESTS = 128  # over which turnarounds are compared


class PassTimes(NamedTuple):
    """What a pass costs. layers: with experts; resident: those of them that need no transfer.
    transfer_s: T_x. flops_per_s: P."""

    layers: int
    resident: int
    transfer_s: float
    flops_per_s: float

    def pass_s(self, flops: float) -> float:
        layer_s = flops / (self.layers * self.flops_per_s)
        return self.resident * layer_s + (self.layers - self.resident) * max(
            layer_s, self.transfer_s
        )

    @property
    def full_flops(self) -> float:
        """Work at which no transfer is exposed: Eq. 1 without its margin."""
        return self.layers * self.transfer_s * self.flops_per_s


class FillLimits(msgspec.Struct, frozen=True, kw_only=True):
    """max_wait_s: of the oldest request of a held batch. max_flops: about the largest batch."""

    max_wait_s: float
    max_flops: float = math.inf


class _Request(NamedTuple):
    arrived_s: float
    flops: float


class Replay:
    """A worker that always runs at once (hold_s=0), or always holds batches that are not full.

    `arrive` in order of time; `advance` lets it run up to a time. `turnarounds`: of the latest
    requests that have finished, in order of arrival; `finished`: how many have, ever.
    """

    def __init__(self, hold_s: float, max_flops: float) -> None:
        self._hold_s, self._max_flops = hold_s, max_flops
        self._queue: deque[_Request] = deque()
        self._queued_flops = 0.0
        self._free_s = -math.inf
        self._filled_s = math.inf  # when the queue became full
        self.turnarounds: deque[float] = deque(maxlen=WINDOW_REQUESTS)
        self.finished = 0

    def arrive(self, now_s: float, flops: float, times: PassTimes) -> None:
        self.advance(now_s, times)
        self._queue.append(_Request(now_s, flops))
        self._queued_flops += flops
        if self._queued_flops >= times.full_flops:
            self._filled_s = min(self._filled_s, now_s)

    def advance(self, now_s: float, times: PassTimes) -> None:
        """Begins, and with it decides the end of, every pass that is due by now."""
        while self._queue:
            due_s = min(self._queue[0].arrived_s + self._hold_s, self._filled_s)
            start_s = max(self._free_s, due_s, self._queue[0].arrived_s)
            if start_s > now_s or (start_s == now_s and self._hold_s == 0.0 and due_s == now_s):
                return  # who comes at the same moment comes along
            self._run(start_s, times)

    def sum_s(self, first: int, last: int) -> float:
        """Turnarounds of requests number first to last - 1 together."""
        kept_from = self.finished - len(self.turnarounds)
        return sum(islice(self.turnarounds, max(0, first - kept_from), max(0, last - kept_from)))

    def _run(self, start_s: float, times: PassTimes) -> None:
        batch = [self._queue.popleft()]
        flops = batch[0].flops
        while self._queue and flops + self._queue[0].flops <= self._max_flops:
            batch.append(self._queue.popleft())
            flops += batch[-1].flops
        self._free_s = start_s + times.pass_s(flops)
        self._queued_flops = sum(request.flops for request in self._queue)
        self._filled_s = start_s if self._queued_flops >= times.full_flops else math.inf
        self.turnarounds.extend(self._free_s - request.arrived_s for request in batch)
        self.finished += len(batch)


class Filling:
    """What a worker asks before it forms a batch. `times` may be set anew as they are measured."""

    def __init__(self, limits: FillLimits, times: PassTimes) -> None:
        self.times = times
        self._limits = limits
        self._now = Replay(0.0, limits.max_flops)
        self._hold = Replay(limits.max_wait_s, limits.max_flops)

    def arrived(self, now_s: float, flops: float) -> None:
        for replay in (self._now, self._hold):
            replay.arrive(now_s, flops, self.times)

    def due_s(self, now_s: float, oldest_s: float, flops: float) -> float:
        """When to run the batch that waits: `flops` in all, its oldest request since oldest_s. At
        most `max_wait_s` after that; not later than now_s means at once."""
        if self._limits.max_wait_s == 0.0 or flops >= self.times.full_flops:
            return now_s
        return oldest_s + self._limits.max_wait_s if self.holds(now_s) else now_s

    def holds(self, now_s: float) -> bool:
        """Whether holding has been the better of the two of late."""
        for replay in (self._now, self._hold):
            replay.advance(now_s, self.times)
        replays = (self._now, self._hold)
        first = max(replay.finished - len(replay.turnarounds) for replay in replays)
        last = min(replay.finished for replay in replays)
        of_now_s, of_hold_s = (replay.sum_s(first, last) for replay in replays)
        return of_hold_s < of_now_s
