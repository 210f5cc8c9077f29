"""What a stream of LS loses whose experts do not all fit, while long prompts of BE walk
through the same cache: hits and time per token, real reads past the page cache.

    python -m benchmarks.offloaded_beside                                     (about 2 minutes)

In turns on one thread, as preemption has it: a token of the stream, then a layer of the prompt (all
experts of a layer, once). Only the stream's time counts. alone: there is no prompt. bounded: as it
is. unbounded: BE may take any slot that LS does not want at the moment.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from actors.moe.backend import TaskKey
from actors.offload.cached_backend import CachedBackend
from actors.telemetry.timeline import Timeline
from benchmarks.harness import record
from benchmarks.larger_experts import LargerTier
from benchmarks.offloaded_decode import BLOCK, BUNDLED, Model, texts
from contracts.clock import monotonic_s
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.steps import run_to_end
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.kv_pool import KvPool
from models.experts import expert_cache
from models.experts.expert_cache import ExpertCache
from models.experts.expert_file import open_expert_file
from models.experts.expert_format import ComputeFormat
from models.prediction.expert_predictor import ExpertPredictor
from planner.scheduling.expert_eviction import eviction
from planner.scheduling.prefetch_trial import pays

STREAM, PROMPT, ALONE, BOUNDED, UNBOUNDED = 16, 512, "alone", "bounded", "unbounded"
LS, BE = Priority
OF_BE: Final = {ALONE: expert_cache.BE_FRACTION, BOUNDED: expert_cache.BE_FRACTION, UNBOUNDED: 2.0}


class Worker:
    def __init__(self, model: Model, tier: LargerTier, slots: int, *, hints: bool) -> None:
        self.model, self.tier = model, tier
        order = eviction("walk", slots, {})
        self.cache = ExpertCache(
            tier, ComputeFormat(model.layout), slots, order, pays, deadline_s=30.0
        )
        predictor = ExpertPredictor(model.half, model.profile) if hints else None
        timeline = Timeline(0)
        self.backend = CachedBackend(
            "bench", model.half, self.cache, timeline, monotonic_s, predictor
        )
        self._batches = 0

    def layers(
        self, ids: Sequence[int], first: int, kv: KvPool, priority: Priority
    ) -> Iterator[None]:
        """Tokens that stand behind `first` others, a layer at a time."""
        half, self._batches = self.model.half, self._batches + 1
        slices = [SequenceSlice(list(ids), first, range(-(-(first + len(ids)) // BLOCK)))]
        inputs = AttentionBatch.build(slices, block_tokens=BLOCK, device=half.device)
        hidden_TD, batch = half.embed(inputs), self._batches
        decodes = len(ids) == 1
        self.backend.prepare(TaskKey(batch, 0, 0, priority, decodes), inputs.token_ids_T)
        for layer in range(self.model.spec.num_layers):
            attended = half.attend(layer, hidden_TD, inputs, kv)
            hidden_TD = attended.hidden_TD
            assert attended.routed is not None
            key = TaskKey(batch, layer, 0, priority, decodes)
            pending = self.backend.dispatch(key, hidden_TD, attended.routed, Plan())
            run_to_end(self.backend.combine(hidden_TD, pending, None))
            yield

    def kv(self, tokens: int) -> KvPool:
        half = self.model.half
        return KvPool(self.model.spec, -(-tokens // BLOCK), BLOCK, half.dtype, half.device)

    def stream(self, ids: Sequence[int], prompts: Iterator[None]) -> tuple[float, float]:
        """(milliseconds per token, part of its experts that were there)."""
        kv, traffic, spent_s = self.kv(len(ids)), self.cache.traffic, 0.0
        hits = requested = 0
        for _ in self.layers(ids[:STREAM], 0, kv, LS):
            pass
        for place in range(STREAM, len(ids)):
            before = sum(traffic.hits.values()), sum(traffic.requested.values())
            start_s = time.perf_counter()
            for _ in self.layers([ids[place]], place, kv, LS):
                pass
            spent_s += time.perf_counter() - start_s
            hits += sum(traffic.hits.values()) - before[0]
            requested += sum(traffic.requested.values()) - before[1]
            next(prompts, None)
        return 1e3 * spent_s / (len(ids) - STREAM), hits / requested

    def prompts(self, ids: Sequence[int]) -> Iterator[None]:
        """One after the other, for ever."""
        while True:
            yield from self.layers(ids[:PROMPT], 0, self.kv(PROMPT), BE)


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, samples = Model(), dict[str, Any]()
    experts = len(model.spec.moe_layers) * model.spec.num_experts
    every = texts(model.tokenizer, options.rounds + 1, STREAM + options.tokens)
    prompt = texts(model.tokenizer, 1, PROMPT)[0]
    with tempfile.TemporaryDirectory(prefix="tandem-", dir=options.folder) as folder:
        for kept in options.kept:
            slot_format, where = ComputeFormat(model.layout), Path(folder)
            file = open_expert_file(
                BUNDLED, slot_format, store=where, deadline_s=60.0, direct_io=True
            )
            tier = LargerTier(file, options.times)
            slots = round(kept * experts)
            workers = {name: Worker(model, tier, slots, hints=options.hints) for name in OF_BE}
            found: dict[str, dict[str, list[float]]] = {
                name: {"tpot_ms": [], "hits": []} for name in OF_BE
            }
            for number, ids in enumerate(every):
                for name in list(OF_BE) if number % 2 else list(OF_BE)[::-1]:
                    expert_cache.BE_FRACTION = OF_BE[name]  # type: ignore[misc]
                    worker = workers[name]
                    beside = iter(()) if name == ALONE else worker.prompts(prompt)
                    with torch.inference_mode():
                        spent_ms, hits = worker.stream(ids, beside)
                    if number:  # the first one warms up
                        found[name]["tpot_ms"].append(spent_ms)
                        found[name]["hits"].append(hits)
            samples[f"{kept:.0%} kept"] = found
            tier.close()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48, help="generated in a round")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--times", type=int, default=1, help="how large experts are read")
    parser.add_argument("--hints", action="store_true", help="read ahead, both classes")
    parser.add_argument("--folder", help="on the disk to read from (default: the system's)")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    samples = run(options)
    summary = {
        f"{setting} | {name}": {
            "tpot_ms": round(statistics.median(each["tpot_ms"]), 2),
            "hits": round(statistics.fmean(each["hits"]), 3),
        }
        for setting, by_name in samples.items()
        for name, each in by_name.items()
    }
    for name, row in summary.items():
        print(f"{name:30} {row}")
    record("offloaded_beside", options, samples, summary)


if __name__ == "__main__":
    main()
