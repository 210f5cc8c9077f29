"""Findings of `tandem doctor`: the record, its table, and the check of API keys."""

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table
from rich.text import Text

from cluster.observe.terminal import Terminal
from contracts.api_keys import read_keys
from contracts.config import TandemConfig
from contracts.errors import ConfigError

Level = Literal["ok", "warning", "error"]
_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. advice: what to change; empty for level "ok"."""

    check: str
    level: Level
    found: str
    advice: str = ""


def print_findings(findings: Sequence[Finding]) -> None:
    table = Table("", "check", "found", "advice", box=None, pad_edge=False)
    for finding in findings:
        level = Text(finding.level, style=_COLOURS[finding.level])
        table.add_row(level, *map(Text, (finding.check, finding.found, finding.advice)))
    Terminal().print(table)


def check_keys(config: TandemConfig) -> Finding:
    """Check this machine's keys file and its mode."""
    http = config.http
    if http.keys_file is None:
        count = len(http.api_keys)
        found = f"{count} in the configuration" if count else "none: open to every client"
        return Finding("keys", "ok", found)
    path = Path(http.keys_file)
    try:
        keys, mode = read_keys(path), stat.S_IMODE(path.stat().st_mode)
    except (ConfigError, OSError) as error:
        advice = "servers read their keys from this file at the start and on each change"
        return Finding("keys", "error", str(error), advice)
    found = f"{path}: {len(keys.api_keys)} keys, mode {mode:04o}"
    if mode & stat.S_IRWXO:
        advice = f"all users of this machine may read or change it: chmod o-rwx {path}"
        return Finding("keys", "warning", found, advice)
    if keys.metrics_key and http.metrics_key is None and config.metrics.exporters:
        found = f"{found}; exporters on machines without this file are open"
    return Finding("keys", "ok", found)
