"""A placement as dispatch looks things up in it: arrays made once, by layer.

Shapes: T tokens, K experts of each, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contracts.errors import ConfigError
from contracts.placement import Placement
from planner.placement.few_ranks import FewRanks
from planner.placement.rank_sets import FEW_RANKS
from planner.placement.replicas import MAX_RANKS, Fewest, InTurn
from planner.placement.two_ranks import FewestOfTwo

Array = NDArray[np.int64]
_Choice = FewestOfTwo | FewRanks | Fewest | InTurn


class LayerSlots:
    """Slots of one layer. `bounds`: [first, last) of each rank (`lows_R`: the first); `count`: of
    all; `expert_of_slot`: which expert is in each; `slots_of_expert`: where each is, by rank."""

    __slots__ = (
        "_choice",
        "_first_E",
        "bounds",
        "count",
        "expert_of_slot",
        "lows_R",
        "slots_of_expert",
    )

    def __init__(self, experts: Sequence[int], bounds: Sequence[tuple[int, int]]) -> None:
        """experts: of each slot."""
        self.bounds, self.count = tuple(bounds), len(experts)
        self.expert_of_slot: Array = np.array(experts, np.int64)
        slots: list[list[int]] = [[] for _ in range(max(experts, default=-1) + 1)]
        for slot, expert in enumerate(experts):
            slots[expert].append(slot)
        self.slots_of_expert = tuple(map(tuple, slots))
        kind = np.int16 if self.count < 1 << 15 else np.int64  # narrow ones are sorted sooner
        self.lows_R: NDArray[Any] = np.array([low for low, _ in bounds], kind)
        self._first_E = np.array([each[0] for each in slots], kind)
        self._choice: _Choice | None = None
        if len(experts) > len(slots):
            slot_ER = np.full((len(slots), len(bounds)), -1, kind)
            for rank, (low, high) in enumerate(bounds):
                slot_ER[self.expert_of_slot[low:high], rank] = range(low, high)
            self._choice = _choice(slot_ER)

    def held(self, num_experts: int) -> NDArray[np.bool_]:
        """[E, R] whether the rank has the expert."""
        held_ER = np.zeros((num_experts, len(self.bounds)), bool)
        for rank, (low, high) in enumerate(self.bounds):
            held_ER[self.expert_of_slot[low:high], rank] = True
        return held_ER

    def of_pairs(self, topk_ids_TK: Array, free_rank: int | None = None) -> NDArray[Any]:
        """[T, K] the slot that answers each pair. A token goes to the fewest ranks that have its
        experts; of equals, to those that have least to do for these tokens. free_rank: one to which
        it costs nothing. Equal ids give equal slots."""
        if self._choice is None:
            return self._first_E.take(topk_ids_TK)
        return self._choice.slots(topk_ids_TK, free_rank)


def _choice(slot_ER: NDArray[Any]) -> _Choice:
    ranks = slot_ER.shape[1]
    if ranks == 2:
        return FewestOfTwo(slot_ER)
    if ranks <= FEW_RANKS:
        return FewRanks(slot_ER)
    return Fewest(slot_ER) if ranks <= MAX_RANKS else InTurn(slot_ER)


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
    placement: Placement, ranks: int | None, num_experts: int, moe_layers: Sequence[int]
) -> None:
    """Raises ConfigError where the placement is of another group or model. ranks: None: as many as
    have a use for an expert."""
    placed = [layer for layer, experts in enumerate(placement.expert_of_slot) if experts]
    told = (placement.ranks, placement.num_experts, len(placed))
    fitting = ranks if ranks is not None else min(max(1, placement.ranks), num_experts)
    if told != (fitting, num_experts, len(moe_layers)) or placed != list(moe_layers):
        group = f"the group {ranks} ranks" if ranks is not None else f"1 to {num_experts} ranks"
        raise ConfigError(
            f"the placement is of {told[1]} experts in {told[2]} layers on {told[0]} ranks, the "
            f"model has {num_experts} in {len(moe_layers)} and {group}: "
            "launch the group with a placement of its own"
        )
