"""A micro-batch's packets to expert ranks, of one layer: what is under way, and what was sent to a
rank that is lost and must be sent again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from actors.channels.base import Packet
from actors.experts.dispatch import RankSlice
from actors.experts.plane import TaskKey
from actors.experts.resend import cut_again
from planner.placement.slots import LayerSlots

Reply = tuple[int, int]  # token group, expert rank


class RemotePending:
    """replies: what has been answered. x_TD: what is sent again comes from there. placed, used:
    what the slices were cut by, and its generation; present: the generation that this was, or stood
    in for."""

    __slots__ = (
        "_again",
        "_held",
        "guessed_s",
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
        self.sent_s = 0.0  # the last of them
        self.guessed_s = 0.0  # how long what they may want next was looked for meanwhile
        self._held: set[Reply] | None = None  # not sent, or to a rank that is lost
        self._again: dict[Reply, tuple[LayerSlots, int]] | None = None  # cut anew: by what

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def waits(self) -> bool:
        """Whether some of it cannot be sent."""
        return bool(self._held)

    @property
    def in_use(self) -> set[int]:
        """Generations that it may still have answers of."""
        again = () if self._again is None else self._again.values()
        return {self.used, *(used for _, used in again)}

    def under_way(self) -> Iterable[RankSlice]:
        """What has been sent and is not answered."""
        for piece in self.slices:
            reply = piece.token_group, piece.rank
            if reply not in self.replies and not (self._held and reply in self._held):
                yield piece

    def hold(self, piece: RankSlice) -> None:
        """It cannot be sent now."""
        if self._held is None:
            self._held = set()
        self._held.add((piece.token_group, piece.rank))

    def lose(self, rank: int) -> None:
        """That expert rank answers nothing any more. What it has answered is kept."""
        for piece in list(self.under_way()):
            if piece.rank == rank:
                self.hold(piece)

    def cut(self, placed: LayerSlots, used: int) -> list[RankSlice]:
        """What is held, by the placement of generation `used`: to be sent now, or held again."""
        held, self._held = self._held or set(), None
        again = self._again = self._again or {}
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
            pieces = [piece] if same else cut_again(piece, before, placed, group)
            group += len(pieces)
            again.update({(one.token_group, one.rank): (placed, used) for one in pieces})
            slices += pieces
            found += pieces
        self.missing += len(slices) - len(self.slices)
        self.slices = slices
        return found
