"""Load over streaming HTTP: what a client of the server sees."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import httpx

from benchmarks.load.outcome import Outcome
from contracts.clock import monotonic_s

WORDS = ["the", "of", "and", "to", "in", "that", "was", "his", "it", "with", "is", "for"]


class HttpGenerator:
    """Sends completions. comes_back: a client that is refused waits as it is told, once."""

    def __init__(self, url: str, model: str, seed: int, *, comes_back: bool = False) -> None:
        self._url, self._model = url, model
        self._rng = random.Random(seed)
        self._comes_back = comes_back
        self.again: list[Outcome] = []  # what became of those who came back

    async def run(self, outcomes: Sequence[Outcome], timeout_s: float) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=timeout_s, limits=limits
        ) as client:
            start_s, tasks = monotonic_s(), []
            for outcome in outcomes:
                delay_s = start_s + outcome.arrival.at_s - monotonic_s()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                tasks.append(asyncio.create_task(self._one(client, outcome, start_s)))
            await asyncio.gather(*tasks)

    async def _one(self, client: httpx.AsyncClient, outcome: Outcome, start_s: float) -> None:
        arrival = outcome.arrival
        body = {
            "model": self._model,
            "prompt": " ".join(self._rng.choices(WORDS, k=arrival.lengths.prompt)),
            "max_tokens": arrival.lengths.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "priority": arrival.priority.label,
        }
        await self._send(client, body, outcome, start_s)
        if outcome.retry_s is not None and self._comes_back:
            await asyncio.sleep(outcome.retry_s)
            again = Outcome(arrival._replace(at_s=monotonic_s() - start_s))
            self.again.append(again)
            await self._send(client, body, again, start_s)

    async def _send(
        self, client: httpx.AsyncClient, body: dict[str, object], outcome: Outcome, start_s: float
    ) -> None:
        outcome.sent_s = monotonic_s() - start_s
        times: list[float] = []
        is_whole = False
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    outcome.error = f"{response.status_code}"
                    if "retry-after" in response.headers:
                        outcome.retry_s = float(response.headers["retry-after"])
                    await response.aread()
                    return
                async for line in response.aiter_lines():
                    is_whole = is_whole or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        if '"error"' in line:
                            outcome.error = line[:200]
                        times.append(monotonic_s() - start_s)
        except httpx.HTTPError as error:
            outcome.error = type(error).__name__
        if not is_whole and not outcome.error:
            outcome.error = "the answer has no end"
        outcome.end_s = monotonic_s() - start_s
        outcome.tokens_s = times
