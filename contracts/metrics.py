"""The table of metrics: name, help, labels, buckets.

`actors/telemetry/telemetry.py` creates Prometheus objects from it; `dashboards/` has the panels.
"""

import enum
import functools

import msgspec


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True):
    """A metric. `buckets` of a histogram are upper bounds in the unit of its name."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]


_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10, 30, 60, 120, 240, 300)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_STAGE_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)


def _metric(
    kind: MetricKind, name: str, help: str, *labels: str, buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(kind, name, help, labels, buckets)


_counter = functools.partial(_metric, MetricKind.COUNTER)
_gauge = functools.partial(_metric, MetricKind.GAUGE)
_seconds = functools.partial(_metric, MetricKind.HISTOGRAM)

# Requests, measured by the ingress. outcome: see `RequestOutcome`.
REQUESTS = _counter(
    "tandem_requests_total", "HTTP requests by outcome.", "pipeline", "class", "outcome"
)
TTFT = _seconds(
    "tandem_time_to_first_token_seconds",
    "Time from the arrival of a request to its first token.",
    "pipeline",
    "class",
    buckets=_LATENCY_S,
)
E2E_LATENCY = _seconds(
    "tandem_e2e_request_latency_seconds",
    "Time from the arrival of a request to the end of its response.",
    "pipeline",
    "class",
    buckets=_LATENCY_S,
)
TPOT = _seconds(
    "tandem_time_per_output_token_seconds",
    "Mean time per generated token after the first, per sequence.",
    "class",
    buckets=_TOKEN_S,
)
REQUESTS_WAITING = _gauge(
    "tandem_requests_waiting", "Sequences that wait for their first result.", "pipeline", "class"
)
PROMPT_TOKENS = _counter(
    "tandem_prompt_tokens_total", "Prompt tokens of answered requests.", "pipeline"
)
GENERATED_TOKENS = _counter("tandem_generated_tokens_total", "Generated tokens.", "class")
CACHED_TOKENS = _counter(
    "tandem_cached_tokens_total", "Prompt tokens served from a prefix cache.", "pipeline"
)

# Bulk jobs.
BULK_ROWS = _counter(
    "tandem_bulk_rows_total",
    "Rows that a bulk job has completed since its start: answered, rejected.",
    "outcome",
)
BULK_EXPECTED_ROWS = _gauge(
    "tandem_bulk_expected_rows", "Estimated total rows of a bulk job's input."
)

# Ranks.
RANK_BUSY = _gauge(
    "tandem_rank_busy_fraction", "Fraction of time that a rank computes.", "group", "rank"
)
STAGE = _seconds(
    "tandem_stage_seconds",
    "Duration of a stage: attention, shared, expert, a2e, e2a, gather, host_copy.",
    "stage",
    "rank",
    buckets=_STAGE_S,
)
EXPOSED_COMMUNICATION = _counter(
    "tandem_exposed_communication_seconds_total",
    "Time in which a rank waited for a transfer without work to overlap it with.",
    "rank",
)
KV_BLOCKS = _gauge("tandem_kv_blocks", "KV blocks by state: free, used, cached.", "rank", "state")
CHANNEL_BYTES = _counter(
    "tandem_channel_bytes_total", "Payload sent to other ranks.", "direction", "backend"
)
PREEMPTIONS = _counter(
    "tandem_preemptions_total", "Preemptions of best-effort work by latency-sensitive work."
)
POLICY_FALLBACKS = _counter(
    "tandem_policy_fallbacks_total",
    "Decisions of the custom policy (priority.policy) that were invalid and replaced.",
)
PREEMPTION_BLOCKING = _seconds(
    "tandem_preemption_blocking_seconds",
    "Upper bound on how long a latency-sensitive task waited for a running best-effort step "
    "before preempting it.",
    buckets=_STAGE_S,
)
BE_WAIT = _seconds(
    "tandem_be_wait_seconds",
    "Time that preempted best-effort work waited before it continued.",
    buckets=_LATENCY_S,
)
OBJECTIVE = _gauge(
    "tandem_objective_seconds",
    "Configured targets of section `priority`: ls_ttft, ls_tbt, be_wait.",
    "objective",
)
BE_HELD = _counter(
    "tandem_be_held_seconds_total",
    "Time that a rank held best-effort work back for a latency-sensitive deadline.",
    "rank",
)
EXPERT_TOKENS = _counter(
    "tandem_expert_tokens_total",
    "Tokens routed to an expert, for the most used experts only.",
    "layer",
    "expert",
)
DISPATCHED_TOKENS = _counter(
    "tandem_dispatched_tokens_total",
    "Tokens that a rank dispatched to experts, counted at every layer.",
    "rank",
)
TOKEN_COPIES = _counter(
    "tandem_token_copies_total", "Copies of dispatched tokens, one per receiving rank.", "rank"
)
EXPERT_LOAD = _gauge(
    "tandem_expert_load_ratio",
    "(token, expert) pairs of the busiest expert rank over the mean, since the last scrape.",
    "rank",
)
LOCAL_ACTIVATION = _gauge(
    "tandem_local_activation_fraction",
    "Fraction of (token, expert) pairs whose expert is on the token's own rank (all_to_all).",
    "rank",
)
PREFETCH_HIT = _gauge(
    "tandem_prefetch_hit_fraction", "Fraction of experts in memory when needed.", "layer", "rank"
)
EXPERT_READ = _counter(
    "tandem_expert_read_bytes_total",
    "Bytes of experts read from storage, by cause: demand, used_hint, wasted_hint.",
    "rank",
    "cause",
)
EXPERT_WAIT = _counter(
    "tandem_expert_wait_seconds_total",
    "Time without compute because experts were being read.",
    "rank",
)
PLACEMENT_GENERATION = _gauge(
    "tandem_placement_generation", "Placement generation that an expert rank serves.", "rank"
)
EXPERT_MOVES = _counter(
    "tandem_expert_moves_total",
    "Placement proposals to an expert rank, by outcome: ready, retired, failed.",
    "rank",
    "outcome",
)
EXPERTS_MOVED = _counter(
    "tandem_expert_moved_bytes_total",
    "Bytes of experts that a rank loaded for placement changes.",
    "rank",
)
EXPERT_MOVE_TIME = _counter(
    "tandem_expert_move_seconds_total",
    "Time that a rank spent loading experts for placement changes.",
    "rank",
)
REPAIRS = _counter(
    "tandem_repairs_total",
    "Recoveries of an attention rank: switched to replicas of a lost expert rank (stand_in), or "
    "to its replacement (return).",
    "rank",
    "kind",
)
GROUP_EPOCH = _gauge(
    "tandem_group_epoch", "Epoch of a group; incremented by recoveries and added ranks.", "group"
)
RANK_UP = _gauge(
    "tandem_rank_up",
    "1 if the rank was available at the launcher's latest check, otherwise 0.",
    "group",
    "rank",
)
RANK_RESTARTS = _counter("tandem_rank_restarts_total", "Ranks that were replaced.", "group")
KEYS_RELOADED = _counter(
    "tandem_api_key_reloads_total",
    "Changes of http.keys_file, by outcome: loaded, rejected.",
    "outcome",
)

# Planner and router.
PLAN = _gauge("tandem_plan", "Sizes of the latest plan: ma, r1, me, r2.", "field")
PLAN_INFO = _gauge("tandem_plan_info", "1 for the task order of the latest plan.", "order")
PLAN_PREDICTED = _gauge("tandem_plan_predicted_seconds", "Predicted makespan of the latest batch.")
PLAN_MEASURED = _gauge("tandem_plan_measured_seconds", "Measured makespan of the latest batch.")
PLAN_BATCHES = _counter(
    "tandem_plan_batches_total",
    "Batches by source of their plan, and the reason if it was not the planner.",
    "rank",
    "chosen_by",
    "reason",
)
PLAN_SOLVE = _gauge("tandem_plan_solve_seconds", "Time to compute the latest plan.")
PLACEMENT_PROPOSALS = _counter(
    "tandem_placement_proposals_total", "Placements that the planner proposed to expert ranks."
)
PLACEMENT_GAIN = _gauge(
    "tandem_placement_gain_fraction",
    "Predicted saving of the latest proposed placement, as a fraction of the layers' time.",
)
SATURATION = _gauge(
    "tandem_saturation_flops", "FLOPs per batch that saturate a prefill worker.", "rank"
)
LOAD = _gauge("tandem_load_flops", "FLOPs of queued work at a prefill worker.", "rank")
MODEL_FLOPS_UTILIZATION = _gauge(
    "tandem_model_flops_utilization", "Model FLOPs per second over the peak.", "rank"
)
CAPACITY_USED = _gauge(
    "tandem_capacity_used_fraction",
    "Traffic of the last minute over capacity, from the planner's model (generation) or a "
    "worker's model of its batches (prefill).",
    "pipeline",
    "rank",
)
CAPACITY_GAIN = _gauge(
    "tandem_capacity_gain_fraction",
    "Additional capacity from one more rank of a kind, as a fraction of current capacity.",
    "pipeline",
    "kind",
)
CAPACITY_IN_USE = _gauge(
    "tandem_capacity_in_use_fraction",
    "Modelled utilization of a resource at full capacity: attention, experts, a2e, e2a.",
    "resource",
)
CAPACITY_RANKS = _gauge(
    "tandem_capacity_recommended_ranks",
    "Recommended ranks per group for recent traffic, at the current total.",
    "group",
)

ALL: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)


class RequestOutcome(enum.StrEnum):
    """Values of `tandem_requests_total{outcome}`. REFUSED: any 4xx status without its own value."""

    OK = "ok"
    REFUSED = "refused"
    OVERLOAD = "overload"
    CLIENT_GONE = "client_gone"
    TIMEOUT = "timeout"
    ERROR = "error"


class Pipeline(enum.StrEnum):
    """Values of label `pipeline`: the kind of response, not the rank that computes it."""

    GENERATION = "generation"
    PREFILL = "prefill"
