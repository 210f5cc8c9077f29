"""`tandem profile`."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping
from pathlib import Path

from cluster.cli.arguments import Commands, add_command, pretty
from contracts.config import BUNDLED

_EXAMPLE = """example:
  tandem profile --output here.json --plot here.png
  tandem profile --model DIR --seconds 90
then name the file as "hardware" in a SPEC of `tandem plan`
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


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.capacity.pictures import check_format, pyplot
    from cluster.capacity.profile import ProfileSettings, profile
    from cluster.capacity.profile_report import draw_profile, print_profile
    from cluster.files.hardware import write_hardware
    from cluster.files.model_folder import resolve_model_folder

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
