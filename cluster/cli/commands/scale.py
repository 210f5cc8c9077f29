"""`tandem scale`."""

from __future__ import annotations

import argparse
import math
from collections.abc import MutableMapping

from cluster.cli.arguments import Commands, add_command, pretty
from cluster.cli.config_options import KEY_VARIABLE
from cluster.files.server_url import check_url
from contracts.errors import ConfigError
from contracts.scaling import FIELDS, MOST_RANKS, ScaleWanted, in_words

_EXAMPLE = """example:
  tandem scale --attention-ranks 3
  tandem scale --url http://HOST:8000 --api-key KEY --prefill-workers 4 --expert-ranks 2
requests go on meanwhile: a rank that goes ends what it has within groups.drain_s, or another one
goes on with it; exit status 2 if it cannot be, or has failed: what was done until then stays
"""


def add(commands: Commands) -> None:
    help_ = "Change the number of ranks of a running server."
    command = add_command(commands, "scale", help_, _EXAMPLE, run)
    for name in FIELDS:
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, type=int, metavar="N", help=f"1 to {MOST_RANKS}")
    command.add_argument("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    command.add_argument(
        "--api-key", metavar="KEY", help=f"its http.operator_key (default: ${KEY_VARIABLE})"
    )
    command.add_argument(
        "--within",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="wait so long for its end (default %(default)g)",
    )
    command.add_argument("--json", action="store_true", help="print JSON at the end")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.client.answers import Server
    from cluster.client.scale import begin_scale, follow_scale

    check_url(options.url)
    wanted = ScaleWanted(**{name: getattr(options, name) for name in FIELDS})
    if not wanted.counts:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in FIELDS)
        raise ConfigError(f"no number of ranks is given: give one of {given}")
    for name, count in wanted.counts.items():
        if not 1 <= count <= MOST_RANKS:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {count}: give 1 to {MOST_RANKS}")
    if not (math.isfinite(options.within) and options.within > 0):
        raise ConfigError(f"--within {options.within}: give more than 0 seconds")
    server = Server(options.url, options.api_key or environment.get(KEY_VARIABLE))

    def say(step: str) -> None:
        if not options.json:
            print(step, flush=True)

    ended = follow_scale(server, begin_scale(server, wanted), say, options.within)
    print(pretty(ended) if options.json else f"{in_words(ended.ranks)}, after {ended.seconds:g} s")
    return 0
