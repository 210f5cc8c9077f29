"""An attention and an expert rank for each variant, each rank pinned to a core; they take turns."""

from __future__ import annotations

import contextlib
import os
import re
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
from benchmarks.load.figures import figures
from benchmarks.load.on_rank import Endless, Generator
from benchmarks.support.pinned_batches import bench_client, pin_to_core
from benchmarks.support.policy_rank import ENVIRONMENT
from benchmarks.support.random_checkpoint import MEDIUM
from cluster.routing.rank_client import RankClient
from cluster.tools.bench.outcome import RequestResult
from cluster.tools.bench.workload import RequestArrival
from contracts.loading import load_config
from contracts.requests import Priority
from tests.support.rank_process import RankProcess

_TOKEN = b"benchmark token, of no secret"
_CALL_S, _READY_S = 60.0, 180.0
_TICKS = os.sysconf("SC_CLK_TCK")
POOL_TOKENS = 32_768
SMALL = {
    **MEDIUM,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 128,
}
MODELS = {"medium": MEDIUM, "small": SMALL, "deep": {**SMALL, "num_hidden_layers": 32}}
VOCABULARY = MEDIUM["vocab_size"]


class Variant(NamedTuple):
    """batching: a baseline's name; "": as configured. classless: all requests are of one class for
    the rank. ls, be: whether those come. prefill: on one prefill worker, and no other rank."""

    name: str
    overrides: Sequence[str] = ()
    batching: str = ""
    classless: bool = False
    ls: bool = True
    be: bool = True
    prefill: bool = False


class Group:
    """The ranks of one variant. A context manager."""

    def __init__(
        self,
        folder: Path,
        variant: Variant,
        dtype: str,
        *,
        module: str = "benchmarks.support.policy_rank",
    ) -> None:
        """module: of its ranks' processes."""
        self.variant = variant
        common = [f"kv.pool_tokens={POOL_TOKENS}", "kv.prefix_cache=false", f"model.dtype={dtype}"]
        overrides = [*common, *variant.overrides]
        config = load_config(None, overrides)
        ranks = {"prefill_ranks": 1} if variant.prefill else {"expert_ranks": 1}
        placements = contiguous_placements(str(folder), **ranks)
        group_spec = GroupSpec(config, str(folder), _TOKEN, 1, "shm", placements=placements)
        seat = [Seat("cpu", "127.0.0.1", 1)]
        seats = ((), (), (), seat) if variant.prefill else (seat, seat)
        specs = make_specs(group_spec, *seats)
        os.environ[ENVIRONMENT] = variant.batching
        self.processes = [RankProcess(s.name, module=module) for s in specs]
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

    def metrics(self) -> str:
        return "\n".join(process.call("metrics").result(_CALL_S) for process in self.processes)

    def processor_s(self) -> float:
        """Of all its ranks, so far."""
        ticks = 0
        for process in self.processes:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
        return ticks / _TICKS

    async def close(self) -> None:
        await self.client.close()
        for process in self.processes:
            with contextlib.suppress(Exception):
                process.call("stop").result(_CALL_S)
            process.close()

    async def measure(
        self,
        arrivals: Sequence[RequestArrival],
        seconds: float,
        vocabulary: int,
        seed: int,
        endless: Sequence[Endless] = (),
    ) -> tuple[dict[str, Any], list[RequestResult]]:
        """LS's figures, BE's where it is not endless, and BE's tokens per second where it is;
        seconds of the ranks' processors."""
        variant, before_s = self.variant, self.processor_s()
        wanted = [a for a in arrivals if (variant.ls if a.priority is Priority.LS else variant.be)]
        generator = Generator(self.client, vocabulary, seed, classless=variant.classless)
        outcomes, per_s = await generator.run(wanted, seconds, endless if variant.be else ())
        found: dict[str, Any] = {
            "ls": figures(outcomes, Priority.LS, seconds),
            "processor_s": self.processor_s() - before_s,
        }
        if endless:
            found["be_tokens_per_s"] = per_s[Priority.BE]
            found["be_tokens"] = generator.tokens[Priority.BE]
            found["be_turnarounds_s"] = generator.turnarounds_s[Priority.BE]
        else:
            found["be"] = figures(outcomes, Priority.BE, seconds)
        failed = [each.error for each in outcomes if each.error]
        if failed:
            raise RuntimeError(f"{variant.name}: {len(failed)} failed; the first: {failed[0]}")
        return found, outcomes


def blocking(before: str, after: str) -> dict[str, Any]:
    """Of tandem_preemption_blocking_seconds, between two scrapes: how many waits, their mean, and
    in which bucket the longest one is (its upper end)."""

    def read(text: str) -> tuple[dict[float, float], float, float]:
        buckets: dict[float, float] = {}
        sums = counts = 0.0
        for line in text.splitlines():
            if not line.startswith("tandem_preemption_blocking_seconds"):
                continue
            value = float(line.rpartition(" ")[2])
            if found := re.search(r'le="([^"]+)"', line):
                le = float(found[1])
                buckets[le] = buckets.get(le, 0.0) + value
            elif "_sum" in line:
                sums += value
            elif "_count" in line:
                counts += value
        return buckets, sums, counts

    (old, old_sum, old_count), (new, new_sum, new_count) = read(before), read(after)
    count, total = new_count - old_count, new_sum - old_sum
    longest = next((le for le in sorted(new) if new[le] - old.get(le, 0.0) >= count), float("nan"))
    mean_ms = 1e3 * total / max(1, count)
    return {"waits": count, "mean_ms": mean_ms, "longest_below_ms": 1e3 * longest}
