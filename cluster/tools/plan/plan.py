"""`tandem plan`: the best schedule and split, alternatives, modes of prefill, and their output."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from actors.telemetry.chrome_trace import write_chrome_trace
from cluster.observe.terminal import Terminal, plain_table
from cluster.tools.plan.routing import PlacedRouting, RoutingAnswer, routing_answer
from cluster.tools.plan.spec_file import ModelProblem, read_plan_file
from cluster.tools.plots import draw_gantt
from contracts.clock import monotonic_s
from contracts.errors import ConfigError, writing
from contracts.plan import Order, Plan
from contracts.traces import TaskSpan
from planner.costs.prefill_modes import (
    SEQUENCES,
    OffloadedToken,
    PrefillMode,
    Tier,
    batch_seconds,
    break_even_tokens,
    most_sequences,
    offloaded_token,
    prompts_of,
)
from planner.costs.stages import PlanSpec
from planner.schedule.alternatives import Alternative, Workload, prefill_group
from planner.schedule.deployment_search import (
    Solve,
    Split,
    SplitComparison,
    judge,
    planned_split,
    search,
    with_overhead,
)
from planner.schedule.extended_plans import solve_extended
from planner.schedule.schedule import replay, schedule_of
from planner.schedule.solver import PlannedBatch, solve

LEAST_PROMPT = 16
TOKENS = (256, 1024, 4096, 16_384, 65_536)  # of a worker's batch


class PrefillTimes(msgspec.Struct, kw_only=True):
    """Milliseconds of a batch of `tokens` on each worker. resident: if each had all experts."""

    tokens: int
    resident_ms: float
    gathered_ms: float
    all_to_all_ms: float


class PrefillAnswer(msgspec.Struct, kw_only=True):
    """gathered_from_tokens: batch from which gathering is no slower than all_to_all, or None."""

    batches: list[PrefillTimes]
    gathered_from_tokens: int | None
    advice: str


def prefill_answer(workload: Workload) -> PrefillAnswer:
    """Compare modes of prefill on batches of the workload's prompts."""
    group, prompt = prefill_group(workload), max(LEAST_PROMPT, workload.sequence_tokens)
    batches = []
    for tokens in TOKENS:
        batch = prompts_of(tokens, prompt)
        ms = {f"{way}_ms": 1e3 * batch_seconds(way, batch, group) for way in PrefillMode}
        batches.append(PrefillTimes(tokens=tokens, **ms))
    found = break_even_tokens(
        group, PrefillMode.GATHERED, PrefillMode.ALL_TO_ALL, prompt_tokens=prompt
    )
    where = f"Prefill on {workload.devices} workers"
    if found is None:
        advice = f"{where}: all_to_all for every batch size."
    elif found == 1:
        advice = f"{where}: gathered for every batch size."
    else:
        advice = (
            f"{where}: all_to_all for batches of less than {found} tokens a worker, gathered from "
            "there on."
        )
    return PrefillAnswer(batches=batches, gathered_from_tokens=found, advice=advice)


class PlanAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A plan and its throughput. samples_per_s: of one attention rank, or of all of a split."""

    ma: int
    r1: int
    me: float
    r2: int
    order: Order
    makespan_ms: float
    samples_per_s: float
    shared_lag: int = 0
    micro_batch_samples: tuple[int, ...] = ()
    sequence_chunks: tuple[float, ...] = ()


class SplitAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One split of the search; problem: why it has no plan."""

    attention_ranks: int
    expert_ranks: int
    samples_per_s: float
    plan: PlanAnswer | None = None
    max_samples: int | None = None
    problem: str = ""


class AlternativeAnswer(msgspec.Struct, kw_only=True):
    """The same devices without a split."""

    name: str
    samples_per_s: float
    exposed_communication_fraction: float
    note: str


class PlanReportAnswer(PlanAnswer, kw_only=True, omit_defaults=True):
    """Output of `tandem plan --json`.

    Fields from `attention_ranks` on are set for a SPEC with a model. layers_differ: makespans use
    the actual layers, lower_bound_ms their mean.
    """

    lower_bound_ms: float
    solve_ms: float
    baselines: dict[str, PlanAnswer]
    attention_ranks: int | None = None
    expert_ranks: int | None = None
    max_samples: int | None = None
    disaggregate: bool | None = None
    advice: str = ""
    splits: list[SplitAnswer] = []
    alternatives: list[AlternativeAnswer] = []
    offload: list[OffloadedToken] = []
    offload_advice: str = ""
    layers_differ: bool = False
    routing: RoutingAnswer | None = None
    prefill: PrefillAnswer | None = None


class PlanReport(NamedTuple):
    """verdict None: the SPEC has no model, hence no alternatives."""

    answer: PlanReportAnswer
    spec: PlanSpec
    plan: Plan
    verdict: SplitComparison | None


def plan_file(path: Path, *, devices: int | None, beyond: bool) -> PlanReport:
    """Answer a SPEC. Raises ConfigError, CheckpointError or ResourceError, one line each."""
    given = read_plan_file(path, devices)
    if isinstance(given, PlanSpec):
        return _report(given, beyond=beyond)
    workload, profiled = given.workload, given.profiled
    find: Solve = solve_extended if beyond else _best
    before = None
    if profiled is not None:
        plain = workload._replace(routing_of=PlacedRouting(profiled, workload, is_solved=False))
        before = _verdict(given._replace(workload=plain), find), plain
        placed = PlacedRouting(profiled, workload, is_solved=True)
        given = given._replace(workload=workload._replace(routing_of=placed))
        verdict = _verdict_of_placed(given, placed, find)
    else:
        verdict = _verdict(given, find)
    assert verdict.best.spec is not None
    report = _report(verdict.best.spec, beyond=beyond, verdict=verdict, workload=workload)
    if given.tier is not None:
        _add_offload(report.answer, workload, given.tier)
    if profiled is not None and before is not None:
        pairs = [
            (found.best, of.routing(found.best.deployment.expert_ranks))
            for found, of in (before, (verdict, given.workload))
        ]
        report.answer.routing = routing_answer(profiled, *pairs)
    report.answer.prefill = prefill_answer(given.workload)
    return report


def _best(spec: PlanSpec) -> PlannedBatch:
    return solve(spec).best


def _verdict(problem: ModelProblem, find: Solve) -> SplitComparison:
    workload, deployment = problem.workload, problem.deployment
    if deployment is None:
        return search(workload, find, problem.max_r2)
    split = planned_split(workload, deployment, find, problem.max_r2)  # raises
    return judge(workload, [split])


def _verdict_of_placed(
    problem: ModelProblem, placed: PlacedRouting, find: Solve
) -> SplitComparison:
    """Search all splits with sketched placements, then refine the best.

    The answer also has the same devices without a split.
    """
    workload = problem.workload
    sketched = _verdict(problem, find)
    best = sketched.best.deployment
    placed.refine(best.expert_ranks, workload.devices)
    split = planned_split(workload, best, find, problem.max_r2)
    others = [each for each in sketched.splits if each.deployment != best]
    splits = sorted([split, *others], key=lambda each: each.deployment.attention_ranks)
    return judge(workload, splits)


def _report(
    spec: PlanSpec,
    *,
    beyond: bool,
    verdict: SplitComparison | None = None,
    workload: Workload | None = None,
) -> PlanReport:
    solve(spec)  # one-time initialization is not part of a decision's time
    start_s = monotonic_s()
    solution = solve(spec)
    best = solve_extended(spec) if beyond else solution.best
    solve_ms = 1e3 * (monotonic_s() - start_s)
    ranks = 1 if verdict is None else verdict.best.deployment.attention_ranks
    layers = () if verdict is None else verdict.best.layers

    def to_answer(planned: PlannedBatch) -> PlanAnswer:
        return _answer(with_overhead(planned, spec, layers, workload), ranks)

    answer = PlanReportAnswer(
        **msgspec.structs.asdict(to_answer(best)),
        lower_bound_ms=solution.lower_bound_ms * best.samples / solution.best.samples,
        solve_ms=solve_ms,
        baselines={"naive": to_answer(solution.naive), "pppipe": to_answer(solution.pppipe)},
    )
    if verdict is not None:
        _add_verdict(answer, verdict)
    return PlanReport(answer, spec, best.plan, verdict)


def _answer(planned: PlannedBatch, ranks: int) -> PlanAnswer:
    plan = planned.plan
    assert plan.ma is not None
    assert plan.me is not None
    return PlanAnswer(
        ma=plan.ma,
        r1=plan.r1,
        me=plan.me,
        r2=plan.r2,
        order=plan.order,
        makespan_ms=planned.makespan_ms,
        samples_per_s=ranks * planned.samples_per_s,
        shared_lag=plan.shared_lag,
        micro_batch_samples=plan.micro_batch_samples,
        sequence_chunks=plan.sequence_chunks,
    )


def _add_verdict(answer: PlanReportAnswer, verdict: SplitComparison) -> None:
    best = verdict.best
    answer.attention_ranks = best.deployment.attention_ranks
    answer.expert_ranks = best.deployment.expert_ranks
    answer.max_samples = best.spec.max_samples if best.spec is not None else None
    answer.layers_differ = bool(best.layers)
    answer.disaggregate, answer.advice = verdict.disaggregate, verdict.advice
    answer.splits = [_split_answer(split) for split in verdict.splits]
    answer.alternatives = [
        AlternativeAnswer(
            name=other.name,
            samples_per_s=other.samples_per_s,
            exposed_communication_fraction=other.exposed_fraction,
            note=other.note,
        )
        for other in verdict.others
    ]


def _add_offload(answer: PlanReportAnswer, workload: Workload, tier: Tier) -> None:
    shape, context = workload.shape, workload.context_tokens + workload.sequence_tokens
    answer.offload = [
        offloaded_token(workload.hardware, shape, tier, each, context) for each in SEQUENCES
    ]
    if tier.held >= 1.0:
        answer.offload_advice = "All experts fit as stored: none is read."
        return
    most = most_sequences(shape, tier.held)
    answer.offload_advice = (
        f"From {most + 1} sequence(s) on a step needs more experts of a layer than fit: keep "
        "more of them, or stream whole layers (prefill.experts=streamed)."
    )


def _split_answer(split: Split) -> SplitAnswer:
    planned, ranks = split.planned, split.deployment.attention_ranks
    return SplitAnswer(
        attention_ranks=ranks,
        expert_ranks=split.deployment.expert_ranks,
        samples_per_s=split.samples_per_s,
        plan=None if planned is None else _answer(planned, ranks),
        max_samples=None if split.spec is None else split.spec.max_samples,
        problem=split.problem,
    )


SHOWN_LAYERS = 3
MAX_SPANS = 200_000  # limit of what a browser still opens


def write_picture(report: PlanReport, path: Path) -> None:
    """Draw the first layers. Raises ConfigError."""
    layers = range(min(SHOWN_LAYERS, report.spec.num_layers))
    spans = _spans(report, "--picture")
    title = (
        f"Planned: {report.plan.label}, layers 0 to {layers[-1]} of {report.spec.num_layers}, "
        f"makespan {report.answer.makespan_ms:.4g} ms"
    )
    draw_gantt(spans, layers, title, path)


def write_trace(report: PlanReport, path: Path) -> None:
    """Write all layers for https://ui.perfetto.dev. Raises ConfigError."""
    with writing("--trace", path):
        write_chrome_trace(_spans(report, "--trace"), path)


def _spans(report: PlanReport, option: str) -> list[TaskSpan]:
    plan, layers = report.plan, report.spec.num_layers
    count = layers * plan.r1 * (3 * plan.r2 + 2)
    if count > MAX_SPANS:
        raise ConfigError(
            f"{option}: this plan has {count} tasks, at most {MAX_SPANS} are drawn: lower "
            "num_layers or max_r2"
        )
    return replay(schedule_of(report.spec, plan)).spans


def print_report(report: PlanReport) -> None:
    console = Terminal(highlight=False)
    _print_plans(console, report)
    verdict = report.verdict
    if verdict is not None:
        if len(verdict.splits) > 1:
            _print_splits(console, verdict)
        _print_others(console, verdict.others)
        console.print(f"\n{verdict.advice}")
    answer = report.answer
    if answer.routing is not None:
        console.print(f"\n{answer.routing.advice}")
    if answer.prefill is not None:
        console.print(f"\n{answer.prefill.advice}")
    if answer.offload:
        _print_offload(console, answer)


def _print_plans(console: Terminal, report: PlanReport) -> None:
    answer = report.answer
    console.print(_title(report))
    headings = ("plan", "order", "ma", "r1", "me", "r2", "makespan ms", "samples/s", "")
    table = plain_table(*headings, left=headings[:2])
    rows = {"best": answer, **dict(reversed(answer.baselines.items()))}
    for name, row in rows.items():
        table.add_row(
            name,
            row.order.value,
            str(row.ma),
            str(row.r1),
            _figure(row.me),
            str(row.r2),
            _figure(row.makespan_ms),
            _figure(row.samples_per_s),
            f"{row.samples_per_s / answer.samples_per_s:.2f}x",
        )
    console.print(table)
    alike = "" if not answer.layers_differ else ", if all layers were as their mean"
    console.print(
        f"Solved in {answer.solve_ms:.2f} ms. No plan of the paper's kinds processes as many "
        f"samples in less than {_figure(answer.lower_bound_ms)} ms{alike}."
    )
    if report.plan.is_beyond_paper:
        console.print(f"Beyond the paper: {report.plan.label}")


def _title(report: PlanReport) -> str:
    answer = report.answer
    if answer.attention_ranks is None:
        return f"At most {report.spec.max_samples} samples in memory"
    return (
        f"{answer.attention_ranks} attention and {answer.expert_ranks} expert ranks, at "
        f"most {report.spec.max_samples} samples in the memory of each attention rank"
    )


def _print_splits(console: Terminal, verdict: SplitComparison) -> None:
    console.print("\nSplits")
    headings = ("attention + expert", "samples/s", "samples in memory", "plan")
    table = plain_table(*headings, left=("plan",))
    for split in verdict.splits:
        plan = split.problem if split.planned is None else split.planned.plan.label
        table.add_row(
            f"{split.deployment.attention_ranks} + {split.deployment.expert_ranks}",
            "–" if split.planned is None else _figure(split.samples_per_s),
            "–" if split.spec is None else str(split.spec.max_samples),
            plan,
        )
    console.print(table)


def _print_others(console: Terminal, others: list[Alternative]) -> None:
    console.print("\nWithout a split")
    table = plain_table("way", "samples/s", "waits for communication", "", left=("way", ""))
    for other in others:
        fits = other.samples_per_s > 0
        table.add_row(
            other.name,
            _figure(other.samples_per_s) if fits else "–",
            f"{other.exposed_fraction:.0%}" if fits else "–",
            other.note,
        )
    console.print(table)


def _print_offload(console: Terminal, answer: PlanReportAnswer) -> None:
    console.print("\nExperts read on demand, on one worker: ms per token")
    table = plain_table(
        "sequences", "read of a layer", "all resident", "on demand", "prefetched, at best"
    )
    for row in answer.offload:
        spent = (row.resident_ms, row.on_demand_ms, row.ahead_ms)
        table.add_row(str(row.sequences), _figure(row.missing), *map(_figure, spent))
    console.print(table)
    console.print(f"\n{answer.offload_advice}")


def _figure(value: float) -> str:
    """Format with four digits, without an exponent for common sizes."""
    return f"{value:,.0f}" if 1e3 <= value < 1e9 else f"{value:.4g}"
