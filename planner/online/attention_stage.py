"""Attention times learned from measured ragged micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from contracts.hardware import AttentionCost
from contracts.planner_messages import MicroBatchReport
from planner.costs.cost_model import attention_ms
from planner.costs.fit import fit_nonnegative
from planner.costs.model_shape import (
    NO_WORK,
    AttentionWork,
    Chunks,
    ModelShape,
    count_tokens,
    layer_mean_work,
)
from planner.costs.online_fit import OnlineLinear
from planner.costs.stages import Linear
from planner.online.buckets import BatchBucket, bucket_of
from planner.online.stages import COLD_SAMPLES, COLD_SIZES
from planner.schedule.batch_plan import ChunkTime

_PER_SIZE = 8  # samples kept per size
_MORE_SIZES = 1.5  # growth in the number of sizes after which a new fit is due
_MAX_SIZES = 256


class _AttentionSample(NamedTuple):
    work: AttentionWork
    ms: float


class AttentionStage:
    """Costs per FLOP and byte, and a line from their prediction to measured times.

    `cost` is None while there are too few samples.
    """

    def __init__(self, shape: ModelShape, cost: AttentionCost | None) -> None:
        self.cost = cost
        self.largest_tokens = 0
        self._shape = shape
        self._learns = cost is None
        self._fitted_sizes = 0
        self._added = 0  # since the last fit
        self._samples: dict[BatchBucket, deque[_AttentionSample]] = {}
        self._correction: OnlineLinear | None = None

    def add(self, times: MicroBatchReport) -> None:
        self.largest_tokens = max(self.largest_tokens, count_tokens(times.batch))
        if self._learns:
            self._learn(times)
        if self.cost is not None:
            base_ms = self._base_ms(self.cost, times.batch)
            if self._correction is None:
                self._correction = OnlineLinear(Linear(0.0, 1.0), base_ms)
            self._correction.update(base_ms, times.attention_ms)

    def launch_ms(self) -> float:
        """Return the time of a micro-batch that does not depend on its content."""
        if self.cost is None:
            return 0.0
        return self._corrected(attention_ms(self.cost, self._shape, NO_WORK))

    def chunk_time(self) -> ChunkTime:
        """Return (start, stop) -> ms of a sequence under the present costs; it caches results."""
        cost, known = self.cost, dict[tuple[int, int], float]()
        slope = 1.0 if self._correction is None else self._correction.model.beta_ms

        def chunk_ms(start: int, stop: int) -> float:
            ms = known.get((start, stop))
            if ms is None:
                ms = 0.0
                if cost is not None:
                    ms = slope * self._base_ms(cost, [(start, stop)])
                    ms -= slope * attention_ms(cost, self._shape, NO_WORK)
                known[start, stop] = ms
            return ms

        return chunk_ms

    def _corrected(self, base_ms: float) -> float:
        return base_ms if self._correction is None else self._correction.model.at(base_ms)

    def _base_ms(self, cost: AttentionCost, batch: Chunks) -> float:
        return attention_ms(cost, self._shape, self._work(batch))

    def _work(self, batch: Chunks) -> AttentionWork:
        work = NO_WORK
        for start, stop in batch:
            work = work.plus(layer_mean_work(self._shape, start, stop))
        return work

    def _learn(self, times: MicroBatchReport) -> None:
        """Keep some times of each size and fit when due.

        A fit is due after enough new sizes, or after enough samples if the last fit failed.
        """
        bucket = bucket_of(times.batch)
        if bucket not in self._samples and len(self._samples) == _MAX_SIZES:
            self._samples.pop(next(iter(self._samples)))
        samples = self._samples.setdefault(bucket, deque(maxlen=_PER_SIZE))
        samples.append(_AttentionSample(self._work(times.batch), times.attention_ms))
        sizes, count = len(self._samples), sum(map(len, self._samples.values()))
        self._added += 1
        again = self.cost is None and self._added >= COLD_SAMPLES
        due = again or sizes >= _MORE_SIZES * self._fitted_sizes
        if due and sizes >= COLD_SIZES and count >= COLD_SAMPLES:
            self._fitted_sizes, self._added = sizes, 0
            self._fit([sample for kept in self._samples.values() for sample in kept])

    def _fit(self, samples: Sequence[_AttentionSample]) -> None:
        # Without calls: traffic need not distinguish them from sequences.
        works_NF = np.array([(1.0, *sample.work[:4]) for sample in samples])
        fit = fit_nonnegative(works_NF, np.array([sample.ms for sample in samples]))
        call, sequence, linear, attended, context = fit.coefficients_F.tolist()
        if linear > 0:  # else all batches were too small
            self._correction = None
            self.cost = AttentionCost(
                call_ms=call,
                sequence_ms=sequence,
                linear_ms_per_flop=linear,
                attended_ms_per_flop=attended,
                context_ms_per_byte=context,
            )
