"""Client of `tandem trace`: records all processes of a running server into a file."""

from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import msgspec

from cluster.batch.lines import write_whole
from cluster.observe.server_client import Server, decode_answer, error_message, get_monitored
from cluster.observe.terminal import Terminal, plain_table
from contracts.errors import ConfigError, writing
from contracts.traces import TraceInfo

MAX_BYTES: Final = 512 << 20
EXTRA_S: Final = 40.0  # beyond the recorded seconds


class _TraceMetadata(msgspec.Struct):
    tandem: TraceInfo


class _File(msgspec.Struct, rename={"metadata": "otherData", "events": "traceEvents"}):
    """The events stay undecoded."""

    metadata: _TraceMetadata
    events: msgspec.Raw


def save_trace(server: Server, seconds: float, output: Path) -> TraceInfo:
    """Write the file atomically and return its metadata.

    Raises ConfigError if Tandem does not answer, or another trace is running.
    """
    path = f"/trace?{urlencode({'seconds': f'{seconds:g}'})}"
    answer = get_monitored(server, path, most_bytes=MAX_BYTES, timeout_s=seconds + EXTRA_S)
    if answer.status != 200:
        raise ConfigError(f"--url {server.url}: {answer.status}: {error_message(answer.body)}")
    note = decode_answer(server, "/trace", answer, _File).metadata.tandem
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
