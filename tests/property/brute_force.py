"""Brute-force simulation of every plan in FinDEP's search space.

Written from the paper's task model (Figure 3, Section 3.2), independent of the planner. Specs of
one shape (max_samples, max_r2, num_layers) are simulated together, as arrays [specs].
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.stages import Linear, PlanSpec, StageModels

Array = NDArray[Any]
STAGES = ("attention", "shared", "expert", "a2e", "e2a")


class Shape(NamedTuple):
    max_samples: int
    max_r2: int
    num_layers: int


class Problems(NamedTuple):
    """Specs of one shape: coefficients by stage [specs], tokens per expert per sample [specs]."""

    shape: Shape
    alphas: dict[str, Array]
    betas: dict[str, Array]
    tokens: Array

    def spec(self, index: int) -> PlanSpec:
        lines = {
            name: Linear(float(self.alphas[name][index]), float(self.betas[name][index]))
            for name in STAGES
        }
        return PlanSpec(
            stages=StageModels(**lines),
            tokens_per_expert_per_sample=float(self.tokens[index]),
            has_shared=bool(self.alphas["shared"][index] or self.betas["shared"][index]),
            **self.shape._asdict(),
        )


def problems_of(specs: Sequence[PlanSpec]) -> Problems:
    shape = Shape(specs[0].max_samples, specs[0].max_r2, specs[0].num_layers)
    lines = {
        name: [getattr(spec.stages, name) or Linear(0.0, 0.0) for spec in specs] for name in STAGES
    }
    return Problems(
        shape,
        {name: np.array([line.alpha_ms for line in row]) for name, row in lines.items()},
        {name: np.array([line.beta_ms for line in row]) for name, row in lines.items()},
        np.array([spec.tokens_per_expert_per_sample for spec in specs]),
    )


def random_problems(shape: Shape, count: int, seed: int) -> Problems:
    """Return random stages of very different lengths, some without shared experts or launch times.

    Some have so few tokens that `me >= 1` limits r2.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.choice([0.25, 0.7, 1.0, 4.0, 96.0, 2048.0], count)
    tokens = np.maximum(tokens, 1 / shape.max_samples)
    alphas = {n: rng.choice([0, 0.1, 1], count) * rng.random(count) for n in STAGES}
    betas = {n: 10 ** rng.uniform(-2, 0.5, count) for n in STAGES}
    for name in ("expert", "a2e", "e2a"):
        betas[name] = betas[name] / tokens
    without = rng.random(count) < 0.2
    for coefficients in (alphas, betas):
        coefficients["shared"] = np.where(without, 0.0, coefficients["shared"])
    return Problems(shape, alphas, betas, tokens)


def best_rates(problems: Problems) -> dict[str, Array]:
    """Return the most samples per ms of each order, over all plans [specs]."""
    shape = problems.shape
    rates = {order: np.zeros(len(problems.tokens)) for order in ("asas", "aass", "pppipe", "naive")}
    for ma in range(1, shape.max_samples + 1):
        for r1 in range(1, shape.max_samples // ma + 1):
            for r2 in range(1, shape.max_r2 + 1):
                me = problems.tokens * ma / r2
                allowed = me >= 1 - 1e-9
                if not allowed.any():
                    break
                for order, rate in rates.items():
                    if (order in ("pppipe", "naive") and r2 > 1) or (order == "naive" and r1 > 1):
                        continue
                    if order != "aass" or r1 > 1:  # with one micro-batch it is asas
                        makespan = simulate(problems, order, (ma, r1, r2))
                    np.maximum(rate, np.where(allowed, ma * r1 / makespan, 0), out=rate)
    return rates


def simulate(problems: Problems, order: str, plan: tuple[int, int, int]) -> Array:
    """Return makespans in ms [specs] of (ma, r1, r2) under `order`."""
    ma, r1, r2 = plan
    me = problems.tokens * ma / r2
    x = {"attention": ma, "shared": ma, "expert": me, "a2e": me, "e2a": me}
    t = {name: problems.alphas[name] + problems.betas[name] * x[name] for name in STAGES}
    zero = np.zeros(len(me))
    rank, to, experts, back, returned = zero, zero, zero, zero, [zero] * r1
    for _ in range(problems.shape.num_layers):
        for i in range(r1):
            rank = np.maximum(rank, returned[i]) + t["attention"]
            if order in ("pppipe", "naive"):
                rank = rank + t["shared"]
            for _ in range(r2):
                to = np.maximum(to, rank) + t["a2e"]
                experts = np.maximum(experts, to) + t["expert"]
                back = np.maximum(back, experts) + t["e2a"]
            returned[i] = back
            if order == "asas":
                rank = rank + t["shared"]
        if order == "aass":
            rank = rank + r1 * t["shared"]
    return np.maximum(rank, back)
