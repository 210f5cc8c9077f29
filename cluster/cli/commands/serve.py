"""`tandem serve` and `tandem stop`."""

import argparse
import signal
import sys
import threading
from collections.abc import MutableMapping
from functools import partial

from cluster.cli.arguments import (
    Commands,
    add_command,
    add_config_options,
    config_from_options,
)
from cluster.serving.settings import KEY_VARIABLE, prepare_cluster_environment
from contracts.config import GroupsConfig, ServeConfig, TandemConfig
from contracts.errors import ConfigError

_SERVE_EXAMPLE = """example:
  tandem serve --model bundled --attention-ranks 2 --expert-ranks 2
  tandem serve --config tandem.yaml --set schedule.r1=4 --port 8080
then:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "bundled", "messages": [{"role": "user", "content": "Hello"}]}'
"""


def add_serve(commands: Commands) -> None:
    serve = add_command(commands, "serve", "Serve a model over HTTP.", _SERVE_EXAMPLE, run_serve)
    add = serve.add_argument
    add_config_options(serve)
    add("--host", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, help="port to listen on (default 8000)")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that clients must send; repeatable. Other users can read command lines: prefer "
        f"{KEY_VARIABLE}, or http.api_keys in a file of --config",
    )
    add("--ssl-certfile", metavar="F", help="PEM file: serve HTTPS")
    add("--ssl-keyfile", metavar="F", help="PEM file of its private key")
    add("--root-path", metavar="/PATH", help="prefix that a proxy in front strips")


def run_serve(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    config = config_from_options(options)
    prepare_cluster_environment(config, environment)

    from cluster.serving.application import ingress_handle
    from cluster.serving.server import EXIT_UNRECOVERABLE, serving
    from cluster.serving.shutdown import drain, wait_for_shutdown

    stop, skip_drain = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        (skip_drain if stop.is_set() else stop).set()

    with serving(
        config, environment=environment, show_rank_logs=True, report=partial(print, flush=True)
    ) as served:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as with nohup
                signal.signal(number, end)  # replaces the handlers of ray.init
        print(f"ready in {served.ready_s:.1f} s: {served.url}/v1", flush=True)
        for rank in served.directory.ranks:
            print(f"  {rank.name:<14} pid {rank.pid}", flush=True)
        launcher_timeout_s = config.groups.launcher_timeout_s
        reason = wait_for_shutdown(served.groups, served.directory.token, stop, launcher_timeout_s)
        if reason:
            print(f"tandem serve: the server has failed: {reason}", file=sys.stderr, flush=True)
        else:
            ingress, replicas = ingress_handle(config.serve.name), config.groups.ingress_replicas
            drain(ingress, config.http.drain_timeout_s, skip_drain, replicas)
        print("stopping", flush=True)
    return EXIT_UNRECOVERABLE if reason else 0


_STOP_EXAMPLE = """example:
  tandem stop --address 10.0.0.1:6379 --name other
For an application whose launcher is gone; otherwise use Ctrl-C in `tandem serve`.
"""


def add_stop(commands: Commands) -> None:
    help_ = "Stop an application that remains on a Ray cluster."
    stop = add_command(commands, "stop", help_, _STOP_EXAMPLE, run_stop)
    stop.add_argument("--name", default=ServeConfig().name, help='default "tandem"')
    stop.add_argument("--address", help="of the Ray cluster (default RAY_ADDRESS; auto: this one)")


def run_stop(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    from cluster.serving import application
    from cluster.serving.ray_session import ray_session
    from cluster.serving.settings import cluster_address

    config = TandemConfig(groups=GroupsConfig(address=options.address))
    if cluster_address(config, environment) is None:
        raise ConfigError("give --address, or set RAY_ADDRESS: a local cluster stops by itself")
    with ray_session(config, environment, show_rank_logs=False):
        application.check_present(options.name)
        application.end(options.name, is_clusters_end=False)
    print(f"{options.name}: ended")
    return 0
