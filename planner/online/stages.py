"""Stages whose time depends on one size."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from contracts.planner_messages import MicroBatchReport
from planner.costs.fit import OnlineLinear, fit_linear, fit_nonnegative
from planner.costs.model_shape import ModelShape, count_tokens
from planner.costs.stages import FREE, Linear
from planner.schedule.batch_plan import ChunkTime

COLD_SIZES = 3  # different sizes, and
COLD_SAMPLES = 12  # samples, before a stage without a profile has a model


class SizedStage:
    """A stage whose time depends on one number x; `model` is None while cold."""

    def __init__(self, prior: Linear | None, typical_x: float) -> None:
        self._online = None if prior is None else OnlineLinear(prior, typical_x)
        self._typical_x = typical_x
        self._samples: dict[int, list[tuple[float, float]]] = {}

    def resized(self, per_x: float) -> SizedStage:
        """Return a stage that starts with this one's line, `per_x` times as steep."""
        now = self.model
        line = None if now is None else Linear(now.alpha_ms, now.beta_ms * per_x)
        return SizedStage(line, self._typical_x)

    @property
    def model(self) -> Linear | None:
        return None if self._online is None else self._online.model

    def add(self, x: float, ms: float) -> None:
        if self._online is not None:
            self._online.update(x, ms)
            return
        size = math.floor(4 * math.log2(max(x, 1e-9)))
        self._samples.setdefault(size, []).append((x, ms))
        samples = [sample for of_size in self._samples.values() for sample in of_size]
        if len(self._samples) >= COLD_SIZES and len(samples) >= COLD_SAMPLES:
            self._online = OnlineLinear(fit_linear(samples), self._typical_x)
            self._samples.clear()


_PER_SIZE = 8  # latest samples kept per size
_SIZES_PER_OCTAVE = 4
_SAMPLES_BETWEEN = 32  # from one fit to the next
_MAX_AGE_SAMPLES = 2048  # older samples are dropped
_QUARTER = 0.25


class ExpertTimes(NamedTuple):
    """Times in ms; hit_per_token: the fraction of the experts that one token uses."""

    call_ms: float
    read_ms: float
    token_ms: float
    hit_per_token: float

    def at(self, x: float) -> float:
        """Return the time at x tokens per expert."""
        return self.call_ms + self.read_ms * _hit(x, self.hit_per_token) + self.token_ms * x

    def around(self, x: float) -> Linear:
        """Return a line that is exact at x and x / 4, and an upper bound below."""
        less = _QUARTER * x
        slope = (self.at(x) - self.at(less)) / (x - less)
        return Linear(max(0.0, self.at(x) - slope * x), slope)

    @property
    def of_many(self) -> Linear:
        """The line for calls that use every expert."""
        return Linear(self.call_ms + self.read_ms, self.token_ms)


class ExpertStage:
    """Expert calls: a hardware file's line that is refitted, or learned and cold at first."""

    def __init__(self, shape: ModelShape, prior: Linear | None, typical_x: float) -> None:
        self._shape, self._typical_x = shape, typical_x
        self._hit_per_token = shape.top_k / shape.num_experts
        self._line = None if prior is None else OnlineLinear(prior, typical_x)
        self._times: ExpertTimes | None = None
        self._samples: dict[int, deque[_Sample]] = {}
        self._added = 0

    def resized(self, call: float, token: float) -> ExpertStage:
        """Return a stage with scaled call and token times, until it has times of its own."""
        line = None
        if self._line is not None:
            now = self._line.model
            line = Linear(now.alpha_ms * call, now.beta_ms * token)
        stage = ExpertStage(self._shape, line, self._typical_x)
        if self._times is not None:
            stage._times = self._times._replace(
                call_ms=self._times.call_ms * call,
                read_ms=self._times.read_ms * call,
                token_ms=self._times.token_ms * token,
            )
        return stage

    @property
    def model(self) -> Linear | None:
        """The line for many tokens; None while cold."""
        if self._line is not None:
            return self._line.model
        return None if self._times is None else self._times.of_many

    def around(self, x: float) -> Linear | None:
        """Return the line for a batch of x tokens per expert; None while cold."""
        return self.model if self._times is None else self._times.around(x)

    def add(self, x: float, ms: float) -> None:
        if self._line is not None:
            self._line.update(x, ms)
            return
        self._added += 1
        size = math.floor(_SIZES_PER_OCTAVE * math.log2(max(x, 1e-9)))
        kept = self._samples.setdefault(size, deque(maxlen=_PER_SIZE))
        kept.append(_Sample(self._added, x, ms))
        if self._times is None or self._added % _SAMPLES_BETWEEN == 0:
            self._fit()

    def _fit(self) -> None:
        late = self._added - _MAX_AGE_SAMPLES
        self._samples = {size: kept for size, kept in self._samples.items() if kept[-1].of > late}
        samples = [one for kept in self._samples.values() for one in kept if one.of > late]
        if len(self._samples) < COLD_SIZES or len(samples) < COLD_SAMPLES:
            return
        works_NF = np.array([(1.0, _hit(one.x, self._hit_per_token), one.x) for one in samples])
        fit = fit_nonnegative(works_NF, np.array([one.ms for one in samples]))
        call_ms, read_ms, token_ms = fit.coefficients_F.tolist()
        self._times = ExpertTimes(call_ms, read_ms, token_ms, self._hit_per_token)


class _Sample(NamedTuple):
    of: int  # number of the sample
    x: float
    ms: float


def _hit(x: float, per_token: float) -> float:
    return 1.0 if per_token >= 1 else -math.expm1(x / per_token * math.log1p(-per_token))


_TYPICAL_SEQUENCES, _TYPICAL_TOKENS = 8.0, 64.0
_BOTH_WAYS = 2.0  # each packet has an answer that is added up


class MicroBatchStage:
    """Costs of sending and finishing a micro-batch; zero while there are few samples."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._finish = SizedStage(None, _TYPICAL_SEQUENCES)
        self._send = SizedStage(None, _TYPICAL_TOKENS)

    def carry_over(self, before: MicroBatchStage) -> None:
        """Take over the finish stage, which does not depend on the group's size."""
        self._finish = before._finish

    def add(self, times: MicroBatchReport) -> None:
        if times.finish_ms > 0:
            self._finish.add(len(times.batch), times.finish_ms)
        if times.send_ms > 0:
            self._send.add(count_tokens(times.batch), times.send_ms)

    def launch_ms(self, more: float) -> float:
        """Return the time per micro-batch and layer; more: further expert ranks, relative."""
        finish, send = self._finish.model or FREE, self._send.model or FREE
        return finish.alpha_ms / self._layers + max(0.0, more) * _BOTH_WAYS * send.alpha_ms

    def chunk_time(self, chunk_ms: ChunkTime, more: float) -> ChunkTime:
        """Return `chunk_ms` plus the cost per sequence and token."""
        finish, send = self._finish.model or FREE, self._send.model or FREE
        sequence_ms = finish.beta_ms / self._layers
        token_ms = max(0.0, more) * _BOTH_WAYS * send.beta_ms
        return lambda start, stop: chunk_ms(start, stop) + sequence_ms + token_ms * (stop - start)
