"""Which expert rank holds which expert."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class ExpertPlacement:
    """Experts of all expert ranks as one line of slots, rank after rank:

        rank       0       |     1     |   2
        slots   0  1  2    |  3  4     |  5  6        (7 experts on 3 ranks)
        expert  by default the slot's own number

    `expert_of_slot[s]` is the expert in slot s; `slot_of_expert` its inverse; `first_slot[r]` to
    `first_slot[r + 1]` are the slots of rank r.
    """

    def __init__(self, expert_of_slot: NDArray[np.int64], slots_per_rank: list[int]) -> None:
        if sum(slots_per_rank) != len(expert_of_slot):
            raise ValueError(f"{sum(slots_per_rank)} slots for {len(expert_of_slot)} experts")
        self.expert_of_slot = expert_of_slot
        self.slot_of_expert = np.empty_like(expert_of_slot)
        self.slot_of_expert[expert_of_slot] = np.arange(len(expert_of_slot))
        self.first_slot = np.concatenate([[0], np.cumsum(slots_per_rank)]).astype(np.int64)

    @classmethod
    def contiguous(cls, num_experts: int, ranks: int) -> ExpertPlacement:
        """Experts in order; the first `num_experts % ranks` ranks hold one more than the rest."""
        base, extra = divmod(num_experts, ranks)
        sizes = [base + (rank < extra) for rank in range(ranks)]
        return cls(np.arange(num_experts, dtype=np.int64), sizes)

    @property
    def num_experts(self) -> int:
        return len(self.expert_of_slot)

    @property
    def ranks(self) -> int:
        return len(self.first_slot) - 1

    def experts_of(self, rank: int) -> list[int]:
        """Global expert ids of `rank`, in the order of its local indices."""
        return [
            int(expert)
            for expert in self.expert_of_slot[self.first_slot[rank] : self.first_slot[rank + 1]]
        ]
