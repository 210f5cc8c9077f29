"""`tandem stop`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping

from cluster.cli.arguments import Commands, add_command
from contracts.config import GroupsConfig, ServeConfig, TandemConfig
from contracts.errors import ConfigError

_EXAMPLE = """example:
  tandem stop --address 10.0.0.1:6379 --name other
Ctrl-C in `tandem serve` does the same. This is for an application whose launcher is gone.
"""


def add(commands: Commands) -> None:
    help_ = "End an application that is left on a Ray cluster."
    stop = add_command(commands, "stop", help_, _EXAMPLE, run)
    stop.add_argument("--name", default=ServeConfig().name, help='default "tandem"')
    stop.add_argument("--address", help="of the Ray cluster (default RAY_ADDRESS; auto: this one)")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.serving import application
    from cluster.serving.ray_environment import cluster_address
    from cluster.serving.ray_session import ray_session

    config = TandemConfig(groups=GroupsConfig(address=options.address))
    if cluster_address(config, environment) is None:
        raise ConfigError("give --address, or set RAY_ADDRESS: a local cluster ends by itself")
    with ray_session(config, environment, show_rank_logs=False):
        application.check_present(options.name)
        application.end(options.name, is_clusters_end=False)
    print(f"{options.name}: ended")
    return 0
