"""Interface of the slower tier of an expert cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from models.experts.expert_format import SlotMemory


class CompletedRead(NamedTuple):
    """seconds: duration; 0: skipped. error: reason of a failure, or empty."""

    ticket: int
    seconds: float
    error: str = ""


class ExpertTier(Protocol):
    """Reads experts in `parts` beside the owner's thread; `room` is what it accepts now."""

    @property
    def parts(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def room(self) -> int: ...

    def enqueue(self, layer: int, expert: int, part: int, urgency: int) -> int:
        """Enqueue a read for the next `submit`; more urgent ones go first. Returns a ticket."""

    def submit(self) -> None:
        """Start the enqueued reads."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait` would return at once."""

    def expedite(self, ticket: int, urgency: int) -> None:
        """Raise the urgency of a read."""

    def cancel(self, ticket: int) -> None:
        """Cancel a read that has not started."""

    def poll_completed(self) -> Iterable[CompletedRead]:
        """Return reads completed since the last call. Raises ChannelError if the tier failed."""

    def copy(self, ticket: int, into: SlotMemory) -> None:
        """Copy the bytes of a completed read to its slot."""

    def free(self, ticket: int) -> None:
        """Release the ticket of a completed read."""

    def wait(self, timeout_s: float) -> None:
        """Wait for a completed read or `wake`."""

    def wake(self) -> None:
        """End a `wait`. Thread-safe."""

    def close(self) -> None: ...
