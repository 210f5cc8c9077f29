"""Application for `serve run deploy/serve.yaml`, `serve deploy` and KubeRay."""

import os
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from cluster.serving.deployment_checks import check_deployment
from cluster.serving.serve_app import build_serve_app
from cluster.serving.server import prepare
from contracts.errors import TandemError
from deploy.args import serve_config


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application for `args`, the sections of a configuration file as nested dicts.

    Raises RayServeException before anything starts or ends. `serve status` shows its one line, and
    Serve does not try again.
    """
    try:
        config = prepare(serve_config(args), os.environ)
        return build_serve_app(check_deployment(config, args))
    except TandemError as error:
        raise RayServeException(error.message) from None
