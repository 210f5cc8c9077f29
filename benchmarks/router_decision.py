"""CPU time of a routing decision in microseconds: `python -m benchmarks.router_decision`.

100,000 blocks are cached on 8 workers. A decision looks up the prompt's blocks, chooses, and books
what it adds; hashing the prompt is not in it (`hash` times that). Each sample is another prompt.
The thread's CPU time, so that other processes on the machine do not count.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Result, write_result
from benchmarks.router_simulation import qwen3_235b
from benchmarks.router_workloads import BLOCK_TOKENS
from contracts.block_hash import DIGEST_BYTES, chain_hashes
from contracts.routing_messages import Prompt, RequestKey, WorkerReport
from planner.routing.backlog import Backlog
from planner.routing.request_work import flops_work
from planner.routing.router import Router, RouterConfig
from planner.routing.saturation import SaturationConfig

WORKERS = 8
CHAIN_BLOCKS = 100
CASES = {
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


def measure(options: argparse.Namespace, tokens: int, cached: int) -> dict[str, list[float]]:
    rng = random.Random(options.seed)
    router, chains = filled_router(options.blocks, rng)
    work = flops_work(qwen3_235b())
    backlog = Backlog(router, work)
    samples: dict[str, list[float]] = {"route": [], "put_and_take": [], "hash": []}
    for number in range(options.count):
        fresh = [rng.randbytes(DIGEST_BYTES) for _ in range(tokens // BLOCK_TOKENS - cached)]
        hashes = (*map(_copy, rng.choice(chains)[:cached]), *fresh)
        prompt = Prompt(RequestKey(0, number), tokens, hashes)
        samples["route"].append(_timed(lambda p=prompt: router.route(p)))
        router.withdraw(prompt.key)
        prompt = Prompt(RequestKey(1, number), tokens, tuple(map(_copy, hashes)))
        samples["put_and_take"].append(_timed(lambda p=prompt: (backlog.put(p), backlog.take())))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=100_000, help="cached (default: 100,000)")
    parser.add_argument("--count", type=int, default=1000, help="decisions of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="JSON file of the result")
    options = parser.parse_args()
    gc.freeze()
    samples = {case: measure(options, *sizes) for case, sizes in CASES.items()}
    summary = {
        case: {
            name: {f"p{p}": round(float(np.percentile(row, p)), 1) for p in (50, 90, 99)}
            for name, row in rows.items()
        }
        for case, rows in samples.items()
    }
    for case, rows in summary.items():
        print(case, rows)
    settings = {**vars(options), "output": "", "cores": sorted(os.sched_getaffinity(0))}
    result = Result(
        name="router_decision", kind="measured", settings=settings, samples=samples, summary=summary
    )
    print(f"written: {write_result(result, options.output)}")


if __name__ == "__main__":
    main()
