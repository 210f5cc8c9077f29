"""`tandem serve`."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Mapping

from cluster.arguments import Commands, add_command
from cluster.config_options import add_config_options, config_of

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


def run(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from cluster.serving import serving

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
