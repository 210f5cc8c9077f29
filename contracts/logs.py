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
import threading
from pathlib import Path
from typing import TextIO

from contracts.config import LogConfig

TOP = "tandem"
ACCESS = "tandem.access"
ACCESS_DELAY_S = 0.2
_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+")


def event(log: logging.Logger, name: str, /, level: int = logging.INFO, **fields: object) -> None:
    """Logs `name key=value …`. name: fixed, for people search for it; what varies is a field."""
    if log.isEnabledFor(level):
        log.log(level, "%s", " ".join([name, *(f"{k}={_shown(v)}" for k, v in fields.items())]))


class LineFormatter(logging.Formatter):
    """One line a record, in UTC. has_traces: tracebacks, too; else another place has them."""

    def __init__(self, *, has_traces: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._has_traces = has_traces

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        head, _, trace = line.partition("\n")
        if not trace:
            return head
        return f"{head} trace={json.dumps(trace)}" if self._has_traces else head


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Ours, to be known again."""


class _FileHandler(logging.handlers.RotatingFileHandler):
    """Ours, to be known again. Lines of the access log are written out together, up to
    ACCESS_DELAY_S late, and the file's size is counted: as the base class has it, a line takes five
    system calls, which are a tenth of a small request's time."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
        self._size_bytes = path.stat().st_size
        self._is_patient = self._is_closed = False
        self._written = threading.Event()
        threading.Thread(target=self._flush_late, name="access-log", daemon=True).start()

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802
        return self._size_bytes >= self.maxBytes

    def doRollover(self) -> None:  # noqa: N802
        super().doRollover()
        self._size_bytes = 0

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        self._size_bytes += len(line) + 1
        return line

    def emit(self, record: logging.LogRecord) -> None:
        self._is_patient = record.name == ACCESS
        super().emit(record)

    def flush(self) -> None:
        if self._is_patient:
            self._written.set()
        else:
            super().flush()

    def close(self) -> None:
        self._is_patient, self._is_closed = False, True
        super().close()
        self._written.set()

    def _flush_late(self) -> None:
        pause = threading.Event()
        while self._written.wait() and not self._is_closed:
            pause.wait(ACCESS_DELAY_S)
            self._written.clear()
            self.acquire()
            try:
                self._is_patient = False
                self.flush()
            finally:
                self.release()


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


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
