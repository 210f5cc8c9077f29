"""Slices of a layer that are sent to expert ranks, and their replies.

After a loss the slices of the lost rank are cut again for the ranks that hold its experts. Pairs
keep their weights and tokens, and slices with a reply are not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from actors.channels.base import Header, Packet
from actors.channels.endpoint import Endpoint
from actors.moe.backend import TaskKey
from actors.moe.device_dispatch import DeviceDispatch, DeviceSlice
from actors.moe.dispatch import DispatchCounts, RankSlice, plan_dispatch
from actors.moe.routing_sample import RoutingSample
from contracts.clock import Clock
from kernels.device import runs_on_device
from models.experts.expert_half import RoutedTokens
from planner.placement.slots import LayerSlots

Reply = tuple[int, int]  # token group, expert rank
Piece = RankSlice | DeviceSlice


class PacketPlanner:
    """Plans the packets of layers where their rows are, and counts them. Owned by one thread."""

    def __init__(self, counts: DispatchCounts, sample: RoutingSample | None, clock: Clock) -> None:
        self._counts, self._sample, self._clock = counts, sample, clock
        self._on_device: DeviceDispatch | None = None  # made for the first rows on a device

    def plan(
        self,
        key: TaskKey,
        routed: RoutedTokens,
        token_groups: Sequence[tuple[int, int]],
        placed: LayerSlots,
    ) -> Sequence[Piece]:
        """Return the packets of a layer by token group and rank."""
        device, own_rank = routed.x_TD.device, self._counts.own_rank
        if runs_on_device(device):
            if self._on_device is None:
                self._on_device = DeviceDispatch(device, self._counts, self._sample, self._clock)
            return self._on_device.plan(key, routed, token_groups, placed)
        ids, weights = routed.topk_ids_TK.numpy(), routed.topk_weights_TK.numpy()
        if self._sample is not None:
            self._sample.routed(key.owner, ids)
        slices = plan_dispatch(ids, weights, token_groups, placed, free_rank=own_rank)
        self._counts.add(key.layer, len(ids), slices, placed)
        return slices

    def poll(self) -> None:
        """Receive counts and samples of a device."""
        if self._on_device is not None:
            self._on_device.poll()

    def forget_placements(self) -> None:
        if self._on_device is not None:
            self._on_device.forget_placements()


@dataclass(slots=True, eq=False)
class RemotePending:
    """Handle of one dispatched layer.

    x_TD: source of rows that are sent again. placed, used: the placement of the slices and its
    generation. present: the base generation, for `end_layer`. sent_s: time of the last send.
    """

    key: TaskKey
    x_TD: Tensor
    slices: Sequence[Piece]
    placed: LayerSlots
    used: int
    present: int
    missing: int = field(init=False)
    sent_s: float = 0.0
    replies: dict[Reply, Packet] = field(default_factory=dict)
    _held: set[Reply] | None = None  # slices that cannot be sent yet
    _resent: dict[Reply, tuple[LayerSlots, int]] | None = None  # placement of resent ones

    def __post_init__(self) -> None:
        self.missing = len(self.slices)

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


def send_slice(endpoint: Endpoint, peer: str, header: Header, piece: Piece, x_TD: Tensor) -> None:
    """Send the rows and pairs of `piece` to `peer`. Raises as `Endpoint.reserve`."""
    reservation = endpoint.reserve(peer, piece.parts(x_TD))
    piece.fill(x_TD, reservation.tensors)
    endpoint.commit(reservation, header)
