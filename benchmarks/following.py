"""What it costs streams that experts move beside them: token times while moves follow each other
without a pause, against none.

    python -m benchmarks.following                     (about 4 minutes)
    python -m benchmarks.following --backend tcp --experts 4

An attention and two expert ranks, each a process. Segments with and without moves in turns, the
same prompts in each; their tokens are held against each other. A move exchanges some experts of
every layer between the two ranks, which take them from each other at placement.bytes_per_s; the
next one, back, is proposed when both have let go of the last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.channels.authenticated_server import AuthenticatedServer
from actors.channels.handshake import Identity, Remote
from benchmarks.harness import record
from benchmarks.pinned_batches import bench_client
from benchmarks.random_checkpoint import MEDIUM, write_random_checkpoint
from benchmarks.rank_stream import open_stream
from cluster.routing.rank_client import RankClient
from contracts.errors import TandemError
from contracts.frames import encode_frame, read_frame
from contracts.loading import load_config
from contracts.messages import Failed, Submit, Tokens
from contracts.placement import Placement
from contracts.planner_messages import (
    MAX_PLANNER_FRAME_BYTES,
    CurrentPlacement,
    MoveOutcome,
    PlacementProposal,
    PlacementReport,
    ToPlanner,
)
from contracts.requests import Sampling
from models.spec.model import read_spec
from planner.placement.slots import contiguous
from tests.support.local_group import LocalGroup

_CALL_S, _MOVE_S, PROMPT_TOKENS = 60.0, 60.0, 32
STILL, MOVING = "still", "moving"
EXPERT_RANKS = "expert-0", "expert-1"


class Mover:
    """A planner of two placements in turns. loaded_bytes, moves: so far."""

    def __init__(self, token: bytes, base: Placement, experts: int) -> None:
        self._turns = base, exchanged(base, experts)
        self._generation = base.generation
        identity = Identity(name="planner-0", token=token, epoch=None)
        self._door = AuthenticatedServer(identity, answer=lambda _: b"", serve=self._serve)
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._ends: asyncio.Queue[PlacementReport] = asyncio.Queue()
        self.loaded_bytes = self.moves = 0
        self.seconds: list[float] = []

    def open(self) -> str:
        return self._door.open("127.0.0.1")

    async def close(self) -> None:
        await self._door.close(1.0)

    async def joined(self, ranks: int) -> None:
        end_s = time.monotonic() + _CALL_S
        while len(self._writers) < ranks:
            if time.monotonic() > end_s:
                raise TandemError(f"{len(self._writers)} of {ranks} expert ranks have joined")
            await asyncio.sleep(0.01)

    async def move(self) -> None:
        """One, to its end. Raises TandemError where it fails."""
        self._generation += 1
        start_s = time.perf_counter()
        target = self._turns[self.moves % 2 == 0]
        proposal = PlacementProposal(msgspec.structs.replace(target, generation=self._generation))
        for writer in self._writers.values():
            writer.write(encode_frame(msgspec.msgpack.encode(proposal)))
        left = set(self._writers)
        while left:
            end = await asyncio.wait_for(self._ends.get(), _MOVE_S)
            if end.outcome is MoveOutcome.FAILED:
                raise TandemError(f"{end.rank}: {end.reason}")
            if end.outcome is MoveOutcome.RETIRED:
                left.discard(end.rank)
                self.loaded_bytes += end.loaded_bytes
        self.moves += 1
        self.seconds.append(time.perf_counter() - start_s)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: Remote
    ) -> None:
        with contextlib.suppress(EOFError):  # it is stopped
            while True:
                body = await read_frame(reader, MAX_PLANNER_FRAME_BYTES)
                message = msgspec.msgpack.decode(body, type=ToPlanner)
                if isinstance(message, CurrentPlacement):
                    self._writers[message.rank] = writer
                elif isinstance(message, PlacementReport):
                    self._ends.put_nowait(message)


def exchanged(base: Placement, experts: int) -> Placement:
    """So many experts of each layer stand on the other rank."""
    first, _ = base.slot_bounds[1]
    lines = []
    for line in base.expert_of_slot:
        slots = list(line)
        if slots:
            slots[:experts], slots[first : first + experts] = (
                slots[first : first + experts],
                slots[:experts],
            )
        lines.append(tuple(slots))
    return msgspec.structs.replace(base, expert_of_slot=tuple(lines))


async def segment(
    client: RankClient, prompts: list[list[int]], tokens: int
) -> tuple[list[float], list[list[int]]]:
    """(milliseconds between tokens of each stream, all in one list; the streams' tokens)."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    async def one(ids: list[int]) -> tuple[list[float], list[int]]:
        stream = await open_stream(client, Submit(request_id=0, token_ids=ids, sampling=sampling))
        times_s, found = list[float](), list[int]()
        async for event in stream:
            if isinstance(event, Failed):
                raise TandemError(event.message)
            if isinstance(event, Tokens):
                times_s.append(time.perf_counter())
                found += event.token_ids
        return [1e3 * (b - a) for a, b in itertools.pairwise(times_s)], found

    streams = await asyncio.gather(*map(one, prompts))
    return [ms for times_ms, _ in streams for ms in times_ms], [found for _, found in streams]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-") as name:
        folder = write_random_checkpoint(Path(name) / "model", MEDIUM)
        spec = read_spec(folder)
        base = contiguous(
            spec.num_experts, 2, num_layers=spec.num_layers, moe_layers=spec.moe_layers
        )
        config = load_config(
            None,
            [
                "model.dtype=float32",
                "groups.attention_ranks=1",
                "groups.expert_ranks=2",
                "kv.pool_tokens=16384",
                "kv.prefix_cache=false",
                "planner.enabled=false",
                "placement.rebalance=continuous",
                f"placement.bytes_per_s={options.bytes_per_s}",
            ],
        )
        with LocalGroup(str(folder), config, backend=options.backend) as group:
            return await measure(group, base, options)


async def measure(
    group: LocalGroup, base: Placement, options: argparse.Namespace
) -> dict[str, Any]:
    ((name, address),) = group.client_addresses.items()
    client = await bench_client(name, address, group.token, heartbeat_timeout_s=30.0)
    mover = Mover(group.token, base, options.experts)
    at = mover.open()
    for process in group.processes.values():
        await asyncio.to_thread(process.call("join_planner", at).result, _CALL_S)
    await mover.joined(2)
    rng = np.random.default_rng(options.seed)
    prompts = [
        rng.integers(3, MEDIUM["vocab_size"], PROMPT_TOKENS).tolist()
        for _ in range(options.streams)
    ]
    expected: list[list[int]] = []
    samples: dict[str, Any] = {STILL: [], MOVING: [], "rss_mb": []}
    for turn in range(2 * options.rounds + 2):  # the first two warm up
        variant = (STILL, MOVING)[(turn + turn // 2) % 2]
        times_ms, found = await (
            _moving(client, prompts, options, mover)
            if variant == MOVING
            else segment(client, prompts, options.tokens)
        )
        expected = expected or found
        if found != expected:
            raise TandemError(f"other tokens than before, {variant}")
        if turn >= 2:
            samples[variant].append(times_ms)
        if variant == MOVING:
            samples["rss_mb"].append([_rss_mb(group, rank) for rank in EXPERT_RANKS])
    await client.close()
    await mover.close()
    return {
        **samples,
        "moves": mover.moves,
        "loaded_bytes": mover.loaded_bytes,
        "move_s": mover.seconds,
    }


def _rss_mb(group: LocalGroup, rank: str) -> float:
    """Resident memory of its process."""
    status = Path(f"/proc/{group.processes[rank].pid}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1e3, 1)


async def _moving(
    client: RankClient, prompts: list[list[int]], options: argparse.Namespace, mover: Mover
) -> tuple[list[float], list[list[int]]]:
    streaming = asyncio.create_task(segment(client, prompts, options.tokens))
    while not streaming.done():
        await mover.move()
    return await streaming


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Of the times between tokens; ratios: moving over still, pair by pair."""
    found: dict[str, Any] = {}
    for variant in (STILL, MOVING):
        every = [ms for times_ms in samples[variant] for ms in times_ms]
        found[variant] = {
            f"p{q}_ms": round(float(np.percentile(every, q)), 3) for q in (50, 90, 99)
        } | {"mean_ms": round(statistics.fmean(every), 3)}
    for q in (50, 99):
        ratios = [
            np.percentile(moving, q) / np.percentile(still, q)
            for still, moving in zip(samples[STILL], samples[MOVING], strict=True)
        ]
        found[f"p{q} ratio, pairs"] = {
            "median": round(float(np.median(ratios)), 3),
            "p10": round(float(np.percentile(ratios, 10)), 3),
            "p90": round(float(np.percentile(ratios, 90)), 3),
        }
        found[f"p{q} ratio, all"] = round(found[MOVING][f"p{q}_ms"] / found[STILL][f"p{q}_ms"], 3)
    found["moves"], found["loaded_bytes"] = samples["moves"], samples["loaded_bytes"]
    found["rss_mb after first, last"] = [samples["rss_mb"][0], samples["rss_mb"][-1]]
    found["move_s, median"] = round(statistics.median(samples["move_s"]), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream in a segment")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8, help="of a layer that change their rank")
    parser.add_argument("--bytes-per-s", type=float, default=100e6)
    parser.add_argument("--backend", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    samples = asyncio.run(run(options))
    found = summary(samples)
    for name, value in found.items():
        print(name, value)
    record("following", options, samples, found)


if __name__ == "__main__":
    main()
