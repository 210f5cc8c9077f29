"""What a generation of experts needs: one brings it in, another keeps it
(actors/experts/moving.py says when)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from contracts.placement import Placement

P = TypeVar("P")
P_in = TypeVar("P_in", contravariant=True)


class Brought(NamedTuple, Generic[P]):
    """What a generation needs is there, or why not. experts: as `Store.place` takes them."""

    generation: int
    experts: P | None
    reason: str = ""
    loaded_bytes: int = 0
    seconds: float = 0.0


class Store(Protocol[P_in]):
    """A `RankExperts` of several generations."""

    @property
    def count(self) -> int: ...

    def holds(self, generation: int) -> bool: ...

    def place(self, generation: int, experts: P_in) -> None: ...

    def free(self, generation: int) -> None: ...


class Bringer(Protocol[P]):
    """Brings in what a generation has here that the present one has not. expert_bytes: of each."""

    @property
    def expert_bytes(self) -> int: ...

    def room(self) -> tuple[str, int]:
        """Where it brings them, and the free bytes there. From any thread."""

    def misfit(self, placement: Placement, *, resizes: bool = False) -> str:
        """Why that cannot be; empty: it can. resizes: the number of ranks may change, however much
        that brings in."""

    def begin(self, placement: Placement, done: Callable[[Brought[P]], None]) -> None:
        """`done` is called once, from any thread, unless it is stopped before."""

    def stop(self) -> None:
        """What has come is let go of."""

    def settled(self, placement: Placement) -> None:
        """That is what ranks have now, and no other."""

    def close(self) -> None: ...
