"""A placement as dispatch looks things up in it: arrays made once, by layer.

Shapes: T tokens, K experts of each, E experts, P replicas of the expert that has most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from contracts.errors import ConfigError
from contracts.placement import Placement

Array = NDArray[np.int64]


class LayerSlots:
    """Slots of one layer. `bounds`: [first, last) of each rank; `count`: of all; `expert_of_slot`:
    which expert is in each."""

    __slots__ = (
        "_replicas_E",
        "_slots_EP",
        "bounds",
        "count",
        "expert_of_slot",
        "slot_of_expert",
    )

    def __init__(self, experts: Sequence[int], bounds: Sequence[tuple[int, int]]) -> None:
        """experts: of each slot."""
        self.bounds, self.count = tuple(bounds), len(experts)
        self.expert_of_slot: Array = np.array(experts, np.int64)
        slots: dict[int, list[int]] = {expert: [] for expert in sorted(set(experts))}
        for slot, expert in enumerate(experts):
            slots[expert].append(slot)
        self.slot_of_expert: Array = np.array([each[0] for each in slots.values()], np.int64)
        self._replicas_E: Array | None = None
        most = max(map(len, slots.values()), default=0)
        if most > 1:
            padded = [each + each[:1] * (most - len(each)) for each in slots.values()]
            self._slots_EP: Array = np.array(padded, np.int64)
            self._replicas_E = np.array([len(each) for each in slots.values()], np.int64)

    def of_pairs(self, topk_ids_TK: Array) -> Array:
        """[T, K] the slot that answers each pair. Token t of a micro-batch takes replica t modulo
        their number: a pure rule that spreads the tokens of a large batch evenly."""
        if self._replicas_E is None:
            slot_TK: Array = self.slot_of_expert[topk_ids_TK]
            return slot_TK
        token_T1 = np.arange(len(topk_ids_TK))[:, None]
        replica_TK = token_T1 % self._replicas_E[topk_ids_TK]
        chosen_TK: Array = self._slots_EP[topk_ids_TK, replica_TK]
        return chosen_TK


class ExpertPlacement:
    """The slots of every layer."""

    def __init__(self, placement: Placement) -> None:
        self.ranks = placement.ranks
        made: dict[tuple[int, ...], LayerSlots] = {}  # layers are often alike
        for experts in placement.expert_of_slot:
            if experts not in made:
                made[experts] = LayerSlots(experts, placement.slot_bounds)
        self._layers = [made[experts] for experts in placement.expert_of_slot]

    def layer(self, layer: int) -> LayerSlots:
        return self._layers[layer]


def expert_ranges(placement: Placement) -> list[tuple[int, int]]:
    """[first, last) expert of each rank, in every layer. Raises ConfigError where some layer's
    experts are not in order, or are replicated."""
    bounds, everyone = placement.slot_bounds, tuple(range(placement.num_experts))
    for layer, experts in enumerate(placement.expert_of_slot):
        if experts not in ((), everyone):
            raise ConfigError(
                f"the placement has layer {layer}'s experts in another order, or more than once: "
                "workers that gather weights take contiguous ranges of experts"
            )
    return list(bounds)


def check_fits(
    placement: Placement, ranks: int, num_experts: int, moe_layers: Sequence[int]
) -> None:
    """Raises ConfigError where the placement is of another group or model."""
    placed = [layer for layer, experts in enumerate(placement.expert_of_slot) if experts]
    told = (placement.ranks, placement.num_experts, len(placed))
    if told != (ranks, num_experts, len(moe_layers)) or placed != list(moe_layers):
        raise ConfigError(
            f"the placement is of {told[1]} experts in {told[2]} layers on {told[0]} ranks, the "
            f"model has {num_experts} in {len(moe_layers)} and the group {ranks} ranks: "
            "launch the group with a placement of its own"
        )
