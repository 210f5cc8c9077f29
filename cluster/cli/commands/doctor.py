"""`tandem doctor`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping

from cluster.cli.arguments import EXIT_ERROR, Commands, add_command, pretty
from cluster.cli.config_options import add_config_options, config_of

_EXAMPLE = """example:
  tandem doctor
  tandem doctor --config tandem.yaml --json
"""


def add(commands: Commands) -> None:
    doctor = add_command(
        commands, "doctor", "Check this machine and a configuration.", _EXAMPLE, run
    )
    add_config_options(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    """2 if there is an error among the findings; warnings are none."""
    from cluster.capacity.doctor import examine, print_findings

    findings = examine(config_of(options), environment)
    if options.json:
        print(pretty(findings))
    else:
        print_findings(findings)
    return EXIT_ERROR if any(finding.level == "error" for finding in findings) else 0
