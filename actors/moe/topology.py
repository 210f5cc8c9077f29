"""The placement of experts as the remote backend sees it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from actors.channels.base import Packet, PeerLost
from planner.placement.slots import ExpertPlacement


class MissingRank(NamedTuple):
    """An expert rank without the current generation's experts. epoch: of the lost process."""

    reason: str
    epoch: int
    since_s: float
    is_lost: bool


class Topology(NamedTuple):
    """One state of the expert ranks; replaced, never changed.

    experts: names by rank number, including ranks that are no longer used. unreachable: ranks
    that cannot serve `slots`. has_unused: leases can be released. missing: by name.
    """

    generation: int
    slots: ExpertPlacement
    experts: tuple[str, ...]
    unreachable: frozenset[int] = frozenset()
    has_unused: bool = False
    missing: tuple[tuple[str, MissingRank], ...] = ()


class TopologySource(Protocol):
    """Follows the expert ranks on behalf of a remote backend. Owned by the backend's thread."""

    topology: Topology

    def poll(self) -> None:
        """Send due messages; replace `topology` if it has changed."""

    def handle(self, packet: Packet) -> None: ...

    def add_peer(self, expert: str) -> None: ...

    def remove_peer(self, lost: PeerLost) -> None: ...

    def begin_layer(self) -> int:
        """Return the generation that the layer uses, for `end_layer`."""

    def end_layer(self, generation: int) -> None: ...

    def release_unused(self, in_use: Collection[int]) -> None:
        """Release leases of generations that are not in `in_use`."""
