"""Of the board *Capacity*: panels made of several metrics."""

from __future__ import annotations

from contracts import metrics
from dashboards.queries import OF_CLUSTER, OF_RANK, WINDOW, PanelRow, PanelSpec, PromQuery


def busiest() -> dict[str, str]:
    """Resource -> PromQL of the part of time in which the busiest of its kind is in use; of memory
    the part that is taken by running sequences. Recording rules have the same."""
    busy, stage = metrics.RANK_BUSY.name, metrics.STAGE.name
    blocks, where = metrics.KV_BLOCKS.name, OF_RANK
    of_rank = 'cluster=~"$cluster", rank=~"$rank"'  # group: the metric's own
    waited = f'sum by (rank) (rate({stage}_sum{{stage=~"%s", {where}}}[{WINDOW}]))'
    return {
        "attention": f'max({busy}{{group="attention", {of_rank}}})',
        "experts": f'max({busy}{{group="expert", {of_rank}}})',
        "prefill": f'max({busy}{{group="prefill", {of_rank}}})',
        "link": f"max(rate({metrics.EXPOSED_COMMUNICATION.name}{{{where}}}[{WINDOW}]))",
        "memory": (
            f'max(sum by (rank) ({blocks}{{state="used", {where}}}) '
            f"/ sum by (rank) ({blocks}{{{where}}}))"
        ),
        "host copy": f"max({waited % 'host_copy|gather'})",
    }


def _named(resource: str, expression: str) -> str:
    return f'label_replace({expression}, "resource", "{resource}", "", "")'


_RESOURCES = busiest()
_PREDICTED, _MEASURED = metrics.PLAN_PREDICTED.name, metrics.PLAN_MEASURED.name
_OK = f'{metrics.REQUESTS.name}{{outcome="ok", {OF_CLUSTER}}}'

_ANSWERED = f"sum by (pipeline) (rate({_OK}[1m]))"
_USED = f"avg by (pipeline) ({metrics.CAPACITY_USED.name}{{{OF_CLUSTER}}} > 0)"
HEADROOM = f"clamp_min({_ANSWERED} * on (pipeline) (1 / {_USED} - 1), 0)"
ONE_MORE = (
    f"max by (pipeline, kind) ({metrics.CAPACITY_GAIN.name}{{{OF_CLUSTER}}}) * on (pipeline) "
    f"group_left () ({_ANSWERED} / on (pipeline) {_USED})"
)

ROWS = (
    PanelRow(
        "How much more",
        (
            PanelSpec(
                "Headroom",
                "reqps",
                "Requests per second that could come beyond those of now, if they are as those of "
                "the last minute: by the planner's model of the measured stage times, at batches "
                "as full as they may be. Of the ranks alone: what an ingress can do is not in it.",
                (PromQuery(HEADROOM, "{{pipeline}}"),),
                warn=1.0,
                bad=0.1,
                is_stat=True,
            ),
            PanelSpec(
                "One more rank would add",
                "reqps",
                "Requests per second, by the kind of the rank: what the whole could then do, less "
                "what it can now. The kind that adds most is the one to buy.",
                (PromQuery(ONE_MORE, "{{kind}}"),),
                is_stat=True,
            ),
            PanelSpec(
                "Recommended split",
                "short",
                "Of as many attention and expert ranks as now, how many of each would do most of "
                "the traffic of late; and how many there are. Memory is not looked at.",
                (
                    PromQuery(
                        f"max by (group) ({metrics.CAPACITY_RANKS.name}{{{OF_CLUSTER}}})",
                        "{{group}}, recommended",
                    ),
                    PromQuery(
                        f'count by (group) ({metrics.RANK_BUSY.name}{{group=~"attention|expert", '
                        f"{OF_CLUSTER}}})",
                        "{{group}}, now",
                    ),
                ),
                is_stat=True,
            ),
        ),
    ),
    PanelRow(
        "At a glance",
        (
            PanelSpec(
                "Bottleneck now",
                "percentunit",
                "The resource that is in use for most of the time: attention, experts, prefill "
                "(workers), link (transfers that nothing hides), memory (KV blocks that running "
                "sequences hold), host copy (weights that are waited for).",
                (
                    PromQuery(
                        "topk(1, " + " or ".join(_named(*one) for one in _RESOURCES.items()) + ")",
                        "{{resource}}",
                    ),
                ),
                warn=0.85,
                bad=0.97,
                is_stat=True,
            ),
            PanelSpec(
                "Requests answered",
                "reqps",
                "Requests per second that were answered.",
                (PromQuery(f"sum by (pipeline) (rate({_OK}[{WINDOW}]))", "{{pipeline}}"),),
                is_stat=True,
            ),
            PanelSpec(
                "Prediction error",
                "percentunit",
                "How far the predicted makespan of the latest batch was from the measured one, as "
                "a part of the measured one.",
                (
                    PromQuery(
                        f"abs(max({_PREDICTED}{{{OF_CLUSTER}}}) / "
                        f"max({_MEASURED}{{{OF_CLUSTER}}}) - 1)",
                        "of the latest batch",
                    ),
                ),
                warn=0.15,
                bad=0.5,
                is_stat=True,
            ),
        ),
    ),
    PanelRow(
        "What is in use",
        (
            PanelSpec(
                "In use, by resource",
                "percentunit",
                "As in 'Bottleneck now', over time: the highest line is the bottleneck.",
                tuple(PromQuery(promql, resource) for resource, promql in _RESOURCES.items()),
                warn=0.85,
                bad=0.97,
            ),
        ),
    ),
)
