"""`tandem profile`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.arguments import Commands, add_command, pretty
from contracts.config import BUNDLED

if TYPE_CHECKING:
    from cluster.tools.profile.routing_profile import RoutingReport
    from models.prediction.routing_counts import CountLimits

_EXAMPLE = """example:
  tandem profile --output here.json --plot here.png
  tandem profile --model DIR --seconds 90
use the file as "hardware" in a SPEC of `tandem plan`
  tandem profile --routing --model DIR --input texts.jsonl --output DIR/routing.safetensors
counts the experts of tokens for `tandem place`, and fits predictors of the next layer's experts for
prefill.experts=cached; a server reads the file there, or from experts.profile
  tandem profile --routing --model DIR --add monday.safetensors --add tuesday.safetensors
adds the counts of files
"""


def add_profile(commands: Commands) -> None:
    help_ = "Measure this machine's stages and links with a model, and fit a hardware file."
    profile = add_command(commands, "profile", help_, _EXAMPLE, run)
    profile.add_argument("--model", default=BUNDLED, help='Hugging Face folder, or "bundled"')
    profile.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    profile.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto (default): a GPU if there is one",
    )  # fmt: skip
    profile.add_argument("--seconds", type=float, default=60.0, help="to measure for (default 60)")
    profile.add_argument("--output", type=Path, metavar="F", help="write the hardware file (.json)")
    profile.add_argument("--plot", type=Path, metavar="F", help="draw the fits (.png, .svg, .pdf)")
    profile.add_argument("--json", action="store_true", help="print the hardware file, no table")
    profile.add_argument(
        "--routing", action="store_true", help="profile the model's routing, not the machine"
    )
    profile.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="FILES",
        help="--routing: texts, in the formats of `tandem bulk`; repeatable",
    )
    profile.add_argument(
        "--text-field", default="text", metavar="NAME", help="--routing: of a row (default text)"
    )
    profile.add_argument(
        "--tokens", type=int, default=60_000, help="--routing: limit of all texts (default 60000)"
    )
    profile.add_argument(
        "--add",
        action="append",
        default=[],
        type=Path,
        metavar="F",
        help="--routing: add the counts of this file; repeatable",
    )
    profile.add_argument(
        "--paths", type=int, metavar="N", help="--routing: limit of sampled tokens in the file"
    )
    profile.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help="--routing: limit of pairs (token id, expert) of a layer",
    )


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.fleet.hardware import write_hardware
    from cluster.fleet.model_folder import resolve_model_folder
    from cluster.tools.plots import check_format, pyplot
    from cluster.tools.profile.hardware_profile import ProfileSettings, profile
    from cluster.tools.profile.report import draw_profile, print_profile

    if options.routing:
        return _routing(options)
    if options.plot is not None:  # before a minute of measurement
        check_format(options.plot, "--plot")
        pyplot("--plot")
    folder = resolve_model_folder(options.model)
    hardware = profile(ProfileSettings(folder, options.dtype, options.seconds, options.device))
    if options.output is not None:
        write_hardware(hardware, options.output)
    if options.plot is not None:
        draw_profile(hardware, options.plot)
    if options.json:
        print(pretty(hardware))
    else:
        print_profile(hardware)
    return 0


def _routing(options: argparse.Namespace) -> int:
    from cluster.fleet.model_folder import resolve_model_folder
    from cluster.tools.profile.report import print_routing
    from cluster.tools.profile.routing_profile import merge_counts
    from contracts.errors import ConfigError
    from models.spec.checkpoint_files import ROUTING

    path, folder = options.output or Path(ROUTING), resolve_model_folder(options.model)
    limits = _limits(options)
    if options.input:
        report = _measured(options, folder, limits)
        counts = merge_counts(report.counts, options.add, folder).truncate(limits)
        report.profile.write(path, folder, counts)
        if options.json:
            layers = [precision._asdict() for precision in report.layers]
            print(pretty({"tokens": report.tokens, "layers": layers}))
            return 0
        print_routing(report)
    elif options.add:
        merge_counts(None, options.add, folder).truncate(limits).write(path)
    else:
        raise ConfigError("--routing: texts are missing: give --input FILES")
    print(f"written: {path}")
    return 0


def _limits(options: argparse.Namespace) -> CountLimits:
    from contracts.errors import ConfigError
    from models.prediction.routing_counts import COUNT_LIMITS, MAX_OVERSIZE

    for name, most in (
        ("paths", COUNT_LIMITS.paths * MAX_OVERSIZE),
        ("pairs", COUNT_LIMITS.pairs * MAX_OVERSIZE),
    ):
        given = getattr(options, name)
        if given is not None and not 1 <= given <= most:
            raise ConfigError(f"--{name} {given}: give a number from 1 to {most}")
    return COUNT_LIMITS._replace(
        paths=options.paths or COUNT_LIMITS.paths, pairs=options.pairs or COUNT_LIMITS.pairs
    )


def _measured(options: argparse.Namespace, folder: Path, limits: CountLimits) -> RoutingReport:
    from rich.progress import Progress

    from cluster.observe.terminal import Terminal
    from cluster.tools.profile.routing_profile import RoutingSettings, routing_profile

    settings = RoutingSettings(folder, options.dtype, options.tokens, limits=limits)
    with Progress(console=Terminal(stderr=True), transient=True) as bar:
        task = bar.add_task("routing", total=1.0)
        return routing_profile(
            settings,
            _texts(options.input, options.text_field),
            lambda part: bar.update(task, completed=part),
        )


def _texts(inputs: Sequence[str], field: str) -> Iterator[str]:
    from cluster.tools.bulk.records import Fields, InputRow
    from cluster.tools.bulk.sources import ReadProgress, find_sources, read_all

    sources = find_sources(inputs)
    for row in read_all(sources, Fields(text=field), ReadProgress(0)):
        if isinstance(row, InputRow):
            yield row.prefix + row.text
