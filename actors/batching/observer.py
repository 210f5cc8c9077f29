"""Who hears what happens in a serving loop: a planner's link, a worker's log, a warm-up."""

from __future__ import annotations

from typing import Protocol

from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence
from actors.rpc.client_server import ClientMessage
from contracts.errors import ChannelError
from contracts.messages import Event, Submit


class LoopControl(Protocol):
    """What an observer may ask of the loop, in the loop's thread."""

    def admit(self, client: int, submit: Submit) -> None:
        """As if a client had sent it."""

    def send_answers(self) -> None:
        """Those that there are, now."""

    def send(self, client: int, events: list[Event]) -> None: ...

    def fail(self, error: ChannelError) -> None:
        """The rank can serve no more: every request ends with this error."""

    def announce_drain(self) -> None:
        """Nothing new is to be sent here."""

    def report_waiting(self, waits: bool) -> None:
        """Whether nothing goes on here for now."""

    def hand_over(self) -> None:
        """Every request goes on elsewhere."""

    @property
    def load(self) -> tuple[int, int]:
        """How many sequences are running, and waiting."""


class Observer:
    """Hears everything in the loop's thread, but for `sections` and `notes`. It does nothing by
    default."""

    def begin(self, loop: LoopControl) -> None:
        """First thing in the loop."""

    def received(self, message: ClientMessage) -> None:
        """Before anything is done about it."""

    def check(self, client: int, submit: Submit) -> None:
        """Raises TandemError for a request that is refused."""

    def accepted(self, sequence: Sequence) -> None:
        """It joins the queue. What is raised here is its own failure."""

    def formed(self, batch: ScheduledBatch) -> None:
        """It runs from now on."""

    def stepped(self) -> None:
        """Once a turn."""

    def completed(self, batch: ScheduledBatch) -> None:
        """It has run, and the scheduler knows."""

    def dropped(self, batch: ScheduledBatch) -> None:
        """It was running, and will not end."""

    def ended(self, sequence: Sequence) -> None:
        """It has gone from the scheduler, for whatever reason."""

    def answers(self, by_client: dict[int, list[Event]]) -> None:
        """What is about to be sent: may be added to."""

    def sections(self) -> dict[str, dict[str, float]]:
        """Of the rank's status. From any thread."""
        return {}

    def notes(self) -> dict[str, str]:
        """Of the rank's status. From any thread."""
        return {}
