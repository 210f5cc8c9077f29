"""A plan as a picture and as a Perfetto trace, from its replay."""

from __future__ import annotations

from pathlib import Path

from actors.telemetry.chrome_trace import write_chrome_trace
from cluster.capacity.gantt import draw_gantt
from cluster.capacity.plan import Report
from contracts.errors import ConfigError
from contracts.events import TaskSpan
from planner.findep.replay import replay
from planner.findep.schedule import schedule_of

SHOWN_LAYERS = 3
MAX_SPANS = 200_000  # of a file that a browser still opens


def write_picture(report: Report, path: Path) -> None:
    """The first layers. Raises ConfigError."""
    layers = range(min(SHOWN_LAYERS, report.spec.num_layers))
    spans = _spans(report, "--picture")
    title = (
        f"Planned: {report.plan.label}, layers 0 to {layers[-1]} of {report.spec.num_layers}, "
        f"makespan {report.answer.makespan_ms:.4g} ms"
    )
    draw_gantt(spans, layers, title, path)


def write_trace(report: Report, path: Path) -> None:
    """All layers, for https://ui.perfetto.dev. Raises ConfigError."""
    try:
        write_chrome_trace(_spans(report, "--trace"), path)
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be written: {error.strerror}") from None


def _spans(report: Report, option: str) -> list[TaskSpan]:
    plan, layers = report.plan, report.spec.num_layers
    count = layers * plan.r1 * (3 * plan.r2 + 2)
    if count > MAX_SPANS:
        raise ConfigError(
            f"{option}: this plan has {count} tasks, at most {MAX_SPANS} are drawn: lower "
            "num_layers or max_r2"
        )
    return replay(schedule_of(report.spec, plan)).spans
