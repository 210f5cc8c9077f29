"""FinDEP's Tables 5 and 7 for testbed A, and what is beyond the paper there (modelled).

`python -m benchmarks.cases.findep_tables` prints them: Eq. 1 to 4 with the
coefficients that the paper prints. It does not say how many samples fit in memory, so several
limits are shown.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec

from planner.costs.stages import Linear, PlanSpec, StageModels
from planner.schedule.extended_plans import solve_extended
from planner.schedule.replay import replay
from planner.schedule.schedule import schedule_of
from planner.schedule.solver import PlannedBatch, Solution, solve

# Caption of Figure 7: ms, and ms per multiply-add or per element.
GEMM = Linear(0.17, 8.59e-11)
ATTENTION = Linear(0.15, 1.54e-11)
LINKS = {
    (1, 7): Linear(0.10, 9.61e-7),
    (2, 6): Linear(0.01, 1.28e-6),
    (4, 4): Linear(0.37, 2.55e-6),
}
LIMITS = (1, 2, 4, 8)


class Model(NamedTuple):
    """What Eq. 1 to 4 need, from the published configuration."""

    name: str
    num_layers: int  # of the paper's shortened model on testbed A
    hidden: int
    ffn: int
    experts: int
    top_k: int
    shared_experts: int
    projections: tuple[int, ...]  # multiply-adds per token of each GEMM of attention
    heads: int
    head_dims: int  # d_k + d_v


DEEPSEEK = Model(
    "DeepSeek-V2", 8, 5120, 1536, 160, 6, 2,
    (5120 * 1536, 1536 * 128 * 192, 5120 * 576, 512 * 128 * 256, 128 * 128 * 5120), 128, 192 + 128,
)  # fmt: skip
QWEN = Model(
    "Qwen3-MoE", 24, 4096, 1536, 128, 8, 0,
    (4096 * 64 * 128, 4096 * 4 * 128, 4096 * 4 * 128, 64 * 128 * 4096), 64, 256,
)  # fmt: skip
# PPPipe and FinDEP by S (Table 5); naive, PPPipe and FinDEP by S (Table 7).
TABLE_5 = {
    "DeepSeek-V2": {1024: (48.50, 53.40), 2048: (46.28, 50.27), 4096: (44.21, 51.47)},
    "Qwen3-MoE": {
        1024: (13.94, 15.81), 2048: (14.00, 15.85), 4096: (13.80, 15.55), 8192: (8.57, 13.14),
    },
}  # fmt: skip
TABLE_7 = {
    4096: (905.49, 528.94, 309.81),
    2048: (536.22, 144.32, 52.60),
    1024: (194.95, 188.65, 97.33),
}


def plan_spec(model: Model, split: tuple[int, int], tokens: int, max_samples: int) -> PlanSpec:
    """Eq. 1 to 4 and 7 to 11, with the factor 3 of Eq. 3 in alpha and beta."""
    ag, eg = split
    experts = -(-model.experts // eg)
    gemms = len(model.projections)
    attention = Linear(
        gemms * GEMM.alpha_ms + ATTENTION.alpha_ms,
        tokens * sum(model.projections) * GEMM.beta_ms
        + tokens * tokens * model.heads * model.head_dims * ATTENTION.beta_ms,
    )
    matrix = model.hidden * model.ffn
    shared = Linear(
        3 * model.shared_experts * GEMM.alpha_ms,
        3 * model.shared_experts * tokens * matrix * GEMM.beta_ms,
    )
    link = LINKS[split]
    wire = Linear(link.alpha_ms, experts * model.hidden * link.beta_ms)
    expert = Linear(3 * experts * GEMM.alpha_ms, 3 * experts * matrix * GEMM.beta_ms)
    return PlanSpec(
        stages=StageModels(attention=attention, shared=shared, expert=expert, a2e=wire, e2a=wire),
        tokens_per_expert_per_sample=ag * model.top_k * tokens / model.experts,
        num_layers=model.num_layers,
        max_samples=max_samples,
        max_r2=64,
        has_shared=model.shared_experts > 0,
    )


class Prediction(NamedTuple):
    """One schedule at its own best split; rate in samples per second of the whole cluster."""

    split: tuple[int, int]
    planned: PlannedBatch
    rate: float
    exposed_ms: float


def predictions(model: Model, tokens: int, max_samples: int) -> list[Prediction]:
    """Naive, PPPipe and FinDEP, each at its own best of the splits with printed coefficients."""
    specs = {split: plan_spec(model, split, tokens, max_samples) for split in LINKS}
    solutions = {split: solve(spec) for split, spec in specs.items()}
    result = []
    for pick in (_naive, _pppipe, _findep):
        split = max(LINKS, key=lambda s: s[0] * pick(solutions[s]).samples_per_s)
        planned = pick(solutions[split])
        exposed_ms = replay(schedule_of(specs[split], planned.plan)).exposed_ms
        result.append(Prediction(split, planned, split[0] * planned.samples_per_s, exposed_ms))
    return result


def _naive(solution: Solution) -> PlannedBatch:
    return solution.naive


def _pppipe(solution: Solution) -> PlannedBatch:
    return solution.pppipe


def _findep(solution: Solution) -> PlannedBatch:
    return solution.best


def beyond_cells(model: Model, tokens: int) -> list[str]:
    """How much faster than FinDEP with chunks (all that one sample leaves), and the plan."""
    pairs_ms = ATTENTION.beta_ms * tokens * model.heads * model.head_dims
    projections_ms = GEMM.beta_ms * sum(model.projections)
    split = (2, 6)
    spec = msgspec.structs.replace(
        plan_spec(model, split, tokens, max_samples=1),
        attention_quadratic_fraction=pairs_ms / (pairs_ms + projections_ms),
    )
    findep, beyond = solve(spec).best, solve_extended(spec)
    return [f"{beyond.samples_per_s / findep.samples_per_s:.2f}", beyond.plan.label]


def main() -> None:
    for model in (DEEPSEEK, QWEN):
        for tokens, (printed_pppipe, printed_findep) in TABLE_5[model.name].items():
            cells = [f"{model.name} | {tokens} | {printed_findep / printed_pppipe:.2f}"]
            for limit in LIMITS:
                naive, pppipe, findep = predictions(model, tokens, limit)
                ratios = f"1 : {pppipe.rate / naive.rate:.2f} : {findep.rate / naive.rate:.2f}"
                cells.append(f"{ratios} ({findep.rate / pppipe.rate:.2f})")
            print("| " + " | ".join(cells) + " |")
    for tokens, printed in TABLE_7.items():
        cells = [f"{tokens} | " + " : ".join(f"{value / printed[0]:.2f}" for value in printed)]
        for limit in LIMITS:
            rows = predictions(DEEPSEEK, tokens, limit)
            exposed = [row.exposed_ms / (row.split[0] * row.planned.samples) for row in rows]
            cells.append(" : ".join(f"{value / exposed[0]:.2f}" for value in exposed))
        print("| " + " | ".join(cells) + " |")
    for model, tokens in itertools.product((DEEPSEEK, QWEN), (4096, 8192)):
        print(f"| {model.name} | {tokens} | {' | '.join(beyond_cells(model, tokens))} |")
    for model, tokens in ((DEEPSEEK, 4096), (QWEN, 8192)):
        for limit in LIMITS:
            for prediction in predictions(model, tokens, limit):
                rate = f"{prediction.rate:.2f} samples/s, {prediction.rate * tokens:.0f} tokens/s"
                label = prediction.planned.plan.label
                print(f"{model.name} S={tokens} limit {limit}: {prediction.split} {label}: {rate}")


if __name__ == "__main__":
    main()
