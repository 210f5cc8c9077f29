"""Of the board *Bulk*: what keeps prefill workers busy, whoever sends it."""

from __future__ import annotations

from contracts import metrics
from dashboards.queries import OF_CLUSTER, OF_RANK, WINDOW, PanelRow, PanelSpec, PromQuery

_OF_WORKERS = 'group="prefill", cluster=~"$cluster", rank=~"$rank"'
_OF_PIPELINE = f'pipeline="prefill", {OF_CLUSTER}'


def _rate(name: str, where: str, by: str) -> str:
    return f"sum by ({by}) (rate({name}{{{where}}}[{WINDOW}]))"


_FILL = (
    f"max by (rank) ({metrics.LOAD.name}{{{OF_RANK}}}) / "
    f"max by (rank) ({metrics.SATURATION.name}{{{OF_RANK}}})"
)

ROWS = (
    PanelRow(
        "Work",
        (
            PanelSpec(
                "Prefill-only requests",
                "reqps",
                "Requests of the prefill pipeline, by outcome and class.",
                (
                    PromQuery(
                        _rate(metrics.REQUESTS.name, _OF_PIPELINE, "class, outcome"),
                        "{{class}} {{outcome}}",
                    ),
                ),
            ),
            PanelSpec(
                "Prompt tokens of the prefill pipeline",
                "short",
                "Tokens per second, and those of them that came from a prefix cache.",
                (
                    PromQuery(_rate(metrics.PROMPT_TOKENS.name, _OF_PIPELINE, "pipeline"), "all"),
                    PromQuery(
                        _rate(metrics.CACHED_TOKENS.name, _OF_PIPELINE, "pipeline"), "cached"
                    ),
                ),
            ),
            PanelSpec(
                "Waiting at the prefill pipeline",
                "short",
                "Sequences that wait for a first answer.",
                (
                    PromQuery(
                        f"sum by (class) ({metrics.REQUESTS_WAITING.name}{{{_OF_PIPELINE}}})",
                        "{{class}}",
                    ),
                ),
                warn=1024,
                bad=65536,
            ),
        ),
    ),
    PanelRow(
        "Workers",
        (
            PanelSpec(
                "Workers in use",
                "percentunit",
                "Part of the time in which a worker computes. A bulk job should keep it near 1.",
                (
                    PromQuery(
                        f"max by (rank) ({metrics.RANK_BUSY.name}{{{_OF_WORKERS}}})", "{{rank}}"
                    ),
                ),
            ),
            PanelSpec(
                "Saturation fill",
                "percentunit",
                "Work that waits at a worker over what saturates it: below 1 it may run dry, far "
                "above 1 nothing is gained.",
                (PromQuery(_FILL, "{{rank}}"),),
                warn=4.0,
                bad=16.0,
            ),
            PanelSpec(
                "Utilization of a worker's arithmetic",
                "percentunit",
                "Model FLOPs per second over the machine's peak, where that is known.",
                (
                    PromQuery(
                        f"max by (rank) ({metrics.MODEL_FLOPS_UTILIZATION.name}{{{OF_RANK}}})",
                        "{{rank}}",
                    ),
                ),
            ),
        ),
    ),
)
