"""`tandem profile`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

from cluster.cli.arguments import Commands, add_command, pretty
from cluster.fleet.hardware import write_hardware
from cluster.fleet.model_folder import resolve_model_folder
from cluster.observe.terminal import Terminal
from cluster.tools.bulk.records import Fields, InputRow
from cluster.tools.bulk.sources import ReadProgress, find_sources, read_all
from cluster.tools.plots import pyplot
from contracts.config import BUNDLED
from contracts.errors import ConfigError
from models.prediction.routing_counts import COUNT_LIMITS, MAX_OVERSIZE, CountLimits
from models.spec.checkpoint_files import ROUTING

if TYPE_CHECKING:
    from cluster.tools.profile.routing_profile import RoutingReport

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
    add = profile.add_argument
    add("--model", default=BUNDLED, help='Hugging Face folder, or "bundled"')
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    add(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto (default): a GPU if there is one",
    )  # fmt: skip
    add("--seconds", type=float, default=60.0, help="to measure for (default 60)")
    add("--output", type=Path, metavar="F", help="write the hardware file (.json)")
    add("--plot", type=Path, metavar="F", help="draw the fits (.png, .svg, .pdf)")
    add("--json", action="store_true", help="print the hardware file, no table")
    add("--routing", action="store_true", help="profile the model's routing, not the machine")
    add(
        "--input",
        action="append",
        default=[],
        metavar="FILES",
        help="--routing: texts, in the formats of `tandem bulk`; repeatable",
    )
    add("--text-field", default="text", metavar="NAME", help="--routing: of a row (default text)")
    add("--tokens", type=int, default=60_000, help="--routing: limit of all texts (default 60000)")
    add(
        "--add",
        action="append",
        default=[],
        type=Path,
        metavar="F",
        help="--routing: add the counts of this file; repeatable",
    )
    add("--paths", type=int, metavar="N", help="--routing: limit of sampled tokens in the file")
    add(
        "--pairs",
        type=int,
        metavar="N",
        help="--routing: limit of pairs (token id, expert) of a layer",
    )


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.tools.profile.hardware_profile import draw_profile, print_profile, profile

    if options.routing:
        return _routing(options)
    if options.plot is not None:  # before a minute of measurement
        pyplot(options.plot, "--plot")
    folder = resolve_model_folder(options.model)
    hardware = profile(folder, options.dtype, options.seconds, options.device)
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
    from cluster.tools.profile.routing_profile import merge_counts, print_routing

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
    from cluster.tools.profile.routing_profile import routing_profile

    with Progress(console=Terminal(stderr=True), transient=True) as bar:
        task = bar.add_task("routing", total=1.0)
        return routing_profile(
            folder,
            options.dtype,
            _texts(options.input, options.text_field),
            most_tokens=options.tokens,
            limits=limits,
            progress=lambda part: bar.update(task, completed=part),
        )


def _texts(inputs: Sequence[str], field: str) -> Iterator[str]:
    sources = find_sources(inputs)
    for row in read_all(sources, Fields(text=field), ReadProgress(0)):
        if isinstance(row, InputRow):
            yield row.prefix + row.text
