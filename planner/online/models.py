"""Stage models of a running group, from a hardware file or learned, then refitted.

Without a hardware file a stage is *cold* until it has times of several sizes, and plans are made
only for batches not much larger than measured ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from contracts.hardware import AttentionCost, Hardware
from contracts.planner_messages import BatchReport, ExpertReport, MicroBatchReport, RowsTime
from planner.costs.cost_model import (
    Deployment,
    attention_ms,
    resize_factors,
    resized,
    stage_models,
    tokens_per_expert,
)
from planner.costs.fit import LEAST_MS, OnlineLinear, fit_nonnegative
from planner.costs.model_shape import (
    NO_WORK,
    AttentionWork,
    Chunks,
    ModelShape,
    count_tokens,
    layer_mean_work,
)
from planner.costs.routing_shape import Spread, uniform_spread
from planner.costs.stages import Linear, PlanSpec, StageModels
from planner.online.stages import COLD_SAMPLES, COLD_SIZES, ExpertStage, MicroBatchStage, SizedStage
from planner.schedule.batch_plan import BatchBucket, ChunkTime, bucket_of

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
        base_ms = attention_ms(self.cost, self._shape, NO_WORK)
        return base_ms if self._correction is None else self._correction.model.at(base_ms)

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


MAX_TOKEN_GROUPS = 16
EXTRAPOLATION = 4.0  # largest planned batch over the largest measured one
TYPICAL_TOKENS = 256  # size around which a hardware file's line has weight


class OnlineSetup(NamedTuple):
    """Setup of a planner.

    hardware: None: learned from measurements. refit: refit a hardware file's figures. beyond:
    include plans beyond the paper.
    """

    shape: ModelShape
    attention_ranks: int
    expert_ranks: int
    max_batch_tokens: int
    backend: str
    hardware: Hardware | None = None
    beyond: bool = True
    refit: bool = True


class OnlineModels:
    """All stages of one layer. A sample of the spec is one token, as for `plan_batch`."""

    def __init__(self, setup: OnlineSetup) -> None:
        """Create the models. Raises ConfigError if the hardware lacks figures for the split."""
        shape = setup.shape
        self._setup = setup
        self._tokens_per_expert = tokens_per_expert(shape, _one_token(setup))
        self._uniform = uniform_spread(shape, setup.expert_ranks)
        self._spread = self._uniform
        # rows of a packet -> tokens per expert of one attention rank, for uniform routing
        self._me_per_row = shape.top_k / shape.num_experts / self._uniform.mean.rows
        typical_tokens = min(TYPICAL_TOKENS, setup.max_batch_tokens)
        typical_me = typical_tokens * self._tokens_per_expert
        hardware = setup.hardware
        prior = None if hardware is None else _prior(setup, hardware)
        self.attention = AttentionStage(shape, None if hardware is None else hardware.attention)
        self._beside = MicroBatchStage(shape.moe_layers)
        self._shared = SizedStage(prior.shared if prior else None, typical_tokens)
        self._expert = ExpertStage(shape, prior.expert if prior else None, typical_me)
        self._a2e = SizedStage(prior.a2e if prior else None, typical_me)
        self._e2a = SizedStage(prior.e2a if prior else None, typical_me)

    def carry_over(self, before: OnlineModels) -> None:
        """Take over measurements of a group of another size.

        Attention, the shared expert and the end of a sequence belong to one rank and are shared
        with `before`. Experts and links start from its models scaled by `resize_factors`.
        """
        self.attention, self._shared = before.attention, before._shared
        self._beside.carry_over(before._beside)
        by = resize_factors(self._setup.shape, _one_token(before._setup), _one_token(self._setup))
        self._expert = before._expert.resized(by.call, by.token)
        self._a2e, self._e2a = before._a2e.resized(by.a2e), before._e2a.resized(by.e2a)

    def spread_over(self, spread: Spread) -> None:
        """Set how tokens spread over the expert ranks.

        Stages are learned by rows and pairs and stay valid; only the rows and pairs of a batch
        change.
        """
        self._spread = spread

    def unit_ms(self) -> tuple[float, float] | None:
        """Return the times of a (token, expert) pair and of a token's copy on all links.

        None while a stage is cold.
        """
        expert, a2e, e2a = self._expert.model, self._a2e.model, self._e2a.model
        if expert is None or a2e is None or e2a is None:
            return None
        tokens = (
            1 / self._tokens_per_expert * self._setup.attention_ranks
        )  # of all ranks for me = 1
        link_ms = max(a2e.beta_ms, e2a.beta_ms)
        return expert.beta_ms / self._uniform.mean.pairs, link_ms / tokens / self._uniform.copies

    @property
    def cold_stages(self) -> list[str]:
        """Names of the stages without a model."""
        sized: dict[str, SizedStage | ExpertStage] = {
            "expert": self._expert,
            "a2e": self._a2e,
            "e2a": self._e2a,
        }
        if self._setup.shape.num_shared_experts:
            sized["shared"] = self._shared
        cold = [name for name, stage in sized.items() if stage.model is None]
        return ["attention", *cold] if self.attention.cost is None else cold

    def most_tokens(self) -> float:
        """Return the largest batch that the models can predict."""
        if self._setup.hardware is not None:
            return math.inf
        return EXTRAPOLATION * self.attention.largest_tokens

    def add_batch(self, report: BatchReport) -> None:
        """Add an attention rank's times."""
        for times in report.micro_batches:
            self.attention.add(times)
            self._beside.add(times)
            if times.shared_ms > 0:
                self._shared.add(count_tokens(times.batch), times.shared_ms)
        self._add(self._e2a, report.e2a, self._setup.attention_ranks)

    def add_experts(self, report: ExpertReport) -> None:
        """Add an expert rank's times."""
        mean, uniform = self._spread.mean, self._uniform.mean
        pairs_of_rows = mean.pairs / mean.rows / (uniform.pairs / uniform.rows)
        self._add(self._expert, report.experts, pairs_of_rows)
        self._add(self._a2e, report.a2e, self._setup.attention_ranks)

    def spec(self, tokens: float | None = None) -> PlanSpec | None:
        """Return the present planning problem; None while a stage is cold.

        tokens: of a batch (None: enough for every expert).
        """
        expert, a2e, e2a = self._expert.model, self._a2e.model, self._e2a.model
        if tokens is not None:
            expert = self._expert.around(tokens * self._tokens_per_expert)
        if self.cold_stages or expert is None or a2e is None or e2a is None:
            return None
        setup, busiest, uniform = self._setup, self._spread.busiest, self._uniform.mean
        by_pairs, by_rows = busiest.pairs / uniform.pairs, busiest.rows / uniform.rows
        launch = Linear(self.attention.launch_ms() + self._beside.launch_ms(0.0), 0.0)
        return PlanSpec(
            stages=StageModels(
                attention=launch if not launch.is_free else Linear(LEAST_MS, 0.0),
                expert=_steeper(expert, by_pairs) if not expert.is_free else Linear(LEAST_MS, 0.0),
                a2e=_steeper(a2e, by_rows),
                e2a=_steeper(e2a, by_rows),
                shared=self._shared.model,
            ),
            tokens_per_expert_per_sample=self._tokens_per_expert,
            num_layers=setup.shape.moe_layers,
            max_samples=setup.max_batch_tokens,
            max_r2=MAX_TOKEN_GROUPS,
            has_shared=setup.shape.num_shared_experts > 0,
        )

    def chunk_time(self, expert_ranks: int | None = None) -> ChunkTime:
        """Return (start, stop) -> ms of a sequence per layer of a micro-batch.

        expert_ranks: of a group of another size.
        """
        return self._beside.chunk_time(self.attention.chunk_time(), self._more(expert_ranks))

    def _more(self, expert_ranks: int | None) -> float:
        return 0.0 if expert_ranks is None else expert_ranks / self._setup.expert_ranks - 1

    def spec_of(
        self, attention_ranks: int, expert_ranks: int, tokens: float | None = None
    ) -> PlanSpec | None:
        """Return the spec of a group of another size.

        None while a stage is cold or with more expert ranks than experts. tokens: of a batch of one
        attention rank. Each attention rank's packets count as separate calls: independent batches
        rarely wait for the same layer at the same time.
        """
        of_each = None if tokens is None else tokens / self._setup.attention_ranks
        spec = self.spec(of_each)
        shape = self._setup.shape
        if spec is None or not 1 <= expert_ranks <= shape.num_experts or attention_ranks < 1:
            return None
        then = Deployment(
            attention_ranks=attention_ranks, expert_ranks=expert_ranks, sequence_tokens=1
        )
        tokens = tokens_per_expert(shape, then)
        if tokens * spec.max_samples < 1:  # less than a token per expert in any batch
            return None
        stages = resized(spec.stages, shape, _one_token(self._setup), then)
        launch_ms = self.attention.launch_ms() + self._beside.launch_ms(self._more(expert_ranks))
        return msgspec.structs.replace(
            spec,
            stages=msgspec.structs.replace(
                stages,
                attention=Linear(max(launch_ms, LEAST_MS), 0.0),
                expert=Linear(attention_ranks * stages.expert.alpha_ms, stages.expert.beta_ms),
            ),
            tokens_per_expert_per_sample=tokens,
        )

    def _add(
        self, stage: SizedStage | ExpertStage, times: Iterable[RowsTime], senders: float
    ) -> None:
        """Add times; x of a link counts all senders, that of an expert call its own pairs."""
        for time in times:
            stage.add(time.rows * self._me_per_row * senders, time.ms)


def _steeper(model: Linear, factor: float) -> Linear:
    return model if factor == 1.0 else Linear(model.alpha_ms, model.beta_ms * factor)


def _prior(setup: OnlineSetup, hardware: Hardware) -> StageModels:
    """Return the stages for the backend in use, or for the file's first one."""
    known = {link.backend for link in hardware.links}
    backend = setup.backend if setup.backend in known else None
    return stage_models(setup.shape, hardware, _one_token(setup), backend)


def _one_token(setup: OnlineSetup) -> Deployment:
    return Deployment(
        attention_ranks=setup.attention_ranks, expert_ranks=setup.expert_ranks, sequence_tokens=1
    )
