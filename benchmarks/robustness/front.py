"""An ingress replica as a plain process: the real application behind the real front.

    python -m benchmarks.robustness.front

Standard input: a line that says what to serve, then one whenever ranks are elsewhere. It answers
with its port once it serves, and ends when standard input does.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, BinaryIO

import msgspec

from cluster.fleet.replies import Directory
from cluster.http.server import HttpServer
from cluster.serving.ingress_app import build_ingress_app
from cluster.serving.serve_app import Launcher
from contracts.config import TandemConfig
from contracts.logs import set_up_logging


class Orders(msgspec.Struct, frozen=True):
    """name: of the replica."""

    name: str
    config: TandemConfig
    directory: Directory


_decode_directory = msgspec.json.Decoder(Directory).decode
_decode_orders = msgspec.json.Decoder(Orders).decode


class Place:
    """The current addresses of ranks, read from `lines` from the start on. over: done at the end of
    `lines`."""

    def __init__(self, directory: Directory, lines: BinaryIO) -> None:
        self.directory = directory
        self.over: Future[None] = Future()
        threading.Thread(target=self._listen, args=[lines], name="place", daemon=True).start()

    async def find(self, _: dict[str, str]) -> Mapping[str, str]:
        return self.directory.client_addresses | self.directory.prefill_addresses

    def _listen(self, lines: BinaryIO) -> None:
        while line := lines.readline():
            self.directory = _decode_directory(line)
        self.over.set_result(None)


class NoLauncher:
    """Launcher without metrics: a chaos run has only those of the ingress."""

    def __init__(self) -> None:
        self.metrics = self.status = self

    async def remote(self) -> list[Any]:
        return []


async def serve(lines: BinaryIO, answers: BinaryIO) -> None:
    orders = _decode_orders(lines.readline())
    set_up_logging(orders.name, orders.config.log)
    place = Place(orders.directory, lines)
    launcher = Launcher(NoLauncher())
    app = await build_ingress_app(orders.config, orders.directory, launcher, place.find)
    front = HttpServer(app, orders.config.http)
    await front.start()
    answers.write(f"{front.port}\n".encode())
    answers.flush()
    await asyncio.wrap_future(place.over)
    await front.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(serve(sys.stdin.buffer, answers))


if __name__ == "__main__":
    main()
