"""What a trace of a running cluster is made of: what each process tells, and what is said of it in
the file. No text of any request: names, times and counts."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

MAX_TRACE_S = 60.0
MAX_NAMES = 16  # of the requests of a batch


class BatchSpan(msgspec.Struct, frozen=True, array_like=True):
    """A batch on a rank, from its forming to its end. requests: what clients call those that have
    tokens in it, MAX_NAMES at most; others: how many more there are."""

    rank: str
    number: int
    start_s: float
    end_s: float
    tokens: int
    priority: str
    requests: tuple[str, ...] = ()
    others: int = 0


class RequestSpan(msgspec.Struct, frozen=True, array_like=True):
    """A request in an ingress, from its head to the end of its answer. first_s: when its first
    token came; None: none did."""

    name: str
    pipeline: str
    priority: str
    outcome: str
    start_s: float
    first_s: float | None
    end_s: float


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Times on the rank's own clock. is_cut: older spans of the time that was asked for have been
    overwritten (trace.spans). boot: names the kernel whose clock it is."""

    rank: str
    spans: list[TaskSpan] = []
    batches: list[BatchSpan] = []
    is_cut: bool = False
    boot: str = ""


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """By how much another clock is ahead of ours, as round trips tell, at best so exactly.
    is_shared: it is the same one (of one kernel), and nothing was to be corrected."""

    offset_ms: float
    uncertainty_ms: float
    is_shared: bool

    @property
    def applied_s(self) -> float:
        return 0.0 if self.is_shared else self.offset_ms / 1e3


class RankTraceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Of a process in a trace."""

    clock: ClockOffset
    spans: int
    is_cut: bool = False


class TraceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says of itself. missing: processes that are not in it, and why."""

    seconds: float
    ranks: dict[str, RankTraceInfo] = {}
    missing: dict[str, str] = {}


class TraceResponse(msgspec.Struct, frozen=True, kw_only=True):
    """From whoever owns the ranks. events: Chrome trace events on its own clock, JSON objects with
    commas between. refused_s: none, for another trace takes so long still."""

    note: TraceInfo = TraceInfo(seconds=0.0)
    events: msgspec.Raw = msgspec.Raw(b"[]")
    refused_s: float | None = None


def boot_identity() -> str:
    """Names the running kernel and the time namespace: processes with the same name of it share
    CLOCK_MONOTONIC. Empty: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


class Stage(enum.StrEnum):
    """Stages as the metrics name them (`tandem_stage_seconds{stage}`). SEND: a rank cuts and sends
    packets; FINISH: logits and sampling; WAIT: it has nothing to do; HELD: best-effort work is held
    back for a due time; GATHER, HOST_COPY: a layer's experts come from other workers, or from the
    host's memory; SOLVE: a planner answers a rank's question."""

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

    `resource` is a rank ("attention-0") or a link ("attention-0>expert-1"). of: what an expert rank
    has merged in it: attention ranks, and the numbers of their batches.
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
