"""`tandem bench`."""

from __future__ import annotations

import argparse
import math
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from cluster.cli.arguments import EXIT_ERROR, Commands, add_command, pretty
from cluster.cli.config_options import KEY_VARIABLE
from cluster.files.server_url import check_url
from contracts.errors import ConfigError

_EXAMPLE = """example:
  tandem bench --rate 4 --seconds 30
  tandem bench --url http://HOST:8000 --chat --rate 8 --prompt-tokens 512 --output-tokens 64
  tandem bench --trace AzureLLMInferenceTrace_conv_2023.csv --rate 2 --divide-lengths 10 --ls 0.2 \\
    --picture bench.svg --output bench.json
Requests come when they are due, whether or not earlier ones are answered: times count from then.
Any server with OpenAI's API is measured alike; --ls and --set name fields that only some take.
"""


def add(commands: Commands) -> None:
    help_ = "Load a server that speaks OpenAI's API, open loop, and tell what its clients saw."
    command = add_command(commands, "bench", help_, _EXAMPLE, run)
    command.add_argument("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    command.add_argument("--model", metavar="M", help="default: the first that the server names")
    command.add_argument("--api-key", metavar="KEY", help=f"default: ${KEY_VARIABLE}")
    command.add_argument("--chat", action="store_true", help="chats instead of completions")
    command.add_argument("--rate", type=float, help="requests per second (default 1, or a trace's)")
    command.add_argument("--seconds", type=float, default=30.0, help="of arrivals (default 30)")
    command.add_argument("--prompt-tokens", type=int, metavar="N", help="of each, about")
    command.add_argument(
        "--output-tokens", type=int, metavar="N", help="of each (default: as chats have them)"
    )
    command.add_argument(
        "--trace", type=Path, metavar="F", help="arrivals and lengths (.csv, .jsonl)"
    )
    command.add_argument(
        "--divide-lengths", type=int, default=1, metavar="N", help="--trace: for a smaller server"
    )
    command.add_argument(
        "--ls", type=float, metavar="PART", help="latency-sensitive part of the requests, 0 to 1"
    )
    command.add_argument(
        "--timeout-s", type=float, default=600.0, help="of a request (default 600)"
    )
    command.add_argument(
        "--come-back", action="store_true", help="who is refused waits as told, and comes once more"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a=b",
        help="a field of every body; repeatable",
    )
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--picture", type=Path, metavar="F", help="draw the times (.png, .svg, .pdf)"
    )
    command.add_argument("--output", type=Path, metavar="F", help="write every request (.json)")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    """2 if no request was answered."""
    from rich.progress import Progress

    from cluster.files.pictures import check_format, pyplot
    from cluster.files.terminal import Terminal
    from cluster.load.bench import BenchSettings, bench
    from cluster.load.report import answer_of, draw_bench, print_bench, write_outcomes

    _check(options)
    if options.picture is not None:  # before all the load
        check_format(options.picture, "--picture")
        pyplot("--picture")
    settings = BenchSettings(
        url=options.url,
        model=options.model,
        key=options.api_key or environment.get(KEY_VARIABLE),
        chat=options.chat,
        rate=options.rate,
        seconds=options.seconds,
        trace=options.trace,
        divisor=options.divide_lengths,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        ls=options.ls,
        timeout_s=options.timeout_s,
        comes_back=options.come_back,
        fields=_fields(options.set),
        seed=options.seed,
    )
    console = Terminal(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=None)
        found = bench(
            settings, lambda ended, of: bar.update(task, completed=float(ended), total=float(of))
        )
    if options.output is not None:
        write_outcomes(found, options.output)
    if options.picture is not None:
        draw_bench(found, options.picture)
    if options.json:
        print(pretty(answer_of(found)))
    else:
        print_bench(found)
    return 0 if found.all.answered else EXIT_ERROR


def _check(options: argparse.Namespace) -> None:
    for name in ("rate", "seconds", "timeout_s"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number above 0")
    for name in ("prompt_tokens", "output_tokens", "divide_lengths"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= 1 << 20:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give 1 to {1 << 20}")
    if options.ls is not None and not 0 <= options.ls <= 1:
        raise ConfigError(f"--ls {options.ls}: give a part, 0 to 1")
    check_url(options.url)


def _fields(given: list[str]) -> dict[str, Any]:
    """Values are JSON, or else strings."""
    fields: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise ConfigError(f"--set {each}: give FIELD=VALUE, such as ignore_eos=true")
        try:
            fields[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            fields[name] = value
    return fields
