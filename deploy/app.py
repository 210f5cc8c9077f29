"""Application for `serve run deploy/serve.yaml`, `serve deploy` and KubeRay."""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve

from cluster.serving.serve_app import build_serve_app
from cluster.serving.server import preflight
from deploy.args import serve_config


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application for `args`, the sections of a configuration file as nested dicts.

    Raises TandemError before anything starts; `serve status` then shows its one line.
    """
    config = serve_config(args)
    # The port of `http` is not used: 0 passes the check that it is free.
    http = msgspec.structs.replace(config.http, host="127.0.0.1", port=0)
    preflight(msgspec.structs.replace(config, http=http))
    return build_serve_app(config)
