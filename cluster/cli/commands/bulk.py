"""`tandem bulk`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import MutableMapping

from cluster.bulk.arguments import EXAMPLE, add_options, job_of
from cluster.cli.arguments import Commands, add_command, pretty
from cluster.cli.config_options import add_config_options, config_of, sizes_of
from cluster.files.terminal import Terminal
from cluster.serving.ray_environment import before_a_cluster_is_started
from contracts.errors import ConfigError
from contracts.logs import set_up_logging


def add(commands: Commands) -> None:
    help_ = "Classify the rows of files, each exactly once, whatever dies in between."
    bulk = add_command(commands, "bulk", help_, EXAMPLE, run)
    add_options(bulk)
    add_config_options(bulk)


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    job = job_of(options)
    if (options.address is None) == (options.model is None and options.config is None):
        raise ConfigError(
            "give --address (a Ray cluster where Tandem runs; auto: this one), or --model or "
            "--config to start workers for this job"
        )
    if options.config is None and not any(sizes_of(options)):
        options.attention_ranks, options.expert_ranks, options.prefill_ranks = 0, 0, 1
    config = config_of(options)
    set_up_logging("bulk", config.log, stderr_level=logging.WARNING)
    if options.address is None:
        before_a_cluster_is_started(config, environment)

    from cluster.bulk.run import run_bulk, summary_line
    from cluster.bulk.session import own_workers, running_workers

    workers = (
        running_workers(options.address, config.serve.name, environment)
        if options.address
        else own_workers(config, environment)
    )
    console = Terminal(stderr=True)
    summary = run_bulk(job, workers, console)
    if options.json:
        print(pretty(summary))
    else:
        console.print(summary_line(summary, job.output), soft_wrap=True, highlight=False)
    return 0
