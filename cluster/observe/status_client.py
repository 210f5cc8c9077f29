"""Client of `tandem status`: a server's state as a table."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from rich.console import Group as Lines
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.http.response_types import Status
from cluster.observe.server_client import Server, decode_answer, get_monitored
from cluster.observe.terminal import Terminal, plain_table
from contracts.errors import ConfigError
from contracts.ranks import RankStatus
from contracts.traces import BUSY

_REQUEST_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 16 << 20


def fetch_status(server: Server) -> Status:
    """Return the server's state. Raises ConfigError if Tandem does not answer there."""
    answer = get_monitored(server, "/status", most_bytes=_MAX_BYTES, timeout_s=_REQUEST_TIMEOUT_S)
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
