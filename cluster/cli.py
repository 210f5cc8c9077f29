"""The command line: `tandem`, or `python -m cluster`.

Errors are one line on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cluster.bulk.arguments import EXAMPLE as BULK_EXAMPLE
from cluster.bulk.arguments import add_options, job_of
from cluster.config_options import add_config_options, config_of, sizes_of
from cluster.hardware import known_hardware
from contracts.config import BUNDLED
from contracts.errors import ConfigError, TandemError

EXIT_ERROR = 2

_SERVE_EXAMPLE = """example:
  tandem serve --model bundled --attention-ranks 2 --expert-ranks 2
  tandem serve --config tandem.yaml --set schedule.r1=4 --port 8080
then:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "bundled", "messages": [{"role": "user", "content": "Hello"}]}'
"""
_DEMO_EXAMPLE = """example:
  tandem demo
  tandem demo --trace demo.trace.json     (open the file in https://ui.perfetto.dev)
"""
_DOCTOR_EXAMPLE = """example:
  tandem doctor
  tandem doctor --config tandem.yaml --json
"""
_PLAN_EXAMPLE = """example:
  tandem plan spec.json
  tandem plan spec.json --devices 8 --json
  tandem plan spec.json --beyond --picture plan.svg --trace plan.trace.json
spec.json, a model on a machine (a Hugging Face folder, or the fields of its config.json; a file of
`tandem profile`, or one of: {hardware}):
  {{"model": "bundled", "hardware": "h200-node", "sequence_tokens": 2048,
   "attention_ranks": 3, "expert_ranks": 5}}
or stage models, in ms per sample (attention, shared) and per token of an expert (expert, link):
  {{"stages": {{"attention": {{"alpha_ms": 0.2, "beta_ms": 1.5}},
              "shared": {{"alpha_ms": 0.1, "beta_ms": 0.4}},
              "expert": {{"alpha_ms": 0.5, "beta_ms": 0.02}},
              "link": {{"alpha_ms": 0.1, "beta_ms": 0.01}}}},
   "tokens_per_expert_per_sample": 64, "num_layers": 24, "max_samples": 8, "max_r2": 16,
   "has_shared": true}}
"""
_PROFILE_EXAMPLE = """example:
  tandem profile --output here.json --plot here.png
  tandem profile --model DIR --seconds 90
then name the file as "hardware" in a SPEC of `tandem plan`
"""


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
        return int(options.run(options))
    except TandemError as error:
        print(f"tandem {options.command}: {error.message}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Serves Mixture-of-Experts language models on Ray."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_demo(commands)
    _add_plan(commands)
    _add_profile(commands)
    _add_bulk(commands)
    _add_doctor(commands)
    return parser


def _add_command(commands: Any, name: str, help_: str, example: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_,
        description=help_,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def _add_serve(commands: Any) -> None:
    serve = _add_command(commands, "serve", "Serve a model over HTTP.", _SERVE_EXAMPLE)
    add_config_options(serve)
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 8000)")
    serve.set_defaults(run=_serve)


def _add_demo(commands: Any) -> None:
    demo = _add_command(
        commands,
        "demo",
        "Start a local cluster, serve the bundled model, send real requests, show the answers.",
        _DEMO_EXAMPLE,
    )
    demo.add_argument("--trace", type=Path, help="also write a Perfetto trace to this file")
    demo.set_defaults(run=_demo)


def _add_plan(commands: Any) -> None:
    help_ = "Plan capacity: the best schedule and split, or why not to split."
    example = _PLAN_EXAMPLE.format(hardware=", ".join(known_hardware()))
    plan = _add_command(commands, "plan", help_, example)
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
    plan.set_defaults(run=_plan)


def _add_profile(commands: Any) -> None:
    help_ = "Measure this machine's stages and links with a model, and fit a hardware file to them."
    profile = _add_command(commands, "profile", help_, _PROFILE_EXAMPLE)
    profile.add_argument("--model", default=BUNDLED, help='Hugging Face folder, or "bundled"')
    profile.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    profile.add_argument("--seconds", type=float, default=60.0, help="to measure for (default 60)")
    profile.add_argument("--output", type=Path, metavar="F", help="write the hardware file (.json)")
    profile.add_argument("--plot", type=Path, metavar="F", help="draw the fits (.png, .svg, .pdf)")
    profile.add_argument("--json", action="store_true", help="print the hardware file, no table")
    profile.set_defaults(run=_profile)


def _add_bulk(commands: Any) -> None:
    help_ = "Classify the rows of files, each exactly once, whatever dies in between."
    bulk = _add_command(commands, "bulk", help_, BULK_EXAMPLE)
    add_options(bulk)
    add_config_options(bulk)
    bulk.set_defaults(run=_bulk)


def _add_doctor(commands: Any) -> None:
    doctor = _add_command(
        commands, "doctor", "Check this machine and a configuration.", _DOCTOR_EXAMPLE
    )
    add_config_options(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.set_defaults(run=_doctor)


def _serve(options: argparse.Namespace) -> int:
    from cluster.serving import serving  # Ray takes a second to import: --help need not wait

    config = config_of(options)
    stop = threading.Event()
    with serving(config, show_rank_logs=True) as served:
        for number in (signal.SIGINT, signal.SIGTERM):  # not earlier: ray.init sets its own
            signal.signal(number, lambda *_: stop.set())
        print(f"ready in {served.ready_s:.1f} s: {served.url}/v1", flush=True)
        for rank in served.directory.ranks:
            print(f"  {rank.name:<14} pid {rank.pid}", flush=True)
        stop.wait()
        print("stopping", flush=True)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from cluster.demo import run_demo

    return run_demo(options.trace)


def _plan(options: argparse.Namespace) -> int:
    from cluster.plan import plan_file, print_report
    from cluster.plan_files import write_picture, write_trace

    report = plan_file(options.spec, devices=options.devices, beyond=options.beyond)
    if options.picture is not None:
        write_picture(report, options.picture)
    if options.trace is not None:
        write_trace(report, options.trace)
    if options.json:
        print(_pretty(report.answer))
    else:
        print_report(report)
    return 0


def _profile(options: argparse.Namespace) -> int:
    from cluster.hardware import write_hardware
    from cluster.model_folder import resolve_model_folder
    from cluster.pictures import check_format, pyplot
    from cluster.profile import ProfileSettings, profile
    from cluster.profile_report import draw_profile, print_profile

    if options.plot is not None:  # before a minute of measuring
        check_format(options.plot, "--plot")
        pyplot("--plot")
    folder = resolve_model_folder(options.model)
    hardware = profile(ProfileSettings(folder, options.dtype, options.seconds))
    if options.output is not None:
        write_hardware(hardware, options.output)
    if options.plot is not None:
        draw_profile(hardware, options.plot)
    if options.json:
        print(_pretty(hardware))
    else:
        print_profile(hardware)
    return 0


def _bulk(options: argparse.Namespace) -> int:
    job = job_of(options)
    if (options.address is None) == (options.model is None and options.config is None):
        raise ConfigError(
            "give --address (a Ray cluster where Tandem runs; auto: this one), or --model or "
            "--config to start workers for this job"
        )
    if options.config is None and not any(sizes_of(options)):
        options.attention_ranks, options.expert_ranks, options.prefill_ranks = 0, 0, 1
    config = config_of(options)

    from rich.console import Console

    from cluster.bulk.run import run_bulk, summary_line
    from cluster.bulk.session import own_workers, running_workers

    workers = (
        running_workers(options.address, os.environ)
        if options.address
        else own_workers(config, os.environ)
    )
    console = Console(stderr=True)
    summary = run_bulk(job, workers, console)
    if options.json:
        print(_pretty(summary))
    else:
        console.print(summary_line(summary, job.output), soft_wrap=True, highlight=False)
    return 0


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def _doctor(options: argparse.Namespace) -> int:
    from cluster.doctor import examine, print_findings

    findings = examine(config_of(options), os.environ)
    if options.json:
        print(_pretty(findings))
    else:
        print_findings(findings)
    return EXIT_ERROR if any(finding.level == "error" for finding in findings) else 0
