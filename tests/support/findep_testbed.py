"""The planning problems of FinDEP's testbed A, with the coefficients that the paper prints."""

from typing import NamedTuple

from planner.costs.stages import Linear, PlanSpec, StageModels

# Caption of Figure 7: ms, and ms per multiply-add or per element.
GEMM = Linear(0.17, 8.59e-11)
ATTENTION = Linear(0.15, 1.54e-11)
LINKS = {
    (1, 7): Linear(0.10, 9.61e-7),
    (2, 6): Linear(0.01, 1.28e-6),
    (4, 4): Linear(0.37, 2.55e-6),
}


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
