"""`tandem demo`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping
from pathlib import Path

from cluster.cli.arguments import Commands, add_command
from cluster.serving.ray_environment import before_a_cluster_is_started
from contracts.config import TandemConfig

_EXAMPLE = """example:
  tandem demo
  tandem demo --trace demo.trace.json     (open the file in https://ui.perfetto.dev)
"""


def add(commands: Commands) -> None:
    help_ = "Start a local cluster, serve the bundled model, send real requests, show the answers."
    demo = add_command(commands, "demo", help_, _EXAMPLE, run)
    demo.add_argument("--trace", type=Path, help="also write a Perfetto trace to this file")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    before_a_cluster_is_started(TandemConfig(), environment)

    from cluster.cli.demo import run_demo

    return run_demo(options.trace)
