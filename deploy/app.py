"""The application that `serve run deploy/serve.yaml`, `serve deploy` and KubeRay import."""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve

from cluster.serve_app import build_serve_app
from cluster.serving import preflight
from contracts.config import TandemConfig
from contracts.errors import ConfigError
from contracts.loading import config_from

_SOURCE = "args of deploy.app:build"


def build(args: dict[str, Any]) -> serve.Application:
    """The application for `args`, the sections of a configuration file as nested dicts.

    Serve's proxy listens here, with the host and port of `http_options`: so http.front is "serve",
    and http.host and http.port mean nothing. Raises TandemError, one line that names the key.
    """
    config = serve_config(args)
    # The port of `http` is not used: 0 passes the check that it is free.
    http = msgspec.structs.replace(config.http, host="127.0.0.1", port=0)
    preflight(msgspec.structs.replace(config, http=http))
    return build_serve_app(config)


def serve_config(args: dict[str, Any]) -> TandemConfig:
    """`args` as a configuration behind Serve's proxy. Raises ConfigError."""
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
