"""Encodes events as frames of at most MAX_FRAME_BYTES."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contracts.errors import ChannelError, TooCostlyError
from contracts.frames import encode_frame
from contracts.messages import MAX_FRAME_BYTES, Event, Events, Failed, RankState
from contracts.routing_messages import WorkerReport, WorkerSnapshot

_encoder = msgspec.msgpack.Encoder()


def event_frames(events: Sequence[Event], max_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
    """Encode `events` in order, as one frame if it is small enough, else as several.

    An answer that is too large by itself becomes a `Failed` of its request. Raises ChannelError for
    a worker's log entry that is too large: the log is useless without it.
    """
    body = _encoder.encode(Events(list(events)))
    if len(body) <= max_bytes:
        return [encode_frame(body)]
    if len(events) == 1:
        return event_frames([_failed(events[0], len(body), max_bytes)], max_bytes)
    half = len(events) // 2  # each event is encoded at most log2(len(events)) times
    return [*event_frames(events[:half], max_bytes), *event_frames(events[half:], max_bytes)]


def _failed(event: Event, size: int, max_bytes: int) -> Failed:
    problem = (
        f"an answer of {size} bytes is more than the {max_bytes} of one message between processes"
    )
    if isinstance(event, RankState | WorkerReport | WorkerSnapshot | Failed):
        raise ChannelError(f"{type(event).__name__}: {problem}")
    error = TooCostlyError(f"{problem}: ask for fewer logprobs, or a shorter prompt", None)
    return Failed(event.request_id, error.code, error.message, error.status)
