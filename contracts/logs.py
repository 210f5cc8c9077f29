"""Logging: a fixed event name and fields, one line per record, as text or JSON (log.format).

    2026-01-31T12:00:00.123Z WARNING tandem.worker rank_lost rank=expert-1 reason="no heartbeat"
    {"at": "2026-01-31T12:00:00.123Z", "level": "WARNING", "logger": "tandem.worker",
     "process": "attention-0", "event": "rank_lost", "rank": "expert-1", …}

Only loggers below "tandem" are configured. Fields contain no colours, and no unquoted spaces or
line ends, so that lines can be parsed.
"""

import datetime
import json
import logging
import logging.handlers
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from contracts.config import LogConfig

TOP = "tandem"
ACCESS = "tandem.access"
# Attributes of a record: its event and fields; the lines of `log_lines`; a private exception.
_EVENT, _LINES, _PRIVATE = "event", "lines", "private"
_Event = tuple[str, dict[str, object]]
Line = tuple[float, str, dict[str, object]]  # seconds since the epoch, event, fields
_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+")


def event(
    log: logging.Logger,
    name: str,
    /,
    level: int = logging.INFO,
    raised: BaseException | None = None,
    is_private: bool = False,
    **fields: object,
) -> None:
    """Log `name key=value …`.

    name: fixed, for searching; variable parts are fields. raised: logged with its traceback.
    is_private: omit the exception's message, which may quote a prompt, unless log.prompts allows
    it. Exceptions among the fields are stored as text, since a record may outlive their frames.
    """
    if log.isEnabledFor(level):
        for key, value in fields.items():
            if isinstance(value, BaseException):
                fields[key] = str(value)
        extra: dict[str, object] = {_EVENT: (name, fields)}
        if is_private:
            extra[_PRIVATE], raised = raised, None
        log.log(level, "%s", _text(name, fields), exc_info=raised, extra=extra)


def log_lines(log: logging.Logger, lines: Sequence[Line]) -> None:
    """Log several lines with their own times as one record, at the cost of one."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", _Lines(lines), extra={_LINES: lines})


class _Lines(NamedTuple):
    """Text for foreign handlers, formatted on demand."""

    lines: Sequence[Line]

    def __str__(self) -> str:
        return "\n".join([_text(name, fields) for _, name, fields in self.lines])


def _text(name: str, fields: dict[str, object]) -> str:
    parts = [f"{key}={_shown(value)}" for key, value in fields.items()]
    return " ".join([name, *parts] if name else parts)


class LineFormatter(logging.Formatter):
    """Format with one line per record, in UTC.

    has_traces: include tracebacks. has_prompts: include messages of private exceptions.
    json_process: name of the logging process, in lines of JSON; None: text.
    """

    def __init__(
        self, *, has_traces: bool, has_prompts: bool = False, json_process: str | None = None
    ) -> None:
        super().__init__()
        self._json_process = json_process
        self._has_traces, self._has_prompts = has_traces, has_prompts

    def format(self, record: logging.LogRecord) -> str:
        lines: Sequence[Line] | None = getattr(record, _LINES, None)
        if lines is None:
            by_hand: _Event = (" ".join(record.getMessage().split()), {})
            logged: _Event = getattr(record, _EVENT, by_hand)
            name, fields = logged
            trace = self._trace(record)
            lines = [(record.created, name, {**fields, "trace": trace} if trace else fields)]
        return "\n".join([self._line(record, *line) for line in lines])

    def _line(
        self, record: logging.LogRecord, at_s: float, name: str, fields: dict[str, object]
    ) -> str:
        if self._json_process is None:
            return f"{_stamp(at_s)} {record.levelname} {record.name} {_text(name, fields)}"
        own = {
            "at": _stamp(at_s),
            "level": record.levelname,
            "logger": record.name,
            "process": self._json_process,
            "event": name or "request",
        }
        return json.dumps({**fields, **own}, default=str, ensure_ascii=False)

    def _trace(self, record: logging.LogRecord) -> str:
        if not self._has_traces:
            return ""
        error: BaseException | None = getattr(record, _PRIVATE, None)
        if error is not None and not self._has_prompts:
            frames = "".join(traceback.format_tb(error.__traceback__))
            return f"{frames}{type(error).__name__} (its message: log.prompts)"
        if error is None and record.exc_info:
            error = record.exc_info[1]
        return "" if error is None else "".join(traceback.format_exception(error)).rstrip()


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Marks handlers of `set_up_logging`."""


class _FileHandler(logging.handlers.RotatingFileHandler):
    """Rotating file. The base class formats each record twice to check its size."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802
        assert self.stream is not None
        return self.stream.tell() >= self.maxBytes


def set_up_logging(
    process: str, config: LogConfig, *, stderr_level: int | None = None
) -> Path | None:
    """Send events to standard error and, with log.folder, to the file `process`.log there.

    Replaces an earlier set-up. Returns the path of the file, if any. With a file, standard error
    shows events from `stderr_level` on (default: warnings). If the folder is not writable, for
    example on another node, standard error shows everything.
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
    shown.setFormatter(_formatter(process, config, has_traces=file is None))
    if stderr_level is not None:
        shown.setLevel(stderr_level)
    if file is None:
        return None
    file.setFormatter(_formatter(process, config, has_traces=True))
    top.addHandler(file)
    if stderr_level is None:
        shown.setLevel(max(level, logging.WARNING))
    return Path(file.baseFilename)


def _formatter(process: str, config: LogConfig, *, has_traces: bool) -> LineFormatter:
    name = process if config.format == "json" else None
    return LineFormatter(has_traces=has_traces, has_prompts=config.prompts, json_process=name)


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
