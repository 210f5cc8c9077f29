"""Commands for running servers and configurations: status, scale, trace, doctor, config."""

import argparse
import math
from collections.abc import MutableMapping
from pathlib import Path

from cluster.cli.arguments import (
    EXIT_ERROR,
    Commands,
    add_command,
    add_config_options,
    config_from_options,
    pretty,
)
from cluster.cli.config_page import config_keys, render_table
from cluster.fleet.targets_file import targets_path
from cluster.observe.operator_client import (
    fetch_status,
    follow_scale,
    print_status,
    print_trace,
    save_trace,
    start_scale,
    watch,
)
from cluster.observe.server_client import Server, check_url, tls_context
from cluster.observe.terminal import Terminal
from cluster.serving.settings import KEY_VARIABLE
from cluster.tools.doctor.findings import check_keys, print_findings
from cluster.tools.doctor.server_checks import check_server
from contracts.errors import ConfigError
from contracts.scaling import FIELDS, MAX_RANKS_PER_KIND, ScaleTarget, format_counts
from contracts.traces import MAX_TRACE_S


def _add_server_options(command: argparse.ArgumentParser, key: str) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    command.add_argument("--api-key", metavar="KEY", help=f"its {key} (default: ${KEY_VARIABLE})")
    _add_tls_options(command)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_tls_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--cacert", type=Path, metavar="F", help="PEM file that verifies --url")
    command.add_argument(
        "--insecure", action="store_true", help="do not verify --url's certificate"
    )


def _server(options: argparse.Namespace, environment: MutableMapping[str, str]) -> Server:
    check_url(options.url)
    key = options.api_key or environment.get(KEY_VARIABLE)
    return Server(options.url, key, tls_context(options.cacert, is_insecure=options.insecure))


_STATUS_EXAMPLE = """example:
  tandem status
  tandem status --url http://HOST:8000 --watch
  tandem status --json
exit status 2 if the server is not ready or does not answer
"""


def add_status(commands: Commands) -> None:
    help_ = "Show a running server's ranks, plans, loads and queues."
    command = add_command(commands, "status", help_, _STATUS_EXAMPLE, run_status)
    _add_server_options(command, "http.metrics_key")
    command.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="refresh periodically (default: every second)",
    )


def run_status(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    server = _server(options, environment)
    if options.watch is not None:
        if not (math.isfinite(options.watch) and options.watch >= 0.1):
            raise ConfigError(f"--watch {options.watch}: give 0.1 or more seconds")
        if options.json:
            raise ConfigError("--watch with --json: give one of them")
        watch(server, options.watch)
    found = fetch_status(server)
    if options.json:
        print(pretty(found))
    else:
        print_status(server, found)
    return EXIT_ERROR if found.problems else 0


_SCALE_EXAMPLE = """example:
  tandem scale --attention-ranks 3
  tandem scale --url http://HOST:8000 --api-key KEY --prefill-workers 4 --expert-ranks 2
requests continue: a rank that stops finishes its requests within groups.drain_timeout_s, or
another one continues them; exit status 2 if the change is refused or fails: completed steps remain
"""


def add_scale(commands: Commands) -> None:
    help_ = "Change the number of ranks of a running server."
    command = add_command(commands, "scale", help_, _SCALE_EXAMPLE, run_scale)
    for name in FIELDS:
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, type=int, metavar="N", help=f"1 to {MAX_RANKS_PER_KIND}")
    _add_server_options(command, "http.operator_key")
    command.add_argument(
        "--within",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="time limit of the change (default %(default)g)",
    )


def run_scale(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    server = _server(options, environment)
    requested = ScaleTarget(**{name: getattr(options, name) for name in FIELDS})
    if not requested.counts:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in FIELDS)
        raise ConfigError(f"no number of ranks: give one of {given}")
    for name, count in requested.counts.items():
        if not 1 <= count <= MAX_RANKS_PER_KIND:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {count}: give 1 to {MAX_RANKS_PER_KIND}")
    if not (math.isfinite(options.within) and options.within > 0):
        raise ConfigError(f"--within {options.within}: give more than 0 seconds")

    def report(step: str) -> None:
        if not options.json:
            print(step, flush=True)

    ended = follow_scale(server, start_scale(server, requested), report, options.within)
    print(
        pretty(ended)
        if options.json
        else f"{format_counts(ended.ranks)}, after {ended.seconds:g} s"
    )
    return 0


_TRACE_EXAMPLE = """example:
  tandem trace --seconds 5
  tandem trace --url http://HOST:8000 --seconds 1 --output trace.json
open the file in https://ui.perfetto.dev; exit status 2 if the server does not answer or another
trace is running; ranks that do not answer are listed and their spans are missing
"""


def add_trace(commands: Commands) -> None:
    help_ = "Record the tasks of all processes of a running server for Perfetto."
    command = add_command(commands, "trace", help_, _TRACE_EXAMPLE, run_trace)
    _add_server_options(command, "http.metrics_key")
    command.add_argument("--seconds", type=float, default=5.0, help="default %(default)g")
    command.add_argument(
        "--output", type=Path, default=Path("trace.json"), help="default %(default)s"
    )


def run_trace(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    server = _server(options, environment)
    if not 0 < options.seconds <= MAX_TRACE_S:
        raise ConfigError(f"--seconds {options.seconds}: give more than 0, {MAX_TRACE_S:g} at most")
    if not options.output.absolute().parent.is_dir():
        raise ConfigError(
            f"--output {options.output}: folder {options.output.parent} does not exist"
        )
    note = save_trace(server, options.seconds, options.output)
    if options.json:
        print(pretty(note))
    else:
        print_trace(note, options.output)
    return 0


_DOCTOR_EXAMPLE = """example:
  tandem doctor
  tandem doctor --config tandem.yaml --json
  tandem doctor --url http://127.0.0.1:8000
exit status 2 if a finding is an error; warnings are not
"""


def add_doctor(commands: Commands) -> None:
    help_ = "Check this machine and a configuration, or a running server."
    doctor = add_command(commands, "doctor", help_, _DOCTOR_EXAMPLE, run_doctor)
    add_config_options(doctor)
    doctor.add_argument(
        "--url",
        help="check this running server, and of the configuration only its keys file and "
        "exporters (serve.name, metrics.targets)",
    )
    doctor.add_argument(
        "--api-key", metavar="KEY", help=f"of its http.metrics_key (default: ${KEY_VARIABLE})"
    )
    _add_tls_options(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_doctor(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.tools.doctor.config_checks import check_config

    key, options.api_key = options.api_key, None  # the client's key, not the configuration's
    config = config_from_options(options)
    options.api_key = key
    if options.url is None:
        findings = check_config(config, environment)
    else:
        findings = check_server(_server(options, environment), targets_path(config))
        if config.http.keys_file is not None:
            findings.append(check_keys(config))
    if options.json:
        print(pretty(findings))
    else:
        print_findings(findings)
    return EXIT_ERROR if any(finding.level == "error" for finding in findings) else 0


_CONFIG_EXAMPLE = """example:
  tandem config
  tandem config --config tandem.yaml --set schedule.r1=4 --json
"""


def add_config(commands: Commands) -> None:
    help_ = "Print every configuration key: value, default, accepted values, meaning."
    config = add_command(commands, "config", help_, _CONFIG_EXAMPLE, run_config)
    add_config_options(config)
    config.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_config(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    keys = config_keys(config_from_options(options))
    if options.json:
        print(pretty(keys))
    else:
        Terminal().print(render_table(keys))
    return 0
