"""Cached experts give the bits of resident ones, whatever is predicted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from actors.moe.backend import TaskKey
from actors.moe.prefetcher import ExpertPrefetcher
from actors.offload.cached_backend import CachedBackend, CachedPending
from actors.offload.file_tier import FileTier
from actors.telemetry.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.errors import CheckpointError
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.routing import local_index
from kernels.steps import run_to_end
from models.decoder.decoder import AttentionHalf
from models.experts import cached_sum
from models.experts.cache_requests import PredictedExpert
from models.experts.expert_cache import ExpertCache
from models.experts.expert_file import open_expert_file
from models.experts.expert_format import CheckpointFormat, ComputeFormat, ExpertFormat
from models.experts.expert_half import expert_sums
from models.experts.expert_layout import ExpertLayout
from models.experts.router import ExpertRouter, RoutedTokens
from models.prediction.expert_predictor import (
    ExpertPredictor,
    Ids,
    Precision,
    PredictedRouting,
    Speculation,
)
from models.weights.checkpoint import Checkpoint, check_checkpoint
from planner.scheduling.expert_eviction import Kind, eviction, pays
from tests.support.local_model import LocalModel
from tests.support.quantised_models import make_fp8, make_mxfp4

Checkpoints = Callable[..., Path]
LS, BE = Priority
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")
ODD = {"hidden_size": 150, "moe_intermediate_size": 140}  # no multiples of a block of fp8
GROUPS = {"hidden_size": 64, "intermediate_size": 96}  # multiples of a group of MXFP4


class Fewer(Precision):
    """Returns some of the predictions only."""

    def __init__(self, known: dict[int, list[float]], dice: random.Random) -> None:
        super().__init__(known)
        self._dice = dice

    def predicted_experts(self, layer: int, predicted_routing: Ids) -> list[PredictedExpert]:
        found = super().predicted_experts(layer, predicted_routing)
        return found[: self._dice.randrange(len(found) + 1)]


class AnyGuess(ExpertPredictor):
    """Predicts at random, or nothing."""

    def __init__(self, half: AttentionHalf, seed: int) -> None:
        super().__init__(half, None)
        self._dice = random.Random(seed)
        self.first = self.before = Fewer(
            {layer: [0.5] * half.spec.top_k for layer in half.spec.moe_layers}, self._dice
        )

    def predict_first(self, token_ids_T: torch.Tensor) -> PredictedRouting:
        return self._any(self._half.spec.moe_layers[0], len(token_ids_T))

    def predict(
        self, layer: int, hidden_TD: torch.Tensor, routed: RoutedTokens
    ) -> PredictedRouting | None:
        following = self._next_of.get(layer)
        return None if following is None else self._any(following, len(hidden_TD))

    def _any(self, layer: int, tokens: int) -> PredictedRouting:
        spec = self._half.spec
        experts = range(spec.num_experts)
        ids = [self._dice.sample(experts, spec.top_k) for _ in range(tokens)]
        return PredictedRouting(layer, ids, self.before)


class Rig:
    def __init__(self, folder: Path, store: Path) -> None:
        self.local = LocalModel.load(folder, dtype="float32")
        self.spec = self.local.spec
        self._folder, self._store = folder, store
        self._identity_E = local_index(list(range(self.spec.num_experts)), self.spec.num_experts)
        self.backends: list[CachedBackend] = []

    def backend(
        self,
        slots: int,
        *,
        kind: Kind = "lru",
        seed: int | None = None,
        predictor: ExpertPredictor | None = None,
        stored: bool = False,
    ) -> CachedBackend:
        slot_format: ExpertFormat = CheckpointFormat(
            Checkpoint(self._folder), self.spec, torch.float32
        )
        if not stored:
            slot_format = ComputeFormat(ExpertLayout(self.spec, torch.float32, torch.device("cpu")))
        file = open_expert_file(self._folder, slot_format, store=self._store, deadline_s=20.0)
        order = eviction(kind)
        cache = ExpertCache(FileTier(file), slot_format, slots, order, pays, deadline_s=20.0)
        half = self.local.attention
        ahead = predictor if seed is None else AnyGuess(half, seed)
        backend = CachedBackend("prefill-0", half, cache, Timeline(10), monotonic_s, ahead)
        self.backends.append(backend)
        return backend

    def routed(self, tokens: int, seed: int) -> RoutedTokens:
        generator = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(tokens, self.spec.hidden_size, generator=generator)
        logits_TE = torch.randn(tokens, self.spec.num_experts, generator=generator)
        weights_TK, ids_TK = logits_TE.softmax(-1).topk(self.spec.top_k)
        return RoutedTokens(x_TD, ids_TK, weights_TK)

    def expected(self, layer: int, routed: RoutedTokens) -> torch.Tensor:
        return expert_sums(routed, self.local.experts[0].layer_experts(layer), self._identity_E)

    def begin(
        self,
        backend: CachedBackend,
        layer: int,
        routed: RoutedTokens,
        number: int = 0,
        *,
        decodes: bool = False,
    ) -> CachedPending:
        """number: of the micro-batch; odd ones are best-effort."""
        key = TaskKey(0, layer, number, BE if number % 2 else LS, decodes)
        if layer == self.spec.moe_layers[0]:
            backend.prepare(key, torch.zeros(len(routed.x_TD), dtype=torch.int64))
        return backend.dispatch(key, routed.x_TD, routed, Plan())

    def finish(self, backend: CachedBackend, pending: CachedPending) -> torch.Tensor:
        hidden_TD = torch.zeros_like(pending.sum.out_UD)
        run_to_end(backend.combine(hidden_TD, pending, None))
        return hidden_TD

    def check_bits(self, backend: CachedBackend) -> None:
        """Compare with resident experts for several batch sizes."""
        with torch.inference_mode():
            for seed, tokens in enumerate((1, 3, 40, 700, 1)):
                for layer in self.spec.moe_layers:
                    routed = self.routed(tokens, seed)
                    found = self.finish(backend, self.begin(backend, layer, routed))
                    assert torch.equal(found, self.expected(layer, routed)), (layer, tokens)


@pytest.fixture
def opened(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(family: str = "qwen3_moe", *, folder: Path | None = None, **overrides: int) -> Rig:
        rigs.append(Rig(folder or tiny_checkpoint(family, **overrides), tmp_path))
        return rigs[-1]

    yield make
    for rig in rigs:
        for backend in rig.backends:
            backend._cache.check()
            backend._cache.close()


@pytest.mark.parametrize("family", [*FAMILIES, "fp8", "mxfp4"])
def test_both_formats_are_bit_equal_to_resident_experts(
    opened: Callable[..., Rig], tiny_checkpoint: Checkpoints, tmp_path: Path, family: str
) -> None:
    if family == "fp8":
        folder, _ = make_fp8(tiny_checkpoint("deepseek_v3", **ODD), tmp_path)
        rig = opened(folder=folder)
    elif family == "mxfp4":
        folder, _ = make_mxfp4(tiny_checkpoint("gpt_oss", **GROUPS), tmp_path)
        rig = opened(folder=folder)
    else:
        rig = opened(family)
    backend, computed = rig.backend(6, seed=1, stored=True), rig.backend(6, seed=1)
    if family in ("fp8", "mxfp4"):
        assert backend._cache.num_bytes < 0.3 * computed._cache.num_bytes
    for each in (backend, computed):
        rig.check_bits(each)


def test_expert_with_other_storage_format_is_rejected(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder, _ = make_fp8(tiny_checkpoint("qwen3_moe"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(folder)
    slot_format = CheckpointFormat(checkpoint, check_checkpoint(folder), torch.float32)
    with pytest.raises(
        CheckpointError, match=r"expert 2 of layer 1 .* experts.storage_format to false"
    ):
        open_expert_file(folder, slot_format, store=tmp_path, deadline_s=20.0)
    assert not list(tmp_path.glob("**/*.partial")), "nothing was written"


@settings(deadline=None, max_examples=25)
@given(
    slots=st.integers(3, 12),
    kind=st.sampled_from(["lru", "walk"]),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    run_pairs=st.sampled_from([2, 5, 512]),
)
def test_interleaved_micro_batches_are_bit_equal(
    tiny_checkpoint: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
    slots: int,
    kind: Kind,
    seed: int,
    sizes: list[int],
    run_pairs: int,
) -> None:
    """Micro-batches advance independently, and one may be dropped."""
    rig = Rig(tiny_checkpoint("qwen3_moe"), tmp_path_factory.getbasetemp())
    backend, dice = rig.backend(slots, kind=kind, seed=seed), random.Random(seed)
    layers = rig.spec.moe_layers
    at = dict.fromkeys(range(len(sizes)), 0)  # by micro-batch: how many layers it has gone through
    running = {}
    with torch.inference_mode(), patch.object(cached_sum, "RUN_PAIRS", run_pairs):
        while at:
            number = dice.choice(list(at))
            layer = layers[at[number]]
            routed = rig.routed(sizes[number], seed + number + layer)
            if number not in running:
                pending = rig.begin(backend, layer, routed, number)
                hidden_TD = torch.zeros_like(routed.x_TD)
                running[number] = pending, hidden_TD, backend.combine(hidden_TD, pending, None)
            pending, hidden_TD, steps = running[number]
            if dice.random() < 0.05:
                steps.close()
                backend.drop(pending)
                del running[number], at[number]
                continue
            try:
                next(steps)
            except StopIteration:
                assert torch.equal(hidden_TD, rig.expected(layer, routed))
                del running[number]
                at[number] += 1
                if at[number] == len(layers):
                    del at[number]
            backend._cache.check()
    backend._cache.close()


def test_pending_is_complete_while_an_expert_is_ready(opened: Callable[..., Rig]) -> None:
    rig = opened()
    backend, layer = rig.backend(100), rig.spec.moe_layers[0]
    with torch.inference_mode():
        one = rig.routed(1, 3)
        rig.finish(backend, rig.begin(backend, layer, one))
        assert rig.begin(backend, layer, one).is_complete, "all of it is there"
        pending = rig.begin(backend, layer, rig.routed(30, 4))
        while not pending.is_complete:
            backend.poll(0.1, idle=False)
        rig.finish(backend, pending)


def test_predictions_of_dropped_batches_are_bounded(opened: Callable[..., Rig]) -> None:
    rig = opened()
    backend, layer = rig.backend(100, seed=2), rig.spec.moe_layers[0]
    with torch.inference_mode():
        for number in range(200):
            rig.finish(backend, rig.begin(backend, layer, rig.routed(1, number), number))
    assert isinstance(backend._prefetcher, ExpertPrefetcher)
    assert len(backend._prefetcher) < 100
    assert len(backend._cache._hints) < 100


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["router", "predicted"])
def test_speculated_layer_runs_predicted_experts(
    opened: Callable[..., Rig], family: str, weights: Any
) -> None:
    rig = opened(family, num_hidden_layers=4)
    first, second, third = rig.spec.moe_layers[:3]
    half = rig.local.attention
    speculation = Speculation(frozenset([second]), weights)
    backend = rig.backend(100, predictor=ExpertPredictor(half, None, speculation=speculation))
    with torch.inference_mode():
        one = rig.routed(4, 1)
        rig.finish(backend, rig.begin(backend, first, one, decodes=True))
        guessed, routed = _router(half, second)(one.x_TD), rig.routed(4, 2)
        run = RoutedTokens(routed.x_TD, guessed.topk_ids_TK, guessed.topk_weights_TK)
        if weights == "router":
            run = _router(half, second).weigh(routed.x_TD, guessed.topk_ids_TK)
        found = rig.finish(backend, rig.begin(backend, second, routed, decodes=True))
        assert torch.equal(found, rig.expected(second, run))
        assert not torch.equal(found, rig.expected(second, routed))
        found = rig.finish(backend, rig.begin(backend, third, routed, decodes=True))
        assert torch.equal(found, rig.expected(third, routed)), "that layer is exact"
        rig.finish(backend, rig.begin(backend, first, one))
        found = rig.finish(backend, rig.begin(backend, second, routed))
        assert torch.equal(found, rig.expected(second, routed)), "prompts are exact"


def _router(half: AttentionHalf, layer: int) -> ExpertRouter:
    router = half.router(layer)
    assert router is not None
    return router
