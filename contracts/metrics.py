"""The table of metrics: names, units, labels, buckets, and how dashboards show them. Declared
here once; `actors/telemetry/telemetry.py` makes Prometheus objects of it, `dashboards/generate.py`
the dashboards."""

from __future__ import annotations

import enum
import functools

import msgspec


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class PanelView(enum.StrEnum):
    """What of a metric is drawn; if nothing is said, the first one of its kind."""

    RATE = "rate"  # of a counter: increase per second, summed over the other labels
    SUM = "sum"  # of a gauge
    MAX = "max"  # of a gauge
    QUANTILES = "quantiles"  # of a histogram: p50 and p95
    TIME = "time"  # of a histogram of seconds: seconds per second


class Board(enum.StrEnum):
    """Dashboards, a file each in `dashboards/`."""

    CAPACITY = "capacity"  # how much more, what is the bottleneck, what another rank would add
    OBJECTIVES = "objectives"  # whether requests are answered in time
    PIPELINE = "pipeline"  # what happens inside
    BULK = "bulk"


class Panel(msgspec.Struct, frozen=True):
    """Of a dashboard. unit: Grafana's name of it. by: a line for each value of these labels. where:
    PromQL's selection. share_of: the metric that it is divided by, viewed alike. Panels with the
    same title are one; legend: which line of it this is. warn, bad: levels at which it is yellow
    and red, bad below warn where less is worse; None: no level of it is bad by itself."""

    title: str
    unit: str
    by: tuple[str, ...] = ()
    view: PanelView | None = None
    where: str = ""
    share_of: str = ""
    legend: str = ""
    board: Board = Board.PIPELINE
    warn: float | None = None
    bad: float | None = None


class Metric(msgspec.Struct, frozen=True):
    """name: as Prometheus shows it. buckets: upper bounds in `unit`, for histograms."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[str, ...]
    panels: tuple[Panel, ...]
    unit: str
    buckets: tuple[float, ...]


_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_STAGE_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)


def _metric(
    kind: MetricKind,
    name: str,
    help: str,
    labels: tuple[str, ...] = (),
    *panels: Panel,
    unit: str = "",
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(kind, name, help, labels, panels, unit, buckets)


_counter = functools.partial(_metric, MetricKind.COUNTER)
_gauge = functools.partial(_metric, MetricKind.GAUGE)
_seconds = functools.partial(_metric, MetricKind.HISTOGRAM, unit="s")

# Requests, as the ingress sees them. outcome: see `RequestOutcome`.
REQUESTS = _counter(
    "tandem_requests_total",
    "HTTP requests answered.",
    ("pipeline", "class", "outcome"),
    Panel("Requests by outcome", "reqps", ("pipeline", "outcome"), board=Board.OBJECTIVES),
)
TTFT = _seconds(
    "tandem_time_to_first_token_seconds",
    "From a request's arrival to its first token.",
    ("pipeline", "class"),
    Panel("Time to first token", "s", ("class",), board=Board.OBJECTIVES, warn=0.5, bad=1.0),
    buckets=_LATENCY_S,
)
E2E_LATENCY = _seconds(
    "tandem_e2e_request_latency_seconds",
    "From a request's arrival to the end of its answer.",
    ("pipeline", "class"),
    Panel("Turnaround", "s", ("pipeline", "class"), board=Board.OBJECTIVES, warn=30.0, bad=300.0),
    buckets=_LATENCY_S,
)
TPOT = _seconds(
    "tandem_time_per_output_token_seconds",
    "Mean time per generated token after the first, per sequence.",
    ("class",),
    Panel("Time per output token", "s", ("class",), board=Board.OBJECTIVES, warn=0.1, bad=0.2),
    buckets=_TOKEN_S,
)
REQUESTS_WAITING = _gauge(
    "tandem_requests_waiting",
    "Sequences that wait for a first answer.",
    ("pipeline", "class"),
    Panel("Queue depth", "short", ("pipeline", "class"), board=Board.OBJECTIVES, warn=64, bad=512),
)
PROMPT_TOKENS = _counter(
    "tandem_prompt_tokens_total",
    "Prompt tokens of answered requests.",
    ("pipeline",),
    Panel("Prompt tokens per second", "short", ("pipeline",)),
    unit="tokens",
)
GENERATED_TOKENS = _counter(
    "tandem_generated_tokens_total",
    "Tokens generated.",
    ("class",),
    Panel("Generated tokens per second", "short", ("class",)),
    unit="tokens",
)
CACHED_TOKENS = _counter(
    "tandem_cached_tokens_total",
    "Prompt tokens that came from a prefix cache.",
    ("pipeline",),
    Panel("Cached share of prompts", "percentunit", ("pipeline",), share_of=PROMPT_TOKENS.name),
    unit="tokens",
)

# Bulk jobs.
BULK_ROWS = _counter(
    "tandem_bulk_rows_total",
    "Rows that a bulk job has done since it was started: answered, rejected.",
    ("outcome",),
    Panel("Rows of bulk jobs per second", "ops", ("outcome",), board=Board.BULK),
)
BULK_EXPECTED_ROWS = _gauge(
    "tandem_bulk_expected_rows",
    "Rows that a bulk job will have done, as far as its input can be told.",
    (),
    Panel("Rows that bulk jobs are to do", "short", board=Board.BULK, legend="all jobs"),
)

# Ranks.
RANK_BUSY = _gauge(
    "tandem_rank_busy_fraction",
    "Part of the time a rank computes.",
    ("group", "rank"),
    Panel(
        "Busy share of a rank", "percentunit", ("rank",), board=Board.CAPACITY, warn=0.85, bad=0.97
    ),
)
STAGE = _seconds(
    "tandem_stage_seconds",
    "Duration of one stage: attention, shared, expert, a2e, e2a, gather, host_copy.",
    ("stage", "rank"),
    Panel("Seconds per second in each stage", "short", ("stage", "rank"), PanelView.TIME),
    Panel("Stage duration, all ranks", "s", ("stage",), warn=0.1, bad=0.5),
    Panel(
        "Weights waited for, seconds per second",
        "short",
        ("stage", "rank"),
        PanelView.TIME,
        'stage=~"gather|host_copy"',
        warn=0.2,
        bad=0.5,
    ),
    buckets=_STAGE_S,
)
EXPOSED_COMMUNICATION = _counter(
    "tandem_exposed_communication_seconds_total",
    "Time so far in which a rank had nothing to compute because it waited for a transfer.",
    ("rank",),
    Panel(
        "Exposed communication, seconds per second",
        "short",
        ("rank",),
        board=Board.CAPACITY,
        warn=0.2,
        bad=0.5,
    ),
    unit="s",
)
KV_BLOCKS = _gauge(
    "tandem_kv_blocks",
    "KV blocks by state: free, used, cached.",
    ("rank", "state"),
    Panel("KV blocks by state", "short", ("rank", "state"), board=Board.CAPACITY),
)
CHANNEL_BYTES = _counter(
    "tandem_channel_bytes_total",
    "Payload sent.",
    ("direction", "backend"),
    Panel("Channel payload sent", "Bps", ("direction", "backend")),
    unit="bytes",
)
PREEMPTIONS = _counter(
    "tandem_preemptions_total",
    "Times that LS work overtook running BE work.",
    (),
    Panel("Preemptions per second", "ops", legend="all ranks"),
)
POLICY_FALLBACKS = _counter(
    "tandem_policy_fallbacks_total",
    "Choices of priority.policy that could not be used.",
    (),
    Panel(
        "Choices of priority.policy given up per second",
        "ops",
        legend="all ranks",
        warn=0.01,
        bad=1.0,
    ),
)
PREEMPTION_BLOCKING = _seconds(
    "tandem_preemption_blocking_seconds",
    "At most so long LS work has waited for the step of BE work that it then overtook.",
    (),
    Panel("Waited for a step of best-effort work", "s", board=Board.OBJECTIVES, warn=0.05, bad=0.2),
    buckets=_STAGE_S,
)
BE_WAIT = _seconds(
    "tandem_be_wait_seconds",
    "Time that BE work stood parked behind LS work, each time.",
    (),
    Panel("Best-effort work parked, each time", "s", board=Board.OBJECTIVES, warn=30.0, bad=300.0),
    buckets=_LATENCY_S,
)
OBJECTIVE = _gauge(
    "tandem_objective_seconds",
    "What the section `priority` of the configuration promises: ls_ttft, ls_tbt, be_wait.",
    ("objective",),
    Panel("Promised", "s", ("objective",), PanelView.MAX, board=Board.OBJECTIVES),
    unit="s",
)
BE_HELD = _counter(
    "tandem_be_held_seconds_total",
    "Time so far in which a rank held BE work back for an LS due time.",
    ("rank",),
    Panel(
        "Best-effort work held back, seconds per second",
        "short",
        ("rank",),
        board=Board.OBJECTIVES,
        warn=0.5,
        bad=0.9,
    ),
    unit="s",
)
EXPERT_TOKENS = _counter(
    "tandem_expert_tokens_total",
    "Tokens routed to an expert (the most used experts only).",
    ("layer", "expert"),
    Panel("Tokens of the most used experts", "ops", ("layer", "expert")),
    unit="tokens",
)
DISPATCHED_TOKENS = _counter(
    "tandem_dispatched_tokens_total",
    "Tokens that a rank has sent to experts, at each layer anew.",
    ("rank",),
    unit="tokens",
)
TOKEN_COPIES = _counter(
    "tandem_token_copies_total",
    "Other ranks that these tokens were sent to.",
    ("rank",),
    Panel("Copies of a token", "short", ("rank",), share_of=DISPATCHED_TOKENS.name),
)
EXPERT_LOAD = _gauge(
    "tandem_expert_load_ratio",
    "(token, expert) pairs of the busiest rank with experts over the mean, as this rank has sent "
    "them since it was last asked.",
    ("rank",),
    Panel(
        "Busiest rank with experts over the mean",
        "short",
        ("rank",),
        PanelView.MAX,
        warn=1.5,
        bad=2.5,
    ),
)
LOCAL_ACTIVATION = _gauge(
    "tandem_local_activation_fraction",
    "(token, expert) pairs whose expert is on the token's own rank (all_to_all).",
    ("rank",),
    Panel("Pairs whose expert is on the token's own rank", "percentunit", ("rank",), PanelView.MAX),
)
PREFETCH_HIT = _gauge(
    "tandem_prefetch_hit_fraction",
    "Expert weights that were there when needed.",
    ("layer",),
    Panel("Experts that were there when needed", "percentunit", ("layer",), warn=0.9, bad=0.5),
)
EXPERT_READ = _counter(
    "tandem_expert_read_bytes_total",
    "Bytes of experts read so far, by cause: demand, used_hint, wasted_hint.",
    ("rank", "cause"),
    Panel("Experts read", "Bps", ("cause",)),
    unit="bytes",
)
EXPERT_WAIT = _counter(
    "tandem_expert_wait_seconds_total",
    "Time so far in which nothing was computed because experts had not been read.",
    ("rank",),
    Panel(
        "Waiting for experts to be read, seconds per second",
        "short",
        ("rank",),
        warn=0.2,
        bad=0.5,
    ),
    unit="s",
)
PLACEMENT_GENERATION = _gauge(
    "tandem_placement_generation",
    "Generation of the placement of experts that a rank has and all attention ranks use.",
    ("rank",),
    Panel("Generation of the placement", "short", ("rank",), PanelView.MAX),
)
EXPERT_MOVES = _counter(
    "tandem_expert_moves_total",
    "Placements that were proposed to an expert rank, by outcome: ready, retired, failed.",
    ("rank", "outcome"),
    Panel("Moves of experts", "short", ("outcome",)),
)
EXPERTS_MOVED = _counter(
    "tandem_expert_moved_bytes_total",
    "Bytes of experts that came to a rank by moves.",
    ("rank",),
    Panel("Experts moved", "Bps", ("rank",)),
    unit="bytes",
)
EXPERT_MOVE_TIME = _counter(
    "tandem_expert_move_seconds_total",
    "Time in which a rank brought experts in.",
    ("rank",),
    Panel("Moving experts, seconds per second", "short", ("rank",)),
    unit="s",
)
REPAIRS = _counter(
    "tandem_repairs_total",
    "Times an attention rank went over to ranks that stand in for a lost one (stand_in), and that "
    "a lost one's place was taken (return).",
    ("rank", "kind"),
    Panel("Repairs per second", "ops", ("kind",), warn=0.002, bad=0.01),
)
GROUP_EPOCH = _gauge(
    "tandem_group_epoch",
    "Epoch of a group; grows with each repair.",
    ("group",),
    Panel("Epoch of a group", "short", ("group",), PanelView.MAX),
)
RANK_UP = _gauge(
    "tandem_rank_up",
    "1 where the launcher's latest check found the rank of use, else 0.",
    ("group", "rank"),
    Panel("Ranks of use", "short", ("group",), PanelView.SUM),
)
RANK_RESTARTS = _counter(
    "tandem_rank_restarts_total",
    "Ranks that were replaced.",
    ("group",),
    Panel("Replaced ranks per second", "ops", ("group",), warn=0.002, bad=0.01),
)
KEYS_RELOADED = _counter(
    "tandem_api_key_reloads_total",
    "Changed files of http.keys_file, by what became of them: taken, or refused.",
    ("outcome",),
    Panel("Keys files read per second", "ops", ("outcome",)),
)

# Planner and router.
PLAN = _gauge(
    "tandem_plan",
    "Latest plan: ma, r1, me, r2.",
    ("field",),
    Panel("Sizes of the latest plan", "short", ("field",), PanelView.MAX),
)
PLAN_INFO = _gauge(
    "tandem_plan_info",
    "1 for the order of the latest plan.",
    ("order",),
    Panel("Order of the latest plan", "short", ("order",), PanelView.MAX),
)
_MAKESPAN = "Makespan of the latest planned batch, predicted and measured"
PLAN_PREDICTED = _gauge(
    "tandem_plan_predicted_seconds",
    "Predicted makespan.",
    (),
    Panel(_MAKESPAN, "s", legend="predicted", board=Board.CAPACITY),
    unit="s",
)
PLAN_MEASURED = _gauge(
    "tandem_plan_measured_seconds",
    "Measured makespan.",
    (),
    Panel(_MAKESPAN, "s", legend="measured", board=Board.CAPACITY),
    unit="s",
)
PLAN_BATCHES = _counter(
    "tandem_plan_batches_total",
    "Batches by who chose their plan, and why it was not the planner.",
    ("rank", "chosen_by", "reason"),
    Panel("Batches by who chose the plan", "ops", ("chosen_by", "reason")),
)
PLAN_SOLVE = _gauge(
    "tandem_plan_solve_seconds",
    "Time to find the latest plan.",
    (),
    Panel("Time to find the latest plan", "s", legend="solve", warn=0.1, bad=1.0),
    unit="s",
)
PLACEMENT_PROPOSALS = _counter(
    "tandem_placement_proposals_total",
    "Placements that the planner has proposed to the expert ranks.",
    (),
    Panel("Placements proposed", "ops"),
)
PLACEMENT_GAIN = _gauge(
    "tandem_placement_gain_fraction",
    "Of the layers' time, what the latest proposed placement was predicted to save.",
    (),
    Panel("Predicted gain of the latest placement", "percentunit"),
)
SATURATION = _gauge(
    "tandem_saturation_flops", "FLOPs per batch that saturate a rank.", ("rank",), unit="flops"
)
LOAD = _gauge(
    "tandem_load_flops",
    "FLOPs that wait at a rank.",
    ("rank",),
    Panel(
        "Work at a prefill worker, FLOPs", "short", ("rank",), PanelView.MAX, board=Board.CAPACITY
    ),
    Panel(
        "Work as a share of the saturation threshold",
        "percentunit",
        ("rank",),
        PanelView.MAX,
        share_of=SATURATION.name,
        board=Board.CAPACITY,
        warn=2.0,
        bad=8.0,
    ),
    unit="flops",
)
MODEL_FLOPS_UTILIZATION = _gauge(
    "tandem_model_flops_utilization",
    "Model FLOPs per second over peak.",
    ("rank",),
    Panel("Model FLOPs utilization", "percentunit", ("rank",), board=Board.CAPACITY),
)

CAPACITY_USED = _gauge(
    "tandem_capacity_used_fraction",
    "What came in the last minute over what could come, by the planner's model of what is measured "
    "(generation), or a worker's model of its batches (prefill).",
    ("pipeline", "rank"),
    Panel(
        "Capacity used",
        "percentunit",
        ("pipeline", "rank"),
        PanelView.MAX,
        board=Board.CAPACITY,
        warn=0.75,
        bad=0.95,
    ),
)
CAPACITY_GAIN = _gauge(
    "tandem_capacity_gain_fraction",
    "Of what could come now, what one more rank of a kind would add.",
    ("pipeline", "kind"),
    Panel(
        "One more rank would add, of what could come",
        "percentunit",
        ("kind",),
        PanelView.MAX,
        board=Board.CAPACITY,
    ),
)
CAPACITY_IN_USE = _gauge(
    "tandem_capacity_in_use_fraction",
    "Of the time at the knee, when a resource would be in use: attention, experts, a2e, e2a.",
    ("resource",),
    Panel("In use at the knee", "percentunit", ("resource",), PanelView.MAX, board=Board.CAPACITY),
)
CAPACITY_RANKS = _gauge(
    "tandem_capacity_recommended_ranks",
    "Of as many ranks as now, how many in each group would do most of the traffic of late.",
    ("group",),
)

ALL: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)


class RequestOutcome(enum.StrEnum):
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
