"""Command-line options that set configuration keys."""

import argparse
import json
from pathlib import Path

from cluster.serving.settings import with_absolute_paths
from contracts.config import TandemConfig
from contracts.loading import load_config


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


def group_sizes(options: argparse.Namespace) -> tuple[int | None, ...]:
    """Return the numbers of attention ranks, expert ranks and prefill workers as given."""
    return options.attention_ranks, options.expert_ranks, options.prefill_ranks
