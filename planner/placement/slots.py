"""Look-up arrays of a placement for dispatch, layers as sequences of slots, choice of replicas.

Shapes: T tokens, K experts of each, E experts, R ranks.
"""

import functools
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from contracts.errors import ConfigError
from contracts.placement import Placement, bounds_of
from planner.arrays import Array, Bools, Floats, Ints

MAX_TOP_K = 255


class RoundRobinChooser:
    """Replica choice for more than MAX_RANKS ranks: token t takes replica t modulo their number."""

    def __init__(self, slot_ER: Array) -> None:
        self._replicas_E = (slot_ER >= 0).sum(axis=1)
        self._slots_ER = np.sort(slot_ER, axis=1)[:, ::-1]

    def slots(self, topk_ids_TK: Ints, *_: object) -> Array:
        """Return the slot of each pair [T, K]."""
        token_T1 = np.arange(len(topk_ids_TK))[:, None]
        slot_TK: Array = self._slots_ER[topk_ids_TK, token_T1 % self._replicas_E[topk_ids_TK]]
        return slot_TK


class FewestRanksChooser:
    """The compiled rule, for up to MAX_RANKS ranks. sets_E: ranks of each expert, as bits."""

    def __init__(self, slot_ER: Array) -> None:
        self.slot_ER, self._kind = np.ascontiguousarray(slot_ER, np.int64), slot_ER.dtype
        self.sets_E: Ints = (slot_ER >= 0) @ (1 << np.arange(slot_ER.shape[1]))

    def slots(
        self,
        topk_ids_TK: Ints,
        free_rank: int | None = None,
        weights_T: Floats | None = None,
        load_R: Floats | None = None,
    ) -> Array:
        """Return the slot of each pair [T, K].

        free_rank: a rank that costs a token nothing. weights_T: equal tokens in each, default 1.
        load_R: pairs of the ranks beside these, default 0."""
        from kernels.replica_choice import choose_replicas

        ids_TK = np.require(topk_ids_TK, np.int64, ("C", "W"))
        slot_TK, ranks = np.empty_like(ids_TK), self.slot_ER.shape[1]
        load_R = np.zeros(ranks) if load_R is None else load_R.copy()
        weights_T = np.ones(len(ids_TK)) if weights_T is None else weights_T
        free = 0 if free_rank is None else 1 << free_rank
        choose_replicas(ids_TK, weights_T, self.sets_E, self.slot_ER, free, load_R, slot_TK)
        return slot_TK.astype(self._kind)


def replica_chooser(slot_ER: Array) -> FewestRanksChooser | RoundRobinChooser:
    """Return the choice of one layer's replicas. slot_ER: -1 on ranks without the expert."""
    from kernels.replica_choice import MAX_RANKS

    if slot_ER.shape[1] > MAX_RANKS:
        return RoundRobinChooser(slot_ER)
    compile_rule()
    return FewestRanksChooser(slot_ER)


@functools.cache
def compile_rule() -> None:
    """Compile the rule, or read it from disk: before the first batch with replicas."""
    from kernels.compiled import compile_on_disk

    chooser = FewestRanksChooser(np.array([[0, 1]]))

    def call() -> None:
        chooser.slots(np.zeros((1, 1), np.int64))

    compile_on_disk(call)


class LayerSlots:
    """Slots of one layer.

    `bounds`: [first, last) of each rank (`lows_R`: the first); `count`: of all slots;
    `expert_of_slot`, `slots_of_expert`: both directions; `choice`: of replicas, if it has any."""

    __slots__ = (
        "_first_E",
        "bounds",
        "choice",
        "count",
        "expert_of_slot",
        "lows_R",
        "slots_of_expert",
    )

    def __init__(self, experts: Sequence[int], bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds, self.count = tuple(bounds), len(experts)
        self.expert_of_slot: Ints = np.array(experts, np.int64)
        slots: list[list[int]] = [[] for _ in range(max(experts, default=-1) + 1)]
        for slot, expert in enumerate(experts):
            slots[expert].append(slot)
        self.slots_of_expert = tuple(map(tuple, slots))
        kind = np.int16 if self.count < 1 << 15 else np.int64  # narrow integers sort faster
        self.lows_R: Array = np.array([low for low, _ in bounds], kind)
        self._first_E = np.array([each[0] for each in slots], kind)
        self.choice: FewestRanksChooser | RoundRobinChooser | None = None
        if len(experts) > len(slots):
            slot_ER = np.full((len(slots), len(bounds)), -1, kind)
            for rank, (low, high) in enumerate(bounds):
                slot_ER[self.expert_of_slot[low:high], rank] = range(low, high)
            self.choice = replica_chooser(slot_ER)

    def held(self, num_experts: int) -> Bools:
        """Return True for each expert on each rank [E, R]."""
        held_ER = np.zeros((num_experts, len(self.bounds)), bool)
        for rank, (low, high) in enumerate(self.bounds):
            held_ER[self.expert_of_slot[low:high], rank] = True
        return held_ER

    def ranks_of(self, slots: Array) -> Array:
        """Return the rank of each slot."""
        return np.searchsorted(self.lows_R[1:], slots, "right")

    def of_pairs(self, topk_ids_TK: Ints, free_rank: int | None = None) -> Array:
        """Return the slot that serves each pair [T, K], by the rule of kernels/replica_choice.py.

        free_rank: a rank that costs a token nothing. Equal ids give equal slots."""
        if self.choice is None:
            return self._first_E.take(topk_ids_TK)
        return self.choice.slots(topk_ids_TK, free_rank)


class ExpertPlacement:
    """Slots of every layer. Compiles the choice of replicas, which a failover may need at once."""

    def __init__(self, placement: Placement) -> None:
        self.ranks = placement.ranks
        if self.ranks > 1:
            compile_rule()
        made: dict[tuple[int, ...], LayerSlots] = {}  # layers are often equal
        for experts in placement.expert_of_slot:
            if experts not in made:
                made[experts] = LayerSlots(experts, placement.slot_bounds)
        self._layers = [made[experts] for experts in placement.expert_of_slot]

    def layer(self, layer: int) -> LayerSlots:
        return self._layers[layer]


def expert_ranges(placement: Placement) -> list[tuple[int, int]]:
    """Return the [first, last) expert of each rank, equal in every layer.

    Raises ConfigError if a layer's experts are out of order or replicated."""
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
    """Raise ConfigError if the placement does not fit the group or the model.

    ranks: None: any number up to the number of experts."""
    placed = [layer for layer, experts in enumerate(placement.expert_of_slot) if experts]
    placed_shape = (placement.ranks, placement.num_experts, len(placed))
    fitting = ranks if ranks is not None else min(max(1, placement.ranks), num_experts)
    if placed_shape != (fitting, num_experts, len(moe_layers)) or placed != list(moe_layers):
        group = f"the group {ranks} ranks" if ranks is not None else f"1 to {num_experts} ranks"
        raise ConfigError(
            f"the placement is of {placed_shape[1]} experts in {placed_shape[2]} layers on "
            f"{placed_shape[0]} ranks, the model has {num_experts} in {len(moe_layers)} and "
            f"{group}: launch the group with a placement of its own"
        )


Line = tuple[int, ...]


def ranks_of(slots_per_rank: Sequence[int] | Ints) -> Ints:
    """Return the rank of each slot."""
    return np.repeat(np.arange(len(slots_per_rank)), slots_per_rank)


def layer_slots(line: Line, slots_per_rank: Sequence[int]) -> LayerSlots:
    return LayerSlots(line, bounds_of(slots_per_rank))


def held(line: Line, slots_per_rank: Sequence[int], num_experts: int) -> Bools:
    """Return True for each expert on each rank [E, R]."""
    return layer_slots(line, slots_per_rank).held(num_experts)


def moved(before: Line, after: Line, slots_per_rank: Sequence[int]) -> tuple[int, ...]:
    """Return the number of experts that each rank has to load."""
    pairs = bounds_of(slots_per_rank)
    return tuple(len(set(after[low:high]) - set(before[low:high])) for low, high in pairs)


def check_slots(num_experts: int, slots_per_rank: Sequence[int]) -> None:
    """Raise ConfigError unless every expert has a slot and no rank has more slots than experts."""
    slots, most = sum(slots_per_rank), max(slots_per_rank, default=0)
    if min(slots_per_rank, default=-1) < 0 or slots < num_experts or most > num_experts:
        raise ConfigError(
            f"slots_per_rank={tuple(slots_per_rank)}: {num_experts} experts need as many slots or "
            f"more in all, and a rank has a use for {num_experts} at most"
        )


def first_homes(num_experts: int, slots_per_rank: Sequence[int]) -> Ints:
    """Return how many experts have their first slot on each rank [R], as even as slots permit."""
    homes_R, room_R = np.zeros(len(slots_per_rank), np.int64), np.asarray(slots_per_rank)
    while (left := num_experts - int(homes_R.sum())) > 0:
        open_R = np.flatnonzero(homes_R < room_R)
        level_R = open_R[homes_R[open_R] == homes_R[open_R].min()]
        homes_R[level_R[:left]] += 1
    return homes_R


def contiguous_line(load_E: Ints, slots_per_rank: Sequence[int]) -> Line:
    """Return the experts in order, each rank's spare slots filled with its hottest missing ones.

    A replica divides the load that an expert counts."""
    homes_R = first_homes(len(load_E), slots_per_rank)
    ranks_E = ranks_of(homes_R)
    lines = [np.flatnonzero(ranks_E == rank).tolist() for rank in range(len(homes_R))]
    replicas_E = np.ones(len(load_E))
    for _ in range(max(slots_per_rank)):
        for line, slots in zip(lines, slots_per_rank, strict=True):
            if len(line) < slots:
                heat_E = load_E / replicas_E
                heat_E[line] = -1.0
                line.append(int(heat_E.argmax()))
                replicas_E[line[-1]] += 1
    return tuple(itertools.chain.from_iterable(lines))


def line_of(experts_S: Ints, ranks_S: Ints, slots_per_rank: Sequence[int], start: Line) -> Line:
    """Return the slots of a layer, experts ascending on each rank.

    With a `start`, experts that stay on a rank keep their slots, and new ones take the free slots.
    """
    line: list[int] = []
    for rank, (low, high) in enumerate(bounds_of(slots_per_rank)):
        rank_experts = sorted(experts_S[ranks_S == rank].tolist())
        before = start[low:high]
        arriving = iter(sorted(set(rank_experts) - set(before)))
        line += (
            [e if e in rank_experts else next(arriving) for e in before] if start else rank_experts
        )
    return tuple(line)


def contiguous(
    num_experts: int, ranks: int, *, num_layers: int, moe_layers: Collection[int]
) -> Placement:
    """Return the placement of each expert once, the first ranks with one more than the others."""
    if ranks == 0:
        return Placement()
    base, extra = divmod(num_experts, ranks)
    everyone = tuple(range(num_experts))
    return Placement(
        num_experts=num_experts,
        slots_per_rank=tuple(base + (rank < extra) for rank in range(ranks)),
        expert_of_slot=tuple(everyone if n in moe_layers else () for n in range(num_layers)),
    )
