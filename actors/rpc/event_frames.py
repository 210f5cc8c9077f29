"""Events as frames that their receiver accepts: none above MAX_FRAME_BYTES."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contracts.errors import ChannelError, TooCostlyError
from contracts.frames import encode_frame
from contracts.messages import MAX_FRAME_BYTES, Event, Events, Failed, RankState
from contracts.routing_messages import WorkerReport, WorkerSnapshot

_encoder = msgspec.msgpack.Encoder()


def event_frames(events: Sequence[Event], max_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
    """`events` in order, as one frame where that is small enough, else as several. An answer that
    fits none by itself becomes a `Failed` of its own request. Raises ChannelError for an entry of a
    worker's log that fits none: without it the log makes no sense.
    """
    body = _encoder.encode(Events(list(events)))
    if len(body) <= max_bytes:
        return [encode_frame(body)]
    if len(events) == 1:
        return event_frames([_failed(events[0], len(body), max_bytes)], max_bytes)
    half = len(events) // 2  # halved at most log2 times: each event is encoded as often
    return [*event_frames(events[:half], max_bytes), *event_frames(events[half:], max_bytes)]


def _failed(event: Event, size: int, max_bytes: int) -> Failed:
    problem = (
        f"an answer of {size} bytes is more than the {max_bytes} of one message between processes"
    )
    if isinstance(event, RankState | WorkerReport | WorkerSnapshot | Failed):
        raise ChannelError(f"{type(event).__name__}: {problem}")
    error = TooCostlyError(f"{problem}: ask for fewer logprobs, or a shorter prompt", None)
    return Failed(event.request_id, error.code, error.message, error.status)
