"""Choice of the workers that compute a batch, from measured times and moved volumes.

Volume that one layer of a batch moves between workers, by scheme:

                     before experts   experts      after   rows per token
    all_reduce       all-reduce       A2A, A2A     AG      3 (D - 1) + 2 u    the paper's baseline
    reduce_scatter   reduce-scatter   A2A, A2A     AG      2 (D - 1) + 2 u
    shuffled         the same, and tokens land where their experts are predicted: u is smaller
    tensor_parallel  all-reduce       all-reduce   -       4 (D - 1)
    data_parallel    -                A2A, A2A     -       2 u                deduplicated DP+EP

Rows have the model's dimension and are counted over all D workers together, which have equal shards
of the tokens. u: other workers that a token is sent to, once each; without deduplication
K (1 - local activation rate), as the paper has it. Speculative MoE, Section 3.2, reconstructed.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from planner.scheduling.task_order import TaskTimes

LONGEST_BUSY_S = 60.0
_LEAST_TOKENS, _NEWEST = 64, 0.3
_RETRIED_AFTER = 64  # batches of a size that one worker computes sooner
_KEPT = 0.95  # of the weight of earlier idle times, at each new one
_LONGEST_IDLE_S, _FIRST_IDLE_S = 2.0, 1.0  # the most that counts; assumed before any was seen
COLLECTIVES, COLLECTIVE_S, BYTES_PER_S = 4, 2e-4, 1e9  # assumed before a pass was measured


class ExchangeScheme(enum.StrEnum):
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    SHUFFLED = "shuffled"
    TENSOR_PARALLEL = "tensor_parallel"
    DATA_PARALLEL = "data_parallel"


_COLLECTIVE_ROWS = {  # in D - 1 rows per token
    ExchangeScheme.ALL_REDUCE: 3,
    ExchangeScheme.REDUCE_SCATTER: 2,
    ExchangeScheme.SHUFFLED: 2,
    ExchangeScheme.TENSOR_PARALLEL: 4,
    ExchangeScheme.DATA_PARALLEL: 0,
}


def served_scheme(nodes: Sequence[int]) -> ExchangeScheme:
    """Return the scheme for workers on these nodes.

    Inside a node the rows that shuffling saves cost less than their prediction.
    """
    return ExchangeScheme.SHUFFLED if len(set(nodes)) > 1 else ExchangeScheme.REDUCE_SCATTER


def moved_rows(scheme: ExchangeScheme, workers: int, remote_copies: float) -> float:
    """Return the rows per token. remote_copies: u."""
    exchanged = 0.0 if scheme is ExchangeScheme.TENSOR_PARALLEL else 2 * remote_copies
    return _COLLECTIVE_ROWS[scheme] * (workers - 1) + exchanged


class BatchWork(NamedTuple):
    """A batch: its new tokens, the FLOPs and the number of layers. row_bytes: of a token."""

    tokens: int
    flops: int
    layers: int
    row_bytes: int


class BatchChoice:
    """Measured rates, and what a batch is expected to gain if all workers compute it.

    Times are averaged per FLOP, for batches of similar size.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._flops_per_s = workers, 0.0
        self._times = TaskTimes()
        self._refused: Counter[int] = Counter()
        self._unmeasured = {"alone", "shared"}

    def alone_s(self, batch: BatchWork, copy_s: float) -> float:
        """Return the expected seconds on one worker; 0 before a batch was measured.

        A layer takes no less than the copy of the next one's experts, copy_s; 0: all are resident.
        """
        if not self._flops_per_s or not batch.layers:
            return 0.0
        compute_s = batch.flops / self._flops_per_s
        modelled_s = compute_s / batch.layers + (batch.layers - 1) * copy_s
        return self._measured_s("alone", batch) or max(compute_s, modelled_s)

    def gain_s(
        self, batch: BatchWork, copy_s: float, mean_row: float, leaves_per_s: float = 0.0
    ) -> float:
        """Return the expected gain; not positive before a batch was measured alone.

        mean_row: time of a row over a link, in times of one inside a node. leaves_per_s: rate at
        which others leave a batch, whose layer is then computed again.
        """
        if not self._flops_per_s:
            return 0.0
        alone_s, shared_s = self.alone_s(batch, copy_s), self._measured_s("shared", batch)
        shared_s = shared_s or self._modelled_s(batch, mean_row)
        layer_s = shared_s / batch.layers
        stay = math.exp(-leaves_per_s * layer_s)
        layers = (1 - stay**batch.layers) / (1 - stay) if stay < 1 else batch.layers
        lost_s = layer_s / 2 + copy_s  # the next experts are not copied yet
        return layers * (stay * (alone_s - shared_s) / batch.layers - (1 - stay) * lost_s)

    def _measured_s(self, kind: str, batch: BatchWork) -> float:
        """Return the seconds of batches of this size; 0: not measured yet."""
        return self._times.predict(kind, batch.tokens) * batch.flops

    def _modelled_s(self, batch: BatchWork, mean_row: float) -> float:
        """Return the seconds on all workers.

        Computing time is divided and rows travel, at most those of tokens that all have experts
        elsewhere.
        """
        workers = self._workers
        rows = moved_rows(ExchangeScheme.SHUFFLED, workers, workers - 1)
        rows = rows * batch.tokens * batch.layers
        moved_s = rows * batch.row_bytes * mean_row / workers / BYTES_PER_S
        moved_s += COLLECTIVES * COLLECTIVE_S * batch.layers
        return batch.flops / self._flops_per_s / workers + moved_s

    def _forget(self, batch: BatchWork) -> None:
        """Forget a time of all workers that has kept batches from them for long."""
        size = batch.tokens.bit_length()
        self._refused[size] += 1
        if self._refused[size] == _RETRIED_AFTER:
            self._refused[size] = 0
            self._times.forget("shared", batch.tokens)

    def alone(self, batch: BatchWork, seconds: float) -> None:
        """Note the time of a batch on one worker. Rates are those of large batches."""
        if self._is_first("alone"):
            return
        self._times.add("alone", batch.tokens, seconds / batch.flops)
        if self._measured_s("shared", batch) >= self._measured_s("alone", batch):
            self._forget(batch)
        if batch.tokens >= _LEAST_TOKENS:
            rate = batch.flops / seconds
            known = self._flops_per_s or rate
            self._flops_per_s = known + _NEWEST * (rate - known)

    def shared(self, batch: BatchWork, seconds: float) -> None:
        """Note the time of a batch on all workers."""
        if not self._is_first("shared"):
            self._times.add("shared", batch.tokens, seconds / batch.flops)

    def _is_first(self, kind: str) -> bool:
        """Return True once for each kind: the first batch allocates memory and is not measured."""
        is_first = kind in self._unmeasured
        self._unmeasured.discard(kind)
        return is_first


def finishes_layer(rest_s: float, own_s: float, layer_s: float, batch_s: float) -> bool:
    """Return whether a worker with requests of its own finishes a layer of a shared batch first.

    If it leaves in the layer, the leader computes that again alone, in layer_s; else requests wait
    for the rest. Both losses are compared relative to what they delay, own_s and batch_s alone.
    """
    return rest_s * batch_s < (layer_s - rest_s) * own_s


class BusyWorkers:
    """Other workers that compute alone, by their own announcements or by what is known of them."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}
        self._idle_times = self._idle_s = 0.0  # newer ones count more

    def note(self, worker: str, seconds: float, now_s: float) -> None:
        """Note that a worker is busy for some time, of which LONGEST_BUSY_S count; 0: idle."""
        self._until_s[worker] = now_s + min(LONGEST_BUSY_S, seconds)  # the longest for NaN
        if seconds == 0.0:
            self._idle_since_s.setdefault(worker, now_s)
        elif (since_s := self._idle_since_s.pop(worker, None)) is not None:
            self._idle_times = 1.0 + _KEPT * self._idle_times
            self._idle_s = min(_LONGEST_IDLE_S, now_s - since_s) + _KEPT * self._idle_s

    def leaves_per_s(self, now_s: float) -> float:
        """Return the rate at which an idle worker gets requests, times the workers; 0: unknown."""
        since = self._idle_since_s.values()
        idle_s = self._idle_s + sum(now_s - each for each in since)
        return len(self._until_s) * self._idle_times / (_FIRST_IDLE_S + idle_s)

    @property
    def until_s(self) -> float:
        """Return when none is expected to be busy."""
        return max(self._until_s.values(), default=0.0)
