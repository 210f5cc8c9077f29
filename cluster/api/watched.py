"""What a server tells those who watch it: load, state of the ranks, metrics. It has a key of its
own, and costs the same however many ask."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from actors.telemetry.scrapes import Scrapes
from actors.telemetry.telemetry import CONTENT_TYPE, merge_expositions
from cluster.api import answer_types
from cluster.api.answers import json_response
from cluster.api.session import Services
from cluster.files.version import version
from contracts import metrics
from contracts.errors import TandemError
from contracts.logs import event
from contracts.metrics import Pipeline
from contracts.requests import Priority
from contracts.worker import RankStatus

log = logging.getLogger("tandem.ingress")

SCRAPE_TIMEOUT_S = 5.0

Plain = Callable[[Services, Request], Awaitable[Response]]


async def load(services: Services, request: Request) -> Response:
    """Requests under way, and of their sequences those that wait for a first answer."""
    services.callers.check_metrics(request)
    return json_response(
        answer_types.Load(server_load=len(services.sessions), pipelines=_pipelines(services))
    )


def _pipelines(services: Services) -> dict[str, answer_types.PipelineLoad]:
    requests = Counter(session.pipeline for session in services.sessions)
    waiting = services.backend.waiting()
    return {
        pipeline.value: answer_types.PipelineLoad(
            requests=requests[pipeline],
            waiting={one.label: waiting.get((pipeline.value, one.label), 0) for one in Priority},
        )
        for pipeline in Pipeline
    }


def status_of(services: Services) -> Plain:
    scrapes = Scrapes(lambda: _status(services), services.clock)

    async def answer(services: Services, request: Request) -> Response:
        services.callers.check_metrics(request)
        return Response(await scrapes.text(), media_type="application/json")

    return answer


async def _status(services: Services) -> str:
    problems, ranks = list(services.backend.problems()), list[RankStatus]()
    if services.ranks is not None:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                ranks = await services.ranks()
        except TimeoutError:
            problems.append(f"the ranks have not told their state within {SCRAPE_TIMEOUT_S:g} s")
        except TandemError as error:
            problems.append(error.message)
    found = answer_types.Status(
        model=services.model.name,
        version=version(),
        problems=problems,
        pipelines=_pipelines(services),
        ranks=ranks,
    )
    return msgspec.json.encode(found).decode()


def metrics_of(services: Services) -> Plain:
    scrapes = Scrapes(lambda: _scrape(services), services.clock)
    services.telemetry.read_each(
        metrics.QUEUE_DEPTH,
        lambda: {(one, label): n for (one, label), n in services.backend.waiting().items()},
    )

    async def answer(services: Services, request: Request) -> Response:
        services.callers.check_metrics(request)
        return Response(await scrapes.text(), headers={"Content-Type": CONTENT_TYPE})

    return answer


async def _scrape(services: Services) -> str:
    texts = [services.telemetry.exposition()]
    if services.extra is not None:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                texts.append(await services.extra())
        except TimeoutError:  # the ingress's own metrics are still worth a scrape
            reason = f"none within {SCRAPE_TIMEOUT_S:g} s"
            event(log, "rank_metrics_failed", logging.WARNING, error=reason)
    return merge_expositions(texts)
