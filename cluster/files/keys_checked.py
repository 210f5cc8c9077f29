"""Whether http.keys_file can be used, and who may read it."""

from __future__ import annotations

import stat
from pathlib import Path

from cluster.files.findings import Finding
from contracts.config import TandemConfig
from contracts.errors import ConfigError
from contracts.keys_file import read_keys

_OTHERS = stat.S_IRWXO


def keys_finding(config: TandemConfig) -> Finding:
    """Of this machine's file."""
    http = config.http
    if http.keys_file is None:
        count = len(http.api_keys)
        found = f"{count} in the configuration" if count else "none: open to all who reach the port"
        return Finding("keys", "ok", found)
    path = Path(http.keys_file)
    try:
        keys, mode = read_keys(path), stat.S_IMODE(path.stat().st_mode)
    except (ConfigError, OSError) as error:
        return Finding("keys", "error", str(error), "servers start and change keys by this file")
    found = f"{path}: {len(keys.api_keys)} keys, mode {mode:04o}"
    if mode & _OTHERS:
        advice = f"all users of this machine may read or change it: chmod o-rwx {path}"
        return Finding("keys", "warning", found, advice)
    if keys.metrics_key and http.metrics_key is None and config.metrics.exporters:
        found = f"{found}; exporters on machines without this file are open"
    return Finding("keys", "ok", found)
