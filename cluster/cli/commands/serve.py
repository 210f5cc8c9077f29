"""`tandem serve`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import MutableMapping

from cluster.cli.arguments import EXIT_BEYOND_REPAIR, Commands, add_command
from cluster.cli.config_options import KEY_VARIABLE, add_config_options, config_of, with_key_of
from cluster.serving.ray_environment import before_a_cluster_is_started

_EXAMPLE = """example:
  tandem serve --model bundled --attention-ranks 2 --expert-ranks 2
  tandem serve --config tandem.yaml --set schedule.r1=4 --port 8080
then:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "bundled", "messages": [{"role": "user", "content": "Hello"}]}'
"""


def add(commands: Commands) -> None:
    serve = add_command(commands, "serve", "Serve a model over HTTP.", _EXAMPLE, run)
    add_config_options(serve)
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 8000)")
    serve.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that opens the server; repeatable. Everybody on this machine can read command "
        f"lines: better in {KEY_VARIABLE}, or as http.api_keys in a file of --config",
    )
    serve.add_argument("--ssl-certfile", metavar="F", help="PEM file: serve HTTPS")
    serve.add_argument("--ssl-keyfile", metavar="F", help="PEM file of its private key")
    serve.add_argument(
        "--root-path", metavar="/PATH", help="prefix that a proxy in front takes off"
    )


def _say(line: str) -> None:
    print(line, flush=True)


def run(options: argparse.Namespace, environment: MutableMapping[str, str]) -> int:
    config = with_key_of(config_of(options), environment)
    before_a_cluster_is_started(config, environment)

    from cluster.serving.application import ingress_of
    from cluster.serving.serve_end import drain, wait_for_end
    from cluster.serving.server import serving

    stop, hurry = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        (hurry if stop.is_set() else stop).set()

    with serving(config, show_rank_logs=True, say=_say) as served:
        for number in (signal.SIGINT, signal.SIGTERM):  # not earlier: ray.init sets its own
            signal.signal(number, end)
        print(f"ready in {served.ready_s:.1f} s: {served.url}/v1", flush=True)
        for rank in served.directory.ranks:
            print(f"  {rank.name:<14} pid {rank.pid}", flush=True)
        give_up_s = config.groups.give_up_s
        reason = wait_for_end(served.groups, served.directory.token, stop, give_up_s)
        if reason:
            print(f"tandem serve: can serve no more: {reason}", file=sys.stderr, flush=True)
        elif config.http.drain_s > 0:
            ingress, replicas = ingress_of(config.serve.name), config.groups.ingress_replicas
            drain(ingress, config.http.drain_s, hurry, replicas)
        print("stopping", flush=True)
    return EXIT_BEYOND_REPAIR if reason else 0
