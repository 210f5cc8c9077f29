"""Board *Pipeline*: throughput, stages, plans, ranks, and the features of each."""

from contracts import metrics
from dashboards.panels import (
    BYTES_PER_S,
    EVENTS_PER_S,
    PERCENT,
    PERCENT_OF_TIME,
    SECONDS,
    TOKENS_PER_S,
    Board,
    BoardSpec,
    PanelRow,
    PanelSpec,
    Unit,
    average,
    largest,
    line,
    quantiles,
    rate,
    time_share,
    total,
)

_THROUGHPUT = PanelRow(
    "Throughput",
    (
        PanelSpec(
            "Prompt tokens",
            TOKENS_PER_S,
            "Prompt tokens of answered requests, by pipeline.",
            "compare with the expected traffic.",
            line(rate(metrics.PROMPT_TOKENS, "pipeline"), "pipeline"),
        ),
        PanelSpec(
            "Generated tokens",
            TOKENS_PER_S,
            "Generated tokens, by priority class.",
            "if it falls at equal traffic, see board Capacity.",
            line(rate(metrics.GENERATED_TOKENS, "class"), "class"),
        ),
        PanelSpec(
            "Prefix cache hits",
            PERCENT,
            "Share of prompt tokens served from a prefix cache.",
            "if it is low for repeated prompts, increase kv.memory_fraction.",
            line(
                f"{rate(metrics.CACHED_TOKENS, 'pipeline')} / "
                f"{rate(metrics.PROMPT_TOKENS, 'pipeline')}",
                "pipeline",
            ),
        ),
    ),
)
_STAGES = PanelRow(
    "Stages",
    (
        PanelSpec(
            "Time in each stage",
            PERCENT_OF_TIME,
            "Time that each rank spends in each stage. Stages overlap, so the sum can exceed 100 "
            "percent.",
            "the stage with the largest share limits its rank.",
            line(time_share(metrics.STAGE, "stage", "rank"), "stage", "rank"),
        ),
        PanelSpec(
            "Stage duration",
            SECONDS,
            "Duration of one stage of a micro-batch, median and p95 over all ranks.",
            "if a stage is slow, compare with tandem profile on the same hardware.",
            quantiles(metrics.STAGE, "stage"),
            levels=(0.1, 0.5),
        ),
        PanelSpec(
            "Traffic between ranks",
            BYTES_PER_S,
            "Payload that ranks send to each other, by direction and transport.",
            "near the network's bandwidth, place groups on fewer nodes (groups.placement).",
            line(rate(metrics.CHANNEL_BYTES, "direction", "backend"), "direction", "backend"),
        ),
    ),
)
_PLANS = PanelRow(
    "Plans",
    (
        PanelSpec(
            "Batches by source of the plan",
            EVENTS_PER_S,
            "Batches planned by the planner, or by section schedule and why.",
            "reasons lost and slow indicate a planner that is down or overloaded.",
            line(rate(metrics.PLAN_BATCHES, "chosen_by", "reason"), "chosen_by", "reason"),
        ),
        PanelSpec(
            "Sizes of the latest plan",
            Unit("short", "sequences (ma), tokens (me), parts (r1, r2)"),
            "Sizes of the latest plan: micro-batches (r1) of ma sequences, token groups (r2) of "
            "me tokens per expert.",
            "none; it explains changes of the other panels.",
            line(largest(metrics.PLAN, "field"), "field"),
        ),
        PanelSpec(
            "Task order of the latest plan",
            Unit("short", "1 for the order in use"),
            "Order of attention and shared-expert tasks (schedule.order).",
            "none; it explains changes of the other panels.",
            line(largest(metrics.PLAN_INFO, "order"), "order"),
        ),
    ),
)
_RANKS = PanelRow(
    "Ranks",
    (
        PanelSpec(
            "Available ranks",
            Unit("short", "ranks"),
            "Ranks that were available at the launcher's latest check, by group.",
            "if it is below the configured number, see runbook Rank down.",
            line(total(metrics.RANK_UP, "group"), "group"),
        ),
        PanelSpec(
            "Replaced ranks",
            EVENTS_PER_S,
            "Ranks that were lost and replaced, by group.",
            "look up rank_failed and rank_lost in the log; repetition indicates a faulty node.",
            line(rate(metrics.RANK_RESTARTS, "group"), "group"),
            levels=(0.002, 0.01),
        ),
        PanelSpec(
            "Recoveries",
            EVENTS_PER_S,
            "Switches of an attention rank to replicas of a lost expert rank (stand_in), and to "
            "its replacement (return).",
            "every stand_in is followed by a return; otherwise see runbook Rank down.",
            line(rate(metrics.REPAIRS, "kind"), "kind"),
            levels=(0.002, 0.01),
        ),
    ),
)
_PLANNER = PanelRow(
    "Planner and policies",
    (
        PanelSpec(
            "Planning time",
            SECONDS,
            "Time to compute the latest plan.",
            "if it is high, set planner.extended_search=false.",
            line(largest(metrics.PLAN_SOLVE), name="latest plan"),
            levels=(0.1, 1.0),
        ),
        PanelSpec(
            "Invalid policy decisions",
            EVENTS_PER_S,
            "Decisions of a custom scheduling policy that were invalid; the default "
            "policy replaces them.",
            "correct the policy (priority.policy).",
            line(rate(metrics.POLICY_FALLBACKS), name="all ranks"),
            levels=(0.01, 1.0),
        ),
        PanelSpec(
            "Group epoch",
            Unit("short", "recoveries and added ranks since the start"),
            "Epoch of a group, incremented by each recovery and by each added rank.",
            "if it increases often, see runbook Group epoch flaps.",
            line(largest(metrics.GROUP_EPOCH, "group"), "group"),
        ),
        PanelSpec(
            "Reloads of the API key file",
            EVENTS_PER_S,
            "Changes of the key file that were loaded or rejected.",
            "on rejected, see api_keys_rejected in the log; the previous keys stay.",
            line(rate(metrics.KEYS_RELOADED, "outcome"), "outcome"),
        ),
    ),
    collapsed=True,
)
_EXPERT_LOAD = PanelRow(
    "Expert load",
    (
        PanelSpec(
            "Tokens of the most used experts",
            TOKENS_PER_S,
            "Tokens routed to the most used experts, by layer and expert.",
            "if few experts dominate, use placement.rebalance or replicas.",
            line(rate(metrics.EXPERT_TOKENS, "layer", "expert"), "layer", "expert"),
        ),
        PanelSpec(
            "Load imbalance of expert ranks",
            Unit("short", "ratio"),
            "Load of the busiest expert rank over the mean.",
            "above 1.5, use placement.rebalance or a placement made by tandem place.",
            line(largest(metrics.EXPERT_LOAD, "rank"), "rank"),
            levels=(1.5, 2.5),
        ),
        PanelSpec(
            "Copies per token",
            Unit("short", "copies"),
            "Expert ranks that receive a token, on average.",
            "to lower it, place experts that are used together on one rank (tandem place).",
            line(
                f"{rate(metrics.TOKEN_COPIES, 'rank')} / {rate(metrics.DISPATCHED_TOKENS, 'rank')}",
                "rank",
            ),
        ),
        PanelSpec(
            "Local experts (all_to_all)",
            PERCENT,
            "Share of (token, expert) pairs whose expert is on the token's own rank.",
            "none; a higher value means less traffic.",
            line(largest(metrics.LOCAL_ACTIVATION, "rank"), "rank"),
        ),
    ),
    collapsed=True,
)
_OFFLOADING = PanelRow(
    "Expert offloading",
    (
        PanelSpec(
            "Experts in memory when needed",
            PERCENT,
            "Share of experts that were in memory when a layer needed them, by layer.",
            "if it is low, increase experts.slots or record a routing profile.",
            line(average(metrics.PREFETCH_HIT, "layer"), "layer"),
            levels=(0.9, 0.5),
        ),
        PanelSpec(
            "Experts read from storage",
            BYTES_PER_S,
            "Bytes read on demand, by useful prefetches (used_hint) and by wasted ones "
            "(wasted_hint).",
            "near the bandwidth of the storage, increase experts.slots.",
            line(rate(metrics.EXPERT_READ, "cause"), "cause"),
        ),
        PanelSpec(
            "Waiting for expert reads",
            PERCENT_OF_TIME,
            "Time without compute because experts were being read.",
            "increase experts.slots, or use faster storage.",
            line(rate(metrics.EXPERT_WAIT, "rank"), "rank"),
            levels=(0.2, 0.5),
        ),
        PanelSpec(
            "Loading expert weights",
            PERCENT_OF_TIME,
            "Time in which a prefill worker gathers weights or copies them from the host.",
            "raise prefill.resident_layers, or use larger batches.",
            line(
                time_share(metrics.STAGE, "stage", "rank", where='stage=~"gather|host_copy"'),
                "stage",
                "rank",
            ),
            levels=(0.2, 0.5),
        ),
    ),
    collapsed=True,
)
_PLACEMENT = PanelRow(
    "Expert placement",
    (
        PanelSpec(
            "Placement generation",
            Unit("short", "generation"),
            "Placement that each expert rank serves.",
            "if ranks differ for long, a move is stuck; see placement.move_timeout_s.",
            line(largest(metrics.PLACEMENT_GENERATION, "rank"), "rank"),
        ),
        PanelSpec(
            "Proposed placements",
            EVENTS_PER_S,
            "Placements that the planner proposed to the expert ranks.",
            "if they are frequent, increase placement.payback_s.",
            line(rate(metrics.PLACEMENT_PROPOSALS), name="proposals"),
        ),
        PanelSpec(
            "Predicted gain of a placement",
            PERCENT,
            "Share of the layers' time that the latest proposed placement saves.",
            "compare with the load imbalance after the move.",
            line(largest(metrics.PLACEMENT_GAIN), name="latest proposal"),
        ),
        PanelSpec(
            "Expert moves",
            Unit("short", "moves per second"),
            "Placement proposals at expert ranks by outcome (ready, retired, failed).",
            "on failed, see the log of the rank.",
            line(rate(metrics.EXPERT_MOVES, "outcome"), "outcome"),
        ),
        PanelSpec(
            "Moved experts",
            BYTES_PER_S,
            "Bytes of experts that ranks load for a placement change.",
            "limit it with placement.bytes_per_s.",
            line(rate(metrics.EXPERTS_MOVED, "rank"), "rank"),
        ),
        PanelSpec(
            "Time for expert moves",
            PERCENT_OF_TIME,
            "Time that a rank spends loading experts for a placement change.",
            "if moves slow requests down, lower placement.bytes_per_s.",
            line(rate(metrics.EXPERT_MOVE_TIME, "rank"), "rank"),
        ),
    ),
    collapsed=True,
)

PIPELINE = BoardSpec(
    Board.PIPELINE,
    "Throughput, stages, plans and ranks; expert load, offloading and placement.",
    (_THROUGHPUT, _STAGES, _PLANS, _RANKS, _PLANNER, _EXPERT_LOAD, _OFFLOADING, _PLACEMENT),
)
