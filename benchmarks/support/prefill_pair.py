"""Two prefill workers, each in a network namespace and on a core of its own, and batches on both at
once."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from actors.channels.handshake import new_token
from actors.ranks.rendezvous import GroupSpec, Seat, contiguous_placements, form_group, make_specs
from benchmarks.support.pinned_batches import CANDIDATES, bench_client, pin_to_core
from benchmarks.support.rank_stream import open_stream
from benchmarks.support.two_nodes import HEAD, OTHER, TwoNodes
from cluster.routing.rank_client import RankClient
from contracts.loading import load_config
from contracts.messages import Scored, Submit
from contracts.ranks import RankStatus
from contracts.traces import Stage, TaskSpan
from tests.support.rank_process import RankProcess

_HEAD_START_S = 0.05
_CALL_S = 30.0
_SILENCE_S = 20.0  # times are measured here, not faults
_ATTEMPTS = 4
_COPIES = (Stage.GATHER, Stage.HOST_COPY)
_TRANSFERS = (*_COPIES, Stage.A2E, Stage.E2A)  # of no batch, or numbered by passes in lockstep


class Pass(NamedTuple):
    """One batch on one worker. gathers: copies of a layer's experts that ended within it, gather_s
    in all. wait_s: in which experts were waited for."""

    tokens: int
    pass_s: float
    wait_s: float
    gather_s: float
    gathers: int


class Round(NamedTuple):
    """Batches on both workers at once. cpu_s: of their processes, for `tokens` in all."""

    number: int
    passes: list[Pass]
    cpu_s: float
    tokens: int

    @property
    def pass_s(self) -> float:
        return statistics.mean(found.pass_s for found in self.passes)


class Pair:
    """Workers of one kind. Made by `start`; `close` ends their processes."""

    def __init__(self, processes: list[RankProcess], clients: list[RankClient]) -> None:
        self.processes, self.clients = processes, clients

    @staticmethod
    async def start(nodes: TwoNodes, folder: Path, max_batch_tokens: int, **prefill: Any) -> Pair:
        """prefill: keys of the configuration's section. Return after the reference pass of
        both."""
        settings = {"max_batch_tokens": max_batch_tokens, "max_batch_sequences": 1024, **prefill}
        config = load_config(
            None,
            [
                "model.dtype=float32",
                "kv.prefix_cache=false",
                f"kv.pool_tokens={3 * max_batch_tokens}",
                "groups.prefill_ranks=2",
                "channel.connect_timeout_s=60",
                f"channel.heartbeat_timeout_s={_SILENCE_S}",
                "trace.spans=4000",
                *(f"prefill.{key}={value}" for key, value in settings.items()),
            ],
        )
        token = new_token()
        placements = contiguous_placements(str(folder), prefill_ranks=2)
        group_spec = GroupSpec(config, str(folder), token, 1, "tcp", placements=placements)
        seats = [Seat("cpu", host, 1) for host in (HEAD, OTHER)]
        specs = make_specs(group_spec, [], [], prefill=seats)
        processes = [
            RankProcess(spec.name, inside=nodes.inside(rank)) for rank, spec in enumerate(specs)
        ]
        try:
            if os.cpu_count() == len(processes):
                for core, process in enumerate(processes):
                    pin_to_core(process.pid, core)
            ready = await asyncio.to_thread(form_group, specs, processes, timeout_s=180.0)
            clients = [
                await bench_client(w.name, w.client_address, token, heartbeat_timeout_s=_SILENCE_S)
                for w in ready
            ]
        except BaseException:
            for process in processes:
                process.close()
            raise
        return Pair(processes, clients)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        stopping = [
            process.call("stop") for process in self.processes
        ]  # neither is lost to the other
        await asyncio.to_thread(wait, stopping, _CALL_S)
        for process in self.processes:
            await asyncio.to_thread(process.close)

    def status(self, worker: int) -> RankStatus:
        answer: RankStatus = self.processes[worker].call("status").result(_CALL_S)
        return answer

    async def logits(self, worker: int, rows: Sequence[list[int]]) -> torch.Tensor:
        return torch.tensor([await self.score(worker, ids) for ids in rows])

    async def score(self, worker: int, ids: list[int]) -> list[float]:
        """One request. Raises RuntimeError if it fails."""
        submit = Submit(request_id=0, token_ids=ids, sampling=None, candidates=CANDIDATES)
        async for event in await open_stream(self.clients[worker], submit):
            if isinstance(event, Scored) and event.candidate_logits is not None:
                return list(event.candidate_logits)
            raise RuntimeError(f"the request failed: {event}")
        raise RuntimeError("the request ended without an answer")

    async def run(self, number: int, rows: Sequence[list[int]], batches: int) -> Round:
        """`batches` times the rows, as batches, on both workers at once; the passes that were just
        that. Raises RuntimeError if there were none."""
        tokens = sum(map(len, rows))
        for _ in range(_ATTEMPTS):
            works = (self._work(worker, rows, batches) for worker in (0, 1))
            cpu_s = sum(await asyncio.gather(*works))
            passes = [
                found
                for process in self.processes
                for found in passes_of(process.call("spans").result(_CALL_S), batches)
            ]
            exact = [found for found in passes if found.tokens == tokens]
            if len(exact) >= len(passes) - 1 > 0:
                return Round(number, exact, cpu_s, 2 * batches * tokens)
        raise RuntimeError(f"no batches of {tokens} tokens, but {[p.tokens for p in passes]}")

    def _cpu_s(self, worker: int) -> float:
        """That its process has used so far, in the kernel too."""
        used = psutil.Process(self.processes[worker].pid).cpu_times()
        return used.user + used.system

    async def _work(self, worker: int, rows: Sequence[list[int]], batches: int) -> float:
        """The batches' processor time. A row is sent ahead: while the worker is busy with it, the
        others all arrive."""
        ahead = asyncio.create_task(self.score(worker, rows[0]))
        await asyncio.sleep(_HEAD_START_S)
        scores = asyncio.gather(*(self.score(worker, ids) for _ in range(batches) for ids in rows))
        await ahead
        before_s = self._cpu_s(worker)
        await scores
        return self._cpu_s(worker) - before_s


def passes_of(spans: Sequence[TaskSpan], last: int) -> list[Pass]:
    """The latest `last` batches."""
    numbers = sorted({span.batch for span in spans if span.stage is Stage.ATTENTION})[-last:]
    return [_pass(spans, number) for number in numbers]


def _pass(spans: Sequence[TaskSpan], number: int) -> Pass:
    of_batch = [s for s in spans if s.batch == number and s.stage not in _TRANSFERS]
    start_s, end_s = min(s.start_s for s in of_batch), max(s.end_s for s in of_batch)
    gathers = [s for s in spans if s.stage in _COPIES and start_s < s.end_s <= end_s]
    return Pass(
        tokens=max(s.tokens for s in of_batch),
        pass_s=end_s - start_s,
        wait_s=sum(s.end_s - s.start_s for s in of_batch if s.stage is Stage.WAIT),
        gather_s=sum(s.end_s - s.start_s for s in gathers),
        gathers=len(gathers),
    )
