"""Board *Bulk*: bulk jobs and the prefill workers that serve them."""

from contracts import metrics
from dashboards.capacity import SATURATION_FILL
from dashboards.panels import (
    OF_CLUSTER,
    PERCENT,
    PERCENT_OF_TIME,
    REQUESTS_PER_S,
    TOKENS_PER_S,
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

_WORKERS = f'{metrics.RANK_BUSY.name}{{group="prefill", {OF_CLUSTER}, rank=~"$rank"}}'
_PREFILL = 'pipeline="prefill"'

_JOBS = PanelRow(
    "Jobs",
    (
        PanelSpec(
            "Completed rows",
            Unit("short", "rows per second"),
            "Rows that bulk jobs complete: answered or rejected.",
            "on rejected, see the job's output for the reasons.",
            line(rate(metrics.BULK_ROWS, "outcome"), "outcome"),
        ),
        PanelSpec(
            "Expected rows",
            Unit("short", "rows"),
            "Estimated total rows of all running jobs.",
            "none; completed rows over this is the progress.",
            line(total(metrics.BULK_EXPECTED_ROWS), name="all jobs"),
        ),
    ),
)
_WORK = PanelRow(
    "Requests of the prefill pipeline",
    (
        PanelSpec(
            "Prefill requests",
            REQUESTS_PER_S,
            "Requests of the prefill pipeline, by class and outcome.",
            "on overload, lower the number of simultaneous jobs or add workers.",
            line(rate(metrics.REQUESTS, "class", "outcome", where=_PREFILL), "class", "outcome"),
        ),
        PanelSpec(
            "Prompt tokens of the prefill pipeline",
            TOKENS_PER_S,
            "All prompt tokens, and those served from a prefix cache.",
            "if few are cached, sort the input so that equal prefixes are adjacent.",
            line(rate(metrics.PROMPT_TOKENS, "pipeline", where=_PREFILL), name="all")
            + line(rate(metrics.CACHED_TOKENS, "pipeline", where=_PREFILL), name="cached"),
        ),
        PanelSpec(
            "Waiting prefill requests",
            Unit("short", "sequences"),
            "Sequences that wait for their first result.",
            "near 0 the workers run idle; far above 1,000 add workers.",
            line(total(metrics.REQUESTS_WAITING, "class", where=_PREFILL), "class"),
            levels=(1024, 65536),
        ),
    ),
)
_RANKS = PanelRow(
    "Workers",
    (
        PanelSpec(
            "Busy time of workers",
            PERCENT_OF_TIME,
            "Time in which a worker computes.",
            "a bulk job keeps it near 100 %; if it is lower, see Saturation of workers.",
            line(f"max by (cluster, rank) ({_WORKERS})", "rank"),
        ),
        PanelSpec(
            "Saturation of workers",
            PERCENT,
            "Queued work of a worker over the work that saturates it.",
            "below 100 % send more requests at a time; far above adds only latency.",
            line(SATURATION_FILL, "rank"),
            levels=(4.0, 16.0),
        ),
        PanelSpec(
            "Model FLOPs utilization of workers",
            PERCENT,
            "Model FLOPs per second over the peak of the hardware, if the peak is known.",
            "if it is low at full busy time, use larger batches (prefill.max_batch_tokens).",
            line(largest(metrics.MODEL_FLOPS_UTILIZATION, "rank"), "rank"),
        ),
    ),
)

BULK = BoardSpec(
    Board.BULK, "Bulk jobs and the prefill workers that serve them.", (_JOBS, _WORK, _RANKS)
)
