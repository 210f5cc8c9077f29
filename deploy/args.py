"""Configuration from the arguments of a Serve application. Imports neither ray nor torch."""

from typing import Any

from contracts.config import TandemConfig
from contracts.errors import ConfigError
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
