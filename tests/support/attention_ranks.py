"""Tests with fake attention ranks on real sockets and a pipeline backend in front of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cluster.routing.least_work_placer import Choose, LeastWorkPlacer, least_work
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import RoutingConfig
from contracts.messages import Submit
from tests.support.api_harness import ME, QUICK
from tests.support.fake_rank import FakeRank

Body = Callable[..., Coroutine[Any, Any, None]]
Directory = dict[str, str]
LIMIT_S = 20.0


def counted_on(submit: Submit) -> list[int]:
    """A model whose next token is the number of tokens."""
    return list(range(len(submit.token_ids), len(submit.token_ids) + 100))


def run_ranks(
    body: Body,
    ranks: int = 1,
    *,
    waiting: int = 0,
    known: int | None = None,
    path: Path | None = None,
    choose: Choose = least_work,
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
        addresses = {f.name: await f.listen(str(path / f.name) if path else None) for f in fakes}
        directory = dict(list(addresses.items())[:known])

        async def find(_: Directory) -> Directory:
            return directory

        def connect(name: str, address: str) -> RankClient:
            return RankClient(name, address, ME, QUICK)

        clients = [connect(*each) for each in directory.items()]
        finds = {} if known is None else {"find": find, "connect": connect}
        config = RoutingConfig(**limits)
        backend = PipelineBackend(LeastWorkPlacer(clients, config, choose, **finds))  # type: ignore[arg-type]
        backend.start()
        try:
            await backend.wait_ready()
            if known is None:
                await body(backend, fakes)
            else:
                directory["prefill-0"] = "tcp:127.0.0.1:1"  # of the other pipeline
                await body(backend, fakes, directory)
        finally:
            await backend.close()
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
