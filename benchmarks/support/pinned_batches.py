"""One batch at a time, of known sequences, under a given plan, on ranks that are each pinned to a
core."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from actors.channels.handshake import Identity
from benchmarks.support.rank_stream import open_stream
from cluster.routing.rank_client import RankClient, RankClientConfig
from contracts.messages import Scored, Submit
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan

_HEAD_START_S = 0.01
_ATTEMPTS = 5  # a busy rank may see the rows before it has begun with what is ahead of them


CANDIDATES = [0, 1, 2, 3]


class RanBatch(NamedTuple):
    """Spans of all ranks, and per sequence the logits of CANDIDATES after its last token."""

    spans: list[TaskSpan]
    logits: list[list[float]]


class BatchRunner:
    """Runs batches on one attention rank.

    pin: sets the plan of later batches; spans: what all ranks have recorded; both are called in
    threads. ahead_tokens: length of a sequence that is sent ahead of each batch.
    """

    def __init__(
        self,
        client: RankClient,
        pin: Callable[[Plan], None],
        spans: Callable[[], list[TaskSpan]],
        *,
        ahead_tokens: int = 256,
    ) -> None:
        self._client = client
        self._pin = pin
        self._spans = spans
        self._ahead_ids = [1] * ahead_tokens

    async def run(self, plan: Plan, rows: Sequence[list[int]]) -> RanBatch:
        """The sequences as one batch. Raises RuntimeError if they fail, or are never just one."""
        await asyncio.to_thread(self._pin, plan)
        for _ in range(_ATTEMPTS):
            logits = await self._answers(rows)
            spans = await asyncio.to_thread(self._spans)
            last = max(span.batch for span in spans)
            spans = [span for span in spans if span.batch == last and span.stage is not Stage.WAIT]
            tokens = sum(s.tokens for s in spans if s.stage is Stage.ATTENTION and s.layer == 0)
            if tokens == sum(map(len, rows)):
                return RanBatch(spans, logits)
        raise RuntimeError(f"the last batch had {tokens} tokens, not {sum(map(len, rows))}")

    async def _answers(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Logits of the rows. What is ahead of them keeps the rank busy until all have arrived:
        they then usually form one batch."""
        submits = [
            Submit(request_id=0, token_ids=ids, sampling=None, candidates=CANDIDATES)
            for ids in (self._ahead_ids, *rows)
        ]
        streams = [await open_stream(self._client, submits[0])]
        await asyncio.sleep(_HEAD_START_S)
        streams += [await open_stream(self._client, submit) for submit in submits[1:]]
        logits = []
        for stream in streams:
            async for event in stream:
                if not isinstance(event, Scored) or event.candidate_logits is None:
                    raise RuntimeError(f"the batch failed: {event}")
                logits.append(list(event.candidate_logits))
        return logits[1:]


async def bench_client(
    name: str, address: str, token: bytes, *, heartbeat_timeout_s: float = 2.0
) -> RankClient:
    """Return a client of the rank after its first batch."""
    me = Identity(name="bench", token=token, epoch=None)
    client = RankClient(
        name, address, me, RankClientConfig(heartbeat_timeout_s=heartbeat_timeout_s)
    )
    client.start()
    await client.wait_until(lambda ready: ready.problem is None)
    submit = Submit(request_id=0, token_ids=[1], sampling=None, candidates=CANDIDATES)
    async for _ in await open_stream(client, submit):
        pass
    return client


def pin_to_core(pid: int, core: int) -> None:
    """All threads of the process: affinity is a thread's, and new ones have their maker's."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), {core})
