"""`tandem profile`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.arguments import Commands, add_command, pretty
from contracts.config import BUNDLED

if TYPE_CHECKING:
    from cluster.capacity.routing import RoutingReport

_EXAMPLE = """example:
  tandem profile --output here.json --plot here.png
  tandem profile --model DIR --seconds 90
then name the file as "hardware" in a SPEC of `tandem plan`
  tandem profile --routing --model DIR --input texts.jsonl --output DIR/routing.safetensors
foretells which experts the next layer wants, for prefill.experts=cached: a server finds it there,
or where experts.profile says
"""


def add(commands: Commands) -> None:
    help_ = "Measure this machine's stages and links with a model, and fit a hardware file to them."
    profile = add_command(commands, "profile", help_, _EXAMPLE, run)
    profile.add_argument("--model", default=BUNDLED, help='Hugging Face folder, or "bundled"')
    profile.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
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
        help="--routing: texts, as `python -m cluster.bulk` reads them; may be given several times",
    )
    profile.add_argument(
        "--text-field", default="text", metavar="NAME", help="--routing: of a row (default text)"
    )
    profile.add_argument(
        "--tokens", type=int, default=60_000, help="--routing: to look at (default 60000)"
    )


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.capacity.profile import ProfileSettings, profile
    from cluster.capacity.profile_report import draw_profile, print_profile
    from cluster.files.hardware import write_hardware
    from cluster.files.model_folder import resolve_model_folder
    from cluster.files.pictures import check_format, pyplot

    if options.routing:
        return _routing(options)
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
        print(pretty(hardware))
    else:
        print_profile(hardware)
    return 0


def _routing(options: argparse.Namespace) -> int:
    from rich.progress import Progress

    from cluster.capacity.routing import RoutingSettings, routing_profile
    from cluster.files.model_folder import resolve_model_folder
    from cluster.files.terminal import Terminal
    from contracts.errors import ConfigError
    from models.spec.stored_names import ROUTING

    if not options.input:
        raise ConfigError("--routing: say of which texts: --input FILES")
    folder = resolve_model_folder(options.model)
    settings = RoutingSettings(folder, options.dtype, options.tokens)
    with Progress(console=Terminal(stderr=True), transient=True) as bar:
        task = bar.add_task("routing", total=1.0)
        report = routing_profile(
            settings,
            _texts(options.input, options.text_field),
            lambda part: bar.update(task, completed=part),
        )
    path = options.output or Path(ROUTING)
    report.profile.write(path, folder)
    _print_routing(report)
    print(f"written: {path}")
    return 0


def _texts(inputs: Sequence[str], field: str) -> Iterator[str]:
    from cluster.bulk.rows import Fields, InputRow
    from cluster.bulk.sources import ReadProgress, find_sources, read_all

    sources = find_sources(inputs)
    for row in read_all(sources, Fields(text=field), ReadProgress(0)):
        if isinstance(row, InputRow):
            yield row.prefix + row.text


def _print_routing(report: RoutingReport) -> None:
    """Of each layer, how often a guess of an expert was right."""
    from rich.table import Table

    from cluster.files.terminal import Terminal

    precision = report.profile.precision
    table = Table(title=f"precision on a fourth of {report.tokens} tokens, held out", box=None)
    for name in ("layer", *precision, "first guess"):
        table.add_column(name, justify="right")
    for layer in report.spec.moe_layers:
        means = [float(each[layer].mean()) for each in precision.values()]
        first = max(float(each[layer][0]) for each in precision.values())
        shown = [f"{mean:.3f}" if mean else "–" for mean in means]
        table.add_row(str(layer), *shown, f"{first:.3f}")
    Terminal().print(table)
