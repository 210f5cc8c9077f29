"""Both pipelines behind the API: each request goes to the one that is made for it, if it is there.

What is read from the logits of one pass (no sampling, or at most one token) is the prefill
workers'; what generates is the attention ranks'. Where only one is deployed it does both.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any

from cluster.routing.pipeline_backend import PipelineBackend
from contracts.messages import Finished, Scored, Submit, Tokens

POLL_S = 0.1


class Pipelines:
    """The API's backend. At least one of the two is given."""

    def __init__(
        self, generating: PipelineBackend | None, prefilling: PipelineBackend | None
    ) -> None:
        both = (generating, prefilling)
        self._deployed = [admission for admission in both if admission is not None]
        if not self._deployed:
            raise ValueError("neither attention ranks nor prefill workers")
        self._generating = self._deployed[0]
        self._prefilling = self._deployed[-1]

    def start(self) -> None:
        for admission in self._deployed:
            admission.start()

    async def close(self) -> None:
        for admission in self._deployed:
            await admission.close()

    async def wait_ready(self) -> None:
        """Returns once every rank of every pipeline takes requests."""
        await asyncio.gather(*(admission.wait_ready() for admission in self._deployed))

    async def wait_serving(self, all_ready_timeout_s: float) -> None:
        """Returns once every rank takes requests; after patience_s, one of each pipeline is
        enough."""
        try:
            async with asyncio.timeout(all_ready_timeout_s):
                await self.wait_ready()
        except TimeoutError:
            while not all(admission.is_serving for admission in self._deployed):
                await asyncio.sleep(POLL_S)

    def pool_tokens(self, *, prefill: bool) -> int | None:
        return (self._prefilling if prefill else self._generating).pool_tokens(prefill=prefill)

    def problems(self) -> list[str]:
        return [problem for admission in self._deployed for problem in admission.problems()]

    def waiting(self) -> Mapping[tuple[str, str], int]:
        total: Counter[tuple[str, str]] = Counter()
        for admission in self._deployed:
            total.update(admission.waiting())
        return total

    def generate(
        self, submit: Submit, *, wait_for_slot: bool = False
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        admission = self._prefilling if submit.prefill_only else self._generating
        return admission.generate(submit, wait_for_slot=wait_for_slot)

    def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Coroutine[Any, Any, Scored]:
        return self._prefilling.score(submit, wait_for_slot=wait_for_slot)
