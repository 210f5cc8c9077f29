"""Options of the command line that end up in the configuration."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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


def config_of(options: argparse.Namespace) -> TandemConfig:
    """The file, then --set, then the named options, each overriding the one before."""
    named = {
        "model.path": options.model,
        "model.dtype": options.dtype,
        "groups.attention_ranks": options.attention_ranks,
        "groups.expert_ranks": options.expert_ranks,
        "groups.prefill_ranks": options.prefill_ranks,
        "http.host": getattr(options, "host", None),
        "http.port": getattr(options, "port", None),
    }
    extra = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return load_config(options.config, [*options.set, *extra])


def sizes_of(options: argparse.Namespace) -> tuple[int | None, ...]:
    """Ranks of each group as given: attention, expert, prefill."""
    return options.attention_ranks, options.expert_ranks, options.prefill_ranks
