"""Tests with fake attention ranks on real sockets and a pipeline backend in front of them."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import RoutingConfig
from cluster.serving.ingress_app import rank_clients
from contracts.messages import Finished, Submit, Tokens
from tests.support.api_harness import ME, QUICK
from tests.support.async_tests import until
from tests.support.fake_rank import FakeRank

Body = Callable[..., Coroutine[Any, Any, None]]
Directory = dict[str, str]
LIMIT_S = 20.0


def counted_on(submit: Submit) -> list[int]:
    """A model whose next token is the number of tokens."""
    return list(range(len(submit.token_ids), len(submit.token_ids) + 100))


@asynccontextmanager
async def started(placer: LeastWorkPlacer) -> AsyncIterator[PipelineBackend]:
    """Yield a backend that is ready; close it afterwards."""
    backend = PipelineBackend(placer)
    backend.start()
    try:
        await backend.wait_ready()
        yield backend
    finally:
        await backend.close()


class StreamedRequest:
    """A generation that is read as it arrives."""

    def __init__(self, backend: PipelineBackend, submit: Submit) -> None:
        self.submit = submit
        self.tokens: list[int] = []
        self.cached: list[int] = []
        self.finished: Finished | None = None
        self.task = asyncio.create_task(self._read(backend))

    async def _read(self, backend: PipelineBackend) -> list[int]:
        async for batch in backend.generate(self.submit):
            for event in batch:
                if isinstance(event, Tokens):
                    self.tokens += event.token_ids
                    self.cached += [] if event.cached_tokens is None else [event.cached_tokens]
                else:
                    assert isinstance(event, Finished)
                    self.finished = event
        return self.tokens

    async def has(self, tokens: int) -> None:
        await until(lambda: len(self.tokens) >= tokens)


def run_client(
    addresses: dict[str, str],
    token: bytes,
    body: Callable[[PipelineBackend], Coroutine[Any, Any, None]],
    **limits: Any,
) -> None:
    """Run `body` with a backend of ranks that run already."""

    async def main() -> None:
        placer = LeastWorkPlacer(rank_clients(addresses, token), RoutingConfig(**limits))
        async with started(placer) as backend:
            await body(backend)

    asyncio.run(asyncio.wait_for(main(), 60))


def run_ranks(
    body: Body,
    ranks: int = 1,
    *,
    waiting: int = 0,
    known: int | None = None,
    reply: Callable[[Submit], list[int]] = counted_on,
    **limits: Any,
) -> None:
    """Run `body(backend, ranks)`.

    waiting: ranks that have no expert ranks.
    known: ranks that are in the directory at first; the body also receives the directory.
    """

    async def main() -> None:
        fakes = [FakeRank(f"attention-{i}", reply) for i in range(ranks)]
        for fake in fakes[:waiting]:
            fake.waits = True
        addresses = {fake.name: await fake.listen() for fake in fakes}
        directory = dict(list(addresses.items())[:known])

        async def find(_: Directory) -> Directory:
            return directory

        def connect(name: str, address: str) -> RankClient:
            return RankClient(name, address, ME, QUICK)

        clients = [connect(*each) for each in directory.items()]
        finds = {} if known is None else {"find": find, "connect": connect}
        config = RoutingConfig(**limits)
        placer = LeastWorkPlacer(clients, config, **finds)  # type: ignore[arg-type]
        try:
            async with started(placer) as backend:
                if known is None:
                    await body(backend, fakes)
                else:
                    directory["prefill-0"] = "tcp:127.0.0.1:1"  # of the other pipeline
                    await body(backend, fakes, directory)
        finally:
            for fake in fakes:
                await fake.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def with_ranks(ranks: int = 1, **options: Any) -> Callable[[Body], Callable[..., None]]:
    """Return a decorator that runs a coroutine test with `run_ranks`."""

    def decorate(test: Body) -> Callable[..., None]:
        signature = inspect.signature(test)
        given = 3 if "directory" in signature.parameters else 2

        def run(**parameters: Any) -> None:
            run_ranks(lambda *args: test(*args[:given], **parameters), ranks, **options)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[given:]
        )
        return run

    return decorate
