"""Configuration from the arguments of a Serve application. Imports neither ray nor torch."""

from __future__ import annotations

from typing import Any

from contracts.config import TandemConfig
from contracts.errors import ConfigError
from contracts.loading import config_from

_SOURCE = "args of deploy.app:build"


def serve_config(args: dict[str, Any]) -> TandemConfig:
    """Convert `args`, the sections of a configuration file, for use behind Serve's proxy.

    The proxy listens on the host and port of `http_options`; so http.front is "serve", and
    http.host and http.port are rejected. Raises ConfigError, one line that names the key.
    """
    http = args.get("http") or {}
    if isinstance(http, dict):
        for key in ("host", "port"):
            if key in http:
                raise ConfigError(f"{_SOURCE}: http.{key} has no effect here; use http_options")
        if http.get("front", "serve") != "serve":
            raise ConfigError(
                f"{_SOURCE}: http.front={http['front']} is for `tandem serve`; leave it out"
            )
        http = {**http, "front": "serve"}
    return config_from({**args, "http": http}, source=_SOURCE)
