"""Load straight to a rank's socket: what the rank takes, without an ingress."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.support.rank_stream import open_stream
from cluster.routing.rank_client import RankClient
from cluster.tools.bench.outcome import RequestResult
from cluster.tools.bench.workload import Lengths, RequestArrival
from contracts.clock import monotonic_s
from contracts.messages import Failed, Submit, Tokens
from contracts.requests import Caller, Priority, Sampling

TOGETHER_S = 0.05


class Endless(NamedTuple):
    """So many requests of these lengths are open all the time."""

    open: int
    lengths: Lengths
    priority: Priority = Priority.BE


class Generator:
    """Sends requests of random tokens to one rank. classless: all as LS, whatever they are.

    tokens: computed for endless requests, by class; turnarounds_s: of those that have ended."""

    def __init__(
        self, client: RankClient, vocabulary: int, seed: int, *, classless: bool = False
    ) -> None:
        self._client = client
        self._vocabulary = vocabulary
        self._rng = random.Random(seed)
        self._classless = classless
        self._numbers = itertools.count(1)
        self._ending = False  # endless requests are followed by no others
        self._done: defaultdict[Priority, list[tuple[float, int]]] = defaultdict(list)
        self.tokens: Counter[Priority] = Counter()
        self.turnarounds_s: defaultdict[Priority, list[float]] = defaultdict(list)

    async def run(
        self, arrivals: Sequence[RequestArrival], seconds: float, endless: Sequence[Endless] = ()
    ) -> tuple[list[RequestResult], dict[Priority, float]]:
        """Every arrival's outcome, and tokens of endless requests per second while they came. It
        returns when all have ended."""
        start_s = monotonic_s()
        background = [
            asyncio.create_task(self._endlessly(each)) for each in endless for _ in range(each.open)
        ]
        outcomes = [RequestResult(arrival) for arrival in arrivals]
        tasks = []
        for outcome in outcomes:
            delay_s = start_s + outcome.arrival.at_s - monotonic_s()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            tasks.append(asyncio.create_task(self._one(outcome, start_s)))
        left_s = start_s + seconds - monotonic_s()
        if left_s > 0:
            await asyncio.sleep(left_s)
        per_second = {priority: per_second_of(self._done[priority]) for priority in Priority}
        self._ending = True
        await asyncio.gather(*tasks, *background)
        return outcomes, per_second

    def _submit(self, priority: Priority, lengths: Lengths) -> Submit:
        ids = [self._rng.randrange(1, self._vocabulary) for _ in range(lengths.prompt)]
        return Submit(
            request_id=0,
            token_ids=ids,
            sampling=Sampling(max_tokens=lengths.output, temperature=0.0, ignore_eos=True),
            priority=Priority.LS if self._classless else priority,
            caller=Caller(b"", next(self._numbers)),
        )

    async def _one(self, outcome: RequestResult, start_s: float) -> None:
        arrival = outcome.arrival
        submit = self._submit(arrival.priority, arrival.lengths)
        outcome.sent_s = monotonic_s() - start_s
        times: list[float] = []
        async for event in await open_stream(self._client, submit):
            now_s = monotonic_s() - start_s
            if isinstance(event, Failed):
                outcome.error = event.message
            elif isinstance(event, Tokens):
                times += [now_s] * len(event.token_ids)
            outcome.end_s = now_s
        outcome.tokens_s = times

    async def _endlessly(self, endless: Endless) -> None:
        priority, lengths = endless.priority, endless.lengths
        while not self._ending:
            began_s, prompt = monotonic_s(), lengths.prompt
            async for event in await open_stream(self._client, self._submit(priority, lengths)):
                if isinstance(event, Failed):
                    raise RuntimeError(event.message)
                if isinstance(event, Tokens):  # its prompt is computed by then
                    tokens, prompt = prompt + len(event.token_ids), 0
                    self.tokens[priority] += tokens
                    self._done[priority].append((monotonic_s(), tokens))
            self.turnarounds_s[priority].append(monotonic_s() - began_s)


def per_second_of(done: Sequence[tuple[float, int]]) -> float:
    """Tokens per second, from (seconds, tokens) as they were done: from one end of a batch to
    another. What is done within TOGETHER_S is of one batch, and that which runs when time is up
    counts for nothing, nor does its time."""
    if not done:
        return 0.0
    first_s, last_s = done[0][0], done[-1][0]
    later = sum(tokens for at_s, tokens in done if at_s > first_s + TOGETHER_S)
    return later / (last_s - first_s) if later else 0.0
