"""Device slots, on the CPU with a device that delays copies and ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.moe.backend import TaskKey
from actors.offload.device_backend import DeviceBackend, DeviceCache, DevicePending
from actors.telemetry.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.gpu_experts import gpu_experts
from kernels.steps import run_to_end
from models.decoder.decoder import AttentionHalf
from models.experts.cache_requests import USED_HINT, PredictedExpert
from models.experts.device_lanes import DeviceLane, InlineLane
from models.experts.device_tier import MAX_HINTS_IN_FLIGHT, DeviceFormat, DeviceTier
from models.experts.expert_cache import ExpertCache
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import CheckpointParts, ExpertMemory
from models.experts.router import RoutedTokens
from models.prediction.expert_predictor import DevicePrediction, ExpertPredictor, PredictedRouting
from models.weights.checkpoint import Checkpoint
from planner.scheduling.expert_eviction import Kind, eviction, pays
from tests.support.fake_device import FakeLane, WatchedTier
from tests.support.local_model import LocalModel

Checkpoints = Callable[..., Path]
LS, BE = Priority
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
FEW, MANY = (1, 2, 7), (40, 300)


class AnyHint(ExpertPredictor):
    """Predicts at random: wrong, repeated, or nothing."""

    def __init__(self, half: AttentionHalf, seed: int) -> None:
        super().__init__(half, None)
        self._dice = random.Random(seed)

    def predict_on_device(
        self, layer: int, hidden_TD: Tensor, routed: RoutedTokens
    ) -> DevicePrediction | None:
        following = self._next_of.get(layer)
        if following is None or self._dice.random() < 0.2:
            return None
        spec = self._half.spec
        ids = [
            [self._dice.randrange(spec.num_experts) for _ in range(spec.top_k)]
            for _ in range(len(hidden_TD))
        ]
        return DevicePrediction(
            following, RoutedTokens(hidden_TD, torch.tensor(ids), routed.topk_weights_TK), False
        )

    def predict_first(self, token_ids_T: Tensor) -> PredictedRouting:
        spec = self._half.spec
        ids = [[self._dice.randrange(spec.num_experts) for _ in range(spec.top_k)]]
        return PredictedRouting(spec.moe_layers[0], ids, self.first)


class RightHint(ExpertPredictor):
    """Predicts the next layer's `requested` experts."""

    requested: Tensor

    def predict_on_device(
        self, layer: int, hidden_TD: Tensor, routed: RoutedTokens
    ) -> DevicePrediction | None:
        following = self._next_of.get(layer)
        if following is None:
            return None
        return DevicePrediction(
            following, RoutedTokens(hidden_TD, self.requested, routed.topk_weights_TK), False
        )


class Rig:
    """A model, its experts in host memory, and backends over them."""

    def __init__(self, folder: Path) -> None:
        self.local = LocalModel.load(folder, dtype="float32")
        self.spec = self.local.spec
        self.layout = ExpertLayout(self.spec, torch.float32, torch.device("cpu"), packed=False)
        parts, experts = CheckpointParts(Checkpoint(folder), self.layout), self.spec.num_experts
        stored = [self.layout.empty(experts) for _ in self.spec.moe_layers]
        for layer, tensors in zip(self.spec.moe_layers, stored, strict=True):
            parts.copy_part(layer, 0, experts, self.layout.pieces(tensors, 0, experts))
        self.host = ExpertMemory(stored, self.layout)
        self.backends: list[DeviceBackend] = []

    def backend(
        self,
        slots: int,
        lane: DeviceLane,
        *,
        kind: Kind = "walk",
        predictor: ExpertPredictor | None = None,
        deadline_s: float = 20.0,
    ) -> DeviceBackend:
        part_bytes = self.layout.num_bytes(1) // 3
        tier = DeviceTier(self.host, self.layout, lane, part_bytes=part_bytes)
        if isinstance(lane, FakeLane):
            tier = watched = WatchedTier(self.host, self.layout, lane, part_bytes=part_bytes)
            watched.watch(lane)
        cache = ExpertCache(
            tier, DeviceFormat(self.layout), slots, eviction(kind), pays, deadline_s=deadline_s
        )
        held = DeviceCache(cache, cache._held, tier, lane)  # type: ignore[arg-type]
        backend = DeviceBackend(
            "prefill-0",
            self.local.attention,
            held,
            Timeline(10),
            monotonic_s,
            predictor,
            deadline_s=deadline_s,
        )
        self.backends.append(backend)
        return backend

    def routed(self, tokens: int, seed: int) -> RoutedTokens:
        generator = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(tokens, self.spec.hidden_size, generator=generator)
        logits_TE = torch.randn(tokens, self.spec.num_experts, generator=generator)
        weights_TK, ids_TK = logits_TE.softmax(-1).topk(self.spec.top_k)
        return RoutedTokens(x_TD, ids_TK, weights_TK)

    def expected(self, layer: int, routed: RoutedTokens) -> Tensor:
        """Return the result of resident experts on a GPU."""
        held = self.local.experts[0].layer_experts(layer)
        ids_TK, weights_TK = routed.topk_ids_TK, routed.topk_weights_TK
        return gpu_experts(routed.x_TD, ids_TK, weights_TK, held.gate_up, held.down, held.clamped)

    def begin(
        self, backend: DeviceBackend, layer: int, routed: RoutedTokens, number: int = 0
    ) -> DevicePending:
        """number: of the micro-batch; odd ones are best-effort."""
        key = TaskKey(0, layer, number, BE if number % 2 else LS)
        if layer == self.spec.moe_layers[0]:
            backend.prepare(key, torch.zeros(len(routed.x_TD), dtype=torch.int64))
        return backend.dispatch(key, routed.x_TD, routed, Plan())

    def check(self, backend: DeviceBackend, layer: int, pending: DevicePending) -> None:
        hidden_TD = torch.zeros_like(pending.routed.x_TD)
        run_to_end(backend.combine(hidden_TD, pending, None))
        assert torch.equal(hidden_TD, self.expected(layer, pending.routed)), layer

    def check_bits(self, backend: DeviceBackend, sizes: tuple[int, ...] = (*FEW, *MANY, 1)) -> None:
        with torch.inference_mode():
            for seed, tokens in enumerate(sizes):
                for layer in self.spec.moe_layers:
                    self.check(
                        backend, layer, self.begin(backend, layer, self.routed(tokens, seed))
                    )


@pytest.fixture
def opened(tiny_checkpoint: Checkpoints) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(family: str = "qwen3_moe", **overrides: int) -> Rig:
        rigs.append(Rig(tiny_checkpoint(family, **overrides)))
        return rigs[-1]

    yield make
    for rig in rigs:
        for backend in rig.backends:
            backend._cache.check()
            assert not backend._pending
            backend._held.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [4, 6, 100])
def test_every_family_is_bit_equal_on_device(
    opened: Callable[..., Rig], family: str, slots: int
) -> None:
    rig = opened(family)
    predictor = AnyHint(rig.local.attention, 1)
    rig.check_bits(rig.backend(slots, FakeLane(2), predictor=predictor))
    rig.check_bits(rig.backend(slots, InlineLane(), predictor=predictor))


@settings(max_examples=25)
@given(
    st.integers(2, 14),
    st.integers(0, 1 << 16),
    st.booleans(),
    st.sampled_from(["walk", "lru"]),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 30]), st.integers(0, 9)), min_size=1, max_size=6),
)
def test_hints_slots_and_interleaving_do_not_change_bits(
    shared: Rig, slots: int, seed: int, hints: bool, kind: Kind, batches: list[tuple[int, int]]
) -> None:
    """Micro-batches of both classes, some dropped, with random delays of copies and ids."""
    dice = random.Random(seed)
    predictor = AnyHint(shared.local.attention, seed) if hints else None
    backend = shared.backend(slots, FakeLane(seed), kind=kind, predictor=predictor)
    with torch.inference_mode():
        for layer in shared.spec.moe_layers * 3:
            dispatched = []
            for number, (tokens, routing) in enumerate(batches):
                routed = shared.routed(tokens, routing)
                dispatched.append(shared.begin(backend, layer, routed, number))
            dice.shuffle(dispatched)
            running = [(p, torch.zeros_like(p.routed.x_TD)) for p in dispatched]
            steps = [backend.combine(hidden_TD, p, None) for p, hidden_TD in running]
            left = list(range(len(running)))
            while left:
                at = dice.choice(left)
                pending, hidden_TD = running[at]
                if dice.random() < 0.05:
                    steps[at].close()
                    backend.drop(pending)
                    left.remove(at)
                elif next(steps[at], "ended") == "ended":
                    assert torch.equal(hidden_TD, shared.expected(layer, pending.routed))
                    left.remove(at)
                backend._cache.check()
    assert not backend._pending
    shared.backends.remove(backend)


@pytest.fixture(scope="module")
def shared(tiny_checkpoint: Checkpoints) -> Rig:
    return Rig(tiny_checkpoint("qwen3_moe", num_hidden_layers=3))


def test_host_does_not_wait_for_copies(opened: Callable[..., Rig]) -> None:
    rig = opened()
    lane = FakeLane(0)
    backend, layer = rig.backend(100, lane), rig.spec.moe_layers[0]
    with torch.inference_mode():
        pending = rig.begin(backend, layer, rig.routed(2, seed=0))
        while not pending.is_complete:
            pass
        lane.stalls = True
        hidden_TD = torch.zeros_like(pending.routed.x_TD)
        run_to_end(backend.combine(hidden_TD, pending, None))
    assert lane.waits == 1, "the compute does, once for all that was missing"


def test_requested_experts_are_copied_before_predicted_ones(opened: Callable[..., Rig]) -> None:
    rig = opened()
    lane = FakeLane(0)
    backend = rig.backend(100, lane)
    tier, (first, second) = backend._held.tier, rig.spec.moe_layers[:2]
    assert isinstance(tier, WatchedTier)
    lane.stalls = True
    with torch.inference_mode():
        backend._cache.hint("somebody", second, [PredictedExpert(e, 1.0) for e in range(5)])
        backend._cache.wait(0.0)
        assert len(tier.log) == MAX_HINTS_IN_FLIGHT, "what is queued cannot be taken back"
        backend._cache.wait(0.0)
        assert len(tier.log) == MAX_HINTS_IN_FLIGHT
        request = backend._cache.request(first, [3, 5], LS)
        assert [acquired.expert for acquired in backend._cache.acquire_ready(request)] == [3, 5]
        demanded = tier.log[MAX_HINTS_IN_FLIGHT:]
        assert demanded == [(first, e, part) for e in (3, 5) for part in range(tier.parts)]
        request_hinted = backend._cache.request(second, [0, 4], LS)
        assert len(backend._cache.acquire_ready(request_hinted)) == 2, (
            "a hint that is wanted is a demand"
        )
        for each in (request, request_hinted):
            backend._cache.cancel(each)
        backend._cache.forget_hints("somebody")


def test_right_hints_avoid_waiting(opened: Callable[..., Rig]) -> None:
    rig = opened(num_hidden_layers=3)
    lane, predictor = FakeLane(0), RightHint(rig.local.attention, None)
    backend, (first, second, _) = rig.backend(100, lane, predictor=predictor), rig.spec.moe_layers
    routed = rig.routed(1, seed=3)
    predictor.requested = routed.topk_ids_TK
    with torch.inference_mode():
        rig.check(backend, first, rig.begin(backend, first, routed))
        for _ in range(20):
            backend._cache.wait(0.0)
        lane.drain()
        waits = lane.waits
        rig.check(backend, second, rig.begin(backend, second, routed))
    traffic = backend._cache.traffic
    assert lane.waits == waits
    assert traffic.hits[second] == traffic.requested[second] == rig.spec.top_k
    assert traffic.read_bytes[USED_HINT] == rig.spec.top_k * backend._held.tier.expert_bytes


def test_stalled_device_is_named_in_error(opened: Callable[..., Rig]) -> None:
    rig = opened()
    lane = FakeLane(0)
    backend, layer = rig.backend(100, lane, deadline_s=0.05), rig.spec.moe_layers[0]
    lane.stalls = True
    pending = rig.begin(backend, layer, rig.routed(2, seed=0))
    expected_error = (
        rf"ids of layer {layer} have not arrived from cpu for 0\..* s; "
        "see channel.connect_timeout_s=0.05"
    )
    with pytest.raises(ChannelError, match=expected_error):
        run_to_end(backend.combine(pending.routed.x_TD, pending, None))
    with pytest.raises(ChannelError, match=expected_error):
        backend.poll(0.02, idle=False)
    backend.drop(pending)


def test_wake_ends_device_poll(opened: Callable[..., Rig]) -> None:
    rig = opened()
    lane = FakeLane(0)
    backend, layer = rig.backend(100, lane), rig.spec.moe_layers[0]
    lane.stalls = True
    backend.wake()
    assert not backend.poll(20.0, idle=True)
    pending = rig.begin(backend, layer, rig.routed(2, seed=0))
    backend.wake()
    assert not backend.poll(20.0, idle=False)
    backend.drop(pending)
