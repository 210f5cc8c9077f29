"""A simulated group with the stage times of a hardware file, with noise."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from contracts.hardware import AttentionCost, ExpertCost, Hardware, LinkCost, SharedCost
from contracts.plan import Plan
from contracts.planner_messages import BatchReport, ExpertReport, MicroBatchReport, RowsTime
from planner.costs.cost_model import Deployment, attention_ms, stage_models, tokens_per_expert
from planner.costs.model_shape import ModelShape, hit_fraction, layer_mean_batch
from planner.costs.stages import Linear, PlanSpec
from planner.online.models import OnlineSetup
from planner.schedule.recurrence import makespan_ms
from planner.schedule.schedule import Piece, schedule_of_pieces

Chunks = list[tuple[int, int]]


def hardware(slower: float = 1.0) -> Hardware:
    """Return a machine on which launches, products and links all matter."""
    return Hardware(
        version=1,
        name="simulated",
        kind="public figures",
        source="made up for tests",
        device="simulated",
        memory_bytes=1 << 40,
        attention=AttentionCost(
            call_ms=0.3 * slower,
            sequence_ms=0.01 * slower,
            linear_ms_per_flop=2e-9 * slower,
            attended_ms_per_flop=3e-9 * slower,
            context_ms_per_byte=1e-7 * slower,
        ),
        shared=SharedCost(call_ms=0.1, ms_per_flop=2e-9),
        expert=ExpertCost(call_ms=0.1, expert_ms=0.02, ms_per_flop=2e-9),
        links=[LinkCost(backend="shm", direction="both", alpha_ms=0.05, ms_per_byte=2e-6)],
    )


def setup_of(shape: ModelShape, known: Hardware | None, **fields: Any) -> OnlineSetup:
    setup = OnlineSetup(
        shape=shape,
        attention_ranks=1,
        expert_ranks=2,
        max_batch_tokens=8192,
        backend="shm",
        hardware=known,
    )
    return setup._replace(**fields)


class SimulatedGroup:
    """Multiplies every time by a random factor from 1 to 1 + `noise`."""

    def __init__(self, setup: OnlineSetup, machine: Hardware, *, noise: float, seed: int) -> None:
        self.setup = setup
        self.machine = machine
        self.noise = noise
        self.random = random.Random(seed)
        deployment = Deployment(
            attention_ranks=setup.attention_ranks,
            expert_ranks=setup.expert_ranks,
            sequence_tokens=1,
        )
        shape, cost = setup.shape, machine.attention
        launch = Linear(cost.call_ms + shape.projections * cost.projection_ms, 0.0)
        stages = stage_models(shape, machine, deployment)
        self.spec = PlanSpec(  # one token per sample
            stages=msgspec.structs.replace(stages, attention=launch),
            tokens_per_expert_per_sample=tokens_per_expert(shape, deployment),
            num_layers=shape.moe_layers,
            max_samples=setup.max_batch_tokens,
            max_r2=16,
            has_shared=shape.num_shared_experts > 0,
        )
        self._rows = hit_fraction(shape, shape.experts_per_rank(setup.expert_ranks))

    def run(
        self, micro_batches: Sequence[Chunks], plan: Plan | None = None, wild: float = 1.0
    ) -> tuple[BatchReport, ExpertReport]:
        """Return the reports of one batch. wild: factor of its attention times."""
        plan = plan or Plan(r1=len(micro_batches))
        times = [
            MicroBatchReport(
                batch, wild * self._noisy(self._attention_ms(batch)), self._shared(batch)
            )
            for batch in micro_batches
        ]
        stages, sent, called = self.spec.stages, [], []
        for batch in micro_batches:
            tokens = max(1, _tokens(batch) // plan.r2)
            rows = max(1, round(tokens * self._rows))
            me = self.spec.me(tokens, 1)
            sent.append(RowsTime(rows, self._noisy(stages.e2a.at(me))))
            merged = rows * self.setup.attention_ranks  # in one call of experts
            called.append(RowsTime(merged, self._noisy(stages.expert.at(me))))
        report = BatchReport(
            rank="attention-0",
            plan=plan,
            measured_ms=self._noisy(self.makespan_ms(micro_batches, plan)),
            micro_batches=times,
            e2a=sent,
        )
        return report, ExpertReport(rank="expert-0", experts=called, a2e=sent)

    def makespan_ms(self, micro_batches: Sequence[Chunks], plan: Plan) -> float:
        """Return the time without noise, plus half a millisecond of overhead."""
        pieces = [
            Piece(self._attention_ms(b), self.spec.shared.at(_tokens(b)), _tokens(b))
            for b in micro_batches
        ]
        return 0.5 + makespan_ms(schedule_of_pieces(self.spec, plan, pieces))

    def chunk_ms(self, start: int, stop: int) -> float:
        """Return the attention time that a sequence adds."""
        return self._attention_ms([(start, stop)]) - self.spec.stages.attention.alpha_ms

    def _attention_ms(self, batch: Chunks) -> float:
        work = layer_mean_batch(self.setup.shape, batch)
        return attention_ms(self.machine.attention, self.setup.shape, work)

    def _shared(self, batch: Chunks) -> float:
        shared = self.spec.stages.shared
        return 0.0 if shared is None else self._noisy(shared.at(_tokens(batch)))

    def _noisy(self, ms: float) -> float:
        return ms * (1 + self.random.uniform(0, self.noise))


def _tokens(batch: Chunks) -> int:
    return sum(stop - start for start, stop in batch)
