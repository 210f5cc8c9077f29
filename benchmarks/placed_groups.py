"""Groups of ranks whose experts stand in different places, up at once, and rounds of equal batches
on them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from actors.planning.planner_inputs import layer_routing
from actors.ranks.rendezvous import GroupSpec, Seat, contiguous_placements, form_group, make_specs
from benchmarks.pinned_batches import CANDIDATES, bench_client
from benchmarks.placement.traces import BUNDLED
from benchmarks.rank_stream import RankStream, open_stream
from benchmarks.two_nodes import HEAD, OTHER, TwoNodes
from cluster.routing.rank_client import RankClient
from contracts.config import TandemConfig
from contracts.loading import load_config
from contracts.messages import Scored, Submit
from contracts.placement import Placement
from contracts.ranks import Group, RankStatus
from contracts.traces import Stage, TaskSpan
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import ModelSpec
from planner.placement.solve import solve_layer
from tests.support.rank_process import RankProcess

CALL_S, READY_S = 30.0, 120.0
HOST = "127.0.0.1"
QUARTER = 1.25
AHEAD_TOKENS, HEAD_START_S = 1024, 0.01
MOST_WARM = 16  # rounds

Chunks = list[tuple[int, int]]


class Running(NamedTuple):
    """A group that is up."""

    attention: RankProcess
    client: RankClient
    ranks: Sequence[RankProcess] = ()  # the attention rank first

    def bytes_moved(self) -> tuple[int, int]:
        status: RankStatus = self.attention.call("status").result(CALL_S)
        moved = status.sections["channel_bytes"]
        return int(moved["sent"]), int(moved["received"])

    async def run(self, rows: Sequence[list[int]]) -> None:
        await _answered([await self.open_stream(row) for row in rows])

    async def open_stream(self, row: list[int]) -> RankStream:
        submit = Submit(request_id=0, token_ids=row, sampling=None, candidates=CANDIDATES)
        return await open_stream(self.client, submit)


async def _answered(streams: Iterable[RankStream]) -> None:
    for stream in streams:
        async for event in stream:
            if not isinstance(event, Scored):
                raise RuntimeError(f"a row failed: {event}")


def placements_of(spec: ModelSpec, counts: RoutingCounts, ranks: int) -> dict[str, Placement]:
    """By name."""
    in_order = contiguous_placements(str(BUNDLED), expert_ranks=ranks)[Group.EXPERT]
    each = spec.num_experts // ranks
    return {
        "contiguous": in_order,
        "placed": _solved(spec, counts, [each] * ranks),
        "replicas": _solved(spec, counts, [round(each * QUARTER)] * ranks),
    }


def _solved(spec: ModelSpec, counts: RoutingCounts, slots: Sequence[int]) -> Placement:
    def layer(number: int) -> tuple[int, ...]:
        if number not in spec.moe_layers:
            return ()
        return tuple(map(int, solve_layer(layer_routing(counts, number), slots).expert_of_slot))

    return Placement(
        num_experts=spec.num_experts,
        slots_per_rank=tuple(slots),
        expert_of_slot=tuple(map(layer, range(spec.num_layers))),
    )


@contextlib.asynccontextmanager
async def groups(
    options: argparse.Namespace, placements: dict[str, Placement], nodes: TwoNodes | None
) -> AsyncIterator[dict[str, Running]]:
    """One of each placement, up at once."""
    async with contextlib.AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(
                _group(_config(options, placement.ranks), placement, nodes)
            )
            for name, placement in placements.items()
        }


def _config(options: argparse.Namespace, ranks: int) -> TandemConfig:
    return load_config(
        None,
        [
            "model.dtype=bfloat16",
            f"groups.expert_ranks={ranks}",
            "kv.prefix_cache=false",
            "kv.pool_tokens=32768",
            f"schedule.max_batch_tokens={options.batch_tokens}",
            "schedule.max_batch_sequences=256",
            "priority.preempt=false",
        ],
    )


@contextlib.asynccontextmanager
async def _group(
    config: TandemConfig, placement: Placement, nodes: TwoNodes | None
) -> AsyncIterator[Running]:
    backend, here, there = ("tcp", HEAD, OTHER) if nodes else ("shm", HOST, HOST)
    token = secrets.token_bytes(32)
    group_spec = GroupSpec(
        config, str(BUNDLED), token, 1, backend, placements={Group.EXPERT: placement}
    )
    seats = [Seat("cpu", there, 1)] * placement.ranks
    specs = make_specs(group_spec, [Seat("cpu", here, 1)], seats)
    handles = []
    try:
        for spec in specs:
            away = nodes is not None and spec.group is Group.EXPERT
            inside = nodes.inside(1) if away and nodes is not None else ()
            handles.append(RankProcess(spec.name, inside=inside))
        ready = form_group(specs, handles, timeout_s=READY_S)
        first = ready[0]
        client = await bench_client(
            first.name, first.client_address, token, heartbeat_timeout_s=CALL_S
        )
        try:
            yield Running(handles[0], client, handles)
        finally:
            await client.close()
    finally:
        for handle in handles:
            handle.close(CALL_S)


def batches_of(lengths: Sequence[int], batch_tokens: int) -> list[Chunks]:
    """As a scheduler fills them: in order, a row that does not fit is cut."""
    batches, room = [Chunks()], batch_tokens
    for length in lengths:
        done = 0
        while done < length:
            if room == 0:
                batches.append([])
                room = batch_tokens
            take = min(room, length - done)
            batches[-1].append((done, done + take))
            done, room = done + take, room - take
    return batches


class Ran(NamedTuple):
    """Seconds: of the batches together; of CPU time of the attention rank, of the busiest expert
    rank and of all of them; that the attention rank waited for a core. From the first row on."""

    whole_s: float
    attention_s: float
    expert_s: float
    experts_s: float
    waited_s: float


async def warm(
    running: Iterable[Running], rows: Sequence[list[int]], tokens: Sequence[int]
) -> None:
    """Until it is long ago that requests of several clients shared a batch."""
    for group in running:
        for _ in range(MOST_WARM):
            if await ran(group, rows, tokens) is not None:
                break


async def ran(group: Running, rows: Sequence[list[int]], tokens: Sequence[int]) -> Ran | None:
    """A row of AHEAD_TOKENS tokens, then the rows: until it is through all of them have come, and
    batches are formed of them in order. None where these had other numbers of tokens."""
    begin_s, pids = time.monotonic(), [handle.pid for handle in group.ranks]
    begun, waited_before_s = list(map(_cpu_s, pids)), _waited_s(pids[0])
    streams = [await group.open_stream([1] * AHEAD_TOKENS)]
    await asyncio.sleep(HEAD_START_S)
    await _answered([*streams, *[await group.open_stream(row) for row in rows]])
    used = [after - before for before, after in zip(begun, map(_cpu_s, pids), strict=True)]
    waited_s = _waited_s(pids[0]) - waited_before_s
    spans = [
        span
        for handle in group.ranks
        for span in handle.call("spans").result(CALL_S)
        if span.start_s >= begin_s and span.stage not in (Stage.WAIT, Stage.A2E, Stage.E2A)
    ]
    first, *others = sorted({span.batch for span in spans})
    formed = [sum(s.tokens for s in spans if _embeds(s) and s.batch == n) for n in others]
    if formed != list(tokens):
        return None
    ended_s = max(span.end_s for span in spans if span.batch == first)
    whole_s = max(span.end_s for span in spans) - ended_s
    # What went ahead ran in that time, too.
    part = whole_s / (max(span.end_s for span in spans) - min(span.start_s for span in spans))
    attention_s, *experts_s = (part * each for each in used)
    return Ran(whole_s, attention_s, max(experts_s), sum(experts_s), part * waited_s)


def _cpu_s(pid: int) -> float:
    """That the process has run so far, all threads."""
    return sum(run for run, _ in _scheduled(pid)) / 1e9


def _waited_s(pid: int) -> float:
    """That its threads could have run, and had no core."""
    return sum(waited for _, waited in _scheduled(pid)) / 1e9


def _scheduled(pid: int) -> list[tuple[int, int]]:
    """Of each thread, in ns."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return [(int(run), int(waited)) for run, waited, _ in map(str.split, texts)]


def _embeds(span: TaskSpan) -> bool:
    return span.stage is Stage.ATTENTION and span.layer == 0
