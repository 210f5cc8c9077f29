"""Traces of all ranks on one clock.

Each rank is asked for its clock several times; the quickest round trip is the most precise.

send ────────> rank's clock ────────> reply        offset = its clock - middle of the round trip,
 t0               clock                  t1        with a precision of half of it
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from actors.ranks.remote import RayRank
from actors.telemetry.chrome_trace import TraceEvent, missing_events, rank_events, requests_by_batch
from contracts.clock import Clock
from contracts.traces import (
    ClockOffset,
    RankTrace,
    RankTraceInfo,
    TraceInfo,
    TraceResponse,
    boot_identity,
)

ROUNDS = 12
CLOCK_TIMEOUT_S = 2.0
TRACE_TIMEOUT_S = 10.0


class TraceReply(NamedTuple):
    """Reply of a rank. trace None: no reply, for that reason."""

    name: str
    trace: RankTrace | None
    clock: ClockOffset
    reason: str = ""


_UNKNOWN = ClockOffset(offset_ms=0.0, uncertainty_ms=0.0, is_shared=False)


def estimate_offset(
    rounds: Sequence[tuple[float, float, float]], *, same_boot: bool
) -> ClockOffset:
    """Estimate the offset of a clock. rounds: send time, remote clock, receive time.

    same_boot: the other process reports the same kernel; used unless the round trips contradict it.
    """
    sent_s, shown_s, known_s = min(rounds, key=lambda one: one[2] - one[0])
    uncertainty_s = (known_s - sent_s) / 2
    offset_s = shown_s - (sent_s + known_s) / 2
    return ClockOffset(
        offset_ms=1e3 * offset_s,
        uncertainty_ms=1e3 * uncertainty_s,
        is_shared=same_boot and abs(offset_s) <= uncertainty_s,
    )


def gather_traces(
    ranks: Sequence[RayRank], since_s: float, clock: Clock, *, spans: bool
) -> list[TraceReply]:
    """Collect traces of all ranks concurrently.

    since_s: on this clock. spans False: clocks only.
    """

    def collect(rank: RayRank) -> TraceReply:
        try:
            return _request_trace(rank, since_s, clock, spans=spans)
        except Exception as error:  # noqa: BLE001 - the other ranks' traces are kept
            reason = str(error).partition("\n")[0] or f"no answer ({type(error).__name__})"
            return TraceReply(rank.name, None, _UNKNOWN, reason)

    with ThreadPoolExecutor(max(1, len(ranks))) as threads:
        return list(threads.map(collect, ranks))


def _request_trace(rank: RayRank, since_s: float, clock: Clock, *, spans: bool) -> TraceReply:
    rounds = []
    for _ in range(ROUNDS):
        sent_s = clock()
        shown_s = rank.call("clock_s").result(CLOCK_TIMEOUT_S)
        rounds.append((sent_s, shown_s, clock()))
    roughly = estimate_offset(rounds, same_boot=False)
    ahead_s = (roughly.offset_ms - roughly.uncertainty_ms) / 1e3
    from_s = since_s + ahead_s if spans else float("inf")
    trace: RankTrace = rank.call("trace", from_s).result(TRACE_TIMEOUT_S)
    same_boot = bool(trace.boot) and trace.boot == boot_identity()
    return TraceReply(rank.name, trace, estimate_offset(rounds, same_boot=same_boot))


def trace_answer(found: Sequence[TraceReply], seconds: float, first_pid: int) -> TraceResponse:
    """Return the events and notes of all replies. Ranks are processes from first_pid on."""
    names = requests_by_batch(one.trace for one in found if one.trace is not None)
    events: list[TraceEvent] = []
    notes, missing = dict[str, RankTraceInfo](), dict[str, str]()
    for pid, one in enumerate(found, first_pid):
        if one.trace is None:
            missing[one.name] = one.reason
            events += missing_events(one.name, pid, one.reason)
            continue
        events += rank_events(one.trace, pid, one.clock.applied_s, names)
        notes[one.name] = RankTraceInfo(
            clock=one.clock, spans=len(one.trace.spans), is_cut=one.trace.is_cut
        )
    note = TraceInfo(seconds=seconds, ranks=notes, missing=missing)
    return TraceResponse(note=note, events=msgspec.Raw(msgspec.json.encode(events)))


class TraceLock:
    """Lock against concurrent traces, for one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: float | None = None

    def begin(self, seconds: float) -> float | None:
        """Return None if the trace may start, else how long the running one will take."""
        if self._until_s is not None:
            return max(1.0, self._until_s - self._clock())
        self._until_s = self._clock() + seconds
        return None

    def end(self) -> None:
        self._until_s = None
