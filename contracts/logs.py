"""One way to log, in every process: a fixed event name and fields, one line a record, as text or as
JSON (log.format):

    2026-01-31T12:00:00.123Z WARNING tandem.worker rank_lost rank=expert-1 reason="no heartbeat"
    {"at": "2026-01-31T12:00:00.123Z", "level": "WARNING", "logger": "tandem.worker",
     "process": "attention-0", "event": "rank_lost", "rank": "expert-1", …}

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
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from contracts.config import LogConfig

TOP = "tandem"
ACCESS = "tandem.access"
# Attributes of a record: what it says, apart from its text; the lines of one that is several; an
# exception whose message may hold what a client has sent.
_EVENT, _LINES, _PRIVATE = "said", "lines", "private"
_Event = tuple[str, dict[str, object]]
Line = tuple[float, str, dict[str, object]]  # when (since the epoch), the event, its fields
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
    """Logs `name key=value …`. name: fixed, for people search for it; what varies is a field.
    raised: with its traceback. is_private: without its message, for that may quote a prompt, unless
    log.prompts allows it. An exception among the fields is kept as its text: a record may live
    longer than what the frames of a traceback hold."""
    if log.isEnabledFor(level):
        for key, value in fields.items():
            if isinstance(value, BaseException):
                fields[key] = str(value)
        extra: dict[str, object] = {_EVENT: (name, fields)}
        if is_private:
            extra[_PRIVATE], raised = raised, None
        log.log(level, "%s", _text(name, fields), exc_info=raised, extra=extra)


def log_lines(log: logging.Logger, lines: Sequence[Line]) -> None:
    """What was said at those times, as one record: it costs as much as one."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", _Lines(lines), extra={_LINES: lines})


class _Lines(NamedTuple):
    """For handlers that are not ours: made only if one asks."""

    lines: Sequence[Line]

    def __str__(self) -> str:
        return "\n".join([_text(name, fields) for _, name, fields in self.lines])


def _text(name: str, fields: dict[str, object]) -> str:
    parts = [f"{key}={_shown(value)}" for key, value in fields.items()]
    return " ".join([name, *parts] if name else parts)


class LineFormatter(logging.Formatter):
    """One line a record, in UTC. has_traces: tracebacks, too; else another place has them.
    has_prompts: messages of exceptions that may quote what a client has sent."""

    def __init__(self, *, has_traces: bool, has_prompts: bool = False) -> None:
        super().__init__()
        self._has_traces, self._has_prompts = has_traces, has_prompts

    def format(self, record: logging.LogRecord) -> str:
        lines: Sequence[Line] | None = getattr(record, _LINES, None)
        if lines is None:
            by_hand: _Event = (" ".join(record.getMessage().split()), {})
            logged: _Event = getattr(record, _EVENT, by_hand)
            name, fields = logged
            trace = self._trace(record)
            lines = [(record.created, name, {**fields, "trace": trace} if trace else fields)]
        return "\n".join([self.line(record, *line) for line in lines])

    def line(
        self, record: logging.LogRecord, at_s: float, name: str, fields: dict[str, object]
    ) -> str:
        return f"{_stamp(at_s)} {record.levelname} {record.name} {_text(name, fields)}"

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


class JsonFormatter(LineFormatter):
    """An object a line. process: whose log it is."""

    def __init__(self, process: str, *, has_traces: bool, has_prompts: bool = False) -> None:
        super().__init__(has_traces=has_traces, has_prompts=has_prompts)
        self._process = process

    def line(
        self, record: logging.LogRecord, at_s: float, name: str, fields: dict[str, object]
    ) -> str:
        own = {
            "at": _stamp(at_s),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "event": name or "request",
        }
        return json.dumps({**fields, **own}, default=str, ensure_ascii=False)


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
    if config.format == "json":
        return JsonFormatter(process, has_traces=has_traces, has_prompts=config.prompts)
    return LineFormatter(has_traces=has_traces, has_prompts=config.prompts)


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
