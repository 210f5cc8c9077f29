"""Settings of a server beside its file and options: environment, current folder.

Imports no Ray, which reads a part of its environment on import.
"""

import typing
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from contracts.config import (
    BUNDLED,
    FROM_ENVIRONMENT,
    TRACES_PATH,
    InputPath,
    OutputFolder,
    TandemConfig,
)
from contracts.errors import ConfigError

KEY_VARIABLE = "TANDEM_API_KEY"
_RAY_VARIABLES = {
    # Otherwise a call after the end of a cluster would start another one.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_DEDUP_LOGS": "0",  # similar lines of two ranks are not duplicates
}


def with_variables(config: TandemConfig, environment: Mapping[str, str]) -> TandemConfig:
    """Return `config` with the key of KEY_VARIABLE if it has none, and the endpoint of traces.

    Raises ConfigError.
    """
    if config.trace.otlp_endpoint == FROM_ENVIRONMENT:
        endpoint = trace_endpoint(environment)
        config = _with(config, "trace", "OTEL_EXPORTER_OTLP_ENDPOINT", otlp_endpoint=endpoint)
    key = environment.get(KEY_VARIABLE)
    if key is None or config.http.has_keys:
        return config
    return _with(config, "http", KEY_VARIABLE, api_keys=[key])


def _with(config: TandemConfig, section: str, source: str, **fields: object) -> TandemConfig:
    """Replace fields of a section. Raises ConfigError that names their source."""
    try:
        changed = msgspec.structs.replace(getattr(config, section), **fields)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return msgspec.structs.replace(config, **{section: changed})


def trace_endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the endpoint that the standard variables name; None: they turn traces off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").rstrip("/")
    return environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (
        base + TRACES_PATH if base else None
    )


def with_environment(
    config: TandemConfig, environment: Mapping[str, str], name: str
) -> TandemConfig:
    """Return the configuration of a replica behind Serve, of the application `name`.

    The environment is that of its node and of its runtime_env. Raises ConfigError.
    """
    return with_variables(_with(config, "serve", "applications", name=name), environment)


def with_absolute_paths(config: TandemConfig, here: Path) -> TandemConfig:
    """Make relative paths absolute: ranks and the ingress start in other folders.

    Names that are not paths, such as "bundled" or a hub id, stay as they are.
    """
    return msgspec.convert(_absolute(msgspec.to_builtins(config), TandemConfig, here), TandemConfig)


def _absolute(tree: dict[str, Any], struct: type, here: Path) -> dict[str, Any]:
    hints = typing.get_type_hints(struct, include_extras=True)
    for key, value in tree.items():
        hint = hints[key]
        kinds = (hint, *typing.get_args(hint))  # None may be one of them
        if isinstance(value, dict) and isinstance(hint, type):
            _absolute(value, hint, here)
        elif isinstance(value, str) and (InputPath in kinds or OutputFolder in kinds):
            path = here / Path(value).expanduser()
            is_name = value == BUNDLED or (InputPath in kinds and not path.exists())
            is_name = is_name or "://" in value
            tree[key] = value if is_name else str(path)
    return tree


def cluster_address(config: TandemConfig, environment: Mapping[str, str]) -> str | None:
    """Return the address of the existing cluster to join, or None to start a local one."""
    address = config.groups.address or environment.get("RAY_ADDRESS")
    return None if address == "local" else address or None


def prepare_ray_environment(environment: MutableMapping[str, str], *, has_terminal: bool) -> None:
    """Set Ray's environment for every command. Existing values are kept."""
    for name, value in _RAY_VARIABLES.items():
        environment.setdefault(name, value)
    if not has_terminal:
        environment.setdefault("RAY_COLOR_PREFIX", "0")


def prepare_cluster_environment(
    config: TandemConfig, environment: MutableMapping[str, str]
) -> None:
    """Enable tokens on a local cluster: Ray listens on all interfaces and executes code."""
    if cluster_address(config, environment) is None:
        environment.setdefault("RAY_AUTH_MODE", "token")
