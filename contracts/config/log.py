"""Section `log`."""

from typing import Annotated, Literal

from msgspec import Meta

from contracts.config.section import Count, OutputFolder, Seconds, Section


class LogConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Level, format and files of the log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of logged events."""
    format: Literal["text", "json"] = "text"
    """Format of a line. "text": key=value pairs. "json": one object."""
    prompts: bool = False
    """Allow client text in the log: request bodies (logger tandem.prompts) and error messages that
    may quote them."""
    stall_threshold_s: Seconds = 10.0
    """Seconds that one step of an event loop may take before the stacks of all threads are logged
    once (`event_loop_blocked`)."""
    folder: OutputFolder | None = None
    """Parent folder of the run folders. null: $XDG_STATE_HOME/tandem/NAME with `tandem serve`,
    otherwise standard error only."""
    runs: Count = 10
    """Run folders to keep."""
    max_file_bytes: Annotated[int, Meta(ge=1 << 16)] = 64 << 20
    """Maximum bytes of a log file before rotation; one rotated file is kept."""
