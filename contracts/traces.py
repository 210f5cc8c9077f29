"""Contents of a trace of a running cluster: names, times and counts, no text of requests."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

MAX_TRACE_S = 60.0
MAX_NAMES = 16  # of the requests of a batch


class BatchSpan(msgspec.Struct, frozen=True, array_like=True):
    """A batch on a rank, from its formation to its end.

    requests: client names of its requests, at most MAX_NAMES; others: the number of further ones.
    """

    rank: str
    number: int
    start_s: float
    end_s: float
    tokens: int
    priority: str
    requests: tuple[str, ...] = ()
    others: int = 0


class RequestSpan(msgspec.Struct, frozen=True, array_like=True):
    """A request in an ingress, from its headers to the end of its response.

    first_s: time of the first token, or None.
    """

    name: str
    pipeline: str
    priority: str
    outcome: str
    start_s: float
    first_s: float | None
    end_s: float


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of a rank on its own clock.

    is_cut: older spans of the requested time have been overwritten (trace.spans). boot: identity of
    the kernel whose clock it is.
    """

    rank: str
    spans: list[TaskSpan] = []
    batches: list[BatchSpan] = []
    is_cut: bool = False
    boot: str = ""


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """Offset of another clock to the local one, estimated from round trips.

    is_shared: both are the same clock of one kernel; no correction applies.
    """

    offset_ms: float
    uncertainty_ms: float
    is_shared: bool

    @property
    def applied_s(self) -> float:
        return 0.0 if self.is_shared else self.offset_ms / 1e3


class RankTraceInfo(msgspec.Struct, frozen=True, kw_only=True):
    clock: ClockOffset
    spans: int
    is_cut: bool = False


class TraceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a trace. missing: processes without spans, and why."""

    seconds: float
    ranks: dict[str, RankTraceInfo] = {}
    missing: dict[str, str] = {}


class TraceResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the launcher.

    events: Chrome trace events on its own clock, comma-separated JSON objects. refused_s: remaining
    seconds of another trace that is under way.
    """

    note: TraceInfo = TraceInfo(seconds=0.0)
    events: msgspec.Raw = msgspec.Raw(b"[]")
    refused_s: float | None = None


def boot_identity() -> str:
    """Return the identity of the kernel and time namespace, "" if unknown.

    Processes with equal identities share CLOCK_MONOTONIC.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


class Stage(enum.StrEnum):
    """Stages, as in `tandem_stage_seconds{stage}`.

    SEND: split and send packets. FINISH: logits and sampling. WAIT: idle. HELD: best-effort work is
    held back for a deadline. GATHER, HOST_COPY: load a layer's experts from other workers or from
    host memory. SOLVE: the planner answers a rank.
    """

    ATTENTION = "attention"
    SHARED = "shared"
    EXPERT = "expert"
    A2E = "a2e"
    E2A = "e2a"
    SEND = "send"
    FINISH = "finish"
    WAIT = "wait"
    HELD = "held"
    GATHER = "gather"
    HOST_COPY = "host_copy"
    SOLVE = "solve"


TRANSFERS = (Stage.A2E, Stage.E2A)
BUSY = (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, Stage.SEND, Stage.FINISH)


class TaskSpan(msgspec.Struct, frozen=True, array_like=True):
    """One task on one resource, from start_s to end_s (monotonic seconds).

    resource: a rank ("attention-0") or a link ("attention-0>expert-1"). of: batches merged in a
    task of an expert rank, as (attention rank, batch number).
    """

    resource: str
    stage: Stage
    start_s: float
    end_s: float
    batch: int = 0
    layer: int = 0
    micro_batch: int = 0
    token_group: int = 0
    tokens: int = 0
    of: tuple[tuple[str, int], ...] = ()
