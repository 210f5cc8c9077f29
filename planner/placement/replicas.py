"""Choice of the replica that serves each (token, expert) pair (kernels/replica_choice.py)."""

import functools

import numpy as np

from planner.arrays import Array, Floats, Ints

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
