"""Messages between a router and its prefill workers.

A worker writes one log. A `WorkerReport` is an entry, sent with the worker's answers to every
router. Numbers have no gaps, so that all routers derive the same state from the same entries
(planner/routing/worker_state.py).
"""

import math
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from contracts.requests import Priority

Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class RequestKey(NamedTuple):
    """Identifier of a request, unique over all routers."""

    router: int
    number: int


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """Routing data of a request: length, chained hashes of its full blocks, class."""

    key: RequestKey
    prompt_tokens: Annotated[int, Meta(ge=1)]
    hashes: tuple[bytes, ...]
    priority: Priority = Priority.LS


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one reference pass (MoE-Prefill, Appendix B.4).

    first_layer_s: of layer 0, whose experts are resident: pure compute. slowest_layer_s: the
    maximum over all layers, compute or transfer. reference_prompts: tokens of each prompt of the
    pass, none of them cached.
    """

    first_layer_s: Seconds
    slowest_layer_s: Seconds
    reference_prompts: Annotated[tuple[int, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        times = (self.first_layer_s, self.slowest_layer_s)
        if not all(math.isfinite(time) and time > 0 for time in times):
            raise ValueError(f"calibration={times} s: a layer's time is a positive number")
        if self.slowest_layer_s < self.first_layer_s:
            raise ValueError(
                f"slowest_layer_s={self.slowest_layer_s:g} is below first_layer_s="
                f"{self.first_layer_s:g}: take the largest over all layers, layer 0 included"
            )
        if not self.reference_prompts or min(self.reference_prompts) < 1:
            raise ValueError(
                f"reference_prompts={self.reference_prompts}: give at least one length, each >= 1"
            )


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a prompt: `done_tokens` are cached or computed.

    The running batch continues to `until_tokens`, if that is more. The first message of a request,
    at its start, contains the number of cached tokens.
    """

    key: RequestKey
    done_tokens: Annotated[int, Meta(ge=0)]
    until_tokens: Annotated[int, Meta(ge=0)] = 0


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report"):
    """Entry `number` (0, 1, 2, …) of the log of `worker`, in its incarnation `epoch`.

    Its parts took effect in the order of the fields. accepted: prompts that joined the queue.
    stored, evicted: hashes of blocks added to and removed from its prefix cache. ended: requests
    that finished, failed or were cancelled.
    """

    worker: int
    epoch: int
    number: int
    calibration: Calibration | None = None
    accepted: tuple[Prompt, ...] = ()
    progress: tuple[PromptProgress, ...] = ()
    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    ended: tuple[RequestKey, ...] = ()


class OpenRequest(msgspec.Struct, frozen=True, array_like=True):
    """An accepted request that has not ended.

    done_tokens, until_tokens: as last reported, or as expected while `started` is false.
    """

    prompt: Prompt
    done_tokens: int
    started: bool
    until_tokens: int = 0


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """State after all log entries up to `number`, for a router that joins or has missed entries."""

    worker: int
    epoch: int
    number: int
    calibration: Calibration | None
    committed: tuple[bytes, ...]
    requests: tuple[OpenRequest, ...]
