"""The command line: `tandem`, or `python -m cluster`.

Errors are one line on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

from cluster.arguments import EXIT_ERROR, Parser
from cluster.commands import bulk, demo, doctor, plan, profile, serve, stop
from contracts.errors import TandemError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("tandem").setLevel(logging.INFO)
    # Else a call that comes after the end of a cluster would quietly start another one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options, os.environ))
        sys.stdout.flush()
    except TandemError as error:
        print(f"tandem {options.command}: {error.message}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tandem", description="Serves Mixture-of-Experts language models on Ray.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (serve, demo, plan, profile, bulk, doctor, stop):
        command.add(commands)
    return parser
