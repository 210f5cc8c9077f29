"""`tandem doctor`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping

from cluster.cli.arguments import EXIT_ERROR, Commands, add_command, pretty
from cluster.cli.config_options import KEY_VARIABLE, add_config_options, config_of
from cluster.files.findings import print_findings
from cluster.files.server_url import check_url

_EXAMPLE = """example:
  tandem doctor
  tandem doctor --config tandem.yaml --json
  tandem doctor --url http://127.0.0.1:8000
exit status 2 if there is an error among the findings; warnings are none
"""


def add(commands: Commands) -> None:
    help_ = "Check this machine and a configuration, or a server that runs."
    doctor = add_command(commands, "doctor", help_, _EXAMPLE, run)
    add_config_options(doctor)
    doctor.add_argument(
        "--url",
        help="of a server that runs: it is checked, and of the configuration its keys file and "
        "its exporters (serve.name, metrics.targets)",
    )
    doctor.add_argument(
        "--api-key", metavar="KEY", help=f"of its http.metrics_key (default: ${KEY_VARIABLE})"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    """2 if there is an error among the findings; warnings are none."""
    from cluster.capacity.doctor import examine
    from cluster.client.answers import Server
    from cluster.client.examined import examine_server
    from cluster.files.keys_checked import keys_finding
    from cluster.files.targets_file import targets_path

    key, options.api_key = options.api_key, None  # the client's, none of a configuration
    config = config_of(options)
    if options.url is None:
        findings = examine(config, environment)
    else:
        check_url(options.url)
        server = Server(options.url, key or environment.get(KEY_VARIABLE))
        findings = examine_server(server, targets_path(config))
        if config.http.keys_file is not None:
            findings.append(keys_finding(config))
    if options.json:
        print(pretty(findings))
    else:
        print_findings(findings)
    return EXIT_ERROR if any(finding.level == "error" for finding in findings) else 0
