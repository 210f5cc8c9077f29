"""One way to log, in every process: a fixed event name and fields, one line a record.

    2026-01-31T12:00:00.123Z WARNING tandem.worker rank_lost rank=expert-1 reason="no heartbeat"

Only loggers below "tandem" are set up: what libraries log is theirs. No colours, no blanks or line
ends in a field without quotes, so that lines can be cut into fields by machines.
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from contracts.config import LogConfig

TOP = "tandem"
ACCESS = "tandem.access"
_LINES = "lines"  # attribute of a record that is several
_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+")


def event(
    log: logging.Logger,
    name: str,
    /,
    level: int = logging.INFO,
    raised: BaseException | None = None,
    **fields: object,
) -> None:
    """Logs `name key=value …`. name: fixed, for people search for it; what varies is a field.
    raised: with its traceback."""
    if log.isEnabledFor(level):
        text = " ".join([name, *(f"{k}={_shown(v)}" for k, v in fields.items())])
        log.log(level, "%s", text, exc_info=raised)


def log_lines(log: logging.Logger, lines: Sequence[tuple[float, str]]) -> None:
    """What was said at those times (since the epoch), as one record: it costs as much as one."""
    text = "\n".join([line for _, line in lines])
    log.info("%s", text, extra={_LINES: lines})


class LineFormatter(logging.Formatter):
    """One line a record, in UTC. has_traces: tracebacks, too; else another place has them."""

    def __init__(self, *, has_traces: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._has_traces = has_traces

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _stamp(record.created)

    def format(self, record: logging.LogRecord) -> str:
        if (lines := getattr(record, _LINES, None)) is not None:
            name = f"{record.levelname} {record.name}"
            return "\n".join([f"{_stamp(at_s)} {name} {line}" for at_s, line in lines])
        line = super().format(record)
        head, _, trace = line.partition("\n")
        if not trace:
            return head
        return f"{head} trace={json.dumps(trace)}" if self._has_traces else head


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Ours, to be known again."""


class _FileHandler(logging.handlers.RotatingFileHandler):
    """Ours, to be known again. The base class formats a record twice, to see whether it fits."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802
        assert self.stream is not None
        return self.stream.tell() >= self.maxBytes


def set_up_logging(
    process: str, config: LogConfig, *, stderr_level: int | None = None
) -> Path | None:
    """Sends this process's events to standard error and, with log.folder, to a file there that is
    called after the `process`; replaces what an earlier call has set up. The file, if there is one.

    With a file, standard error has what an operator should see: from stderr_level on, by default
    warnings. Where the folder cannot be written (on another node, perhaps), it has everything.
    """
    top = logging.getLogger(TOP)
    for handler in [one for one in top.handlers if isinstance(one, _StreamHandler | _FileHandler)]:
        top.removeHandler(handler)
        handler.close()
    level = logging.getLevelName(config.level.upper())
    top.setLevel(level)
    shown = _StreamHandler(sys.stderr)
    top.addHandler(shown)
    file = _file_handler(process, config)
    shown.setFormatter(LineFormatter(has_traces=file is None))
    if stderr_level is not None:
        shown.setLevel(stderr_level)
    if file is None:
        return None
    file.setFormatter(LineFormatter(has_traces=True))
    top.addHandler(file)
    if stderr_level is None:
        shown.setLevel(max(level, logging.WARNING))
    return Path(file.baseFilename)


def _file_handler(process: str, config: LogConfig) -> _FileHandler | None:
    if config.folder is None:
        return None
    path = Path(config.folder) / f"{process}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _FileHandler(path, config.max_file_bytes)
    except OSError as error:
        reason = error.strerror
        event(logging.getLogger(TOP), "log_file_failed", logging.WARNING, path=path, reason=reason)
        return None


def _stamp(at_s: float) -> str:
    at = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
