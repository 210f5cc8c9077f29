"""Settings of a server beside its file and options: environment, current folder.

Imports no Ray, so that every command can use it.
"""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from contracts.config import (
    BUNDLED,
    FROM_ENVIRONMENT,
    TRACES_PATH,
    InputPath,
    OutputFolder,
    ServeConfig,
    TandemConfig,
)
from contracts.errors import ConfigError

KEY_VARIABLE = "TANDEM_API_KEY"


def with_variables(config: TandemConfig, environment: Mapping[str, str]) -> TandemConfig:
    """Return `config` with the key of KEY_VARIABLE if it has none, and the endpoint of traces.

    Raises ConfigError.
    """
    if config.trace.otlp_endpoint == FROM_ENVIRONMENT:
        config = _with_endpoint(config, trace_endpoint(environment))
    key = environment.get(KEY_VARIABLE)
    if key is None or config.http.has_keys:
        return config
    try:
        http = msgspec.structs.replace(config.http, api_keys=[key])
    except ValueError as error:
        raise ConfigError(f"{KEY_VARIABLE}: {error}") from None
    return msgspec.structs.replace(config, http=http)


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


def _with_endpoint(config: TandemConfig, endpoint: str | None) -> TandemConfig:
    try:
        trace = msgspec.structs.replace(config.trace, otlp_endpoint=endpoint)
    except ValueError as error:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_ENDPOINT: {error}") from None
    return msgspec.structs.replace(config, trace=trace)


def with_environment(
    config: TandemConfig, environment: Mapping[str, str], name: str
) -> TandemConfig:
    """Return the configuration of a replica behind Serve, of the application `name`.

    The environment is that of its node and of its runtime_env. Raises ConfigError.
    """
    try:
        named = msgspec.structs.replace(config, serve=ServeConfig(name=name))
    except ValueError as error:
        raise ConfigError(f"applications: {error}") from None
    return with_variables(named, environment)


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
