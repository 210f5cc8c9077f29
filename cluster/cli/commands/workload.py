"""Commands that send work: bulk, bench, demo."""

import argparse
import contextlib
import logging
import math
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from rich.progress import Progress

from cluster.cli.arguments import (
    EXIT_ERROR,
    Commands,
    add_command,
    add_config_options,
    config_from_options,
    pretty,
)
from cluster.observe.server_client import check_url
from cluster.observe.terminal import Terminal
from cluster.serving.settings import KEY_VARIABLE, prepare_cluster_environment
from cluster.tools.bench.bench import bench, draw_bench, print_bench, result_json, write_result
from cluster.tools.bench.load_generator import BenchSettings
from cluster.tools.bulk.job import EXAMPLE, add_options, parse_fields, parse_job
from cluster.tools.plots import pyplot
from contracts.config import TandemConfig
from contracts.errors import ConfigError
from contracts.logs import set_up_logging


def add_bulk(commands: Commands) -> None:
    help_ = "Classify, generate from or score the rows of files, each exactly once."
    bulk = add_command(commands, "bulk", help_, EXAMPLE, run_bulk_command)
    add_options(bulk)
    add_config_options(bulk)


def run_bulk_command(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    job = parse_job(options)
    if (options.address is None) == (options.model is None and options.config is None):
        raise ConfigError(
            "give --address (a Ray cluster where Tandem runs; auto: this one), or --model or "
            "--config to start workers for this job"
        )
    sizes = (options.attention_ranks, options.expert_ranks, options.prefill_ranks)
    if options.config is None and not any(sizes):
        sizes = (1, 1, 0) if options.task == "generate" else (0, 0, 1)
        options.attention_ranks, options.expert_ranks, options.prefill_ranks = sizes
    config = config_from_options(options)
    set_up_logging("bulk", config.log, stderr_level=logging.WARNING)
    if options.address is None:
        prepare_cluster_environment(config, environment)

    from cluster.tools.bulk.run import own_workers, run_bulk, running_workers, summary_line

    workers = (
        running_workers(options.address, config.serve.name, environment)
        if options.address
        else own_workers(config, environment)
    )
    console = Terminal(stderr=True)
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints a line if a node dies
        summary = run_bulk(job, workers, console)
    if options.json:
        print(pretty(summary))
    else:
        console.print(summary_line(summary, job.output), soft_wrap=True, highlight=False)
    return 0


_MAX_THINK_S = 3600.0
_OBJECTIVES = {  # vLLM's names, and AIPerf's
    "ttft": "ttft",
    "tpot": "tpot",
    "e2el": "e2el",
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "request_latency": "e2el",
}
_BENCH_EXAMPLE = """example:
  tandem bench --rate 4 --seconds 30
  tandem bench --url http://HOST:8000 --chat --rate 8 --prompt-tokens 512 --output-tokens 64
  tandem bench --trace AzureLLMInferenceTrace_conv_2023.csv --rate 2 --divide-lengths 10 --ls 0.2 \\
    --picture bench.svg --output bench.json
  tandem bench --trace mooncake_trace.jsonl --divide-lengths 16 --goodput ttft:500 tpot:50
  tandem bench --conversations ShareGPT_V3.json --rate 2 --think-time-s 3
Requests are sent at their arrival times, whether or not earlier ones are answered; latencies count
from the arrival. A turn arrives --think-time-s after the previous answer, which is in its history
as the server gave it. Any server with OpenAI's API can be measured; --ls and --set
need server support. JSON has the names of `vllm bench serve`.
"""


def add_bench(commands: Commands) -> None:
    help_ = "Measure a server with OpenAI's API under open-loop load."
    command = add_command(commands, "bench", help_, _BENCH_EXAMPLE, run_bench)
    add = command.add_argument
    add("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    add("--model", metavar="M", help="default: the first that the server lists")
    add("--api-key", metavar="KEY", help=f"default: ${KEY_VARIABLE}")
    add("--chat", action="store_true", help="chats instead of completions")
    add("--rate", type=float, help="requests or conversations per second (default 1, or a trace's)")
    add("--seconds", type=float, default=30.0, help="of arrivals (default 30)")
    add("--prompt-tokens", type=int, metavar="N", help="of each, about")
    add("--output-tokens", type=int, metavar="N", help="of each (default: as recorded or in chats)")
    files = command.add_mutually_exclusive_group()
    files.add_argument(
        "--trace",
        type=Path,
        metavar="F",
        help="Azure's .csv or Mooncake's .jsonl (.gz); equal hash_ids are equal blocks of text",
    )
    files.add_argument(
        "--conversations",
        type=Path,
        metavar="F",
        help="ShareGPT's or OpenAI's messages (.json, .jsonl), or prompts (.txt), sent as chats in "
        "their order, again from the start if they end (.gz)",
    )
    add("--divide-lengths", type=int, default=1, metavar="N", help="--trace: for a smaller server")
    add("--block-tokens", type=int, default=512, metavar="N", help="--trace: of a hash id")
    add("--think-time-s", type=float, default=0.0, help="from answer to next turn (default 0)")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="objectives: ttft, tpot, e2el")
    add("--ls", type=float, metavar="PART", help="latency-sensitive part of the requests, 0 to 1")
    add("--timeout-s", type=float, default=600.0, help="of a request (default 600)")
    add(
        "--retry-refused", action="store_true", help="refused clients retry once, after Retry-After"
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="a=b",
        help="a field of every body; repeatable",
    )
    add("--seed", type=int, default=0)
    add("--picture", type=Path, metavar="F", help="draw the times (.png, .svg, .pdf)")
    add("--output", type=Path, metavar="F", help="write every request (.json)")
    add("--json", action="store_true", help="print JSON instead of a table")


def run_bench(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    """Run the load; return 2 if no request was answered."""
    _check(options)
    if options.picture is not None:  # before the load
        pyplot(options.picture, "--picture")
    given: dict[str, Any] = {
        name: getattr(options, name, None) for name in BenchSettings.__struct_fields__
    }
    given["key"] = options.api_key or environment.get(KEY_VARIABLE)
    given |= {"goodput": _objectives(options.goodput), "fields": parse_fields("--set", options.set)}
    settings = BenchSettings(**given)
    console = Terminal(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=None)
        found = bench(
            settings, lambda ended, of: bar.update(task, completed=float(ended), total=float(of))
        )
    if options.output is not None:
        write_result(found, options.output)
    if options.picture is not None:
        draw_bench(found, options.picture)
    if options.json:
        print(pretty(result_json(found, detailed=False)))
    else:
        print_bench(found)
    return 0 if found.all.completed else EXIT_ERROR


def _check(options: argparse.Namespace) -> None:
    for name in ("rate", "seconds", "timeout_s"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number above 0")
    if not 0 <= options.think_time_s <= _MAX_THINK_S:
        raise ConfigError(f"--think-time-s {options.think_time_s}: give 0 to {_MAX_THINK_S:g}")
    for name in ("prompt_tokens", "output_tokens", "divide_lengths", "block_tokens"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= 1 << 20:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give 1 to {1 << 20}")
    if options.ls is not None and not 0 <= options.ls <= 1:
        raise ConfigError(f"--ls {options.ls}: give a part, 0 to 1")
    check_url(options.url)


def _objectives(given: list[str]) -> dict[str, float]:
    """Parse NAME:MS pairs, as separate arguments (vLLM) or in one (AIPerf)."""
    found: dict[str, float] = {}
    for each in " ".join(given).split():
        name, _, value = each.partition(":")
        try:
            found[_OBJECTIVES[name]] = float(value)
        except (KeyError, ValueError):
            value = "nan"
        if not 0 < float(value) < math.inf:
            raise ConfigError(
                f"--goodput {each}: give NAME:MILLISECONDS with one of {', '.join(_OBJECTIVES)}"
            )
    return found


_DEMO_EXAMPLE = """example:
  tandem demo
  tandem demo --trace demo.trace.json     (open the file in https://ui.perfetto.dev)
"""


def add_demo(commands: Commands) -> None:
    help_ = "Serve the bundled model on a local cluster, send requests, show the answers."
    demo = add_command(commands, "demo", help_, _DEMO_EXAMPLE, run_demo_command)
    demo.add_argument("--trace", type=Path, help="also write a Perfetto trace to this file")


def run_demo_command(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    prepare_cluster_environment(TandemConfig(), environment)

    from cluster.tools.demo import run_demo

    return run_demo(options.trace, environment)
