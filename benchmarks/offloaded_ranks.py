"""Time per token of one stream through an attention and an expert rank that keeps some of its
experts, with and without hints from the attention rank: real processes, a core each, real reads
past the page cache.

    python -m benchmarks.offloaded_ranks                         (about 10 minutes)
    python -m benchmarks.offloaded_ranks --backend tcp --kept 0.5 --times 2 --rounds 4

Variants in turns, each round on another text; their tokens are held against each other. times: how
large experts are, as in benchmarks.offloaded_decode.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from actors.ranks.rendezvous import GroupSpec, Seat, contiguous_placements, form_group, make_specs
from benchmarks.harness import record
from benchmarks.offloaded_decode import BUNDLED, gain, texts
from benchmarks.offloading_rank import ENVIRONMENT
from benchmarks.pinned_batches import bench_client, pin_to_core
from benchmarks.rank_stream import open_stream
from cluster.routing.rank_client import RankClient
from contracts.loading import load_config
from contracts.messages import Failed, Submit, Tokens
from contracts.requests import Sampling
from models.spec.model import ModelSpec
from models.text.tokenizer import Tokenizer
from models.weights.checkpoint import check_checkpoint
from tests.support.rank_process import RankProcess

_TOKEN = b"benchmark token, of no secret"
_CALL_S, _READY_S = 60.0, 180.0
PROMPT = 16
RESIDENT, ON_DEMAND, SPECULATED = "resident", "on demand", "speculated"
HINTS = {
    "ahead, router": ["experts.predictor=router"],
    "ahead, best": [],
    "ahead, best, again": ["experts.hint_again=true"],
    SPECULATED: ["experts.speculative=speculated"],
}


class Ranks:
    """Of one variant."""

    def __init__(self, name: str, overrides: list[str], times: int, backend: str) -> None:
        self.name = name
        common = ["model.dtype=float32", "kv.pool_tokens=4096", "kv.prefix_cache=false"]
        config = load_config(None, [*common, "planner.enabled=false", *overrides])
        placements = contiguous_placements(str(BUNDLED), expert_ranks=1)
        group_spec = GroupSpec(config, str(BUNDLED), _TOKEN, 1, backend, placements=placements)
        seat = [Seat("cpu", "127.0.0.1", 1)]
        specs = make_specs(group_spec, seat, seat)
        os.environ[ENVIRONMENT] = str(times)
        module = "benchmarks.offloading_rank"
        self.processes = [RankProcess(spec.name, module=module) for spec in specs]
        self._ready = form_group(specs, self.processes, timeout_s=_READY_S)
        if os.cpu_count() == 2:
            for core, process in enumerate(self.processes):
                pin_to_core(process.pid, core)
        self.client: RankClient

    async def join(self) -> None:
        first = self._ready[0]
        self.client = await bench_client(
            first.name, first.client_address, _TOKEN, heartbeat_timeout_s=30.0
        )

    async def generate(self, ids: list[int], tokens: int) -> tuple[float, list[int]]:
        """(milliseconds per token after the first one, the tokens)."""
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        stream = await open_stream(
            self.client, Submit(request_id=0, token_ids=ids, sampling=sampling)
        )
        found: list[int] = []
        first_s = last_s = 0.0
        async for event in stream:
            if isinstance(event, Failed):
                raise RuntimeError(f"{self.name}: {event.message}")
            if isinstance(event, Tokens):
                found += event.token_ids
                last_s = time.perf_counter()
                first_s = first_s or last_s
        return 1e3 * (last_s - first_s) / (tokens - 1), found

    def figures(self) -> dict[str, float]:
        """Of the expert rank's metrics: bytes read by cause, seconds waited."""
        text = self.processes[1].call("metrics").result(_CALL_S)
        found: dict[str, float] = {}
        for line in text.splitlines():
            for name in ("tandem_expert_read_bytes_total", "tandem_expert_wait_seconds_total"):
                if line.startswith(name):
                    cause = line.partition('cause="')[2].partition('"')[0]
                    found[cause or "waited_s"] = float(line.rpartition(" ")[2])
        return found

    async def close(self) -> None:
        await self.client.close()
        for process in self.processes:
            process.call("stop").result(_CALL_S)
            process.close()


def variants(spec: ModelSpec, kept: float, folder: str) -> dict[str, list[str]]:
    slots = max(spec.top_k, round(kept * len(spec.moe_layers) * spec.num_experts))
    some = [f"experts.slots={slots}", "experts.direct_io=true", f"prefill.host_store={folder}"]
    found = {RESIDENT: [], ON_DEMAND: [*some, "experts.predictor=none"]}
    return found | {name: [*some, *hints] for name, hints in HINTS.items()}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    spec, samples = check_checkpoint(BUNDLED), dict[str, Any]()
    rows = texts(Tokenizer.load(BUNDLED), options.rounds + 1, PROMPT)
    with tempfile.TemporaryDirectory(prefix="tandem-", dir=options.folder) as folder:
        for times in options.times:
            for kept in options.kept:
                setting = f"{options.backend}, x{times}, {kept:.0%} kept"
                wanted = {
                    name: [*each, *options.set]
                    for name, each in variants(spec, kept, folder).items()
                    if options.only in name or name in (RESIDENT, ON_DEMAND)
                }
                found = [Ranks(n, each, times, options.backend) for n, each in wanted.items()]
                for ranks in found:
                    await ranks.join()
                try:
                    samples[setting] = await measure(found, rows, options.tokens)
                finally:
                    for ranks in found:
                        await ranks.close()
    return samples


async def measure(found: list[Ranks], rows: list[list[int]], tokens: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {ranks.name: [] for ranks in found}
    for number, ids in enumerate(rows):  # the first one warms up
        expected: list[int] = []
        for ranks in found if number % 2 else found[::-1]:
            spent_ms, came = await ranks.generate(ids, tokens)
            if ranks.name != SPECULATED:
                expected = expected or came
                if came != expected:
                    raise RuntimeError(f"{ranks.name}: other tokens than before: {came} {expected}")
            if number:
                times[ranks.name].append(spent_ms)
    return {ranks.name: {"tpot_ms": times[ranks.name], **ranks.figures()} for ranks in found}


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Medians; gain: on demand over it, pair by pair."""
    found = {}
    for setting, by_variant in samples.items():
        for name, measured in by_variant.items():
            found[f"{setting} | {name}"] = {
                **gain(by_variant[ON_DEMAND]["tpot_ms"], measured["tpot_ms"]),
                **{key: round(each, 2) for key, each in measured.items() if key != "tpot_ms"},
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="generated in a round")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--backend", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--only", default="", help="variants whose name contains this, and bases")
    parser.add_argument("--set", nargs="*", default=[], help="settings of all variants")
    parser.add_argument("--folder", help="on the disk to read from (default: the system's)")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    samples = asyncio.run(run(options))
    found = summary(samples)
    for name, row in found.items():
        print(f"{name:40} {row}")
    record(f"offloaded_ranks_{options.backend}", options, samples, found)


if __name__ == "__main__":
    main()
