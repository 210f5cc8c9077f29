"""`tandem place`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping
from pathlib import Path

from cluster.cli.arguments import Commands, add_command, pretty
from contracts.config import BUNDLED

_EXAMPLE = """example:
  tandem profile --routing --model DIR --input texts.jsonl --output routing.safetensors
  tandem place routing.safetensors --model DIR --ranks 4 --spare 2 --output placement.json
Experts that tokens go to together stand on one rank, so that a token is sent to fewer ranks, and no
rank has more to do than it must; spare slots hold replicas. Bytes count where the link limits,
balance everywhere: where neither gets better, the table says so.
"""


def add(commands: Commands) -> None:
    help_ = "Place experts on ranks, layer by layer, from a routing profile."
    place = add_command(commands, "place", help_, _EXAMPLE, run)
    place.add_argument("profile", type=Path, metavar="routing.safetensors")
    place.add_argument("--model", default=BUNDLED, help='Hugging Face folder, or "bundled"')
    place.add_argument("--ranks", type=int, required=True, metavar="N", help="that hold experts")
    place.add_argument(
        "--spare",
        type=int,
        default=0,
        metavar="N",
        help="slots of each rank for replicas, in every layer (default 0)",
    )
    place.add_argument("--seed", type=int, default=0, help="of the search (default 0)")
    place.add_argument("--output", type=Path, metavar="F", help="write the placement (.json)")
    place.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from rich.progress import Progress

    from cluster.capacity.place import PlaceSettings, as_json, place, print_report
    from cluster.files.model_folder import resolve_model_folder
    from cluster.files.placement_file import check_writable, write_placement
    from cluster.files.terminal import Terminal
    from contracts.errors import ConfigError

    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: give a number from 0")
    if options.output is not None:  # before minutes of search
        check_writable(options.output)
    folder = resolve_model_folder(options.model)
    settings = PlaceSettings(options.profile, folder, options.ranks, options.spare, options.seed)
    errors = Terminal(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("placing", total=1.0)
        report = place(settings, lambda part: bar.update(task, completed=part))
    if options.output is not None:
        write_placement(report.file, options.output)
    if options.json:
        print(pretty(as_json(report)))
        return 0
    print_report(report)
    if options.output is not None:
        print(f"written: {options.output}")
    return 0
