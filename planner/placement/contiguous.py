"""Experts in order, the same in every layer: the first producer of a placement."""

from __future__ import annotations

from collections.abc import Collection

from contracts.placement import Placement


def contiguous(
    num_experts: int, ranks: int, *, num_layers: int, moe_layers: Collection[int]
) -> Placement:
    """Each expert once; the first `num_experts % ranks` ranks hold one more than the rest. Without
    ranks nothing is placed."""
    if ranks == 0:
        return Placement()
    base, extra = divmod(num_experts, ranks)
    everyone = tuple(range(num_experts))
    return Placement(
        num_experts=num_experts,
        slots_per_rank=tuple(base + (rank < extra) for rank in range(ranks)),
        expert_of_slot=tuple(everyone if n in moe_layers else () for n in range(num_layers)),
    )
