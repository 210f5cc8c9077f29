"""`tandem config`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping

from cluster.cli.arguments import Commands, add_command, pretty
from cluster.cli.config_options import add_config_options, config_of

_EXAMPLE = """example:
  tandem config
  tandem config --config tandem.yaml --set schedule.r1=4 --json
"""


def add(commands: Commands) -> None:
    help_ = "Print every key of the configuration: value, default, what it takes, what it means."
    config = add_command(commands, "config", help_, _EXAMPLE, run)
    add_config_options(config)
    config.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.cli.config_table import keys_of, table_of
    from cluster.files.terminal import Terminal

    keys = keys_of(config_of(options))
    if options.json:
        print(pretty(keys))
    else:
        Terminal().print(table_of(keys))
    return 0
