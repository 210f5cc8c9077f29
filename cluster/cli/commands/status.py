"""`tandem status`."""

from __future__ import annotations

import argparse
import math
from collections.abc import MutableMapping

from cluster.cli.arguments import EXIT_ERROR, Commands, add_command, pretty
from cluster.cli.config_options import KEY_VARIABLE
from cluster.files.server_url import check_url
from contracts.errors import ConfigError

_EXAMPLE = """example:
  tandem status
  tandem status --url http://HOST:8000 --watch
  tandem status --json
exit status 2 if the server is not ready, or nobody answers
"""


def add(commands: Commands) -> None:
    help_ = "Look at a running server: its ranks, plans, loads and queues."
    command = add_command(commands, "status", help_, _EXAMPLE, run)
    command.add_argument("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    command.add_argument(
        "--api-key", metavar="KEY", help=f"of its http.metrics_key (default: ${KEY_VARIABLE})"
    )
    command.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="look again and again, every second if nothing is said",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.client.answers import Server
    from cluster.client.status import ask_status, print_status, watch

    check_url(options.url)
    server = Server(options.url, options.api_key or environment.get(KEY_VARIABLE))
    if options.watch is not None:
        if not (math.isfinite(options.watch) and options.watch >= 0.1):
            raise ConfigError(f"--watch {options.watch}: give 0.1 or more seconds")
        if options.json:
            raise ConfigError("--watch with --json: give one of them")
        watch(server, options.watch)
    found = ask_status(server)
    if options.json:
        print(pretty(found))
    else:
        print_status(server, found)
    return EXIT_ERROR if found.problems else 0
