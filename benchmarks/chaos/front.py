"""An ingress replica as a plain process: the real application behind the real front.

    python -m benchmarks.chaos.front

Standard input: a line that says what to serve, then one whenever ranks are elsewhere. It answers
with its port once it serves, and ends when standard input does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import BinaryIO

import msgspec

from cluster.fleet.codec import Directory, encode_trace
from cluster.serving.front import DirectFront
from cluster.serving.launcher import AskGroups
from cluster.serving.wiring import build_ingress_app
from contracts.clock import monotonic_s
from contracts.config import TandemConfig
from contracts.logs import set_up_logging
from contracts.traces import TraceAnswer, this_boot
from contracts.worker import RankStatus


class Orders(msgspec.Struct, frozen=True):
    """name: of the replica."""

    name: str
    config: TandemConfig
    directory: Directory


class Place:
    """Where the ranks are, as whoever looks after them says."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory

    async def find(self, _: dict[str, str]) -> Mapping[str, str]:
        return self.directory.client_addresses | self.directory.prefill_addresses

    async def listen(self, lines: BinaryIO) -> None:
        """Until nothing more is said."""
        while line := await asyncio.to_thread(lines.readline):
            self.directory = msgspec.json.decode(line, type=Directory)


async def _no_metrics() -> list[str]:
    return []


async def _no_status() -> list[RankStatus]:
    return []


async def _no_trace(_: float) -> bytes:
    return encode_trace(TraceAnswer())


async def _clock() -> tuple[float, str]:
    return monotonic_s(), this_boot()


async def _no_scale(_: bytes) -> tuple[bytes, bytes]:
    raise ConnectionError("a chaos run has no launcher that adds ranks")


async def serve(lines: BinaryIO, answers: BinaryIO) -> None:
    orders = msgspec.json.decode(lines.readline(), type=Orders)
    set_up_logging(orders.name, orders.config.log)
    place = Place(orders.directory)
    ask = AskGroups(_no_metrics, _no_status, _no_trace, _clock, _no_scale)
    app = await build_ingress_app(orders.config, orders.directory, ask, place.find)
    front = DirectFront(app, orders.config.http)
    await front.start()
    answers.write(f"{front.port}\n".encode())
    answers.flush()
    await place.listen(lines)
    await front.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(serve(sys.stdin.buffer, answers))


if __name__ == "__main__":
    main()
