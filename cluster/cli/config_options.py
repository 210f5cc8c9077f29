"""Command-line options that set configuration keys."""

import argparse
import json
from pathlib import Path

from cluster.serving.settings import with_absolute_paths
from contracts.config import TandemConfig
from contracts.loading import load_config


def add_config_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", help='Hugging Face model folder, or "bundled"')
    add("--dtype", choices=("auto", "bfloat16", "float32"))
    for group in ("attention", "expert", "prefill"):
        add(f"--{group}-ranks", type=int, metavar="N")
    add("--config", type=Path, help="YAML or TOML file")
    add("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")

    add("--served-model-name", metavar="M", help="name of the model for clients")
    add("--log-level", choices=("debug", "info", "warning", "error"), help="default info")
    add("--name", help='of the application on its Ray cluster (default "tandem")')


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
