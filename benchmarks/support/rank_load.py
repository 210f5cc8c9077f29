"""Requests with given arrival times, straight to one rank's socket, without an ingress."""

import asyncio
import itertools
import random
from collections.abc import Iterable, Sequence

from benchmarks.support.rank_stream import open_stream
from cluster.routing.rank_client import RankClient
from cluster.tools.bench.workload import RequestArrival, RequestResult, mean, percentile
from contracts.clock import monotonic_s
from contracts.messages import Failed, Submit, Tokens
from contracts.requests import Caller, Priority, Sampling


async def run_arrivals(
    client: RankClient,
    arrivals: Sequence[RequestArrival],
    seconds: float,
    *,
    vocabulary: int,
    seed: int,
    classless: bool,
) -> list[RequestResult]:
    """Send requests of random tokens for at least `seconds`; return once all have ended.

    classless: send all requests as LS.
    """
    dice, numbers, start_s = random.Random(seed), itertools.count(1), monotonic_s()

    async def send(outcome: RequestResult) -> None:
        arrival = outcome.arrival
        submit = Submit(
            request_id=0,
            token_ids=[dice.randrange(1, vocabulary) for _ in range(arrival.lengths.prompt)],
            sampling=Sampling(max_tokens=arrival.lengths.output, temperature=0.0, ignore_eos=True),
            priority=Priority.LS if classless else arrival.priority,
            caller=Caller(b"", next(numbers)),
        )
        outcome.sent_s = monotonic_s() - start_s
        async for event in await open_stream(client, submit):
            now_s = monotonic_s() - start_s
            if isinstance(event, Failed):
                outcome.error = event.message
            elif isinstance(event, Tokens):
                outcome.tokens_s += [now_s] * len(event.token_ids)
            outcome.end_s = now_s

    outcomes = [RequestResult(arrival) for arrival in arrivals]
    async with asyncio.TaskGroup() as tasks:
        for outcome in outcomes:
            await asyncio.sleep(max(0.0, start_s + outcome.arrival.at_s - monotonic_s()))
            tasks.create_task(send(outcome))
        await asyncio.sleep(max(0.0, start_s + seconds - monotonic_s()))
    return outcomes


def figures(outcomes: Iterable[RequestResult], priority: Priority) -> dict[str, float]:
    """Return the mean times of the requests of one class, and a quantile."""
    good = [each for each in outcomes if each.arrival.priority is priority and not each.error]
    ttfts = [1e3 * each.ttft_s for each in good]
    gaps = [1e3 * gap for each in good for gap in each.gaps_s]
    return {
        "ttft_ms": mean(ttfts),
        "ttft_p99_ms": percentile(ttfts, 0.99),
        "tbt_ms": mean(gaps),
        "turnaround_s": mean([each.turnaround_s for each in good]),
    }
