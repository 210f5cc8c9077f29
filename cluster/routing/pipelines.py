"""Both pipelines behind the API: each request goes to the one that is made for it, if it is there.

What is read from the logits of one pass (no sampling, or at most one token) is the prefill
workers'; what generates is the attention ranks'. Where only one is deployed it does both.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from cluster.routing.backend import Backend
from cluster.routing.dispatcher import Dispatcher
from cluster.routing.prefill_router import PrefillRouter
from contracts.messages import Finished, Scored, Submit, Tokens

POLL_S = 0.1


class Pipeline(Backend, Protocol):
    """A backend with a life of its own."""

    def start(self) -> None: ...

    async def close(self) -> None: ...

    async def wait_ready(self) -> None: ...

    @property
    def serves(self) -> bool: ...


class Pipelines:
    """The API's backend. At least one of the two is given."""

    def __init__(self, dispatcher: Dispatcher | None, prefill: PrefillRouter | None) -> None:
        pipelines: list[Pipeline | None] = [dispatcher, prefill]
        self._deployed = [pipeline for pipeline in pipelines if pipeline is not None]
        if not self._deployed:
            raise ValueError("neither attention ranks nor prefill workers")
        self._generating = self._deployed[0]
        self._prefilling = self._deployed[-1]

    def start(self) -> None:
        for pipeline in self._deployed:
            pipeline.start()

    async def close(self) -> None:
        for pipeline in self._deployed:
            await pipeline.close()

    async def wait_ready(self) -> None:
        """Returns once every rank of every pipeline takes requests."""
        await asyncio.gather(*(pipeline.wait_ready() for pipeline in self._deployed))

    async def wait_serving(self, patience_s: float) -> None:
        """Returns once every rank takes requests; after patience_s, one of each pipeline is
        enough."""
        try:
            async with asyncio.timeout(patience_s):
                await self.wait_ready()
        except TimeoutError:
            while not all(pipeline.serves for pipeline in self._deployed):
                await asyncio.sleep(POLL_S)

    def pool_tokens(self, *, prefill: bool) -> int | None:
        pipeline = self._prefilling if prefill else self._generating
        return pipeline.pool_tokens(prefill=prefill)

    def problems(self) -> list[str]:
        return [problem for pipeline in self._deployed for problem in pipeline.problems()]

    def waiting(self) -> Mapping[tuple[str, str], int]:
        total: Counter[tuple[str, str]] = Counter()
        for pipeline in self._deployed:
            total.update(pipeline.waiting())
        return total

    def generate(
        self, submit: Submit, *, patient: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        pipeline = self._prefilling if submit.prefill_only else self._generating
        return pipeline.generate(submit, patient=patient)

    async def score(self, submit: Submit, *, patient: bool = False) -> Scored:
        return await self._prefilling.score(submit, patient=patient)
