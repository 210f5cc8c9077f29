"""What `tandem doctor` finds, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.table import Table
from rich.text import Text

from cluster.files.terminal import Terminal

Level = Literal["ok", "warning", "error"]
_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


class Finding(msgspec.Struct, frozen=True):
    """One line. `advice`: what to change; empty when all is well."""

    check: str
    level: Level
    found: str
    advice: str = ""


def print_findings(findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found", "advice"):
        table.add_column(heading)
    for finding in findings:
        level = Text(finding.level, style=_COLOURS[finding.level])
        table.add_row(level, *map(Text, (finding.check, finding.found, finding.advice)))
    Terminal().print(table)
