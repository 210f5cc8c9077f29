"""Board *Objectives*: latency, rejected requests and error budgets by priority class."""

from contracts import metrics
from contracts.metrics import RequestOutcome
from dashboards.objectives import OBJECTIVES
from dashboards.panels import (
    EVENTS_PER_S,
    OF_CLUSTER,
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
    quantiles,
    rate,
    total,
)

_REJECTED = f'outcome=~"{RequestOutcome.OVERLOAD}|{RequestOutcome.REFUSED}"'
_BE_FIRST = f'rate({metrics.TTFT.name}_bucket{{class="be", {OF_CLUSTER}}}[{WINDOW}])'

_BUDGETS = PanelRow(
    "Error budgets",
    tuple(
        PanelSpec(
            f"Burn rate: {objective.title}",
            Unit("x", "multiples of the allowed rate"),
            f"Objective: {objective.promise}. A value of 1 uses the error budget exactly up.",
            f"{objective.action}",
            tuple(
                query
                for window in ("5m", "1h")
                for query in line(objective.burn(window, OF_CLUSTER), name=f"over {window}")
            ),
            levels=(1.0, 14.4),
        )
        for objective in OBJECTIVES
    ),
)
_LATENCY = PanelRow(
    "Latency",
    (
        PanelSpec(
            "Time to first token",
            SECONDS,
            "Time from the arrival of a request to its first token, median and p95 by class.",
            "if it is high, see Waiting requests here and Bottleneck on board Capacity.",
            quantiles(metrics.TTFT, "class"),
            levels=(0.5, 1.0),
        ),
        PanelSpec(
            "Time per output token",
            SECONDS,
            "Mean time per generated token of a sequence, median and p95 by class.",
            "if it is high, lower schedule.max_batch_tokens or add ranks.",
            quantiles(metrics.TPOT, "class"),
            levels=(0.1, 0.2),
        ),
        PanelSpec(
            "Request latency",
            SECONDS,
            "Time from the arrival of a request to the end of its response, median and p95.",
            "compare with time to first token; the rest is generation.",
            quantiles(metrics.E2E_LATENCY, "pipeline", "class"),
            levels=(30.0, 300.0),
        ),
    ),
)
_REQUESTS = PanelRow(
    "Requests",
    (
        PanelSpec(
            "Requests by outcome",
            REQUESTS_PER_S,
            "Requests by pipeline and outcome (ok, refused, overload, client_gone, timeout, "
            "error).",
            "look up errors and timeouts by request id in the log.",
            line(rate(metrics.REQUESTS, "pipeline", "outcome"), "pipeline", "outcome"),
        ),
        PanelSpec(
            "Rejected requests",
            REQUESTS_PER_S,
            "Requests rejected because of load (overload, 429) or because they are invalid "
            "(refused, other 4xx).",
            "on overload, add ranks or raise priority.ls_max_wait_s; on refused, see the log.",
            line(rate(metrics.REQUESTS, "class", "outcome", where=_REJECTED), "class", "outcome"),
            levels=(0.1, 10.0),
        ),
        PanelSpec(
            "Waiting requests",
            Unit("short", "sequences"),
            "Sequences that wait for their first result.",
            "if it keeps growing, traffic exceeds capacity; see board Capacity.",
            line(total(metrics.REQUESTS_WAITING, "pipeline", "class"), "pipeline", "class"),
            levels=(64, 512),
        ),
    ),
)
_BEST_EFFORT = PanelRow(
    "Best effort and preemption",
    (
        PanelSpec(
            "Best-effort time to first token",
            SECONDS,
            "The p95 of best-effort requests, and the limit of admission (priority.be_max_wait_s).",
            "near the limit, add ranks or raise priority.be_share.",
            line(f"histogram_quantile(0.95, sum by (cluster, le) ({_BE_FIRST}))", name="p95")
            + line(largest(metrics.OBJECTIVE, where='objective="be_wait"'), name="limit"),
            levels=(240.0, 300.0),
        ),
        PanelSpec(
            "Preemptions",
            EVENTS_PER_S,
            "Preemptions of best-effort work by latency-sensitive work, all ranks.",
            "none; many preemptions are normal if both classes are busy.",
            line(rate(metrics.PREEMPTIONS), name="all ranks"),
        ),
        PanelSpec(
            "Preemption delay",
            SECONDS,
            "Upper bound on the wait of a latency-sensitive task for a running best-effort step.",
            "if it is high, lower schedule.max_batch_tokens.",
            quantiles(metrics.PREEMPTION_BLOCKING),
            levels=(0.05, 0.2),
        ),
        PanelSpec(
            "Pause of preempted work",
            SECONDS,
            "Time that preempted best-effort work waited before it continued.",
            "if it is high, raise priority.be_share or add ranks.",
            quantiles(metrics.BE_WAIT),
            levels=(30.0, 300.0),
        ),
        PanelSpec(
            "Best effort held back",
            PERCENT_OF_TIME,
            "Time that a rank held best-effort work back for a latency-sensitive deadline.",
            "if it is high, raise priority.ls_ttft_s or priority.ls_tbt_s.",
            line(rate(metrics.BE_HELD, "rank"), "rank"),
            levels=(0.5, 0.9),
        ),
    ),
    collapsed=True,
)

LATENCY = BoardSpec(
    Board.OBJECTIVES,
    "Latency, rejected requests and error budgets by priority class.",
    (_BUDGETS, _LATENCY, _REQUESTS, _BEST_EFFORT),
)
