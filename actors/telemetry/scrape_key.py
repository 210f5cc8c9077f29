"""Bearer token of a process's exporter.

It is `http.metrics_key`, or the one in `http.keys_file`, which takes precedence and may change
while the process runs.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from threading import Lock

from contracts.clock import Clock, monotonic_s
from contracts.config import HttpConfig
from contracts.errors import ConfigError
from contracts.keys_file import read_keys
from contracts.logs import event

log = logging.getLogger("tandem.metrics")

SETTLE_S = 1.0  # a change applies once it is this old, so that it is complete

_FileState = tuple[int, int, int] | None  # identity of the contents; None: no file


class ScrapeKey:
    """Returns the current token. Thread-safe.

    A file that is not on this machine, or is invalid, is ignored; the previous token stays.
    """

    def __init__(self, http: HttpConfig, clock: Clock = monotonic_s) -> None:
        self._configured, self._clock, self._lock = http.metrics_key, clock, Lock()
        self._path = None if http.keys_file is None else Path(http.keys_file)
        self._key = http.metrics_key
        self._loaded: _FileState = None
        self._seen, self._since_s = self._stat(), clock()
        if self._seen is not None:
            self._load(self._seen)

    def __call__(self) -> str | None:
        """Return the token; None: no authentication."""
        if self._path is None:
            return self._key
        with self._lock:
            seen, now_s = self._stat(), self._clock()
            if seen != self._seen:
                self._seen, self._since_s = seen, now_s
            if seen not in (None, self._loaded) and now_s - self._since_s >= SETTLE_S:
                self._load(seen)
            return self._key

    def _stat(self) -> _FileState:
        try:
            found = None if self._path is None else os.stat(self._path)
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)

    def _load(self, seen: _FileState) -> None:
        assert self._path is not None
        try:
            key = read_keys(self._path).metrics_key or self._configured
        except ConfigError as error:
            key = self._key
            event(log, "scrape_key_kept", logging.WARNING, reason=error)
        if self._stat() == seen:  # otherwise it has changed meanwhile
            self._key, self._loaded = key, seen
