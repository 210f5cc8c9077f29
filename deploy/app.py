"""Application for `serve run deploy/serve.yaml`, `serve deploy` and KubeRay."""

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from cluster.fleet.nodes import check_room
from cluster.serving.serve_app import build_serve_app
from cluster.serving.server import prepare
from cluster.serving.settings import with_environment
from contracts.config import TandemConfig
from contracts.errors import ConfigError, TandemError
from contracts.loading import config_from

_SOURCE = "args of deploy.app:build"
_PROXY = "limits of connections are for a proxy in front of Serve's"
WITHOUT_EFFECT = {  # Serve's proxy, not the ingress, has the connections
    "http.host": "use http_options",
    "http.port": "use http_options",
    "http.keep_alive_timeout_s": "use http_options",
    "http.root_path": "use route_prefix, or http_options",
    "http.max_connections": _PROXY,
    "http.max_connections_per_address": _PROXY,
    "http.max_header_bytes": _PROXY,
    "http.max_headers": _PROXY,
    "http.header_timeout_s": _PROXY,
    "http.write_timeout_s": _PROXY,
    "groups.address": "it is the cluster of the deployment",
    "serve.name": "it is the name of the application",
}
_HINTS = {  # options of a deployment that cannot be changed
    ("Groups", "num_replicas"): "its one replica owns all ranks; set args.groups.*_ranks",
    ("Groups", "autoscaling_config"): "its one replica owns all ranks; set args.scaling",
    ("Groups", "user_config"): "settings are in args",
    ("Ingress", "user_config"): "settings are in args",
}


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


def serve_config(args: dict[str, Any]) -> TandemConfig:
    """Convert `args`, the sections of a configuration file, for use behind Serve's proxy.

    http.front is "serve". Keys that have no effect there are rejected. Raises ConfigError, one line
    that names the key.
    """
    for name, hint in WITHOUT_EFFECT.items():
        section, _, key = name.partition(".")
        if isinstance(given := args.get(section), dict) and key in given:
            raise ConfigError(f"{_SOURCE}: {name} has no effect here; leave it out: {hint}")
    http = args.get("http") or {}
    if isinstance(http, dict):
        if http.get("front", "serve") != "serve":
            raise ConfigError(
                f"{_SOURCE}: http.front={http['front']} is for `tandem serve`; leave it out"
            )
        http = {**http, "front": "serve"}
    return config_from({**args, "http": http}, source=_SOURCE)


def check_deployment(config: TandemConfig, args: Mapping[str, Any]) -> TandemConfig:
    """Return `config` with the number of ingress replicas that the deployment's options set.

    args: of the application. Raises ConfigError for a name or an option that cannot be used, and
    ResourceError if ranks that would replace running ones do not fit.
    """
    found = _options_by_name(args)
    for name, deployments in found.items():
        check_room(config, name)
        if len(found) > 1:
            continue  # which of them is built is not known; the launcher checks them again
        with_environment(config, {}, name)
        for options in deployments:
            check_options(options)
            replicas = options.get("num_replicas")
            if options["name"] == "Ingress" and isinstance(replicas, int):
                groups = msgspec.structs.replace(config.groups, ingress_replicas=replicas)
                config = msgspec.structs.replace(config, groups=groups)
    return config


def _options_by_name(args: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the deployments' options of the application with these arguments, by its name.

    Serve passes no name to a builder. Another application may have equal arguments.
    """
    if (
        not ray.is_initialized()
        or (client := _get_global_client(raise_if_no_controller_running=False)) is None
    ):
        return {}
    found = {}
    for name, details in client.get_serve_details()["applications"].items():
        given = details["deployed_app_config"]
        if given and given.get("args", {}) == args:
            found[name] = given.get("deployments", [])
    return found


def check_options(options: dict[str, Any]) -> None:
    """Raise ConfigError for an option of a deployment that cannot be changed."""
    for name, value in options.items():
        hint = _HINTS.get((options["name"], name))
        if hint is not None and value is not None and (name, value) != ("num_replicas", 1):
            raise ConfigError(
                f"deployments: {options['name']}.{name}={value}: {hint}; leave it out"
            )
