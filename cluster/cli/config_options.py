"""Command-line options that set configuration keys."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from contracts.config import BUNDLED, InputPath, OutputFolder, TandemConfig
from contracts.errors import ConfigError
from contracts.loading import load_config

KEY_VARIABLE = "TANDEM_API_KEY"


def add_config_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help='Hugging Face model folder, or "bundled"')
    command.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    for group in ("attention", "expert", "prefill"):
        command.add_argument(f"--{group}-ranks", type=int, metavar="N")
    command.add_argument("--config", type=Path, help="YAML or TOML file")
    command.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable"
    )

    command.add_argument("--served-model-name", metavar="M", help="name of the model for clients")
    command.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="default info"
    )
    command.add_argument("--name", help='of the application on its Ray cluster (default "tandem")')


def config_from_options(options: argparse.Namespace) -> TandemConfig:
    """Load the file, then apply --set, then the named options."""
    named = {
        "model.path": options.model,
        "model.name": options.served_model_name,
        "serve.name": options.name,
        "log.level": options.log_level,
        "model.dtype": options.dtype,
        "groups.attention_ranks": options.attention_ranks,
        "groups.expert_ranks": options.expert_ranks,
        "groups.prefill_ranks": options.prefill_ranks,
        "http.host": getattr(options, "host", None),
        "http.port": getattr(options, "port", None),
        "http.api_keys": getattr(options, "api_key", None),
        "http.tls_certificate": getattr(options, "ssl_certfile", None),
        "http.tls_key": getattr(options, "ssl_keyfile", None),
        "http.root_path": getattr(options, "root_path", None),
    }
    extra = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return with_absolute_paths(load_config(options.config, [*options.set, *extra]), Path.cwd())


def with_environment_key(config: TandemConfig, environment: Mapping[str, str]) -> TandemConfig:
    """Return `config` with the key of KEY_VARIABLE if it has none. Raises ConfigError."""
    key = environment.get(KEY_VARIABLE)
    if key is None or config.http.has_keys:
        return config
    try:
        http = msgspec.structs.replace(config.http, api_keys=[key])
    except ValueError as error:
        raise ConfigError(f"{KEY_VARIABLE}: {error}") from None
    return msgspec.structs.replace(config, http=http)


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
            tree[key] = value if is_name else str(path)
    return tree


def group_sizes(options: argparse.Namespace) -> tuple[int | None, ...]:
    """Return the numbers of attention ranks, expert ranks and prefill workers as given."""
    return options.attention_ranks, options.expert_ranks, options.prefill_ranks
