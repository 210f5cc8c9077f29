"""Times of batches that `tandem plan`'s models foretell from a routing profile and a placement,
beside the measured ones: the bundled model, experts in order, placed, a quarter more slots.

    python -m benchmarks.placed_prediction --data DATA
    python -m benchmarks.placed_prediction --data DATA --hardware here.json --mbit 40

Without --hardware this machine is profiled first, as `tandem profile` does, so that both are of
the same minutes. A row of 1,024 tokens goes ahead: until it is through all others have come, and
batches are formed of them in order; the time is from its end to the end of the last, median of the
rounds.
With --mbit the ranks are in two network namespaces (root, iproute2), and a link's byte takes what
its rate says, with Ethernet's and TCP's headers of full frames; all else is the file's. Copies and
load are of the part of the profile that no placement was made of: nothing of the measured rows is
in a prediction but lengths. `over`: predicted over measured; `attention_cpu_over`,
`expert_cpu_over`: of the CPU time of the attention rank's process and of the busiest expert
rank's, which is what the models are of. `waited`: the part of a round in which the attention rank
could have run and had no core; `calmest`: of the quarter of the rounds in which that was least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from transformers import AutoTokenizer

from actors.planning.planner_inputs import layer_routing, shape_of
from actors.ranks.attention_rank import ChunkCost
from actors.ranks.rendezvous import contiguous_placements
from benchmarks.harness import Result, write_result
from benchmarks.placed_groups import (
    Chunks,
    Ran,
    batches_of,
    groups,
    placements_of,
    ran,
    warm,
)
from benchmarks.placement.traces import BUNDLED, rows_of
from benchmarks.two_nodes import TwoNodes, nodes_of
from cluster.fleet.hardware import load_hardware
from cluster.tools.profile.hardware_profile import ProfileSettings, profile
from contracts.config import ScheduleConfig
from contracts.hardware import Hardware
from contracts.placement import Placement
from contracts.ranks import Group
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import ModelSpec, read_spec
from models.weights.checkpoint import resolve_dtype
from planner.costs.cost_model import (
    Deployment,
    batch_attention_ms,
    serving_ms,
    stage_models,
    tokens_per_expert,
)
from planner.costs.model_shape import ModelShape
from planner.costs.routing_shape import RoutingShape, Spread
from planner.costs.stages import PlanSpec, StageModels
from planner.placement.slots import ExpertPlacement
from planner.placement.solve import split
from planner.schedule.batch_split import balanced_ranges
from planner.schedule.placed_routing import routing_shape
from planner.schedule.plan_fit import default_plan
from planner.schedule.schedule import Piece, schedule_of_pieces
from planner.schedule.shared_cores import Sharing, shared_makespan_ms

CALMEST = 0.25  # of the rounds
FRAME, IN_FRAME = 1514, 1448  # bytes of a full Ethernet frame, and of a payload in it


class PredictedRouting(NamedTuple):
    """Of all batches, one after the other. attention_s, expert_s: work of one rank, the busiest."""

    whole_s: float
    attention_s: float
    expert_s: float


def foretold(
    shape: ModelShape,
    hardware: Hardware,
    routing: RoutingShape,
    ranks: int,
    batches: Sequence[Chunks],
    backend: str,
) -> PredictedRouting:
    """Under the default plan, one attention rank."""
    one = Deployment(attention_ranks=1, expert_ranks=ranks, sequence_tokens=1)
    stages = [stage_models(shape, hardware, one, backend, each) for each in routing.layers]
    specs = [_spec(shape, one, each) for each in stages]
    cores = hardware.devices or ranks + 1
    whole_ms = attention_ms = expert_ms = 0.0
    for batch in batches:
        plan = default_plan(ScheduleConfig(), sum(stop - start for start, stop in batch))
        pieces = _pieces(shape, hardware, routing.mean, batch, plan.r1)
        layers = [schedule_of_pieces(spec, plan, pieces, len(batch)) for spec in specs]
        tokens = sum(piece.amount for piece in pieces)
        beside_ms = serving_ms(
            hardware, shape, micro_batches=len(pieces), sequences=len(batch), tokens=tokens
        )
        attention_ms += beside_ms
        whole_ms += beside_ms + shared_makespan_ms(layers, Sharing(1, ranks, cores))
        for layer in layers:
            for times in layer.micro_batches:
                attention_ms += times.attention_ms
                expert_ms += sum(run.repeats * run.expert_ms for run in times.groups)
    return PredictedRouting(whole_ms / 1e3, attention_ms / 1e3, expert_ms / 1e3)


def _spec(shape: ModelShape, one: Deployment, stages: StageModels) -> PlanSpec:
    return PlanSpec(
        stages=stages,
        tokens_per_expert_per_sample=tokens_per_expert(shape, one),
        num_layers=shape.moe_layers,
        max_samples=1 << 16,
        max_r2=64,
        has_shared=False,
    )


def _pieces(
    shape: ModelShape, hardware: Hardware, spread: Spread, batch: Chunks, r1: int
) -> list[Piece]:
    cost = hardware.attention
    relative = ChunkCost(read_spec(BUNDLED))  # what the executor cuts by
    costs = [relative(*chunk) for chunk in batch]
    return [
        Piece(
            batch_attention_ms(cost, shape, batch[first:last], spread),
            0.0,
            sum(stop - start for start, stop in batch[first:last]),
        )
        for first, last in balanced_ranges(costs, min(r1, len(batch)))
    ]


async def measured(
    options: argparse.Namespace,
    rows: Sequence[list[int]],
    placements: dict[str, Placement],
    nodes: TwoNodes | None,
) -> dict[str, list[Ran]]:
    """Rounds by placement, in turns."""
    batches = batches_of([len(row) for row in rows], options.batch_tokens)
    tokens = [sum(stop - start for start, stop in batch) for batch in batches]
    found: dict[str, list[Ran]] = {name: [] for name in placements}
    async with groups(options, placements, nodes) as running:
        await warm(running.values(), rows, tokens)
        for _ in range(options.rounds):
            for name, group in running.items():
                one = await ran(group, rows, tokens)
                if one is not None:
                    found[name].append(one)
    return found


def routing_of(placement: Placement, spec: ModelSpec, counts: RoutingCounts) -> RoutingShape:
    slots = ExpertPlacement(placement)
    return routing_shape(
        [(split(layer_routing(counts, n))[1], slots.layer(n)) for n in spec.moe_layers]
    )


def machine(options: argparse.Namespace) -> tuple[Hardware, str]:
    """With the link's rate in place of what the file has of TCP."""
    if options.hardware is not None:
        hardware = load_hardware(str(options.hardware))
    else:
        hardware = profile(ProfileSettings(BUNDLED, "bfloat16", options.profile_s))
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
        placements = {"contiguous": in_order(ranks)}
        if ranks > 1:
            placements = placements_of(spec, counts, ranks)
        rounds = asyncio.run(measured(options, rows, placements, nodes))
        key = f"1+{ranks}"
        samples[key] = {
            name: {field: [round(getattr(one, field), 4) for one in found] for field in Ran._fields}
            for name, found in rounds.items()
        }
        summary[key] = {}
        for name, placement in placements.items():
            routing = routing_of(placement, spec, counts)
            said = foretold(shape, hardware, routing, ranks, batches, backend)
            summary[key][name] = compared(routing, said, rounds[name])
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


def compared(
    routing: RoutingShape, said: PredictedRouting, rounds: Sequence[Ran]
) -> dict[str, Any]:
    whole_s, attention_s, expert_s, *_ = map(statistics.median, zip(*rounds, strict=True))
    calm = sorted(rounds, key=lambda one: one.waited_s / one.whole_s)
    calm = calm[: max(1, round(CALMEST * len(rounds)))]
    calm_s = statistics.median(one.whole_s for one in calm)
    return {
        "copies": round(routing.mean.copies, 4),
        "load": round(routing.mean.load, 4),
        "rounds": len(rounds),
        "predicted_s": round(said.whole_s, 4),
        "measured_s": round(whole_s, 4),
        "over": round(said.whole_s / whole_s, 4),
        "waited": round(statistics.median(one.waited_s / one.whole_s for one in rounds), 4),
        "calmest": {
            "measured_s": round(calm_s, 4),
            "over": round(said.whole_s / calm_s, 4),
            "waited": round(statistics.median(one.waited_s / one.whole_s for one in calm), 4),
        },
        "attention_cpu_over": round(said.attention_s / attention_s, 4),
        "expert_cpu_over": round(said.expert_s / expert_s, 4),
    }


def in_order(ranks: int) -> Placement:
    return contiguous_placements(str(BUNDLED), expert_ranks=ranks)[Group.EXPERT]


def main() -> None:
    options = _options()
    run(options, nodes_of(options, "benchmarks.placed_prediction"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--hardware", type=Path, help="of tandem profile, made before")
    parser.add_argument("--profile-s", type=float, default=40.0, help="without --hardware")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
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
