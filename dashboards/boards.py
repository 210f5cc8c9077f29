"""The four dashboards: panels that metrics bring along (contracts/metrics.py), and those that are
made of several metrics."""

from __future__ import annotations

from typing import NamedTuple

from contracts.metrics import ALL, OBJECTIVE, REQUESTS, TTFT, Board, Metric, Panel, RequestOutcome
from dashboards import bulk, capacity
from dashboards.objectives import OBJECTIVES
from dashboards.queries import OF_CLUSTER, WINDOW, PanelRow, PanelSpec, PromQuery, panel_spec


class BoardSpec(NamedTuple):
    """A dashboard."""

    board: Board
    title: str
    description: str
    rows: tuple[PanelRow, ...]


def board_specs() -> list[BoardSpec]:
    """All of them, in the order of `Board`."""
    return [
        BoardSpec(
            Board.CAPACITY,
            "Tandem: capacity",
            "What limits now, how much more would go, and what another rank would add.",
            (*capacity.ROWS, _metric_panels(Board.CAPACITY)),
        ),
        BoardSpec(
            Board.OBJECTIVES,
            "Tandem: objectives",
            "Whether requests are answered as promised, by class.",
            (_burn_rates(), _metric_panels(Board.OBJECTIVES)),
        ),
        BoardSpec(
            Board.PIPELINE,
            "Tandem: pipeline",
            "What happens inside: plans, stages, experts, caches, preemption, repairs.",
            (_metric_panels(Board.PIPELINE),),
        ),
        BoardSpec(
            Board.BULK,
            "Tandem: bulk",
            "Prefill workers and the jobs that keep them busy.",
            tuple(row for row in (*bulk.ROWS, _metric_panels(Board.BULK)) if row.panels),
        ),
    ]


def _metric_panels(board: Board) -> PanelRow:
    """Panels that stand with their metrics, in that order; those of one title are one."""
    by_title: dict[str, list[tuple[Metric, Panel]]] = {}
    for metric in ALL:
        for panel in metric.panels:
            if panel.board is board:
                by_title.setdefault(panel.title, []).append((metric, panel))
    return PanelRow(
        "Measured", tuple(panel_spec(title, shown) for title, shown in by_title.items())
    )


def _burn_rates() -> PanelRow:
    panels = [
        PanelSpec(
            f"Burn rate: {objective.name}",
            "x",
            f"{objective.promise}. How many times as fast as that allows it is broken; 1 uses the "
            "allowance up exactly.",
            tuple(
                PromQuery(objective.burn(window, OF_CLUSTER), f"over {window}")
                for window in ("5m", "1h")
            ),
            warn=1.0,
            bad=14.4,
        )
        for objective in OBJECTIVES
    ]
    where = f'outcome=~"{RequestOutcome.OVERLOAD}|{RequestOutcome.REFUSED}", {OF_CLUSTER}'
    refusals = f"sum by (class, outcome) (rate({REQUESTS.name}{{{where}}}[{WINDOW}]))"
    panels.append(
        PanelSpec(
            "Refusals",
            "reqps",
            "Requests that were not let in: too much waits (overload, 429), or the request is "
            "wrong (refused, another 4xx).",
            (PromQuery(refusals, "{{class}} {{outcome}}"),),
            warn=0.1,
            bad=10.0,
        )
    )
    first = f'rate({TTFT.name}_bucket{{class="be", {OF_CLUSTER}}}[{WINDOW}])'
    panels.append(
        PanelSpec(
            "Best-effort wait against its bound",
            "s",
            "From a best-effort request's arrival to its first token (p95), and the longest wait "
            "for which one is let in (priority.be_max_wait_s).",
            (
                PromQuery(f"histogram_quantile(0.95, sum by (le) ({first}))", "p95"),
                PromQuery(f'max({OBJECTIVE.name}{{objective="be_wait", {OF_CLUSTER}}})', "bound"),
            ),
            warn=240.0,
            bad=300.0,
        )
    )
    return PanelRow("Promises", tuple(panels))
