"""Slices that an attention rank has sent to expert ranks, and their replies.

After a loss the slices of the lost rank are cut again for the ranks that hold its experts. Pairs
keep their weights and tokens, and slices with a reply are not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from actors.channels.base import Packet
from actors.moe.backend import TaskKey
from actors.moe.device_dispatch import DeviceSlice
from actors.moe.dispatch import RankSlice
from planner.placement.slots import LayerSlots

Reply = tuple[int, int]  # token group, expert rank
Piece = RankSlice | DeviceSlice


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
        slices: Sequence[Piece],
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

    def under_way(self) -> Iterable[Piece]:
        """Yield the slices that were sent and have no reply."""
        for piece in self.slices:
            reply = piece.token_group, piece.rank
            if reply not in self.replies and not (self._held and reply in self._held):
                yield piece

    def hold(self, piece: Piece) -> None:
        if self._held is None:
            self._held = set()
        self._held.add((piece.token_group, piece.rank))

    def lose(self, rank: int) -> None:
        """Hold the slices of a lost rank that have no reply."""
        for piece in list(self.under_way()):
            if piece.rank == rank:
                self.hold(piece)

    def cut(self, placed: LayerSlots, used: int) -> list[Piece]:
        """Cut the held slices by the placement of generation `used`; return those to send."""
        held, self._held = self._held or set(), None
        again = self._resent = self._resent or {}
        slices: list[Piece] = []
        found: list[Piece] = []
        group = 1 + max(piece.token_group for piece in self.slices)
        for piece in self.slices:
            reply = piece.token_group, piece.rank
            if reply not in held:
                slices.append(piece)
                continue
            before, generation = again.pop(reply, (self.placed, self.used))
            same = generation == used
            pieces = [piece] if same else piece.recut(before, placed, group)
            group += len(pieces)
            again.update({(one.token_group, one.rank): (placed, used) for one in pieces})
            slices += pieces
            found += pieces
        self.missing += len(slices) - len(self.slices)
        self.slices = slices
        return found
