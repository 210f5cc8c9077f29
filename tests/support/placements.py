"""Random placements with replicas."""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from contracts.placement import Placement
from models.spec.model import ModelSpec
from planner.placement.slots import contiguous


def replicated(
    num_experts: int,
    extra: Sequence[int],
    *,
    num_layers: int,
    moe_layers: Collection[int],
    seed: int,
) -> Placement:
    """Experts in any order, another in each layer; rank r has extra[r] replicas of those that are
    first elsewhere (at most as many as there are)."""
    rng = np.random.default_rng(seed)
    base = contiguous(num_experts, len(extra), num_layers=1, moe_layers=[0]).slots_per_rank
    sizes = [min(num_experts, slots + more) for slots, more in zip(base, extra, strict=True)]

    def layer() -> tuple[int, ...]:
        order, first, line = rng.permutation(num_experts), 0, list[int]()
        for slots, size in zip(base, sizes, strict=True):
            last = first + slots
            others = rng.permutation(np.concatenate([order[:first], order[last:]]))
            own = np.concatenate([order[first:last], others[: size - slots]])
            line += rng.permutation(own).tolist()
            first = last
        return tuple(line)

    return Placement(
        num_experts=num_experts,
        slots_per_rank=tuple(sizes),
        expert_of_slot=tuple(layer() if n in moe_layers else () for n in range(num_layers)),
    )


def replicated_of(spec: ModelSpec, extra: Sequence[int], seed: int) -> Placement:
    return replicated(
        spec.num_experts, extra, num_layers=spec.num_layers, moe_layers=spec.moe_layers, seed=seed
    )


def another(spec: ModelSpec, generation: int, ranks: int = 2) -> Placement:
    """Experts in any order, some twice; spare slots come and go."""
    extra = [(generation + rank) % 3 for rank in range(ranks)]
    placement = replicated_of(spec, extra, generation)
    return msgspec.structs.replace(placement, generation=generation)
