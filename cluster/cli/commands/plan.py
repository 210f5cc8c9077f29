"""`tandem plan`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping
from pathlib import Path

from cluster.cli.arguments import Commands, add_command, pretty
from cluster.files.hardware import known_hardware

_EXAMPLE = """example:
  tandem plan spec.json
  tandem plan spec.json --devices 8 --json
  tandem plan spec.json --beyond --picture plan.svg --trace plan.trace.json
spec.json, a model on a machine (a Hugging Face folder, or the fields of its config.json; a file of
`tandem profile`, or one of: {hardware}):
  {{"model": "bundled", "hardware": "h200-node", "sequence_tokens": 2048,
   "attention_ranks": 3, "expert_ranks": 5}}
  and, with "routing": "routing.safetensors" (of `tandem profile --routing`) and "spare_slots": 2,
  what placing its experts brings
or stage models, in ms per sample (attention, shared) and per token of an expert (expert, link):
  {{"stages": {{"attention": {{"alpha_ms": 0.2, "beta_ms": 1.5}},
              "shared": {{"alpha_ms": 0.1, "beta_ms": 0.4}},
              "expert": {{"alpha_ms": 0.5, "beta_ms": 0.02}},
              "link": {{"alpha_ms": 0.1, "beta_ms": 0.01}}}},
   "tokens_per_expert_per_sample": 64, "num_layers": 24, "max_samples": 8, "max_r2": 16,
   "has_shared": true}}
"""


def add(commands: Commands) -> None:
    help_ = "Plan capacity: the best schedule and split, or why not to split."
    example = _EXAMPLE.format(hardware=", ".join(known_hardware()))
    plan = add_command(commands, "plan", help_, example, run)
    plan.add_argument("spec", type=Path, metavar="SPEC.json")
    plan.add_argument(
        "--devices", type=int, metavar="N", help="search over the splits of N devices"
    )
    plan.add_argument(
        "--beyond", action="store_true", help="also schedules that are not in the paper"
    )
    plan.add_argument("--picture", type=Path, metavar="F", help="draw the plan (.png, .svg, .pdf)")
    plan.add_argument("--trace", type=Path, metavar="F", help="write a Perfetto trace of the plan")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.capacity.plan import plan_file
    from cluster.capacity.plan_files import write_picture, write_trace
    from cluster.capacity.plan_tables import print_report

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
