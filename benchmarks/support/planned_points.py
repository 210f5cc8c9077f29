"""Points of benchmarks/cases/planned_overlap.py: on each, the solver's plans, what they should
take, and what they took; and their tables."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.harness import Table
from benchmarks.support.pinned_batches import BatchRunner
from benchmarks.support.plan_prediction import Costs, Predictor, fit_costs, plan_spec
from benchmarks.support.stage_times import Samples, StageSample, makespan_ms, stage_samples
from contracts.plan import Plan
from contracts.traces import TaskSpan
from planner.costs.model_shape import ModelShape
from planner.schedule.extended_plans import equal_ends, solve_extended
from planner.schedule.schedule import Replay
from planner.schedule.solver import PlannedBatch, solve
from tests.support.spans import exposed_communication

CALIBRATION_ROUNDS = 2
# Alone and beside each other, whole prompts and chunks, several sizes: what any plan is made of.
CALIBRATION = (
    (Samples(1, 256), Plan(ma=1)),
    (Samples(1, 1024), Plan(ma=1)),
    (Samples(1, 2048), Plan(ma=1)),
    (Samples(1, 1024), Plan(ma=1, r2=4)),
    (Samples(8, 128), Plan(ma=2, r1=4)),
    (Samples(8, 512), Plan(ma=2, r1=4)),
    (Samples(8, 512), Plan(ma=8, r1=4, sequence_chunks=equal_ends(4))),
    (Samples(1, 1024), Plan(ma=1, r1=4, sequence_chunks=equal_ends(4))),
    (Samples(1, 4096), Plan(ma=1, r1=4, r2=2, sequence_chunks=equal_ends(4))),
)


class Point(msgspec.Struct, frozen=True):
    """model: a name of MODELS. At most max_samples samples of `tokens` tokens are in flight."""

    model: str
    megabits_per_s: int
    tokens: int
    max_samples: int

    @property
    def label(self) -> str:
        return (
            f"{self.model}, S {self.tokens}, at most {self.max_samples}, "
            f"{self.megabits_per_s} Mbit/s"
        )


class PlanRun(msgspec.Struct):
    """One plan at one point. Lists: an entry per round."""

    plan: Plan
    samples: int
    planned_ms: float
    predicted_ms: float
    predicted_exposed_ms: float
    measured_ms: list[float] = []
    exposed_ms: list[float] = []

    @property
    def median_ms(self) -> float:
        return statistics.median(self.measured_ms)

    @property
    def error_fraction(self) -> float:
        return self.predicted_ms / self.median_ms - 1


class PointRun(msgspec.Struct):
    """By plan name. largest_difference: between the logits of any two plans for the same tokens."""

    point: Point
    plans: dict[str, PlanRun]
    largest_difference: float
    largest_logit: float


class Pictured(NamedTuple):
    """A plan as predicted and as it ran."""

    plan: Plan
    predicted: Replay
    spans: list[TaskSpan]


class PointRunner:
    """Runs points on one group, whose model has `shape`, over a link as it is now."""

    def __init__(self, runner: BatchRunner, shape: ModelShape) -> None:
        self._runner = runner
        self._shape = shape
        self._seed = 0

    async def calibrate(self) -> Costs:
        """Stage times of the ranks and of the link, from batches of known tasks."""
        measured: list[StageSample] = []
        await self._runner.run(CALIBRATION[-1][1], self._rows(CALIBRATION[-1][0]))  # warms up
        for _ in range(CALIBRATION_ROUNDS):
            for samples, plan in CALIBRATION:
                spans = (await self._runner.run(plan, self._rows(samples))).spans
                measured += stage_samples(spans, plan, samples)
        return fit_costs(self._shape, measured)

    async def run(
        self, point: Point, costs: Costs, rounds: int, pictured: str
    ) -> tuple[PointRun, Pictured]:
        """Plans in turn, round by round; and the plan named `pictured`, of the round whose makespan
        was the median. The first round warms up."""
        predictor = Predictor(self._shape, costs)
        done = PointRun(point, _plan(predictor, point), 0.0, 0.0)
        shown = done.plans[pictured]
        rounds_spans: list[list[TaskSpan]] = []
        for number in range(rounds + 1):
            self._seed += 1
            spans = await self._round(done)
            if number == 0:
                continue
            for name, run in done.plans.items():
                run.measured_ms.append(makespan_ms(spans[name]))
                run.exposed_ms.append(1e3 * exposed_communication(spans[name]))
            rounds_spans.append(spans[pictured])
        middle = sorted(range(rounds), key=shown.measured_ms.__getitem__)[rounds // 2]
        predicted = predictor.replay(shown.plan, _batch(point, shown))
        return done, Pictured(shown.plan, predicted, rounds_spans[middle])

    async def _round(self, done: PointRun) -> dict[str, list[TaskSpan]]:
        """Every plan once, on the same tokens: spans by plan. Notes how far logits are apart."""
        spans, first = {}, None
        for name, run in done.plans.items():
            ran = await self._runner.run(run.plan, self._rows(_batch(done.point, run)))
            logits = torch.tensor(ran.logits)
            first = logits if first is None else first
            shared = min(len(first), len(logits))  # rows that both plans have
            apart = float((first[:shared] - logits[:shared]).abs().max())
            done.largest_difference = max(done.largest_difference, apart)
            done.largest_logit = max(done.largest_logit, float(logits.abs().max()))
            spans[name] = ran.spans
        return spans

    def _rows(self, samples: Samples) -> list[list[int]]:
        """Random tokens, the same for all plans of a round."""
        generator = torch.Generator().manual_seed(self._seed)
        size = (samples.sequences, samples.tokens)
        rows: list[list[int]] = torch.randint(
            1, self._shape.vocab_size, size, generator=generator
        ).tolist()
        return rows


def _batch(point: Point, run: PlanRun) -> Samples:
    return Samples(run.samples, point.tokens)


def _plan(predictor: Predictor, point: Point) -> dict[str, PlanRun]:
    """The best plan of each kind, and what it should take. Naive is left out where it is PPPipe's
    best."""
    spec = plan_spec(predictor.shape, predictor.costs, point.tokens, point.max_samples)
    solution = solve(spec)
    planned: dict[str, PlannedBatch] = {
        "naive": solution.naive,
        "pppipe": solution.pppipe,
        "findep": solution.best,
        "beyond": solve_extended(spec),
    }
    if solution.pppipe.plan.r1 == 1:
        del planned["naive"]
    runs = {}
    for name, batch in planned.items():
        timeline = predictor.replay(batch.plan, Samples(batch.samples, point.tokens))
        runs[name] = PlanRun(
            plan=batch.plan,
            samples=batch.samples,
            planned_ms=batch.makespan_ms,
            predicted_ms=timeline.makespan_ms,
            predicted_exposed_ms=1e3 * exposed_communication(timeline.spans),
        )
    return runs


SCHEDULES = ("pppipe", "findep", "beyond")


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = []
    for label, plans in summary["points"].items():
        shown = [plans[name] for name in SCHEDULES]
        speeds = [f"{plan['speed_over_pppipe']:.2f}" for plan in shown[1:]]
        largest = max(abs(plan["error_fraction"]) for plan in plans.values())
        times = [f"{plan['measured_ms']:.0f}" for plan in shown]
        rows.append([label, *times, *speeds, f"{largest:.1%}"])
    columns = [f"{name} ms" for name in SCHEDULES]
    speeds = [f"{name} over pppipe" for name in SCHEDULES[1:]]
    median = f"median error of the prediction {summary['median_error_fraction']:.1%}"
    return [Table(f"Measured; {median}", ["point", *columns, *speeds, "largest error"], rows)]


def speed_ratios(plan: PlanRun, other: PlanRun) -> list[float]:
    """Samples per second, over the other plan's in the same round."""
    return [
        plan.samples / a / (other.samples / b)
        for a, b in zip(plan.measured_ms, other.measured_ms, strict=True)
    ]


def summary_of(runs: Sequence[PointRun]) -> dict[str, Any]:
    """Medians over all points and plans, and the table's figures."""
    plans = [plan for run in runs for plan in run.plans.values()]
    return {
        "median_error_fraction": statistics.median(abs(p.error_fraction) for p in plans),
        "points": {
            run.point.label: {
                name: {
                    "plan": plan.plan.label,
                    "predicted_ms": plan.predicted_ms,
                    "measured_ms": plan.median_ms,
                    "measured_p90_ms": _quantile(plan.measured_ms, 0.9),
                    "error_fraction": plan.error_fraction,
                    "speed_over_pppipe": statistics.median(speed_ratios(plan, run.plans["pppipe"])),
                    "speed_over_findep": statistics.median(speed_ratios(plan, run.plans["findep"])),
                    "exposed_ms": statistics.median(plan.exposed_ms),
                    "predicted_exposed_ms": plan.predicted_exposed_ms,
                }
                for name, plan in run.plans.items()
            }
            for run in runs
        },
    }


def _quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(fraction * (len(ordered) - 1)))]
