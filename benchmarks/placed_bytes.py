"""Bytes between ranks, and the time of a batch, by where experts stand: the bundled model, held-out
rows, experts in order, as the solver places them, and with a quarter more slots.

    python -m benchmarks.placed_bytes --data DATA                over shared memory
    python -m benchmarks.placed_bytes --data DATA --mbit 40      over a link of that rate

With --mbit the attention rank and the expert ranks are in two network namespaces of this machine
(root, iproute2). All groups are up at once and take turns; ratios are of one round. Placements are
of the profile beside the checkpoint; `predicted` bytes are of the copies that the rows' routing has
under them (planner/placement/routing.py), which no rank has anything to do with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.planning.profiled_routing import layer_routing
from actors.ranks.process import RankProcess
from actors.ranks.rendezvous import Formation, Seat, contiguous_placements, form_group, make_specs
from benchmarks.harness import Result, write_result
from benchmarks.pinned_batches import CANDIDATES, bench_client
from benchmarks.placement.traces import BUNDLED, rows_of, traced
from benchmarks.rank_stream import ask
from benchmarks.two_nodes import HEAD, OTHER, TwoNodes, nodes_of
from cluster.routing.rank_client import RankClient
from contracts.config import TandemConfig
from contracts.loading import load_config
from contracts.messages import Scored, Submit
from contracts.placement import Placement
from contracts.worker import Group, RankStatus
from models.foresight.routing_counts import RoutingCounts
from models.spec.model import ModelSpec, read_spec
from planner.placement.routing import LayerRouting, TokenCounts, measure
from planner.placement.slots import ExpertPlacement
from planner.placement.solve import solve_layer

CALL_S, READY_S = 30.0, 120.0
HOST = "127.0.0.1"
ROW_BYTES = 2  # of an element: bfloat16
PAIR_BYTES = 8  # its position and its weight
QUARTER = 1.25


class Running(NamedTuple):
    """A group that is up."""

    attention: RankProcess
    client: RankClient
    ranks: Sequence[RankProcess] = ()  # the attention rank first

    def bytes_moved(self) -> tuple[int, int]:
        status: RankStatus = self.attention.call("status").result(CALL_S)
        moved = status.sections["channel_bytes"]
        return int(moved["sent"]), int(moved["received"])

    async def run(self, rows: Sequence[list[int]]) -> float:
        """Seconds until all rows are answered."""
        start_s = time.perf_counter()
        submits = [
            Submit(request_id=0, token_ids=row, sampling=None, candidates=CANDIDATES)
            for row in rows
        ]
        for stream in [await ask(self.client, submit) for submit in submits]:
            async for event in stream:
                if not isinstance(event, Scored):
                    raise RuntimeError(f"a row failed: {event}")
        return time.perf_counter() - start_s


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


def predicted(placement: Placement, spec: ModelSpec, paths_PLK: Any) -> dict[str, float]:
    """Copies, load, and bytes of a token out and back, at all layers together."""
    slots, none = ExpertPlacement(placement), np.zeros(0, np.int64)
    found = [
        measure(
            LayerRouting(
                spec.num_experts,
                paths_PLK[:, position].astype(np.int64),
                none,
                TokenCounts(none, none, none),
            ),
            slots.layer(layer),
        )
        for position, layer in enumerate(spec.moe_layers)
    ]
    row_bytes = sum(each.copies for each in found) * spec.hidden_size * ROW_BYTES
    return {
        "copies": statistics.fmean(each.copies for each in found),
        "load": statistics.fmean(each.batch_load for each in found),
        "a2e_bytes": row_bytes + len(found) * spec.top_k * PAIR_BYTES,
        "e2a_bytes": row_bytes,
    }


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
    formation = Formation(
        config, str(BUNDLED), token, 1, backend, placements={Group.EXPERT: placement}
    )
    seats = [Seat("cpu", there, 1)] * placement.ranks
    specs = make_specs(formation, [Seat("cpu", here, 1)], seats)
    handles = []
    try:
        for spec in specs:
            away = nodes is not None and spec.group is Group.EXPERT
            inside = nodes.inside(1) if away and nodes is not None else ()
            handles.append(RankProcess(spec.name, inside=inside))
        ready = form_group(specs, handles, timeout_s=READY_S)
        first = ready[0]
        client = await bench_client(first.name, first.client_address, token, silence_s=CALL_S)
        try:
            yield Running(handles[0], client, handles)
        finally:
            await client.close()
    finally:
        for handle in handles:
            handle.close(CALL_S)


async def compare(
    options: argparse.Namespace,
    rows: Sequence[list[int]],
    placements: dict[str, Placement],
    nodes: TwoNodes | None,
) -> dict[str, Any]:
    """Samples by placement: seconds of the rows, bytes of a token out and back."""
    tokens = sum(map(len, rows))
    samples: dict[str, Any] = {name: {"s": []} for name in placements}
    async with groups(options, placements, nodes) as running:
        for group in running.values():
            await group.run(rows)  # warm
        before = {name: group.bytes_moved() for name, group in running.items()}
        for _ in range(options.rounds):
            for name, group in running.items():
                samples[name]["s"].append(round(await group.run(rows), 4))
        for name, group in running.items():
            out, back = np.subtract(group.bytes_moved(), before[name]) / (options.rounds * tokens)
            samples[name] |= {"a2e_bytes": round(float(out), 2), "e2a_bytes": round(float(back), 2)}
    return samples


def summary_of(samples: dict[str, Any], foretold: dict[str, Any]) -> dict[str, Any]:
    base, rows = samples["contiguous"], {}
    whole = base["a2e_bytes"] + base["e2a_bytes"]
    for name, found in samples.items():
        ratio = statistics.median(
            mine / theirs for mine, theirs in zip(found["s"], base["s"], strict=True)
        )
        moved = found["a2e_bytes"] + found["e2a_bytes"]
        rows[name] = {
            **foretold[name],
            "measured_a2e_bytes": found["a2e_bytes"],
            "measured_e2a_bytes": found["e2a_bytes"],
            "a2e_over_predicted": round(found["a2e_bytes"] / foretold[name]["a2e_bytes"], 4),
            "e2a_over_predicted": round(found["e2a_bytes"] / foretold[name]["e2a_bytes"], 4),
            "bytes_ratio": round(moved / whole, 4),
            "median_s": statistics.median(found["s"]),
            "time_ratio": round(ratio, 4),
        }
        if name != "contiguous":
            rows[name]["fall_of_time_over_bytes"] = round((1 - ratio) / (1 - moved / whole), 3)
    return rows


def main() -> None:
    options = _options()
    nodes = nodes_of(options, "benchmarks.placed_bytes")
    spec = read_spec(BUNDLED)
    rows = _rows(options)
    paths_PLK = traced(AutoModelForCausalLM.from_pretrained(BUNDLED).float().eval(), rows).paths_PLK
    counts = RoutingCounts.read(BUNDLED / "routing.safetensors", BUNDLED, spec)
    samples, summary = {}, {}
    for ranks in options.ranks:
        placements = placements_of(spec, counts, ranks)
        foretold = {name: predicted(each, spec, paths_PLK) for name, each in placements.items()}
        samples[f"1+{ranks}"] = asyncio.run(compare(options, rows, placements, nodes))
        summary[f"1+{ranks}"] = summary_of(samples[f"1+{ranks}"], foretold)
        print(json.dumps({f"1+{ranks}": summary[f"1+{ranks}"]}, indent=1), flush=True)
    where = "shm" if nodes is None else f"{options.mbit:g}mbit"
    settings = vars(options) | {"inside": None, "data": None, "output": None}
    result = Result(
        name=f"placed_bytes_{where}",
        kind="measured",
        settings={**settings, "tokens": sum(map(len, rows))},
        samples=samples,
        summary=summary,
    )
    print(f"written: {write_result(result, options.output)}")


def _rows(options: argparse.Namespace) -> list[list[int]]:
    """Test rows of all tasks in turns, so many tokens."""
    every = rows_of(options.data, "test", AutoTokenizer.from_pretrained(BUNDLED))
    order = np.random.default_rng(options.seed).permutation(len(every))
    rows: list[list[int]] = []
    while sum(map(len, rows)) < options.tokens:
        rows.append(every[order[len(rows)]])
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, help="rate of the link, of each direction")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
