"""One of the two servers of `observed_cost`: an ingress and its ranks, as plain processes.

    python -m benchmarks.observed_side PORT on|off FOLDER

"on": as a server is that people run: logs into a folder, an access log, spans kept, metrics counted
and scraped every five seconds. "off": nothing of that.
"""

from __future__ import annotations

import asyncio
import functools
import sys

import uvloop

from actors.ranks import local_group
from actors.ranks.local_group import LocalGroup
from actors.ranks.process import RankProcess
from actors.telemetry.telemetry import merge_expositions
from benchmarks.unobserved_rank import measure_nothing
from cluster.api.app import build_app
from cluster.files.model_folder import resolve_model_folder
from cluster.fleet.codec import Directory
from cluster.serving.front import DirectFront
from cluster.serving.wiring import pipelines, served_model
from contracts.config import BUNDLED, TandemConfig
from contracts.garbage import spare_what_lives_on
from contracts.loading import load_config
from contracts.logs import set_up_logging

SCRAPE_PERIOD_S = 5.0  # as dashboards/prometheus.yml has it
ON = ["log.level=info", "http.access_log=true"]
OFF = ["log.level=error", "http.access_log=false", "trace.spans=0"]
COMMON = ["model.dtype=float32", "kv.prefix_cache=false", "kv.pool_tokens=16384"]


async def serve(port: int, config: TandemConfig, group: LocalGroup, *, is_on: bool) -> None:
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
    spare_what_lives_on()
    await DirectFront(app, config.http).start()
    while True:
        await asyncio.sleep(SCRAPE_PERIOD_S)
        if is_on:
            texts = await asyncio.to_thread(group.metrics)
            merge_expositions([app.services.telemetry.exposition(), *texts.values()])


def main() -> None:
    port, is_on, folder = int(sys.argv[1]), sys.argv[2] == "on", sys.argv[3]
    settings = [*COMMON, f"http.port={port}", f"log.folder={folder}", *(ON if is_on else OFF)]
    config = load_config(None, settings)
    set_up_logging("ingress", config.log)
    if not is_on:
        measure_nothing()
        unobserved = functools.partial(RankProcess, module="benchmarks.unobserved_rank")
        setattr(local_group, "RankProcess", unobserved)  # noqa: B010 - it is no name of its own
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with LocalGroup(str(resolve_model_folder(BUNDLED)), config) as group:
        asyncio.run(serve(port, config, group, is_on=is_on))


if __name__ == "__main__":
    main()
