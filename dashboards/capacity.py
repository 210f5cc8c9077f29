"""Board *Capacity*: the bottleneck, spare capacity, and the gain from one more rank."""

from contracts import metrics
from dashboards.panels import (
    OF_CLUSTER,
    OF_RANK,
    PERCENT,
    PERCENT_OF_TIME,
    REQUESTS_PER_S,
    SECONDS,
    WINDOW,
    Board,
    BoardSpec,
    PanelRow,
    PanelSpec,
    Unit,
    largest,
    line,
    rate,
    total,
)

_RANKS = Unit("short", "ranks")
_WAITED = (  # stages of a rank overlap: their sum can exceed the time
    f'max by (cluster) (rate({metrics.STAGE.name}_sum{{stage=~"%s", {OF_RANK}}}[{WINDOW}]))'
)
_OF_GROUP = 'max by (cluster) ({busy}{{group="{group}", cluster=~"$cluster", rank=~"$rank"}})'


def busiest() -> dict[str, str]:
    """Return resource → PromQL for the utilization of the busiest one of its kind.

    The value for memory is the share of KV blocks that running sequences hold.
    """
    blocks, exposed = metrics.KV_BLOCKS.name, metrics.EXPOSED_COMMUNICATION.name
    groups = {"attention": "attention", "experts": "expert", "prefill": "prefill"}
    return {
        resource: _OF_GROUP.format(busy=metrics.RANK_BUSY.name, group=group)
        for resource, group in groups.items()
    } | {
        "link": f"max by (cluster) (rate({exposed}{{{OF_RANK}}}[{WINDOW}]))",
        "memory": (
            f'max by (cluster) (sum by (cluster, rank) ({blocks}{{state="used", {OF_RANK}}}) '
            f"/ sum by (cluster, rank) ({blocks}{{{OF_RANK}}}))"
        ),
        "host copy": _WAITED % "host_copy|gather",
    }


def _named(resource: str, expression: str) -> str:
    return f'label_replace({expression}, "resource", "{resource}", "", "")'


_RESOURCES = busiest()
_OK = f'{metrics.REQUESTS.name}{{outcome="ok", {OF_CLUSTER}}}'
_ANSWERED = f"sum by (cluster, pipeline) (rate({_OK}[1m]))"
_USED = f"avg by (cluster, pipeline) ({metrics.CAPACITY_USED.name}{{{OF_CLUSTER}}} > 0)"
HEADROOM = f"clamp_min({_ANSWERED} * (1 / {_USED} - 1), 0)"
ONE_MORE = (
    f"{largest(metrics.CAPACITY_GAIN, 'pipeline', 'kind')} * on (cluster, pipeline) "
    f"group_left () ({_ANSWERED} / {_USED})"
)
PREDICTION_ERROR = (  # the gauges keep the latest batch: only while there are batches
    f"quantile_over_time(0.5, (abs({largest(metrics.PLAN_PREDICTED)} / "
    f"{largest(metrics.PLAN_MEASURED)} - 1) and on (cluster) sum by (cluster) "
    f"(increase({metrics.PLAN_BATCHES.name}{{{OF_RANK}}}[1m])) > 0)[10m:15s])"
)
SATURATION_FILL = f"{largest(metrics.LOAD, 'rank')} / {largest(metrics.SATURATION, 'rank')}"

_HEADROOM = PanelRow(
    "Spare capacity",
    (
        PanelSpec(
            "Spare capacity",
            REQUESTS_PER_S,
            "Additional requests that the ranks can serve, modelled from the stage times and the "
            "traffic mix of the last minute. The limit of the ingress is not included.",
            "add the kind of rank with the largest gain before the value reaches 0.",
            line(HEADROOM, "pipeline"),
            levels=(1.0, 0.1),
            is_stat=True,
        ),
        PanelSpec(
            "Gain from one more rank",
            REQUESTS_PER_S,
            "Additional capacity from one more rank, by kind. Negative if the model's best split "
            "of the ranks gets worse.",
            "if capacity is short, add the kind with the largest gain.",
            line(ONE_MORE, "kind"),
            is_stat=True,
            is_signed=True,
        ),
        PanelSpec(
            "Ranks: recommended and current",
            _RANKS,
            "The split of the current number of ranks into attention and expert ranks that serves "
            "recent traffic best, and the current split. Memory limits are not considered.",
            "if they differ for an hour, change groups.attention_ranks and groups.expert_ranks.",
            line(largest(metrics.CAPACITY_RANKS, "group"), "group", name="recommended")
            + line(
                f'count by (cluster, group) ({metrics.RANK_BUSY.name}{{group=~"attention|expert", '
                f"{OF_CLUSTER}}})",
                "group",
                name="current",
            ),
            is_stat=True,
        ),
    ),
)
_NOW = PanelRow(
    "Current state",
    (
        PanelSpec(
            "Bottleneck",
            PERCENT,
            "The resource with the highest utilization: attention, experts, prefill (workers), "
            "link (transfers without overlap), memory (KV blocks of running sequences), host copy "
            "(loading of weights).",
            "relieve this resource first; others have no effect on throughput.",
            line(
                "topk by (cluster) (1, "
                + " or ".join(_named(*one) for one in _RESOURCES.items())
                + ")",
                "resource",
            ),
            levels=(0.85, 0.97),
            is_stat=True,
        ),
        PanelSpec(
            "Answered requests",
            REQUESTS_PER_S,
            "Requests answered successfully, by pipeline.",
            "compare with the expected traffic; see board Objectives if it is lower.",
            line(f"sum by (cluster, pipeline) (rate({_OK}[{WINDOW}]))", "pipeline"),
            is_stat=True,
        ),
        PanelSpec(
            "Prediction error",
            PERCENT,
            "Median over ten minutes of the difference between predicted and measured batch time, "
            "relative to the measured time.",
            "if it stays high, do not rely on spare capacity and gains; check other load on the "
            "machines.",
            line(PREDICTION_ERROR, name="median"),
            levels=(0.15, 0.5),
            is_stat=True,
        ),
    ),
)
_UTILIZATION = PanelRow(
    "Utilization",
    (
        PanelSpec(
            "Utilization by resource",
            PERCENT,
            "Utilization of the busiest one of each kind of resource.",
            "relieve the highest line; it is the bottleneck.",
            tuple(
                query
                for resource, promql in _RESOURCES.items()
                for query in line(promql, name=resource)
            ),
            levels=(0.85, 0.97),
        ),
        PanelSpec(
            "Busy time of ranks",
            PERCENT_OF_TIME,
            "Time in which a rank computes.",
            "add ranks to the group that stays above 85 %.",
            line(largest(metrics.RANK_BUSY, "rank"), "rank"),
            levels=(0.85, 0.97),
        ),
        PanelSpec(
            "Used capacity",
            PERCENT,
            "Traffic of the last minute over modelled capacity.",
            "add ranks above 75 %; latency rises steeply near 100 %.",
            line(largest(metrics.CAPACITY_USED, "pipeline", "rank"), "pipeline", "rank"),
            levels=(0.75, 0.95),
        ),
    ),
)
_MEMORY = PanelRow(
    "Memory and transfers",
    (
        PanelSpec(
            "KV blocks",
            Unit("short", "blocks"),
            "KV cache blocks of each rank: free, used by running sequences, cached for reuse.",
            "if free and cached are near 0, increase kv.memory_fraction or add attention ranks.",
            line(total(metrics.KV_BLOCKS, "rank", "state"), "rank", "state"),
        ),
        PanelSpec(
            "Waiting for transfers",
            PERCENT_OF_TIME,
            "Time in which a rank waits for a transfer without work to overlap it with.",
            "use a faster network or place groups on fewer nodes (groups.placement).",
            line(rate(metrics.EXPOSED_COMMUNICATION, "rank"), "rank"),
            levels=(0.2, 0.5),
        ),
    ),
)
_MODEL = PanelRow(
    "Capacity model",
    (
        PanelSpec(
            "Batch time: predicted and measured",
            SECONDS,
            "Makespan of the latest planned batch.",
            "see panel Prediction error for the difference over time.",
            line(largest(metrics.PLAN_PREDICTED), name="predicted")
            + line(largest(metrics.PLAN_MEASURED), name="measured"),
        ),
        PanelSpec(
            "Modelled utilization at full load",
            PERCENT_OF_TIME,
            "Utilization of each resource at the maximum request rate, from the capacity model.",
            "the resource near 100 % limits capacity.",
            line(largest(metrics.CAPACITY_IN_USE, "resource"), "resource"),
        ),
        PanelSpec(
            "Model FLOPs utilization",
            PERCENT,
            "Model FLOPs per second over the peak of the hardware, if the peak is known.",
            "compare with earlier values after a change of hardware or configuration.",
            line(largest(metrics.MODEL_FLOPS_UTILIZATION, "rank"), "rank"),
        ),
    ),
    collapsed=True,
)
_PREFILL = PanelRow(
    "Prefill workers",
    (
        PanelSpec(
            "Queued work at prefill workers",
            Unit("short", "FLOPs"),
            "FLOPs of the requests that are queued or running at a worker.",
            "compare workers; large differences indicate long requests.",
            line(largest(metrics.LOAD, "rank"), "rank"),
        ),
        PanelSpec(
            "Queued work over saturation",
            PERCENT,
            "Queued work over the work that saturates the worker (prefill.saturation).",
            "add prefill workers if it stays above 200 %.",
            line(SATURATION_FILL, "rank"),
            levels=(2.0, 8.0),
        ),
    ),
    collapsed=True,
)

CAPACITY = BoardSpec(
    Board.CAPACITY,
    "The current bottleneck, spare capacity, and the gain from one more rank.",
    (_HEADROOM, _NOW, _UTILIZATION, _MEMORY, _MODEL, _PREFILL),
)
