"""The command line: `tandem`, or `python -m cluster`.

Errors are one line on standard error with exit status 2.
"""

import argparse
import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence

from cluster.cli.arguments import EXIT_ERROR, Parser
from cluster.cli.commands import operate, plan, profile, serve, workload
from cluster.serving.settings import prepare_ray_environment
from contracts.config import LogConfig
from contracts.errors import TandemError
from contracts.import_path import version
from contracts.logs import set_up_logging


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale such as C lacks characters of ours
            stream.reconfigure(errors="replace")
    set_up_logging("tandem", LogConfig(), stderr_level=logging.WARNING)
    prepare_ray_environment(os.environ, has_terminal=sys.stderr.isatty())
    options = _parser().parse_args(arguments)
    try:
        os.getcwd()
    except OSError as error:
        print(f"tandem: the current folder: {error.strerror}; change to another", file=sys.stderr)
        return EXIT_ERROR
    try:
        status = int(options.run(options, os.environ))
        sys.stdout.flush()
    except TandemError as error:
        print(f"tandem {options.command}: {error.message}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as ended:  # Ray's handlers exit with the signal's number
        if ended.code in (signal.SIGTERM, signal.SIGHUP):
            return 128 + int(ended.code)
        raise
    except BrokenPipeError:  # the reader of our output has exited, as `head` does
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"tandem {options.command}: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR
    return status


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams: files and sockets would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tandem", description="Serves Mixture-of-Experts language models on Ray.")
    parser.add_argument("--version", action="version", version=f"tandem {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in (
        serve.add_serve,
        workload.add_demo,
        operate.add_status,
        operate.add_scale,
        operate.add_trace,
        plan.add_plan,
        plan.add_place,
        profile.add_profile,
        workload.add_bulk,
        workload.add_bench,
        operate.add_doctor,
        operate.add_config,
        serve.add_stop,
    ):
        add_command(commands)
    return parser
