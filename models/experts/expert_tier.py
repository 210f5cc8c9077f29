"""Where experts are that are not in a slot: what a cache asks of whoever reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from models.experts.expert_format import SlotMemory


class CompletedRead(NamedTuple):
    """ticket: of the `read`. seconds: it took; 0: it was skipped. error: why it failed, if it
    did."""

    ticket: int
    seconds: float
    error: str = ""


class ExpertTier(Protocol):
    """Reads parts of experts, beside the thread that owns it. parts: of an expert; room: how many
    more reads it takes now."""

    @property
    def parts(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def room(self) -> int: ...

    def read(self, layer: int, expert: int, part: int, urgency: int) -> int:
        """To be read from the next `submit` on; what is less urgent waits. Returns a ticket."""

    def submit(self) -> None:
        """What has been asked for so far is read."""

    def fileno(self) -> int:
        """A descriptor that can be read while a `wait` would return at once."""

    def expedite(self, ticket: int, urgency: int) -> None:
        """It has become more urgent."""

    def cancel(self, ticket: int) -> None:
        """It is not wanted any more: if it has not begun it never does."""

    def poll_completed(self) -> Iterable[CompletedRead]:
        """What has ended since the last time. Raises ChannelError if nothing will, any more."""

    def copy(self, ticket: int, into: SlotMemory) -> None:
        """What has been read, to where it belongs in a slot."""

    def free(self, ticket: int) -> None:
        """Nobody asks for that any more: it has ended."""

    def wait(self, timeout_s: float) -> None:
        """Until something has ended, or `wake`."""

    def wake(self) -> None:
        """Ends a `wait`. Called from any thread."""

    def close(self) -> None: ...
