"""One of the two servers of `observed_cost`: an ingress and its ranks, as plain processes.

    python -m benchmarks.observed_side PORT on|off|switched FOLDER

"on": as a server is that people run: logs into a folder, an access log, spans kept, metrics counted
and scraped every five seconds. "off": nothing of that. "switched": the one or the other, as
benchmarks/switched_rank.py has it, for benchmarks/observed_switch.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable

import uvloop

from actors.telemetry.telemetry import merge_expositions
from benchmarks.switched_rank import follow_switch
from benchmarks.unobserved_rank import measure_nothing
from cluster.fleet.codec import Directory
from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.app import build_app
from cluster.http.server import HttpServer
from cluster.serving.ingress_app import pipelines, served_model
from contracts.config import BUNDLED, TandemConfig
from contracts.interpreter import freeze_heap
from contracts.loading import load_config
from contracts.logs import set_up_logging
from tests.support import local_group
from tests.support.local_group import LocalGroup
from tests.support.rank_process import RankProcess

LOOK_S = 0.02
SCRAPE_PERIOD_S = 5.0  # as dashboards/prometheus.yml has it
ON = ["log.level=info", "http.access_log=true"]
OFF = ["log.level=error", "http.access_log=false", "trace.spans=0"]
COMMON = ["model.dtype=float32", "kv.prefix_cache=false", "kv.pool_tokens=16384"]


async def serve(
    port: int, config: TandemConfig, group: LocalGroup, is_on: Callable[[], bool]
) -> None:
    model, tokenizer = served_model(config)
    directory = Directory(
        client_addresses=group.client_addresses,
        prefill_addresses={},
        token=group.token,
        backend="shm",
        epoch=1,
        ranks=group.ready,
    )
    backend = pipelines(config, directory)
    backend.start()
    await backend.wait_serving(60.0)
    app = build_app(backend, tokenizer, model, config.http)
    freeze_heap()
    await HttpServer(app, config.http).start()
    seen_s, was_on = 0.0, True
    while True:
        await asyncio.sleep(LOOK_S)
        if is_on() != was_on:
            was_on = is_on()
            logging.disable(logging.NOTSET if was_on else logging.WARNING)
        seen_s += LOOK_S if was_on else 0.0
        if seen_s >= SCRAPE_PERIOD_S:
            seen_s = 0.0
            texts = await asyncio.to_thread(group.metrics)
            merge_expositions([app.app_state.telemetry.exposition(), *texts.values()])


def _ranks_of(module: str) -> None:
    ranks = functools.partial(RankProcess, module=module)
    setattr(local_group, "RankProcess", ranks)  # noqa: B010 - it is no name of its own


def main() -> None:
    port, kind, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    settings = [*COMMON, f"http.port={port}", f"log.folder={folder}"]
    settings += OFF if kind == "off" else ON
    config = load_config(None, settings)
    set_up_logging("ingress", config.log)
    switch = None
    if kind == "off":
        measure_nothing()
        _ranks_of("benchmarks.unobserved_rank")
    elif kind == "switched":
        switch = follow_switch()
        _ranks_of("benchmarks.switched_rank")

    def is_on() -> bool:
        return kind == "on" if switch is None else switch.is_on

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with LocalGroup(str(resolve_model_folder(BUNDLED)), config) as group:
        asyncio.run(serve(port, config, group, is_on))


if __name__ == "__main__":
    main()
