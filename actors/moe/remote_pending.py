"""Slices that an attention rank has sent to expert ranks, and their replies.

After a loss the slices of the lost rank are cut again for the ranks that hold its experts. Pairs
keep their weights and tokens, and slices with a reply are not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from actors.channels.base import Packet
from actors.moe.backend import TaskKey
from actors.moe.dispatch import RankSlice
from planner.placement.slots import LayerSlots


def recut(
    piece: RankSlice, before: LayerSlots, placed: LayerSlots, first_group: int
) -> list[RankSlice]:
    """Cut the pairs of `piece`, placed by `before`, into slices of `placed`, rank by rank.

    The new slices are token groups of their own, numbered from first_group.
    """
    low, high = before.bounds[piece.rank]
    expert_N = np.repeat(before.expert_of_slot[low:high], piece.counts_e)
    row_N = piece.index_N + piece.start if piece.rows_U is None else piece.rows_U[piece.index_N]
    slot_N = placed.of_pairs(expert_N[:, None])[:, 0]
    order_N = slot_N.argsort(kind="stable")
    counts_S = np.bincount(slot_N, minlength=placed.count).astype(np.int32)
    ends = [0, *counts_S.cumsum().tolist()]
    slices: list[RankSlice] = []
    for rank, (first, last) in enumerate(placed.bounds):
        pairs_N = order_N[ends[first] : ends[last]]
        if not len(pairs_N):
            continue
        rows_U, index_N = np.unique(row_N[pairs_N], return_inverse=True)
        slices.append(
            RankSlice(
                rank,
                first_group + len(slices),
                piece.start,
                piece.stop,
                rows_U.astype(np.int64),
                index_N.astype(np.int32).ravel(),
                piece.weights_N[pairs_N],
                counts_S[first:last],
            )
        )
    return slices


Reply = tuple[int, int]  # token group, expert rank


class RemotePending:
    """Handle of one dispatched layer.

    x_TD: source of rows that are sent again. placed, used: the placement of the slices and its
    generation. present: the base generation, for `end_layer`.
    """

    __slots__ = (
        "_held",
        "_resent",
        "key",
        "missing",
        "placed",
        "present",
        "replies",
        "sent_s",
        "slices",
        "used",
        "x_TD",
    )

    def __init__(
        self,
        key: TaskKey,
        x_TD: Tensor,
        slices: Sequence[RankSlice],
        placed: LayerSlots,
        used: int,
        present: int,
    ) -> None:
        self.key, self.x_TD, self.slices = key, x_TD, slices
        self.placed, self.used, self.present = placed, used, present
        self.replies: dict[Reply, Packet] = {}
        self.missing = len(slices)
        self.sent_s = 0.0  # time of the last send
        self._held: set[Reply] | None = None  # slices that cannot be sent yet
        self._resent: dict[Reply, tuple[LayerSlots, int]] | None = None  # placement of resent ones

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def waits(self) -> bool:
        """True if a slice cannot be sent yet."""
        return bool(self._held)

    @property
    def in_use(self) -> set[int]:
        """Generations whose replies may still arrive."""
        again = () if self._resent is None else self._resent.values()
        return {self.used, *(used for _, used in again)}

    def under_way(self) -> Iterable[RankSlice]:
        """Yield the slices that were sent and have no reply."""
        for piece in self.slices:
            reply = piece.token_group, piece.rank
            if reply not in self.replies and not (self._held and reply in self._held):
                yield piece

    def hold(self, piece: RankSlice) -> None:
        if self._held is None:
            self._held = set()
        self._held.add((piece.token_group, piece.rank))

    def lose(self, rank: int) -> None:
        """Hold the slices of a lost rank that have no reply."""
        for piece in list(self.under_way()):
            if piece.rank == rank:
                self.hold(piece)

    def cut(self, placed: LayerSlots, used: int) -> list[RankSlice]:
        """Cut the held slices by the placement of generation `used`; return those to send."""
        held, self._held = self._held or set(), None
        again = self._resent = self._resent or {}
        slices: list[RankSlice] = []
        found: list[RankSlice] = []
        group = 1 + max(piece.token_group for piece in self.slices)
        for piece in self.slices:
            reply = piece.token_group, piece.rank
            if reply not in held:
                slices.append(piece)
                continue
            before, generation = again.pop(reply, (self.placed, self.used))
            same = generation == used
            pieces = [piece] if same else recut(piece, before, placed, group)
            group += len(pieces)
            again.update({(one.token_group, one.rank): (placed, used) for one in pieces})
            slices += pieces
            found += pieces
        self.missing += len(slices) - len(self.slices)
        self.slices = slices
        return found
