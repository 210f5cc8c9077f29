"""Experts follow traffic that turns: rows to classify, then school mathematics (GSM8K). How uneven
expert ranks are loaded by the second, as experts stand second by second.

    python -m benchmarks.turning --data /path/to/data            (2 ranks; about 3 minutes)
    python -m benchmarks.turning --data /path/to/data --ranks 4 --spare 2

The ranks are threads of this process, the planner is a process, all of them as a server starts
them. Load: pairs of the busiest rank over the mean, a layer, of GSM8K's texts (their routing was
counted before, as `tandem profile` does), with the choice of replicas that dispatch makes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from actors.ranks.attention_rank import attention_rank
from actors.ranks.expert_rank import ExpertLoop, expert_rank
from actors.ranks.rank import Rank
from actors.ranks.rendezvous import GroupSpec, Seat, make_specs
from benchmarks.harness import record
from benchmarks.pinned_batches import bench_client
from benchmarks.rank_stream import open_stream
from cluster.routing.rank_client import RankClient
from cluster.tools.profile.routing_profile import RoutingSettings, routing_profile
from contracts.errors import TandemError
from contracts.loading import load_config
from contracts.messages import Failed, Submit
from contracts.placement import Placement
from contracts.ranks import Group, RankSpec
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from models.text.tokenizer import Tokenizer
from planner.placement.routing import LayerRouting, TokenCounts, measure
from planner.placement.slots import ExpertPlacement, contiguous
from tests.support.rank_process import RankProcess

BUNDLED = Path(__file__).resolve().parents[1] / "models" / "bundled"
CLASSIFICATION, GENERATION = ("uci_sentences.jsonl", "sms_spam.jsonl"), "gsm8k_test.jsonl"
_CALL_S, _READY_S, MOST_IDS = 60.0, 120.0, 256


class Texts(NamedTuple):
    rows: list[list[int]]  # token ids, of classification
    gsm8k: list[list[int]]
    counts: RoutingCounts  # of gsm8k


def read_texts(data: Path, tokens: int) -> Texts:
    tokenizer = Tokenizer.load(BUNDLED)
    rows = [
        json.loads(line)["text"]
        for name in CLASSIFICATION
        for line in _lines(data / "classification" / name)
    ]
    rows_of_maths = map(json.loads, _lines(data / "generation" / GENERATION))
    maths = [f"{row['question']}\n{row['answer']}" for row in rows_of_maths]
    settings = RoutingSettings(BUNDLED, "auto", most_tokens=tokens)
    counts = routing_profile(settings, maths).counts
    return Texts(
        [tokenizer.encode(text)[:MOST_IDS] for text in rows],
        [tokenizer.encode(text)[:MOST_IDS] for text in maths],
        counts,
    )


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]


def loads(counts: RoutingCounts, placement: Placement) -> list[float]:
    """Of each layer with experts."""
    slots = ExpertPlacement(placement)
    found = []
    for layer in counts.layers:
        E, sets_PK, ids_P, times = counts.layer(layer)
        routing = LayerRouting(E, sets_PK, ids_P, TokenCounts(*times))
        found.append(measure(routing, slots.layer(layer)).load)
    return found


@contextmanager
def group(specs: Sequence[RankSpec]) -> Iterator[list[Rank]]:
    """Attention and expert ranks in this process, the planner in another."""
    experts = [expert_rank(spec) for spec in specs if spec.group is Group.EXPERT]
    attention = [attention_rank(spec) for spec in specs if spec.group is Group.ATTENTION]
    (planner_spec,) = (spec for spec in specs if spec.group is Group.PLANNER)
    planner = RankProcess(planner_spec.name)
    ranks = [*attention, *experts]
    try:
        at = planner.call("prepare", planner_spec).result(_READY_S).channel_address
        planner.call("start").result(_CALL_S)
        for rank in experts:
            rank.connect({each.ready.name: each.ready.experts_address for each in experts})
        for rank in attention:
            rank.connect({each.ready.name: each.ready.channel_address for each in experts})
        for rank in ranks:
            rank.join_planner(at)
            rank.start()
        yield ranks
    finally:
        for rank in ranks:
            rank.stop()
        planner.call("stop").result(_CALL_S)
        planner.close()


async def traffic(client: RankClient, texts: Sequence[list[int]], for_s: float, width: int) -> int:
    """Runs texts in turns, `width` at a time; how many tokens."""
    end_s, turns, done = time.monotonic() + for_s, itertools.cycle(texts), 0

    async def one() -> None:
        nonlocal done
        while time.monotonic() < end_s:
            ids = next(turns)
            submit = Submit(request_id=0, token_ids=ids, sampling=None, candidates=[1])
            async for event in await open_stream(client, submit):
                if isinstance(event, Failed):
                    raise TandemError(event.message)
            done += len(ids)

    await asyncio.gather(*(one() for _ in range(width)))
    return done


async def watch(ranks: list[Rank], counts: RoutingCounts, for_s: float) -> list[dict[str, Any]]:
    """Generations as they change, with their load for GSM8K."""
    start_s, seen, found = time.monotonic(), -1, []
    loop = next(rank.loop for rank in ranks if isinstance(rank.loop, ExpertLoop))
    while time.monotonic() < start_s + for_s:
        placement = loop.held.moving.placement
        if placement.generation != seen:
            seen = placement.generation
            at_s = time.monotonic() - start_s
            of_layers = await asyncio.to_thread(loads, counts, placement)
            found.append({"s": round(at_s, 2), "generation": seen, "loads": of_layers})
            print(
                f"{at_s:6.2f} s  generation {seen}  worst {max(of_layers):.3f}  "
                f"mean {statistics.fmean(of_layers):.3f}",
                flush=True,
            )
        await asyncio.sleep(0.1)
    return found


async def run(options: argparse.Namespace) -> dict[str, Any]:
    spec = read_spec(BUNDLED)
    texts = await asyncio.to_thread(read_texts, options.data, options.profile_tokens)
    config = load_config(None, [
        "model.dtype=float32", "groups.attention_ranks=1",
        f"groups.expert_ranks={options.ranks}", f"placement.spare_slots={options.spare}",
        "placement.rebalance=continuous", "kv.pool_tokens=16384", "kv.prefix_cache=false",
        "channel.heartbeat_timeout_s=20", *options.set,
    ])  # fmt: skip
    base = started(options, spec.num_experts, spec.num_layers, spec.moe_layers)
    seat = Seat("cpu", "127.0.0.1", 1)
    group_spec = GroupSpec(
        config, str(BUNDLED), secrets.token_bytes(32), 1, "shm", placements={Group.EXPERT: base}
    )
    specs = make_specs(group_spec, [seat], [seat] * options.ranks, [seat])
    contiguous_loads = loads(texts.counts, base)
    print(f"at launch, of GSM8K: worst {max(contiguous_loads):.3f}", flush=True)
    with group(specs) as ranks:
        ready = ranks[0].ready
        client = await bench_client(
            ready.name, ready.client_address, group_spec.token, heartbeat_timeout_s=30.0
        )
        sections = {"rows": (texts.rows, options.before_s), "gsm8k": (texts.gsm8k, options.after_s)}
        samples: dict[str, Any] = {"launch": contiguous_loads}
        for name, (of, for_s) in sections.items():
            print(name, flush=True)
            watching = asyncio.create_task(watch(ranks, texts.counts, for_s))
            tokens = await traffic(client, of, for_s, options.width)
            samples[name] = {"generations": await watching, "tokens_per_s": tokens / for_s}
        samples["placement"] = {
            rank.ready.name: rank.status().sections["placement"] for rank in ranks
        }
        await client.close()
    return samples


def started(
    options: argparse.Namespace, num_experts: int, num_layers: int, moe_layers: Sequence[int]
) -> Placement:
    """Experts in order; spare slots with those of the rank behind, in order."""
    base = contiguous(num_experts, options.ranks, num_layers=num_layers, moe_layers=moe_layers)
    share = num_experts // options.ranks
    line = [
        (rank * share + slot) % num_experts
        for rank in range(options.ranks)
        for slot in range(share + options.spare)
    ]
    return Placement(
        num_experts=num_experts,
        slots_per_rank=(share + options.spare,) * options.ranks,
        expert_of_slot=tuple(tuple(line) if each else () for each in base.expert_of_slot),
    )


def summary(samples: dict[str, Any], target: float) -> dict[str, Any]:
    turned = samples["gsm8k"]["generations"]
    reached = [each["s"] for each in turned if max(each["loads"]) <= target]
    return {
        "worst layer at launch": round(max(samples["launch"]), 3),
        "worst layer when traffic turns": round(max(turned[0]["loads"]), 3),
        "worst layer at the end": round(max(turned[-1]["loads"]), 3),
        "mean at the end": round(float(np.mean(turned[-1]["loads"])), 3),
        f"worst layer at most {target} after, s": reached[0] if reached else None,
        "moves": len(turned) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spare", type=int, default=0)
    parser.add_argument("--before-s", type=float, default=40.0)
    parser.add_argument("--after-s", type=float, default=60.0)
    parser.add_argument("--width", type=int, default=8, help="requests at a time")
    parser.add_argument("--profile-tokens", type=int, default=20_000)
    parser.add_argument("--target", type=float)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = options.target or (1.1 if options.ranks == 2 else 1.15)
    samples = asyncio.run(run(options))
    found = summary(samples, target)
    for name, value in found.items():
        print(name, value)
    record(f"turning_{options.ranks}_ranks", options, samples, found, {"model": "bundled"})


if __name__ == "__main__":
    main()
