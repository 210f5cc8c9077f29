"""Makespan of prefill-only work on eight workers, by routing policy.

`python -m benchmarks router_simulation --data DIR` prints the table of docs/benchmarks.md.

Requests are real (rows and traces in DIR), and so is the router. Workers are not: each runs steps
of max(FLOPs / rate, time to gather all layers' experts), with a prefix cache of the memory that
would be left, for Qwen3-235B-A22B on the H200 of cluster/fleet/hardware_files (public figures). All
requests are there from the start. Reports reach the router at once.
"""

import argparse
import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actors.planning.planner_inputs import shape_of
from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.router_workloads import BLOCK_TOKENS, WORKLOADS, workload
from benchmarks.support.simulated_worker import Machine, SimulatedWorker
from cluster.fleet.hardware import load_hardware
from contracts.routing_messages import Calibration, Prompt
from models.spec.config_fields import ConfigFields
from models.spec.model import spec_from
from planner.costs.model_shape import ModelShape
from planner.routing.backlog import Backlog, HeldRequest, Lane
from planner.routing.open_requests import RequestWork, flops_work, token_work
from planner.routing.router import (
    RouteCandidate,
    RoutePolicy,
    Router,
    RouterConfig,
    prefix_while_busy,
    prefix_within_round,
)
from planner.routing.worker_state import SaturationConfig
from tests.support.paper_routing import route, route_unsaturated, transfer_threshold_flops

QWEN3_235B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
WORKERS, MEMORY_FRACTION = 8, 0.9
REFERENCE = (2048,) * 4  # prompts of the calibration pass


class Variant(NamedTuple):
    """A policy, none for the paper's; the unit in which its router keeps account, whether requests
    get a home ahead of their round, and the lane that they wait in there."""

    policy: RoutePolicy | None
    in_flops: bool
    ahead: bool = False
    lane: Lane = Lane.FIRST


turns = itertools.count()


def round_robin(candidates: Sequence[RouteCandidate]) -> RouteCandidate:
    return candidates[next(turns) % len(candidates)]


def earliest_finish(candidates: Sequence[RouteCandidate]) -> RouteCandidate:
    return min(candidates, key=lambda c: (c.load + c.added, -c.matched_blocks, c.worker))


VARIANTS = {
    "router": Variant(prefix_within_round, in_flops=True, ahead=True),
    "router, best effort": Variant(prefix_while_busy, in_flops=True, ahead=True, lane=Lane.LATER),
    "router, in tokens": Variant(prefix_within_round, in_flops=False, ahead=True),
    "paper's rounds": Variant(None, in_flops=True),
    "paper's rounds, in tokens": Variant(None, in_flops=False),
    "least finish": Variant(earliest_finish, in_flops=True),
    "least finish, in tokens": Variant(earliest_finish, in_flops=False),
    "round robin": Variant(round_robin, in_flops=True),
}


class Outcome(NamedTuple):
    makespan_s: float
    flops: int
    cached_tokens: int


class Simulation:
    """One policy, one workload."""

    def __init__(self, machine: Machine, flops: RequestWork, variant: Variant) -> None:
        config = RouterConfig(
            workers=WORKERS,
            saturation=SaturationConfig(fallback_prompts=REFERENCE),
            block_tokens=machine.block_tokens,
        )
        work = flops if variant.in_flops else token_work
        self._router, self._policy = Router(config, work), variant.policy
        if variant.ahead and variant.policy:
            self._backlog: Backlog | None = Backlog(self._router, work, variant.policy)
        else:
            self._backlog = None
        self._lane = variant.lane
        self._workers = [SimulatedWorker(n, machine, flops) for n in range(WORKERS)]
        self._ends: list[tuple[float, int]] = []
        for worker in self._workers:
            self._router.apply(worker.calibrate(_calibration(machine, flops)))

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        queue, now_s = deque(prompts), 0.0
        self._turn(queue, now_s)
        while self._ends:
            now_s, number = heapq.heappop(self._ends)
            self._router.apply(self._workers[number].finish())
            self._turn(queue, now_s)
        if queue or any(self._router.load(n) for n in range(len(self._workers))):
            raise SystemExit("the books do not balance: requests or load are left")
        return Outcome(
            makespan_s=now_s,
            flops=sum(worker.flops_done for worker in self._workers),
            cached_tokens=sum(worker.cached_tokens for worker in self._workers),
        )

    def _turn(self, queue: deque[Prompt], now_s: float) -> None:
        """Workers begin their next steps, and get the requests of the ones after."""
        self._route(queue)
        self._start_idle(now_s)
        self._route(queue)

    def _route(self, queue: deque[Prompt]) -> None:
        """All that can be sent now, in whichever of the two ways."""
        if self._backlog is not None:
            while queue:
                self._backlog.put(HeldRequest(queue.popleft(), self._lane))
            for prompt, worker in self._backlog.take():
                self._send(prompt, worker)
            return
        while queue and (chosen := self._choose(queue[0])) is not None:
            self._send(queue.popleft(), chosen)

    def _choose(self, prompt: Prompt) -> int | None:
        if self._policy is not None:
            return route(self._router, prompt, self._policy).worker
        chosen = route_unsaturated(self._router, prompt)
        return chosen and chosen.worker

    def _send(self, prompt: Prompt, worker: int) -> None:
        self._router.apply(self._workers[worker].accept(prompt))

    def _start_idle(self, now_s: float) -> None:
        for number, worker in enumerate(self._workers):
            if worker.is_idle and worker.has_work:
                seconds, report = worker.start()
                self._router.apply(report)
                heapq.heappush(self._ends, (now_s + seconds, number))


def qwen3_235b() -> ModelShape:
    """In bfloat16, from the published configuration."""
    return shape_of(spec_from(ConfigFields(Path("config.json"), QWEN3_235B)), 2)


def _calibration(machine: Machine, flops: RequestWork) -> Calibration:
    """What a worker of this kind would measure: layer 0 computes, later ones wait for a gather."""
    compute_s = sum(flops(0, tokens) for tokens in REFERENCE) / machine.flops_per_s
    return Calibration(
        first_layer_s=compute_s,
        slowest_layer_s=max(compute_s, machine.transfer_s),
        reference_prompts=REFERENCE,
    )  # both times a number of layers: only their ratio counts


def machine_of(shape: ModelShape) -> Machine:
    """A worker of the hardware file's kind, with 1/N of the experts and two gathered layers."""
    hardware = load_hardware("h200-node")
    link, peers = hardware.links[0], WORKERS - 1
    layer_bytes = shape.num_experts * shape.expert_elements * shape.element_bytes
    gathered_bytes = layer_bytes * peers / WORKERS
    transfer_s = 1e-3 * shape.moe_layers * (
        peers * link.alpha_ms + gathered_bytes * link.ms_per_byte
    )  # fmt: skip
    flops_per_s = 1e3 / hardware.attention.linear_ms_per_flop
    weights_bytes = (
        shape.attention_rank_bytes + shape.moe_layers * layer_bytes / WORKERS
    ) + 3 * layer_bytes
    usable_bytes = MEMORY_FRACTION * hardware.memory_bytes - weights_bytes
    return Machine(
        flops_per_s=flops_per_s,
        transfer_s=transfer_s,
        saturation_flops=transfer_threshold_flops(
            transfer_s=transfer_s / shape.moe_layers,
            layers=shape.moe_layers,
            flops_per_s=flops_per_s,
        ),
        cache_blocks=int(usable_bytes / (BLOCK_TOKENS * shape.kv_token_bytes)),
        block_tokens=BLOCK_TOKENS,
    )


def least_flops(prompts: Sequence[Prompt], flops: RequestWork) -> int:
    """If every block was computed once, by anyone, and never evicted."""
    seen: set[bytes] = set()
    total = 0
    for prompt in prompts:
        blocks = next((i for i, d in enumerate(prompt.hashes) if d not in seen), len(prompt.hashes))
        seen.update(prompt.hashes)
        done_tokens = min(blocks, (prompt.prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        total += flops(done_tokens, prompt.prompt_tokens)
    return total


def _summary(
    prompts: Sequence[Prompt], outcomes: dict[str, Outcome], machine: Machine, flops: RequestWork
) -> dict[str, Any]:
    tokens = sum(prompt.prompt_tokens for prompt in prompts)
    least = least_flops(prompts, flops)
    ours = outcomes["router"].makespan_s
    rows = {
        label: {
            "makespan_s": outcome.makespan_s,
            "router_is_faster": outcome.makespan_s / ours,
            "flops_over_least": outcome.flops / least,
            "cached_fraction": outcome.cached_tokens / tokens,
        }
        for label, outcome in outcomes.items()
    }
    return {
        "requests": len(prompts),
        "tokens": tokens,
        "lower_bound_s": least / machine.flops_per_s / WORKERS,
        "policies": rows,
    }


def measure(options: argparse.Namespace) -> Measured:
    shape = qwen3_235b()
    machine, flops = machine_of(shape), flops_work(shape)
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for name in options.workloads:
        prompts = workload(name, options.data, options.seed)[: options.limit]
        outcomes = {
            label: Simulation(machine, flops, variant).run(prompts)
            for label, variant in VARIANTS.items()
        }
        samples[name] = {label: outcome._asdict() for label, outcome in outcomes.items()}
        summary[name] = _summary(prompts, outcomes, machine, flops)
    return Measured(samples, summary, {"machine": machine._asdict()})


def tables(summary: dict[str, Any]) -> list[Table]:
    policies = next(iter(summary.values()))["policies"]
    rows = [
        [
            name,
            *(f"{found['policies'][name]['router_is_faster']:.2f}" for found in summary.values()),
        ]
        for name in policies
    ]
    bounds = [
        f"{found['lower_bound_s'] / found['policies']['router']['makespan_s']:.2f}"
        for found in summary.values()
    ]
    rows.append(["lower bound", *bounds])
    return [Table("Makespan over the router's", ["policy", *summary], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets and traces")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--limit", type=int, default=None, help="requests of each workload")
    parser.add_argument("--seed", type=int, default=0)


CASE = documented_case(__doc__, "Router", measure, tables, add_options, kind="simulated")
