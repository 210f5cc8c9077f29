"""Several live batches in one executor, beside one at a time: what the engine gives before any
policy of priorities.

    python -m benchmarks.live_batches

"streamed": a prefill worker whose experts are copied for each layer, its batches far below the
saturation threshold, so that copies are exposed; requests come at random at multiples of what one
batch at a time can do. With several batches, all wait for one copy. "saturated": the same worker
with batches above the threshold, all requests at once: nothing is to be lost. "decode": 16
sequences on an attention and an expert rank, as one batch of 16, or as two of 8 in flight.

Variants take turns in every round, each in processes of its own; ratios are within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actors.ranks.rendezvous import (
    GroupSpec,
    Seat,
    contiguous_placements,
    form_group,
    make_specs,
)
from benchmarks.harness import record
from benchmarks.live_rank import ENVIRONMENT
from benchmarks.pinned_batches import CANDIDATES, bench_client
from benchmarks.random_checkpoint import MEDIUM, write_random_checkpoint
from benchmarks.rank_stream import open_stream
from cluster.routing.rank_client import RankClient
from contracts.clock import monotonic_s
from contracts.loading import load_config
from contracts.messages import Failed, Submit
from contracts.requests import Sampling
from tests.support.rank_process import RankProcess

ROW_TOKENS = 32
SMALL_BATCH, LARGE_BATCH = 64, 2048  # tokens; the threshold lies between
RATES = (1.0, 1.5, 3.0)  # of what one batch at a time can do
SEQUENCES, GENERATED = 16, 48
_TOKEN = b"benchmark token, of no secret"
_CALL_S, _READY_S = 60.0, 180.0


class Variant(NamedTuple):
    """live: batches, and within how many layers another one joins. overrides: of the
    configuration."""

    name: str
    live: tuple[int, int]
    overrides: Sequence[str]


class Ranks:
    """The processes of one variant, and a client of its first rank."""

    def __init__(self, folder: Path, variant: Variant, *, prefill: bool) -> None:
        groups = (0, 0, 1) if prefill else (1, 1, 0)
        names = ("attention_ranks", "expert_ranks", "prefill_ranks")
        sizes = [f"groups.{name}={size}" for name, size in zip(names, groups, strict=True)]
        config = load_config(None, [*sizes, *variant.overrides])
        placements = contiguous_placements(
            str(folder), expert_ranks=groups[1], prefill_ranks=groups[2]
        )
        group_spec = GroupSpec(config, str(folder), _TOKEN, 1, "shm", placements=placements)
        seats = [[Seat("cpu", "127.0.0.1", 1)] * size for size in groups]
        specs = make_specs(group_spec, seats[0], seats[1], prefill=seats[2])
        os.environ[ENVIRONMENT] = ",".join(map(str, variant.live))
        self._processes = [RankProcess(s.name, module="benchmarks.live_rank") for s in specs]
        self._ready = form_group(specs, self._processes, timeout_s=_READY_S)
        self.client: RankClient

    async def join(self) -> None:
        first = self._ready[0]
        self.client = await bench_client(
            first.name, first.client_address, _TOKEN, heartbeat_timeout_s=30.0
        )

    def threshold(self) -> float:
        status = self._processes[0].call("status").result(_CALL_S)
        return float(status.sections["work"]["saturation"])

    async def close(self) -> None:
        await self.client.close()
        for process in self._processes:
            process.call("stop").result(_CALL_S)
            process.close()


async def served(client: RankClient, rows: list[list[int]], gaps_s: list[float]) -> dict[str, Any]:
    """Rows sent after these gaps: rows/s from the first to the last answer, and latencies."""
    latencies_s: list[float] = []

    async def one(row: list[int]) -> None:
        began_s = monotonic_s()
        submit = Submit(request_id=0, token_ids=row, sampling=None, candidates=CANDIDATES)
        async for event in await open_stream(client, submit):
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
        latencies_s.append(monotonic_s() - began_s)

    start_s, waits = monotonic_s(), []
    for row, gap_s in zip(rows, gaps_s, strict=True):
        await asyncio.sleep(gap_s)
        waits.append(asyncio.create_task(one(row)))
    await asyncio.gather(*waits)
    return {
        "rows_per_s": len(rows) / (monotonic_s() - start_s),
        "p50_ms": 1e3 * statistics.median(latencies_s),
        "mean_ms": 1e3 * statistics.mean(latencies_s),
    }


async def decoded(client: RankClient, prompts: list[list[int]]) -> float:
    """Tokens/s of all sequences together."""
    sampling = Sampling(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)

    async def one(ids: list[int]) -> None:
        async for event in await open_stream(
            client, Submit(request_id=0, token_ids=ids, sampling=sampling)
        ):
            if isinstance(event, Failed):
                raise RuntimeError(event.message)

    start_s = monotonic_s()
    await asyncio.gather(*(one(ids) for ids in prompts))
    return len(prompts) * GENERATED / (monotonic_s() - start_s)


def random_rows(generator: random.Random, count: int, tokens: int = ROW_TOKENS) -> list[list[int]]:
    return [[generator.randrange(1, MEDIUM["vocab_size"]) for _ in range(tokens)]
            for _ in range(count)]  # fmt: skip


async def prefill_rounds(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    common = ["prefill.experts=streamed", "kv.prefix_cache=false", "kv.pool_tokens=16384"]
    small = [*common, f"prefill.max_batch_tokens={SMALL_BATCH}"]
    large = [*common, f"prefill.max_batch_tokens={LARGE_BATCH}"]
    variants = [
        Variant("one", (1, 0), small),
        Variant("several", (options.live, options.within), small),
        Variant("one, saturated", (1, 0), large),
        Variant("several, saturated", (options.live, options.within), large),
    ]
    ranks = {v.name: Ranks(folder, v, prefill=True) for v in variants}
    for each in ranks.values():
        await each.join()
    generator = random.Random(1)
    burst = [0.0] * options.rows
    capacity = (await served(ranks["one"].client, random_rows(generator, options.rows), burst))[
        "rows_per_s"
    ]
    samples: dict[str, Any] = {"threshold": ranks["one, saturated"].threshold()}
    for number in range(options.rounds):
        for rate in (*RATES, None):
            rows = random_rows(generator, options.rows)
            expected_s = 0.0 if rate is None else 1.0 / (rate * capacity)
            gaps_s = [expected_s and generator.expovariate(1 / expected_s) for _ in rows]
            for name in ("one", "several") if number % 2 else ("several", "one"):
                client = ranks[name if rate else f"{name}, saturated"].client
                measured = await served(client, rows, gaps_s)
                for key, value in measured.items():
                    series = samples.setdefault(_series(name, rate), {})
                    series.setdefault(key, []).append(round(value, 3))
    for each in ranks.values():
        await each.close()
    return samples


def _series(name: str, rate: float | None) -> str:
    return f"{name}, saturated" if rate is None else f"{name} {rate}"


async def decode_rounds(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    half = SEQUENCES // 2
    variants = [
        Variant("1 x 16", (1, 0), [f"schedule.max_batch_sequences={SEQUENCES}"]),
        Variant("2 x 8", (2, 1 << 10), [f"schedule.max_batch_sequences={half}"]),
        Variant("1 x 8", (1, 0), [f"schedule.max_batch_sequences={half}"]),
    ]
    ranks = {v.name: Ranks(folder, v, prefill=False) for v in variants}
    for each in ranks.values():
        await each.join()
    generator = random.Random(2)
    samples: dict[str, list[float]] = {v.name: [] for v in variants}
    for number in range(options.rounds):
        prompts = random_rows(generator, SEQUENCES)
        for variant in variants if number % 2 else reversed(variants):
            rate = await decoded(ranks[variant.name].client, prompts)
            samples[variant.name].append(round(rate, 1))
    for each in ranks.values():
        await each.close()
    return samples


def ratios(of: Sequence[float], to: Sequence[float]) -> str:
    pairs = sorted(a / b for a, b in zip(of, to, strict=True))
    return f"{statistics.median(pairs):.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rows", type=int, default=96, help="requests of a round")
    parser.add_argument("--live", type=int, default=4, help="batches of a streamed worker")
    parser.add_argument("--within", type=int, default=2, help="layers within which a batch joins")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_checkpoint(Path(folder) / "model", MEDIUM)
        prefill = asyncio.run(prefill_rounds(model, options))
        decode = asyncio.run(decode_rounds(model, options))
    summary: dict[str, Any] = {}
    for rate in (*RATES, None):
        one, several = (prefill[_series(name, rate)] for name in ("one", "several"))
        what = "saturated" if rate is None else f"streamed, rate {rate}"
        for key in ("rows_per_s", "mean_ms"):
            summary[f"{what}, {key}: several over one"] = ratios(several[key], one[key])
    summary["decode, tokens/s: 2 x 8 over 1 x 16"] = ratios(decode["2 x 8"], decode["1 x 16"])
    summary["decode, tokens/s: 2 x 8 over 1 x 8"] = ratios(decode["2 x 8"], decode["1 x 8"])
    for what, ratio in summary.items():
        print(f"{what:55} {ratio}")
    record("live_batches", options, {"prefill": prefill, "decode": decode}, summary)


if __name__ == "__main__":
    main()
