"""CPU time of a routing decision with 100,000 cached blocks on 8 workers.

    python -m benchmarks router_decision

100,000 blocks are cached on 8 workers. A decision looks up the prompt's blocks, chooses, and books
what it adds; hashing the prompt is not in it (`hash` times that). Each sample is another prompt.
The thread's CPU time, so that other processes on the machine do not count.
"""

import argparse
import gc
import os
import random
import time
from typing import Any

import numpy as np

from benchmarks.cases.router_simulation import qwen3_235b
from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.router_workloads import BLOCK_TOKENS
from contracts.requests import DIGEST_BYTES, chain_hashes
from contracts.routing_messages import Prompt, RequestKey, WorkerReport
from planner.routing.backlog import Backlog, HeldRequest
from planner.routing.open_requests import flops_work
from planner.routing.router import Router, RouterConfig
from planner.routing.worker_state import SaturationConfig
from tests.support.paper_routing import route_unsaturated

WORKERS = 8
CHAIN_BLOCKS = 100
SIZES = {
    "64 tokens, nothing cached": (64, 0),
    "640 tokens, half cached": (640, 20),
    "1,600 tokens, 90% cached": (1_600, 90),
    "6,400 tokens, nothing cached": (6_400, 0),
    "16,000 tokens, 10% cached": (16_000, 100),
}  # prompt tokens, cached blocks


def filled_router(blocks: int, rng: random.Random) -> tuple[Router, list[list[bytes]]]:
    """A router whose workers hold `blocks` blocks in chains, never saturated."""
    saturation = SaturationConfig(fallback_prompts=(1,), pinned=1 << 100)
    config = RouterConfig(workers=WORKERS, saturation=saturation)
    router = Router(config, flops_work(qwen3_235b()))
    chains = [
        [rng.randbytes(DIGEST_BYTES) for _ in range(CHAIN_BLOCKS)]
        for _ in range(blocks // CHAIN_BLOCKS)
    ]
    for worker in range(WORKERS):
        stored = tuple(digest for chain in chains[worker::WORKERS] for digest in chain)
        router.apply(WorkerReport(worker=worker, epoch=0, number=0, stored=stored))
    return router, chains


def decisions(options: argparse.Namespace, tokens: int, cached: int) -> dict[str, list[float]]:
    rng = random.Random(options.seed)
    router, chains = filled_router(options.blocks, rng)
    work = flops_work(qwen3_235b())
    backlog = Backlog(router, work)
    samples: dict[str, list[float]] = {"route": [], "put_and_take": [], "hash": []}
    for number in range(options.count):
        fresh = [rng.randbytes(DIGEST_BYTES) for _ in range(tokens // BLOCK_TOKENS - cached)]
        hashes = (*map(_copy, rng.choice(chains)[:cached]), *fresh)
        prompt = Prompt(RequestKey(0, number), tokens, hashes)
        samples["route"].append(_timed(lambda p=prompt: route_unsaturated(router, p)))
        router.withdraw(prompt.key)
        prompt = Prompt(RequestKey(1, number), tokens, tuple(map(_copy, hashes)))
        held = HeldRequest(prompt)
        samples["put_and_take"].append(_timed(lambda h=held: (backlog.put(h), backlog.take())))
        router.withdraw(prompt.key)
        ids = [rng.randrange(1 << 17) for _ in range(tokens)]
        samples["hash"].append(_timed(lambda ids=ids: chain_hashes(ids, BLOCK_TOKENS)))
    return samples


def _timed(call: Any) -> float:
    start_s = time.thread_time()
    call()
    return round((time.thread_time() - start_s) * 1e6, 1)


def _copy(digest: bytes) -> bytes:
    """Another object, as a new prompt's hashes are: bytes keep their hash value once computed."""
    return bytes(bytearray(digest))


def measure(options: argparse.Namespace) -> Measured:
    gc.freeze()
    samples = {case: decisions(options, *sizes) for case, sizes in SIZES.items()}
    summary = {
        case: {
            name: {f"p{p}": round(float(np.percentile(row, p)), 1) for p in (50, 90, 99)}
            for name, row in rows.items()
        }
        for case, rows in samples.items()
    }
    return Measured(samples, summary, {"cores": sorted(os.sched_getaffinity(0))})


def tables(summary: dict[str, Any]) -> list[Table]:
    columns = [
        (name, quantile) for name in ("route", "put_and_take") for quantile in ("p50", "p99")
    ]
    rows = [
        [case, *(f"{by_name[name][quantile]:g}" for name, quantile in columns)]
        for case, by_name in summary.items()
    ]
    heads = [f"{name.replace('_', ' ')} {quantile}" for name, quantile in columns]
    return [Table("us of CPU time", ["decision", *heads], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=100_000, help="cached")
    parser.add_argument("--count", type=int, default=1000, help="decisions of each kind")
    parser.add_argument("--seed", type=int, default=0)


CASE = documented_case(__doc__, "Routing decision", measure, tables, add_options)
