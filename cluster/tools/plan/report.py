"""Output of `tandem plan`: tables, a picture and a Perfetto trace."""

from pathlib import Path

from actors.telemetry.chrome_trace import write_chrome_trace
from cluster.observe.terminal import Terminal, plain_table
from cluster.tools.plan.plan import PlanReport, PlanReportAnswer
from cluster.tools.plots import draw_gantt
from contracts.errors import ConfigError, writing
from contracts.traces import TaskSpan
from planner.schedule.alternatives import Alternative
from planner.schedule.deployment_search import SplitComparison
from planner.schedule.schedule import replay, schedule_of

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
