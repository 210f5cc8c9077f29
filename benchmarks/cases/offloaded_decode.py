"""Time per token of streams whose experts are partly read from a file.

The file is read past the page cache, on demand or a layer ahead.

    python -m benchmarks offloaded_decode                    (about 5 minutes)
    python -m benchmarks offloaded_decode --kept 0.5 --times 1 --rounds 4

Variants run in turn, each round on another text with forced tokens. Logits must equal those of
resident experts. --times: factor on the size of an expert read (support/larger_experts.py).

no cache: keeps only the experts of a token. on demand: a cache without prefetch. ahead: with
prefetch by a predictor; best: the most precise one of each layer; oracle: the experts of a first
run, the bound of prefetch; wrong: never the right experts. stored: experts in the checkpoint's
format (bfloat16, computed in float32): twice as many in the same bytes.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from actors.moe.backend import TaskKey
from actors.offload.device_backend import CachedBackend
from actors.offload.file_tier import ENTRIES, FileTier, open_expert_file
from actors.telemetry.telemetry import Timeline
from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.larger_experts import LargerTier
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.experts import local_index
from kernels.steps import run_to_end
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.experts.cache_requests import PredictedExpert
from models.experts.expert_cache import ExpertCache
from models.experts.expert_eviction import EvictionKind
from models.experts.expert_format import CheckpointFormat, ComputeFormat, ExpertFormat
from models.experts.expert_half import ExpertHalf, RoutedTokens, expert_sum_steps
from models.experts.expert_layout import ExpertLayout
from models.prediction.expert_predictor import ExpertPredictor, Ids, PredictedRouting
from models.prediction.routing_profile import RoutingProfile
from models.spec.checkpoint_files import ROUTING
from models.text.tokenizer import Tokenizer
from models.weights.checkpoint import Checkpoint, check_checkpoint

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "bundled"
TEXTS = Path(__file__).resolve().parents[2] / "docs"
PROMPT, BLOCK, BATCH = 16, 16, 0
ORACLE = "oracle"
HINTS = ("fitted", "best", ORACLE, "wrong")
CACHES = ("walk", "lru")
ON_DEMAND, NO_CACHE, RESIDENT = "on demand, walk", "no cache", "resident"
STORED = ", stored"


class Oracle(ExpertPredictor):
    """Predicts the experts of a text, `requested` by (token, layer). wrong: predicts others."""

    def __init__(
        self, half: AttentionHalf, requested: dict[tuple[int, int], Ids], *, wrong: bool = False
    ) -> None:
        super().__init__(half, None)
        self.requested, self._wrong = requested, wrong
        self.step = 0

    def experts(self, predicted: PredictedRouting) -> list[PredictedExpert]:
        """Return experts whose confidence is the measured precision of the layer."""
        confidence = statistics.mean(self.precision[predicted.layer])
        found = {expert for ids in predicted.ids for expert in ids}
        return [PredictedExpert(expert, confidence) for expert in sorted(found)]

    def predict_first(self, token_ids_T: Tensor) -> PredictedRouting:
        return self._predicted(self._half.spec.moe_layers[0])

    def predict(
        self, layer: int, hidden_TD: Tensor, routed: RoutedTokens
    ) -> PredictedRouting | None:
        following = self._next_of.get(layer)
        return None if following is None else self._predicted(following)

    def _predicted(self, layer: int) -> PredictedRouting:
        ids = self.requested[self.step, layer]
        if self._wrong:
            experts = self._half.spec.num_experts
            ids = [[e for e in range(experts) if e not in row][: len(row)] for row in ids]
        return PredictedRouting(layer, ids)


class Model:
    """The bundled model in float32 on one thread."""

    def __init__(self) -> None:
        checkpoint = Checkpoint(BUNDLED)
        self.spec = check_checkpoint(BUNDLED)
        self.half = AttentionHalf.load(checkpoint, self.spec, dtype=torch.float32)
        everyone = range(self.spec.num_experts)
        self.experts = ExpertHalf.load(checkpoint, self.spec, everyone, dtype=torch.float32)
        self.identity_E = local_index(list(everyone), self.spec.num_experts)
        self.layout = ExpertLayout(self.spec, torch.float32, torch.device("cpu"))
        self.profile = RoutingProfile.read(BUNDLED / ROUTING, BUNDLED, self.spec)
        self.tokenizer = Tokenizer.load(BUNDLED)

    def run(
        self,
        ids: Sequence[int],
        experts: Callable[[int, int, Tensor, RoutedTokens], None],
        starts: Callable[[int, Tensor], None] = lambda step, token_ids_T: None,
    ) -> tuple[float, Tensor]:
        """Return (mean ms per token after the prompt, the last logits). experts: adds the output
        of a layer; starts: is called before each pass."""
        half, blocks = self.half, range(-(-len(ids) // BLOCK))
        kv = KvPool(self.spec, len(blocks), BLOCK, half.dtype, half.device)
        bounds = [(0, PROMPT), *((p, p + 1) for p in range(PROMPT, len(ids)))]
        start_s = logits = None
        with torch.inference_mode():
            for step, (first, stop) in enumerate(bounds):
                if step == 1:
                    start_s = time.perf_counter()
                row = SequenceSlice(list(ids[first:stop]), first, blocks)
                inputs = AttentionBatch.build([row], block_tokens=BLOCK, device=half.device)
                starts(step, inputs.token_ids_T)
                hidden_TD = half.embed(inputs)
                for layer in range(self.spec.num_layers):
                    attended = half.attend(layer, hidden_TD, inputs, kv)
                    hidden_TD = attended.hidden_TD
                    assert attended.routed is not None
                    experts(step, layer, hidden_TD, attended.routed)
                logits = half.logits(hidden_TD[-1:])
        assert start_s is not None
        assert logits is not None
        return 1e3 * (time.perf_counter() - start_s) / (len(bounds) - 1), logits

    def resident(self, step: int, layer: int, hidden_TD: Tensor, routed: RoutedTokens) -> None:
        hidden_TD.add_(
            run_to_end(expert_sum_steps(routed, self.experts.layer_experts(layer), self.identity_E))
        )


class Offloaded:
    """One variant, with a cache that stays from text to text."""

    def __init__(
        self, model: Model, tier: FileTier, slot_format: ExpertFormat, slots: int, name: str
    ) -> None:
        when, _, order = name.removesuffix(STORED).partition(", ")
        hints, order = (order, "walk") if when == "ahead" else ("", order or "walk")
        self.tier = tier
        self.cache = ExpertCache(
            tier, slot_format.slots(slots), cast("EvictionKind", order), deadline_s=30.0
        )
        self.predictor: ExpertPredictor | None = None
        if hints in (ORACLE, "wrong"):
            self.predictor = Oracle(model.half, {}, wrong=hints == "wrong")
        elif hints:
            kind: Any = None if hints == "best" else hints
            self.predictor = ExpertPredictor(model.half, model.profile, kind)
        timeline = Timeline(0)
        self.backend = CachedBackend("bench", model.half, self.cache, timeline, self.predictor)

    def run(
        self, model: Model, ids: Sequence[int], requested: dict[tuple[int, int], Ids]
    ) -> tuple[float, Tensor]:
        def starts(step: int, token_ids_T: Tensor) -> None:
            if isinstance(self.predictor, Oracle):
                self.predictor.step, self.predictor.requested = step, requested
            self.backend.prepare(TaskKey(BATCH, 0, 0, Priority.LS, step > 0), token_ids_T)

        def experts(step: int, layer: int, hidden_TD: Tensor, routed: RoutedTokens) -> None:
            key = TaskKey(BATCH, layer, 0, Priority.LS, step > 0)
            pending = self.backend.dispatch(key, hidden_TD, routed, Plan())
            run_to_end(self.backend.combine(hidden_TD, pending, None))

        found = model.run(ids, experts, starts)
        self.cache.forget_hints((BATCH, 0))
        while self.tier.room < ENTRIES:  # the next variant uses the same tier
            self.cache.wait(0.01)
        return found


def texts(tokenizer: Tokenizer, rounds: int, tokens: int) -> list[list[int]]:
    """Return token ids of this project's documents, one list per round."""
    ids = [i for path in sorted(TEXTS.glob("*.md")) for i in tokenizer.encode(path.read_text())]
    step = max(1, (len(ids) - tokens) // rounds)
    return [ids[number * step : number * step + tokens] for number in range(rounds)]


@contextmanager
def variants(model: Model, folder: Path, kept: float, times: int) -> Iterator[dict[str, Offloaded]]:
    """Yield variants by name. kept: fraction of all experts, in compute format, that fits."""
    whole = len(model.spec.moe_layers) * model.spec.num_experts
    computed = ComputeFormat(model.layout)
    stored = CheckpointFormat(Checkpoint(BUNDLED), model.spec, torch.float32)
    kept_bytes = kept * whole * sum(computed.sizes)

    def opened(slot_format: ExpertFormat) -> FileTier:
        file = open_expert_file(BUNDLED, slot_format, store=folder, deadline_s=60.0, direct_io=True)
        return LargerTier(file, times)

    tiers: dict[ExpertFormat, FileTier] = {
        slot_format: opened(slot_format) for slot_format in (computed, stored)
    }

    def made(name: str) -> Offloaded:
        slot_format: ExpertFormat = stored if name.endswith(STORED) else computed
        slots = min(whole, max(model.spec.top_k, round(kept_bytes / sum(slot_format.sizes))))
        if name == NO_CACHE:
            slots = model.spec.top_k
        return Offloaded(model, tiers[slot_format], slot_format, slots, name)

    names = [NO_CACHE, *(f"on demand, {order}" for order in CACHES), ON_DEMAND + STORED]
    names += [*(f"ahead, {hints}" for hints in HINTS), "ahead, best" + STORED]
    try:
        yield {name: made(name) for name in names}
    finally:
        for tier in tiers.values():
            tier.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, samples = Model(), dict[str, Any]()
    rounds = texts(model.tokenizer, options.rounds + 1, PROMPT + options.tokens)
    with tempfile.TemporaryDirectory(prefix="tandem-", dir=options.folder) as folder:
        for times, kept in itertools.product(options.times, options.kept):
            with variants(model, Path(folder), kept, times) as found:
                samples[f"x{times}, {kept:.0%} kept"] = _measure(model, found, rounds)
    return samples


def _measure(
    model: Model, found: dict[str, Offloaded], rounds: Sequence[list[int]]
) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in (RESIDENT, *found)}
    for number, ids in enumerate(rounds):  # the first one warms up
        requested: dict[tuple[int, int], Ids] = {}

        def noted(step: int, layer: int, hidden_TD: Tensor, routed: RoutedTokens) -> None:
            requested[step, layer] = routed.topk_ids_TK.tolist()  # noqa: B023  (called at once)
            model.resident(step, layer, hidden_TD, routed)

        _, expected = model.run(ids, noted)
        order = list(times)
        for name in order if number % 2 else order[::-1]:
            if name == RESIDENT:
                spent_ms, logits = model.run(ids, model.resident)
            else:
                spent_ms, logits = found[name].run(model, ids, requested)
            if not torch.equal(logits, expected):
                raise RuntimeError(f"{name}: other logits than with resident experts")
            if number:
                times[name].append(spent_ms)
    return {name: {"tpot_ms": each, **_traffic(found.get(name))} for name, each in times.items()}


def _traffic(variant: Offloaded | None) -> dict[str, Any]:
    if variant is None:
        return {}
    traffic = variant.cache.traffic
    requested = sum(traffic.requested.values())
    return {
        "hits": sum(traffic.hits.values()) / requested,
        "waited_s": traffic.waited_s,
        "copied_s": traffic.copied_s,
        "read_ms": 1e3 * variant.cache.read_s,
        **{f"{cause}_bytes": count for cause, count in traffic.read_bytes.items()},
    }


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Return medians. gain: over reading on demand with the same cache, round by round."""
    found = {}
    for setting, by_variant in samples.items():
        for name, measured in by_variant.items():
            row = gain(by_variant[ON_DEMAND]["tpot_ms"], measured["tpot_ms"])
            row |= {key: round(measured[key], 3) for key in ("hits", "read_ms") if key in measured}
            found[f"{setting} | {name}"] = row
    return found


def gain(base_ms: Sequence[float], spent_ms: Sequence[float]) -> dict[str, float]:
    """Return the median time per token, and the median ratio of base to it."""
    ratios = [base / spent for base, spent in zip(base_ms, spent_ms, strict=True)]
    return {
        "tpot_ms": round(statistics.median(spent_ms), 2),
        "gain": round(statistics.median(ratios), 2),
    }


def measure(options: argparse.Namespace) -> Measured:
    samples = run(options)
    return Measured(samples, summary(samples))


def tables(summary: dict[str, Any]) -> list[Table]:
    names = [key.partition(" | ") for key in summary]
    settings = list(dict.fromkeys(setting for setting, _, _ in names))
    rows = [
        [name, *(f"{summary[f'{setting} | {name}']['tpot_ms']:.2f}" for setting in settings)]
        for name in dict.fromkeys(name for _, _, name in names)
    ]
    return [Table("ms per token; xN: size of an expert read", ["variant", *settings], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64, help="generated in a round")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--times", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", help="on the disk to read from (default: the system's)")


CASE = documented_case(__doc__, "Decode with offloaded experts", measure, tables, add_options)
