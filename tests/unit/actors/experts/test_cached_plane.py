"""Experts that come and go give the bits of resident ones, whatever is foretold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.experts.cached_plane import CachedPending, CachedPlane
from actors.experts.file_tier import FileTier
from actors.experts.plane import TaskKey
from actors.telemetry.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.routing import local_index
from kernels.steps import run_through
from models.decoder.decoder import AttentionHalf
from models.decoder.local import LocalModel
from models.experts.expert_cache import ExpertCache, Guess
from models.experts.expert_file import open_expert_file
from models.experts.expert_layout import ExpertLayout
from models.experts.moe import expert_sums
from models.experts.router import Routed
from models.foresight.foresight import Foresight, Ids
from planner.policies.eviction import Kind, eviction
from planner.policies.read_ahead import pays

Checkpoints = Callable[..., Path]
LS, BE = Priority
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")


class AnyGuess(Foresight):
    """Foretells at random, or nothing."""

    def __init__(self, half: AttentionHalf, seed: int) -> None:
        super().__init__(half, None)
        self._dice = random.Random(seed)

    def route(self, layer: int, hidden_TD: torch.Tensor, routed: Routed) -> Ids:
        experts = range(self._half.spec.num_experts)
        return [self._dice.sample(experts, self._half.spec.top_k) for _ in routed.x_TD]

    def guesses(self, layer: int, foretold: Ids) -> list[Guess]:
        found = super().guesses(layer, foretold)
        return found[: self._dice.randrange(len(found) + 1)]


class Rig:
    def __init__(self, folder: Path, store: Path) -> None:
        self.local = LocalModel.load(folder, dtype="float32")
        self.spec = self.local.spec
        self._folder, self._store = folder, store
        self._identity_E = local_index(list(range(self.spec.num_experts)), self.spec.num_experts)
        self.planes: list[CachedPlane] = []

    def plane(self, slots: int, *, kind: Kind = "lru", seed: int | None = None) -> CachedPlane:
        layout = ExpertLayout(self.spec, torch.float32, torch.device("cpu"))
        file = open_expert_file(self._folder, layout, store=self._store, deadline_s=20.0)
        order = eviction(kind, slots, {})
        cache = ExpertCache(FileTier(file), layout, slots, order, pays, deadline_s=20.0)
        half = self.local.attention
        ahead = None if seed is None else AnyGuess(half, seed)
        plane = CachedPlane("prefill-0", half, cache, Timeline(10), monotonic_s, ahead)
        self.planes.append(plane)
        return plane

    def routed(self, tokens: int, seed: int) -> Routed:
        generator = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(tokens, self.spec.hidden_size, generator=generator)
        logits_TE = torch.randn(tokens, self.spec.num_experts, generator=generator)
        weights_TK, ids_TK = logits_TE.softmax(-1).topk(self.spec.top_k)
        return Routed(x_TD, ids_TK, weights_TK)

    def expected(self, layer: int, routed: Routed) -> torch.Tensor:
        return expert_sums(routed, self.local.experts[0].held(layer), self._identity_E)

    def begin(
        self, plane: CachedPlane, layer: int, routed: Routed, number: int = 0
    ) -> CachedPending:
        """number: of the micro-batch; odd ones are BE."""
        key = TaskKey(0, layer, number, BE if number % 2 else LS)
        return plane.begin(key, routed.x_TD, routed, Plan())

    def finish(self, plane: CachedPlane, pending: CachedPending) -> torch.Tensor:
        hidden_TD = torch.zeros_like(pending.x_TD)
        run_through(plane.steps(hidden_TD, pending, None))
        return hidden_TD


@pytest.fixture
def opened(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(family: str = "qwen3_moe") -> Rig:
        rigs.append(Rig(tiny_checkpoint(family), tmp_path))
        return rigs[-1]

    yield make
    for rig in rigs:
        for plane in rig.planes:
            plane._cache.check()
            plane._cache.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [4, 6, 100])
def test_every_family_has_the_bits_of_resident_experts(
    opened: Callable[..., Rig], family: str, slots: int
) -> None:
    rig = opened(family)
    plane = rig.plane(slots, seed=1)
    with torch.inference_mode():
        for seed, tokens in enumerate((1, 3, 40, 700, 1)):
            for layer in rig.spec.moe_layers:
                routed = rig.routed(tokens, seed)
                found = rig.finish(plane, rig.begin(plane, layer, routed))
                assert torch.equal(found, rig.expected(layer, routed)), (layer, tokens)


@settings(deadline=None, max_examples=25)
@given(
    slots=st.integers(3, 12),
    kind=st.sampled_from(["lru", "lfu", "walk"]),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
def test_micro_batches_of_both_classes_in_any_turns_have_the_same_bits(
    tiny_checkpoint: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
    slots: int,
    kind: Kind,
    seed: int,
    sizes: list[int],
) -> None:
    """Each goes through all layers at its own pace; one is dropped on its way, perhaps."""
    rig = Rig(tiny_checkpoint("qwen3_moe"), tmp_path_factory.getbasetemp())
    plane, dice = rig.plane(slots, kind=kind, seed=seed), random.Random(seed)
    layers = rig.spec.moe_layers
    at = dict.fromkeys(range(len(sizes)), 0)  # by micro-batch: how many layers it has gone through
    running = {}
    with torch.inference_mode():
        while at:
            number = dice.choice(list(at))
            layer = layers[at[number]]
            routed = rig.routed(sizes[number], seed + number + layer)
            if number not in running:
                pending = rig.begin(plane, layer, routed, number)
                hidden_TD = torch.zeros_like(routed.x_TD)
                running[number] = pending, hidden_TD, plane.steps(hidden_TD, pending, None)
            pending, hidden_TD, steps = running[number]
            if dice.random() < 0.05:
                steps.close()
                plane.drop(pending)
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
            plane._cache.check()
    plane._cache.close()


def test_it_is_complete_while_something_can_be_computed(opened: Callable[..., Rig]) -> None:
    rig = opened()
    plane, layer = rig.plane(100), rig.spec.moe_layers[0]
    with torch.inference_mode():
        one = rig.routed(1, 3)
        rig.finish(plane, rig.begin(plane, layer, one))
        assert rig.begin(plane, layer, one).is_complete, "all of it is there"
        pending = rig.begin(plane, layer, rig.routed(30, 4))
        while not pending.is_complete:
            plane.poll(0.1, idle=False)
        rig.finish(plane, pending)


def test_a_poll_that_waits_is_woken(opened: Callable[..., Rig]) -> None:
    plane = opened().plane(8)
    plane.wake()
    start_s = monotonic_s()
    plane.poll(20.0, idle=True)
    assert monotonic_s() - start_s < 10.0


def test_what_is_dropped_is_not_hinted_any_more(opened: Callable[..., Rig]) -> None:
    rig = opened()
    plane = rig.plane(100, seed=2)
    with torch.inference_mode():
        pending = rig.begin(plane, rig.spec.moe_layers[0], rig.routed(5, 1))
    assert plane._foretold
    plane.drop(pending)
    assert not plane._foretold
    assert not plane._cache._hints
    assert not plane._pending


def test_of_batches_that_are_dropped_while_they_attend_little_is_kept(
    opened: Callable[..., Rig],
) -> None:
    rig = opened()
    plane, layer = rig.plane(100, seed=2), rig.spec.moe_layers[0]
    with torch.inference_mode():
        for number in range(200):
            rig.finish(plane, rig.begin(plane, layer, rig.routed(1, number), number))
    assert len(plane._foretold) < 100
    assert len(plane._cache._hints) < 100
