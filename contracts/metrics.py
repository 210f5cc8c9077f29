"""The table of metrics: names, units, labels, buckets. Declared here once;
`actors/telemetry/telemetry.py` makes Prometheus objects of it, dashboards and alerts are held
against it."""

from __future__ import annotations

import enum

import msgspec


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """name: as Prometheus shows it. buckets: upper bounds in `unit`, for histograms."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_STAGE_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)


def _counter(name: str, help: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=help, labels=labels, unit=unit)


def _gauge(name: str, help: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, help=help, labels=labels, unit=unit)


def _seconds(name: str, help: str, *labels: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(
        name=name, kind=Kind.HISTOGRAM, help=help, labels=labels, unit="s", buckets=buckets
    )


# Requests, as the ingress sees them. outcome: see `Outcome`.
REQUESTS = _counter(
    "tandem_requests_total", "HTTP requests answered.", "pipeline", "class", "outcome"
)
TTFT = _seconds(
    "tandem_ttft_seconds",
    "From a request's arrival to its first token.",
    "pipeline",
    "class",
    buckets=_LATENCY_S,
)
TPOT = _seconds(
    "tandem_tpot_seconds",
    "Mean time per generated token after the first, per sequence.",
    "class",
    buckets=_TOKEN_S,
)
TURNAROUND = _seconds(
    "tandem_turnaround_seconds",
    "From a request's arrival to the end of its answer.",
    "pipeline",
    "class",
    buckets=_LATENCY_S,
)
QUEUE_DEPTH = _gauge(
    "tandem_queue_depth", "Sequences that wait for a first answer.", "pipeline", "class"
)
PROMPT_TOKENS = _counter(
    "tandem_prompt_tokens_total", "Prompt tokens of answered requests.", "pipeline", unit="tokens"
)
CACHED_TOKENS = _counter(
    "tandem_cached_tokens_total",
    "Prompt tokens that came from a prefix cache.",
    "pipeline",
    unit="tokens",
)
GENERATED_TOKENS = _counter(
    "tandem_generated_tokens_total", "Tokens generated.", "class", unit="tokens"
)

# Ranks.
STAGE = _seconds(
    "tandem_stage_seconds",
    "Duration of one stage: attention, shared, expert, a2e, e2a, gather, host_copy.",
    "stage",
    "rank",
    buckets=_STAGE_S,
)
RANK_BUSY = _gauge(
    "tandem_rank_busy_fraction", "Part of the time a rank computes.", "group", "rank"
)
EXPOSED_COMMUNICATION = _gauge(
    "tandem_exposed_communication_seconds",
    "Time so far in which a rank had nothing to compute because it waited for a transfer.",
    "rank",
    unit="s",
)
CHANNEL_BYTES = _counter(
    "tandem_channel_bytes_total", "Payload sent.", "direction", "backend", unit="bytes"
)
PREEMPTIONS = _counter("tandem_preemptions_total", "Times that LS work overtook running BE work.")
PREEMPTION_BLOCKING = _seconds(
    "tandem_preemption_blocking_seconds",
    "From the arrival of LS work to the first task picked for it.",
    buckets=_STAGE_S,
)
BE_WAIT = _seconds(
    "tandem_be_wait_seconds", "Time that BE work stood parked behind LS work.", buckets=_LATENCY_S
)
EXPERT_TOKENS = _counter(
    "tandem_expert_tokens_total",
    "Tokens routed to an expert (the most used experts only).",
    "layer",
    "expert",
    unit="tokens",
)
LOCAL_ACTIVATION = _gauge(
    "tandem_local_activation_fraction", "Routed tokens whose expert is on their own rank."
)
PREFETCH_HIT = _gauge(
    "tandem_prefetch_hit_fraction", "Expert weights that were there when needed.", "layer"
)
KV_BLOCKS = _gauge("tandem_kv_blocks", "KV blocks by state: free, used, cached.", "rank", "state")
GROUP_EPOCH = _gauge("tandem_group_epoch", "Epoch of a group; grows with each repair.", "group")
RANK_RESTARTS = _counter("tandem_rank_restarts_total", "Ranks that were replaced.", "group")

# Planner and router.
PLAN = _gauge("tandem_plan", "Latest plan: ma, r1, me, r2.", "field")
PLAN_INFO = _gauge("tandem_plan_info", "1 for the order of the latest plan.", "order")
PLAN_PREDICTED = _gauge("tandem_plan_predicted_seconds", "Predicted makespan.", unit="s")
PLAN_MEASURED = _gauge("tandem_plan_measured_seconds", "Measured makespan.", unit="s")
PLAN_SOLVE = _gauge("tandem_plan_solve_seconds", "Time to find the latest plan.", unit="s")
PLAN_BATCHES = _counter(
    "tandem_plan_batches_total",
    "Batches by who chose their plan, and why it was not the planner.",
    "rank",
    "chosen_by",
    "reason",
)
SATURATION = _gauge(
    "tandem_saturation_flops", "FLOPs per batch that saturate a rank.", "rank", unit="flops"
)
LOAD = _gauge("tandem_load_flops", "FLOPs that wait at a rank.", "rank", unit="flops")
MODEL_FLOPS_UTILIZATION = _gauge(
    "tandem_model_flops_utilization", "Model FLOPs per second over peak.", "rank"
)

ALL: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)


class Outcome(enum.StrEnum):
    """`tandem_requests_total{outcome}`."""

    OK = "ok"
    REFUSED = "refused"  # the request is wrong: any 4xx but the two below
    OVERLOAD = "overload"
    CLIENT_GONE = "client_gone"
    TIMEOUT = "timeout"
    ERROR = "error"


class Pipeline(enum.StrEnum):
    """`{pipeline}`: which answer a request wants, not which rank computes it."""

    GENERATION = "generation"
    PREFILL = "prefill"
