"""Times of batches that `tandem plan`'s models foretell from a routing profile and a placement,
beside the measured ones: the bundled model, experts in order, placed, a quarter more slots.

    python -m benchmarks.placed_prediction --data DATA --hardware here.json
    python -m benchmarks.placed_prediction --data DATA --hardware here.json --mbit 40

here.json is a file of `tandem profile` of this machine, made before. With --mbit the ranks are in
two network namespaces (root, iproute2), and a link's byte takes what its rate says, with Ethernet's
and TCP's headers of full frames; all else is the file's. Copies and load are of the part of the
profile that no placement was made of: nothing of the measured rows is in a prediction but lengths.
`over`: predicted over measured, of the median round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from actors.planning.model_shape import shape_of
from actors.planning.profiled_routing import layer_routing
from benchmarks.harness import Result, write_result
from benchmarks.placed_bytes import compare, placements_of
from benchmarks.placement.traces import BUNDLED, rows_of
from benchmarks.two_nodes import TwoNodes, nodes_of
from cluster.files.hardware import load_hardware
from contracts.config import ScheduleConfig
from contracts.hardware import Hardware
from contracts.placement import Placement
from models.foresight.routing_counts import RoutingCounts
from models.spec.model import ModelSpec, read_spec
from models.weights.checkpoint import resolve_dtype
from planner.costs.cost_model import (
    Deployment,
    batch_attention_ms,
    stage_models,
    tokens_per_expert,
)
from planner.costs.model_shape import ModelShape
from planner.costs.routing_shape import RoutingShape
from planner.costs.stages import PlanSpec
from planner.findep.default_plan import default_plan
from planner.findep.placed_routing import routing_shape
from planner.findep.recurrence import makespan_of_layers_ms
from planner.findep.schedule import Piece, schedule_of_pieces
from planner.findep.split import balanced_ranges
from planner.placement.samples import split
from planner.placement.slots import ExpertPlacement

FRAME, IN_FRAME = 1514, 1448  # bytes of a full Ethernet frame, and of a payload in it

Chunks = list[tuple[int, int]]


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


def foretold_s(
    shape: ModelShape,
    hardware: Hardware,
    routing: RoutingShape,
    ranks: int,
    batches: Sequence[Chunks],
    backend: str,
) -> float:
    """Of all batches, one after the other, under the default plan, one attention rank."""
    one = Deployment(attention_ranks=1, expert_ranks=ranks, sequence_tokens=1)
    per_layer = [stage_models(shape, hardware, one, backend, each) for each in routing.layers]
    specs = [
        PlanSpec(
            stages=stages,
            tokens_per_expert_per_sample=tokens_per_expert(shape, one),
            num_layers=shape.moe_layers,
            max_samples=1 << 16,
            max_r2=64,
            has_shared=False,
        )
        for stages in per_layer
    ]
    whole_ms = 0.0
    for batch in batches:
        plan = default_plan(ScheduleConfig(), sum(stop - start for start, stop in batch))
        costs = [batch_attention_ms(hardware.attention, shape, [chunk]) for chunk in batch]
        pieces = []
        for first, last in balanced_ranges(costs, min(plan.r1, len(batch))):
            part = batch[first:last]
            tokens = sum(stop - start for start, stop in part)
            attention_ms = batch_attention_ms(hardware.attention, shape, part)
            pieces.append(Piece(attention_ms, 0.0, tokens))
        layers = [schedule_of_pieces(spec, plan, pieces, len(batch)) for spec in specs]
        whole_ms += makespan_of_layers_ms(layers)
    return whole_ms / 1e3


def routing_of(placement: Placement, spec: ModelSpec, counts: RoutingCounts) -> RoutingShape:
    slots = ExpertPlacement(placement)
    return routing_shape(
        [(split(layer_routing(counts, n))[1], slots.layer(n)) for n in spec.moe_layers]
    )


def machine(options: argparse.Namespace) -> tuple[Hardware, str]:
    """With the link's rate in place of what the file has of TCP."""
    hardware = load_hardware(str(options.hardware))
    if options.mbit is None:
        return hardware, "shm"
    ms_per_byte = 8e3 / (options.mbit * 1e6) * FRAME / IN_FRAME
    links = [
        msgspec.structs.replace(link, ms_per_byte=ms_per_byte) if link.backend == "tcp" else link
        for link in hardware.links
    ]
    return msgspec.structs.replace(hardware, links=links), "tcp"


def run(options: argparse.Namespace, nodes: TwoNodes | None) -> None:
    spec = read_spec(BUNDLED)
    shape = shape_of(spec, resolve_dtype(spec, "bfloat16"))
    counts = RoutingCounts.read(BUNDLED / "routing.safetensors", BUNDLED, spec)
    every = rows_of(options.data, "test", AutoTokenizer.from_pretrained(BUNDLED))
    rows: list[list[int]] = []
    while sum(map(len, rows)) < options.tokens:
        rows.append(every[len(rows) * 37 % len(every)])
    hardware, backend = machine(options)
    batches = batches_of([len(row) for row in rows], options.batch_tokens)
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for ranks in options.ranks:
        placements = placements_of(spec, counts, ranks)
        found = asyncio.run(compare(options, rows, placements, nodes))
        key = f"1+{ranks}"
        samples[key] = found
        summary[key] = {}
        for name, placement in placements.items():
            routing = routing_of(placement, spec, counts)
            said_s = foretold_s(shape, hardware, routing, ranks, batches, backend)
            measured_s = statistics.median(found[name]["s"])
            summary[key][name] = {
                "copies": round(routing.mean.copies, 4),
                "load": round(routing.mean.load, 4),
                "predicted_s": round(said_s, 4),
                "measured_s": measured_s,
                "over": round(said_s / measured_s, 4),
            }
        plain = summary[key]["contiguous"]
        for each in summary[key].values():
            each["predicted_ratio"] = round(each["predicted_s"] / plain["predicted_s"], 4)
            each["measured_ratio"] = round(each["measured_s"] / plain["measured_s"], 4)
        print(json.dumps({key: summary[key]}, indent=1), flush=True)
    where = "shm" if nodes is None else f"{options.mbit:g}mbit"
    settings = vars(options) | {"inside": None, "data": None, "output": None, "hardware": None}
    result = Result(
        name=f"placed_prediction_{where}",
        kind="measured",
        settings={**settings, "tokens": sum(map(len, rows))},
        samples=samples,
        summary=summary,
    )
    print(f"written: {write_result(result, options.output)}")


def main() -> None:
    options = _options()
    run(options, nodes_of(options, "benchmarks.placed_prediction"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--hardware", type=Path, required=True, help="of tandem profile")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--mbit", type=float, help="rate of the link, of each direction")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
