"""`tandem trace`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping
from pathlib import Path

from cluster.cli.arguments import Commands, add_command, pretty
from cluster.cli.config_options import KEY_VARIABLE
from cluster.files.server_url import check_url
from contracts.errors import ConfigError
from contracts.traces import MAX_TRACE_S

_EXAMPLE = """example:
  tandem trace --seconds 5
  tandem trace --url http://HOST:8000 --seconds 1 --output trace.json
open the file in https://ui.perfetto.dev; exit status 2 if nobody answers, or another trace is under
way; a rank that does not answer is named, and the others' spans are there
"""


def add(commands: Commands) -> None:
    help_ = "Record what every process of a running server does, for Perfetto."
    command = add_command(commands, "trace", help_, _EXAMPLE, run)
    command.add_argument("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    command.add_argument(
        "--api-key", metavar="KEY", help=f"of its http.metrics_key (default: ${KEY_VARIABLE})"
    )
    command.add_argument("--seconds", type=float, default=5.0, help="default %(default)g")
    command.add_argument(
        "--output", type=Path, default=Path("trace.json"), help="default %(default)s"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.client.answers import Server
    from cluster.client.trace import ask_trace, print_trace

    check_url(options.url)
    if not 0 < options.seconds <= MAX_TRACE_S:
        raise ConfigError(f"--seconds {options.seconds}: give more than 0, {MAX_TRACE_S:g} at most")
    if not options.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no folder {options.output.parent}")
    server = Server(options.url, options.api_key or environment.get(KEY_VARIABLE))
    note = ask_trace(server, options.seconds, options.output)
    if options.json:
        print(pretty(note))
    else:
        print_trace(note, options.output)
    return 0
