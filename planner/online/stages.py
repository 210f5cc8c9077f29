"""A stage whose time is a line of one size."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from contracts.planner_messages import MicroBatchReport
from planner.costs.fit import fit_linear, fit_nonnegative
from planner.costs.model_shape import ModelShape, count_tokens
from planner.costs.online_fit import OnlineLinear
from planner.costs.stages import FREE, Linear
from planner.schedule.batch_plan import ChunkTime

COLD_SIZES = 3  # of different size, and
COLD_SAMPLES = 12  # times in all, before a stage that nobody has profiled has a model


class SizedStage:
    """A stage whose time depends on one number x. `model` None: cold."""

    def __init__(self, prior: Linear | None, typical_x: float) -> None:
        self._online = None if prior is None else OnlineLinear(prior, typical_x)
        self._typical_x = typical_x
        self._samples: dict[int, list[tuple[float, float]]] = {}

    def resized(self, per_x: float) -> SizedStage:
        """One that begins with this one's line, so many times as steep. Of a cold one: cold."""
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
            self._online = OnlineLinear(fit_linear(samples).model, self._typical_x)
            self._samples.clear()


_PER_SIZE = 8  # times that are kept of each size, the latest
_SIZES_PER_OCTAVE = 4
_SAMPLES_BETWEEN = 32  # from one fit to the next
_MAX_AGE_SAMPLES = 2048  # samples ago: an older one is of another machine
_QUARTER = 0.25


class ExpertTimes(NamedTuple):
    """In ms. hit_per_token: the part of the experts that one token wants."""

    call_ms: float
    read_ms: float
    token_ms: float
    hit_per_token: float

    def at(self, x: float) -> float:
        """x: tokens per expert."""
        return self.call_ms + self.read_ms * _hit(x, self.hit_per_token) + self.token_ms * x

    def around(self, x: float) -> Linear:
        """Exact at x and at a quarter of it, dear below."""
        less = _QUARTER * x
        slope = (self.at(x) - self.at(less)) / (x - less)
        return Linear(max(0.0, self.at(x) - slope * x), slope)

    @property
    def of_many(self) -> Linear:
        """Of calls that want every expert."""
        return Linear(self.call_ms + self.read_ms, self.token_ms)


class ExpertStage:
    """`prior`: of a hardware file, a line that is then followed; None: learned, and cold at
    first."""

    def __init__(self, shape: ModelShape, prior: Linear | None, typical_x: float) -> None:
        self._shape, self._typical_x = shape, typical_x
        self._hit_per_token = shape.top_k / shape.num_experts
        self._line = None if prior is None else OnlineLinear(prior, typical_x)
        self._times: ExpertTimes | None = None
        self._samples: dict[int, deque[_Sample]] = {}
        self._added = 0

    def resized(self, call: float, token: float) -> ExpertStage:
        """Of ranks whose calls start, and whose tokens take, so many times as long: as if it had
        learned that, until it has times of its own. Of a cold one: cold."""
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
        """Of many tokens. None: cold."""
        if self._line is not None:
            return self._line.model
        return None if self._times is None else self._times.of_many

    def around(self, x: float) -> Linear | None:
        """For token groups of a batch that brings x tokens to each expert. None: cold."""
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
    of: int  # how many had been added with it
    x: float
    ms: float


def _hit(x: float, per_token: float) -> float:
    return 1.0 if per_token >= 1 else -math.expm1(x / per_token * math.log1p(-per_token))


_TYPICAL_SEQUENCES, _TYPICAL_TOKENS = 8.0, 64.0
_BOTH_WAYS = 2.0  # an answer is added up for each packet that is cut out


class MicroBatchStage:
    """Nothing of it while there are few times yet."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._finish = SizedStage(None, _TYPICAL_SEQUENCES)
        self._send = SizedStage(None, _TYPICAL_TOKENS)

    def carry_over(self, before: MicroBatchStage) -> None:
        """From a group of another size: what ends a sequence is a rank's own."""
        self._finish = before._finish

    def add(self, times: MicroBatchReport) -> None:
        if times.finish_ms > 0:
            self._finish.add(len(times.batch), times.finish_ms)
        if times.send_ms > 0:
            self._send.add(count_tokens(times.batch), times.send_ms)

    def launch_ms(self, more: float) -> float:
        """Of a micro-batch, in each layer. more: further expert ranks, as a part of those that the
        times are of."""
        finish, send = self._finish.model or FREE, self._send.model or FREE
        return finish.alpha_ms / self._layers + max(0.0, more) * _BOTH_WAYS * send.alpha_ms

    def chunk_time(self, chunk_ms: ChunkTime, more: float) -> ChunkTime:
        """With what a sequence adds here."""
        finish, send = self._finish.model or FREE, self._send.model or FREE
        sequence_ms = finish.beta_ms / self._layers
        token_ms = max(0.0, more) * _BOTH_WAYS * send.beta_ms
        return lambda start, stop: chunk_ms(start, stop) + sequence_ms + token_ms * (stop - start)
