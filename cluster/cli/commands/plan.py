"""`tandem plan` and `tandem place`."""

import argparse
from collections.abc import MutableMapping
from pathlib import Path

from rich.progress import Progress

from cluster.cli.arguments import Commands, add_command, pretty
from cluster.fleet.hardware import known_hardware
from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import check_writable, write_placement
from cluster.observe.terminal import Terminal
from cluster.tools.place import place, print_placement
from cluster.tools.plan.plan import plan_file, print_report, write_picture, write_trace
from contracts.config import BUNDLED
from contracts.errors import ConfigError

_PLAN_EXAMPLE = """example:
  tandem plan spec.json
  tandem plan spec.json --devices 8 --json
  tandem plan spec.json --beyond --picture plan.svg --trace plan.trace.json
spec.json, a model on a machine (a Hugging Face folder, or the fields of its config.json; a file of
`tandem profile`, or one of: {hardware}):
  {{"model": "bundled", "hardware": "h200-node", "sequence_tokens": 2048,
   "attention_ranks": 3, "expert_ranks": 5}}
  and, with "routing": "routing.safetensors" (of `tandem profile --routing`) and "spare_slots": 2,
  the gain of placing its experts
or stage models, in ms per sample (attention, shared) and per token of an expert (expert, link):
  {{"stages": {{"attention": {{"alpha_ms": 0.2, "beta_ms": 1.5}},
              "shared": {{"alpha_ms": 0.1, "beta_ms": 0.4}},
              "expert": {{"alpha_ms": 0.5, "beta_ms": 0.02}},
              "link": {{"alpha_ms": 0.1, "beta_ms": 0.01}}}},
   "tokens_per_expert_per_sample": 64, "num_layers": 24, "max_samples": 8, "max_r2": 16,
   "has_shared": true}}
"""


def add_plan(commands: Commands) -> None:
    help_ = "Plan capacity: the best schedule and split, or why not to split."
    example = _PLAN_EXAMPLE.format(hardware=", ".join(known_hardware()))
    plan = add_command(commands, "plan", help_, example, run_plan)
    add = plan.add_argument
    add("spec", type=Path, metavar="SPEC.json")
    add("--devices", type=int, metavar="N", help="search over the splits of N devices")
    add("--beyond", action="store_true", help="include schedules beyond the paper")
    add("--picture", type=Path, metavar="F", help="draw the plan (.png, .svg, .pdf)")
    add("--trace", type=Path, metavar="F", help="write a Perfetto trace of the plan")
    add("--json", action="store_true", help="print JSON instead of tables")


def run_plan(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    report = plan_file(options.spec, devices=options.devices, beyond=options.beyond)
    if options.picture is not None:
        write_picture(report, options.picture)
    if options.trace is not None:
        write_trace(report, options.trace)
    if options.json:
        print(pretty(report.answer))
    else:
        print_report(report)
    return 0


_PLACE_EXAMPLE = """example:
  tandem profile --routing --model DIR --input texts.jsonl --output routing.safetensors
  tandem place routing.safetensors --model DIR --ranks 4 --spare 2 --output placement.json
Experts that process the same tokens share a rank, so that a token is sent to fewer ranks, and load
is balanced over ranks; spare slots hold replicas. The table marks layers without a gain.
"""


def add_place(commands: Commands) -> None:
    help_ = "Place experts on ranks, layer by layer, from a routing profile."
    command = add_command(commands, "place", help_, _PLACE_EXAMPLE, run_place)
    add = command.add_argument
    add("profile", type=Path, metavar="routing.safetensors")
    add("--model", default=BUNDLED, help='Hugging Face folder, or "bundled"')
    add("--ranks", type=int, required=True, metavar="N", help="expert ranks")
    add(
        "--spare",
        type=int,
        default=0,
        metavar="N",
        help="slots of each rank for replicas, in every layer (default 0)",
    )
    add(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="nodes, with as many consecutive ranks each; links between them are slow (default 1)",
    )
    add("--seed", type=int, default=0, help="of the search (default 0)")
    add("--output", type=Path, metavar="F", help="write the placement (.json)")
    add("--json", action="store_true", help="print JSON instead of a table")


def run_place(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: give a number from 0")
    if options.output is not None:  # before minutes of search
        check_writable(options.output)
    folder = resolve_model_folder(options.model)
    errors = Terminal(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("placing", total=1.0)
        file, report = place(
            options.profile,
            folder,
            ranks=options.ranks,
            spare=options.spare,
            nodes=options.nodes,
            seed=options.seed,
            progress=lambda part: bar.update(task, completed=part),
        )
    if options.output is not None:
        write_placement(file, options.output)
    if options.json:
        print(pretty(report))
        return 0
    print_placement(report)
    if options.output is not None:
        print(f"written: {options.output}")
    return 0
