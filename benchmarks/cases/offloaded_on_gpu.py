"""Time per token of one stream on one GPU whose experts do not all fit, beside Eq. 1 of Speculating
Experts.

Slots are in its memory, the other experts in the host's, pinned. Qwen3-30B-A3B's shape, random
bfloat16 weights, imposed routing.

    python -m benchmarks offloaded_on_gpu                              one GPU of 80 GiB or more
    python -m benchmarks offloaded_on_gpu --device cpu --shape small   the same way, in seconds

Routing is imposed, and even: random weights say nothing of hits, and even routing is the least that
a cache can hit. So is the context: keys and values are random. Predictions are right for
--recall of the experts; the next router still runs.

no cache: what a token needs and no more is kept (the paper's on demand). on demand: a cache and no
hints. ahead: with hints. oracle: hints are right. there: every token wants the same experts, so
that all are there: what is computed. Variants in turns over one cache; logits of all are compared
bit by bit. The bound is Eq. 1's, of what was computed and what was missing, at the measured rate.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.moe.backend import TaskKey
from actors.offload.device_backend import DeviceBackend
from actors.telemetry.telemetry import Timeline
from benchmarks.harness import Measured, Table, documented_case, table_of
from benchmarks.support.gpu_rates import (
    add_device_options,
    add_run_options,
    expert_copies,
    memory_bytes_per_s,
    peak_bytes,
)
from benchmarks.support.imposed_routing import ImposedPredictor, ImposedRouting
from benchmarks.support.offloaded_report import shortened, summarise
from benchmarks.support.random_in_memory import SHAPES, random_offloaded
from contracts.machine import available_bytes
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.device import wait_for_device
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.experts.device_lanes import device_lane
from models.experts.device_tier import DeviceCache, DeviceSlots, DeviceTier
from models.experts.expert_cache import ExpertCache
from models.experts.expert_layout import ExpertLayout
from models.spec.config_fields import ConfigFields
from models.spec.model import spec_from

BLOCK_TOKENS = 16
DEADLINE_S = 60.0
NO_CACHE, ON_DEMAND, AHEAD, ORACLE, THERE = "no cache", "on demand", "ahead", "oracle", "there"
_HOST_PART, _DEVICE_PART = 0.8, 0.85  # of what is free, for experts


class Turn(NamedTuple):
    """tpot_ms: per token, but for the first ones, which warm up. missing_LS: experts that were not
    there, by layer and step. copied_bytes, copied_s: of those steps."""

    tpot_ms: float
    missing_LS: list[list[int]]
    copied_bytes: int
    copied_s: float
    exposed_s: float
    peak_bytes: int


class Variant:
    def __init__(self, bench: Bench, held: DeviceCache, precision: float | None) -> None:
        self.held, half = held, bench.model.attention
        self.predictor = None if precision is None else ImposedPredictor(half, precision)
        self.backend = DeviceBackend(
            "bench", half, held, Timeline(0), self.predictor, deadline_s=DEADLINE_S
        )

    def add(self, step: int, layer: int, hidden_TD: Tensor, routed: Any, batch: int) -> None:
        key = TaskKey(batch, layer, 0, Priority.LS, True)
        if self.predictor is not None:
            self.predictor.step = step
        pending = self.backend.dispatch(key, hidden_TD, routed, Plan())
        for _ in self.backend.combine(hidden_TD, pending, None):
            pass


class Bench:
    """The model, its keys and values, and caches over its experts, one at a time."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.options = given
        self.device, self.dtype = torch.device(given.device), getattr(torch, given.dtype)
        self.config = self._config()
        self.model = random_offloaded(self.config, self.dtype, self.device)
        self.spec, self.lane = self.model.layout.spec, device_lane(self.device)
        self.steps = given.warm + given.tokens
        # each context in blocks of its own: what is written behind one is not in another
        self.first_block, blocks = dict[int, int](), 0
        for context in given.contexts:
            self.first_block[context] = blocks
            blocks += -(-(context + self.steps) // BLOCK_TOKENS)
        self.kv = KvPool(self.spec, blocks, BLOCK_TOKENS, self.dtype, self.device)
        for layer in range(self.spec.num_layers):
            for tensor in self.kv.entries(layer):
                tensor.normal_()
        self.batches = 0

    def _config(self) -> dict[str, Any]:
        """With as many layers as fit, in the host's memory and, all kept, in the device's."""
        given, config = self.options, dict(SHAPES[self.options.shape])
        tokens = max(given.contexts) + given.warm + given.tokens
        config["max_position_embeddings"] = max(config["max_position_embeddings"], tokens)
        layers = given.layers or config["num_hidden_layers"]
        spec = spec_from(ConfigFields(Path("random"), config))
        layout = ExpertLayout(spec, self.dtype, self.device, packed=False)
        layer_bytes = layout.num_bytes(spec.num_experts)
        fits = int(_HOST_PART * available_bytes() / layer_bytes)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            fits = min(fits, int(_DEVICE_PART * free / (max(given.kept) * layer_bytes)))
        config["num_hidden_layers"] = max(2, min(layers, fits))
        print(f"{config['num_hidden_layers']} of {layers} layers: what fits", flush=True)
        return config

    @contextmanager
    def variants(self, kept: float, names: Sequence[str]) -> Iterator[dict[str, Variant]]:
        """Over one cache of `kept` of all experts, but for the one without."""
        caches = {NO_CACHE: self.cache(0.0), "": self.cache(kept)}
        self._fill(caches[""].cache)
        precision = {AHEAD: self.options.recall, ORACLE: 1.0}
        try:
            yield {
                name: Variant(self, caches.get(name, caches[""]), precision.get(name))
                for name in names
            }
        finally:
            for held in caches.values():
                held.close()
            caches.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _fill(self, cache: ExpertCache) -> None:
        """All experts come by once: those that fit stay."""
        spec = self.spec
        for layer in spec.moe_layers:
            for first in range(0, spec.num_experts, spec.top_k):
                experts = range(first, min(first + spec.top_k, spec.num_experts))
                request = cache.request(layer, experts, Priority.LS)
                while request.left:
                    cache.complete(request, cache.acquire_ready(request))

    def cache(self, kept: float) -> DeviceCache:
        spec, layout = self.spec, self.model.layout
        slots = max(spec.top_k, round(kept * len(spec.moe_layers) * spec.num_experts))
        memory, tier = DeviceSlots(layout, slots), DeviceTier(self.model.memory, layout, self.lane)
        cache = ExpertCache(tier, memory, "walk", deadline_s=DEADLINE_S)
        return DeviceCache(cache, memory, tier, self.lane)

    def turn(self, variant: Variant, context: int, routing: ImposedRouting) -> tuple[Turn, Tensor]:
        """With the logits of the last token."""
        traffic, lane = variant.held.cache.traffic, self.lane
        if variant.predictor is not None:
            precision = variant.predictor.imposed
            variant.predictor.ids_SLK = routing.predicted_routing(precision, self.device)
        missing: list[list[int]] = [[] for _ in self.spec.moe_layers]
        self.batches += 1
        start_s = before = logits = None
        with torch.inference_mode():
            for step in range(self.steps):
                if step == self.options.warm:
                    wait_for_device(self.device)
                    before = sum(traffic.read_bytes.values()), lane.copied_s, lane.exposed_s
                    start_s, missing = time.monotonic(), [[] for _ in missing]
                logits = self._pass(variant, step, context, routing, missing)
        assert start_s is not None
        assert before is not None
        assert logits is not None
        spent_s = time.monotonic() - start_s
        lane.drain()
        turn = Turn(
            1e3 * spent_s / self.options.tokens,
            missing,
            sum(traffic.read_bytes.values()) - before[0],
            lane.copied_s - before[1],
            lane.exposed_s - before[2],
            peak_bytes(self.device),
        )
        return turn, logits.cpu()

    def _pass(
        self,
        variant: Variant,
        step: int,
        context: int,
        routing: ImposedRouting,
        missing: list[list[int]],
    ) -> Tensor:
        """The logits of a token; the host waits for it, as for one that is drawn."""
        half, traffic = self.model.attention, variant.held.cache.traffic
        first, at = context + step, self.first_block[context]
        blocks = range(at, at - (-(first + 1) // BLOCK_TOKENS))
        inputs = AttentionBatch.build(
            [SequenceSlice([step % self.spec.vocab_size], first, blocks)],
            block_tokens=BLOCK_TOKENS,
            device=self.device,
        )
        hidden_TD = half.embed(inputs)
        for layer in range(self.spec.num_layers):
            attended = half.attend(layer, hidden_TD, inputs, self.kv)
            hidden_TD, own, router = attended.hidden_TD, attended.routed, half.router(layer)
            assert own is not None
            assert router is not None
            routed = routing.routed(step, layer, own, router.logits(own.x_TD))
            there = traffic.requested[layer] - traffic.hits[layer]
            variant.add(step, layer, hidden_TD, routed, self.batches)
            missing[layer].append(traffic.requested[layer] - traffic.hits[layer] - there)
        logits = half.logits(hidden_TD)
        int(logits.argmax())
        return logits

    def close(self) -> None:
        self.lane.drain()
        self.model.host.close()


def rates(bench: Bench) -> dict[str, float]:
    """As measured alone, in bytes/s."""
    memory, layout = bench.model.memory, bench.model.layout
    link = expert_copies(memory, layout, bench.lane)
    return {"link": link, "memory": memory_bytes_per_s(bench.device)}


def run(bench: Bench, started_s: float) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By setting and variant. Round 0 warms up."""
    given, samples = bench.options, dict[str, dict[str, list[dict[str, Any]]]]()
    expected: dict[tuple[int, int, bool], Tensor] = {}
    for kept in given.kept:
        names = [ON_DEMAND, THERE, NO_CACHE, AHEAD, ORACLE] if kept < 1.0 else [ON_DEMAND, THERE]
        with bench.variants(kept, names) as variants:
            for context in given.contexts:
                found = samples[f"{kept:.0%} kept, context {context}"] = {n: [] for n in names}
                for number in range(given.rounds + 1):
                    for name in names if number % 2 else names[::-1]:
                        same = name == THERE
                        routing = ImposedRouting(
                            bench.spec, bench.steps, number, bench.device, same=same
                        )
                        turn, logits = bench.turn(variants[name], context, routing)
                        key = context, number, same
                        if not torch.equal(logits, expected.setdefault(key, logits)):
                            raise RuntimeError(f"{kept:.0%} kept, {name}: other logits")
                        if number:
                            found[name].append(turn._asdict())
                    if number and time.monotonic() - started_s > given.limit_s:
                        break
                print(f"{kept:.0%} kept, context {context}: {number} rounds", flush=True)
    return samples


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device_options(parser, rounds=3)
    add_run_options(parser, limit_s=400.0)
    add, there = parser.add_argument, torch.cuda.is_available()
    add("--kept", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0], help="of all experts")
    add("--contexts", type=int, nargs="+", default=[1024, 65_536] if there else [64, 256])
    add("--recall", type=float, default=0.95, help="of predictions")
    add("--tokens", type=int, default=24, help="of a turn")
    add("--warm", type=int, default=8, help="tokens before those")


def measure(given: argparse.Namespace) -> Measured:
    started_s = time.monotonic()
    torch.set_num_threads(given.threads or torch.get_num_threads())
    bench = Bench(given)
    try:
        print(f"model made after {time.monotonic() - started_s:.0f} s", flush=True)
        measured = rates(bench)
        samples = run(bench, started_s)
    finally:
        bench.close()
    summary = summarise(samples, measured, bench.spec, bench.model.layout)
    return Measured({"turns": shortened(samples)}, summary, {"model_config": bench.config})


def tables(summary: dict[str, Any]) -> list[Table]:
    settings = {name: row for name, row in summary.items() if "variants" in str(row)}
    return [
        table_of(row["variants"], f"{name}: bound {row['bound_ms']:.2f} ms a token", "variant")
        for name, row in settings.items()
    ]


CASE = documented_case(__doc__, "Offloaded decode on one GPU", measure, tables, add_options)
