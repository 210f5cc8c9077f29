"""Section `trace`."""

from __future__ import annotations

from contracts.config.section import NonNegative, Section


class TraceConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeline of a rank's tasks."""

    spans: NonNegative = 20_000
    """Latest task spans that each rank keeps. 0: recording is off."""
