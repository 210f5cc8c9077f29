"""Interface to observe and control a serving loop."""

from __future__ import annotations

from typing import Protocol

from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence
from actors.rpc.client_server import ClientMessage
from contracts.errors import ChannelError
from contracts.messages import Event, Submit


class LoopControl(Protocol):
    """Operations that an observer may call in the loop's thread."""

    def admit(self, client: int, submit: Submit) -> None:
        """Admit a request as if a client had sent it."""

    def send_answers(self) -> None:
        """Send all pending answers now."""

    def send(self, client: int, events: list[Event]) -> None: ...

    def fail(self, error: ChannelError) -> None:
        """Stop serving: every request ends with this error."""

    def announce_drain(self) -> None:
        """Announce that this rank accepts nothing new."""

    def report_waiting(self, waits: bool) -> None:
        """Report whether the rank is waiting and makes no progress."""

    def hand_over(self) -> None:
        """Hand every request over to other ranks."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of running and of waiting sequences."""


class Observer:
    """Does nothing by default. Called in the loop's thread, except `sections` and `notes`."""

    def begin(self, loop: LoopControl) -> None:
        """Run first in the loop."""

    def received(self, message: ClientMessage) -> None:
        """Run before a message is processed."""

    def check(self, client: int, submit: Submit) -> None:
        """Raise TandemError to refuse a request."""

    def accepted(self, sequence: Sequence) -> None:
        """Run before a sequence is queued. An exception ends that sequence."""

    def formed(self, batch: ScheduledBatch) -> None:
        """Run when a batch starts."""

    def stepped(self) -> None:
        """Run once per iteration."""

    def completed(self, batch: ScheduledBatch) -> None:
        """Run after a batch has completed in the scheduler."""

    def dropped(self, batch: ScheduledBatch) -> None:
        """Run when a started batch is dropped."""

    def ended(self, sequence: Sequence) -> None:
        """Run after a sequence left the scheduler, for any reason."""

    def answers(self, by_client: dict[int, list[Event]]) -> None:
        """Add to the events that are about to be sent."""

    def sections(self) -> dict[str, dict[str, float]]:
        """Return sections of the rank's status. Thread-safe."""
        return {}

    def notes(self) -> dict[str, str]:
        """Return notes of the rank's status. Thread-safe."""
        return {}
