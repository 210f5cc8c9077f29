"""Clients of `tandem status`, `tandem scale` and `tandem trace`."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import msgspec
from rich.console import Group as Lines
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.batch.lines import write_whole
from cluster.http.response_types import Status
from cluster.observe.server_client import (
    Server,
    decode_answer,
    error_message,
    get_monitored,
    send_request,
)
from cluster.observe.terminal import Terminal, plain_table
from contracts.errors import ConfigError, LaunchError, writing
from contracts.ranks import RankStatus
from contracts.scaling import ScaleState, ScaleTarget, format_counts
from contracts.traces import BUSY, TraceInfo

_MAX_BYTES: Final = 16 << 20
_STATUS_TIMEOUT_S: Final = 10.0


def fetch_status(server: Server) -> Status:
    """Return the server's state. Raises ConfigError if Tandem does not answer there."""
    answer = get_monitored(server, "/status", most_bytes=_MAX_BYTES, timeout_s=_STATUS_TIMEOUT_S)
    return decode_answer(server, "/status", answer, Status)


def print_status(server: Server, found: Status) -> None:
    Terminal(highlight=False).print(_render(server, found, None))


def watch(server: Server, period_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show the state periodically until interrupted; report failed requests and retry.

    Raises ConfigError if the first request fails.
    """
    terminal = Terminal(highlight=False)
    before, requested_s = fetch_status(server), time.monotonic()
    with Live(_render(server, before, None), console=terminal, auto_refresh=False) as live:
        while True:
            sleep(period_s)
            try:
                found, now_s = fetch_status(server), time.monotonic()
            except ConfigError as error:
                live.update(Text(error.message), refresh=True)
                continue
            since = _EarlierStatus(before, now_s - requested_s)
            live.update(_render(server, found, since), refresh=True)
            before, requested_s = found, now_s


class _EarlierStatus(NamedTuple):
    """An earlier answer, and the seconds since then."""

    status: Status
    seconds: float

    def rank(self, name: str) -> RankStatus | None:
        return next((rank for rank in self.status.ranks if rank.name == name), None)


def _render(server: Server, found: Status, since: _EarlierStatus | None) -> Lines:
    state = "ready" if not found.problems else "not ready"
    lines: list[Any] = [Text(f"{found.model} on {server.url}, Tandem {found.version}: {state}")]
    lines += [Text(f"  {problem}") for problem in found.problems]
    for name, load in found.pipelines.items():
        waiting = ", ".join(f"{number} {label}" for label, number in load.waiting.items())
        lines.append(
            Text(f"{name:11}{load.requests} requests; waiting for a first answer: {waiting}")
        )
    lines.append(_table(found, since))
    for rank in found.ranks:
        if not rank.healthy:
            lines.append(Text(f"{rank.name} is lost: {rank.reason or 'not healthy'}"))
        if plans := rank.sections.get("plans"):
            lines.append(Text(f"{rank.name} plans: {_most_frequent(plans)}"))
    return Lines(*lines)


def _table(found: Status, since: _EarlierStatus | None) -> Table:
    headings = ("epoch", "up", "running", "waiting", "busy", "exposed", "KV blocks used")
    table = plain_table("rank", *headings, left=("rank",))
    for rank in found.ranks:
        table.add_row(rank.name, *_cells(rank, since))
    return table


def _cells(rank: RankStatus, since: _EarlierStatus | None) -> Iterator[str]:
    before = None if since is None else since.rank(rank.name)
    yield str(rank.epoch)
    yield _duration(rank.uptime_s)
    yield str(rank.running)
    yield str(rank.waiting)
    same = since is not None and before is not None and before.uptime_s <= rank.uptime_s
    seconds = since.seconds if since is not None and same else rank.uptime_s
    for total in (busy_seconds, _exposed_seconds):
        spent_s = total(rank) - (total(before) if same and before is not None else 0.0)
        yield f"{min(1.0, spent_s / seconds):.0%}" if seconds > 0 else "–"
    blocks = rank.sections.get("kv_blocks", {})
    whole = sum(blocks.values())
    yield f"{whole - blocks.get('free', 0):,.0f} of {whole:,.0f}" if blocks else "–"


def busy_seconds(rank: RankStatus) -> float:
    """Return the seconds that a rank has computed since its start."""
    stages = rank.sections.get("stage_s", {})
    return sum(stages.get(stage, 0.0) for stage in BUSY)


def _exposed_seconds(rank: RankStatus) -> float:
    return rank.sections.get("totals", {}).get("exposed_s", 0.0)


def _most_frequent(plans: dict[str, float]) -> str:
    plan, batches = max(plans.items(), key=lambda item: item[1])
    return f"{plan}, {batches:,.0f} of {sum(plans.values()):,.0f} batches"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


_SCALE_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.5
_MAX_SILENCE_S: Final = 60.0  # without an answer, while a launcher is replaced


def start_scale(server: Server, requested: ScaleTarget) -> ScaleState:
    """Start the change. Raises ConfigError if the server refuses or does not answer."""
    return _request_scale(server, "POST", requested)


def follow_scale(
    server: Server, started: ScaleState, report: Callable[[str], None], within_s: float
) -> ScaleState:
    """Report each step until the change has ended.

    Raises LaunchError if the change failed, or has not ended in time: it continues in the server.
    """
    end_s, last_reply_s = time.monotonic() + within_s, time.monotonic()
    num_reported, state = 0, started
    while True:
        for step in state.steps[num_reported:]:
            report(step)
        num_reported = len(state.steps)
        if state.state == "failed":
            raise LaunchError(f"{state.reason}; current ranks: {format_counts(state.ranks)}")
        if state.state != "running":
            return state
        if time.monotonic() > end_s:
            raise LaunchError(
                f"not done within {within_s:g} s (--within): it continues; see `tandem status`"
            )
        time.sleep(_POLL_S)
        try:
            state, last_reply_s = _request_scale(server, "GET", None), time.monotonic()
        except ConfigError:
            if time.monotonic() - last_reply_s > _MAX_SILENCE_S:
                raise
            continue
        if state.number != started.number:
            raise LaunchError(
                "the launcher was restarted, or another scale request has begun: see "
                "`tandem status`, and scale again"
            )


def _request_scale(server: Server, method: str, requested: ScaleTarget | None) -> ScaleState:
    body = None if requested is None else msgspec.json.encode(requested)
    answer = send_request(
        server, method, "/scale", most_bytes=_MAX_BYTES, timeout_s=_SCALE_TIMEOUT_S, content=body
    )
    if answer.status != 200:
        hint = "give http.operator_key as --api-key: " if answer.status == 401 else ""
        detail = error_message(answer.body)
        raise ConfigError(f"--url {server.url}: {answer.status}: {hint}{detail}")
    return decode_answer(server, "/scale", answer, ScaleState)


_MAX_TRACE_BYTES: Final = 512 << 20
_EXTRA_S: Final = 40.0  # beyond the recorded seconds


class _TraceMetadata(msgspec.Struct):
    tandem: TraceInfo


class _TraceFile(msgspec.Struct, rename={"metadata": "otherData", "events": "traceEvents"}):
    """The events stay undecoded."""

    metadata: _TraceMetadata
    events: msgspec.Raw


def save_trace(server: Server, seconds: float, output: Path) -> TraceInfo:
    """Write the file atomically and return its metadata.

    Raises ConfigError if Tandem does not answer, or another trace is running.
    """
    path = f"/trace?{urlencode({'seconds': f'{seconds:g}'})}"
    answer = get_monitored(server, path, most_bytes=_MAX_TRACE_BYTES, timeout_s=seconds + _EXTRA_S)
    if answer.status != 200:
        raise ConfigError(f"--url {server.url}: {answer.status}: {error_message(answer.body)}")
    note = decode_answer(server, "/trace", answer, _TraceFile).metadata.tandem
    with writing("--output", output):
        write_whole(output, answer.body)
    return note


def print_trace(note: TraceInfo, output: Path) -> None:
    """Print a table of processes, and the missing ones on standard error too."""
    terminal = Terminal(highlight=False)
    terminal.print(
        f"{output}: {note.seconds:g} s; open it in https://ui.perfetto.dev", markup=False
    )
    headings = ("process", "spans", "clock offset, ms", "uncertainty, ms")
    table = plain_table(*headings, left=("process",))
    for name, rank in note.ranks.items():
        clock = rank.clock
        ahead = "same clock" if clock.is_shared else f"{clock.offset_ms:.3f}"
        spans = f"{rank.spans:,}" + ("+" if rank.is_cut else "")
        table.add_row(name, spans, ahead, "" if clock.is_shared else f"{clock.uncertainty_ms:.3f}")
    terminal.print(table)
    errors = Terminal(stderr=True, highlight=False)
    for name, reason in note.missing.items():
        errors.print(f"{name} is missing: {reason}", markup=False, soft_wrap=True)
    if any(rank.is_cut for rank in note.ranks.values()):
        errors.print("+: older spans were overwritten: record fewer seconds, or raise trace.spans")
