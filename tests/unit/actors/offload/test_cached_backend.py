"""Cached experts give the bits of resident ones, whatever is predicted."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from actors.channels.base import Header, Packet, PacketKind
from actors.moe.backend import ExpertBackend, TaskKey
from actors.moe.expert_server import merge
from actors.moe.rank_experts import DeviceCachedExperts, DevicePairs
from actors.offload.device_backend import CachedBackend, CachedPending, DeviceBackend, DevicePending
from actors.offload.file_tier import FileTier, open_expert_file
from actors.telemetry.telemetry import Timeline
from contracts.errors import ChannelError, CheckpointError
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.experts import local_index
from kernels.gpu_experts import gpu_experts
from kernels.steps import run_to_end
from models.decoder.decoder import AttentionHalf
from models.experts import cached_sum
from models.experts.cache_requests import USED_HINT, PredictedExpert
from models.experts.device_lanes import DeviceLane, InlineLane
from models.experts.device_tier import MAX_HINTS_IN_FLIGHT, DeviceCache, DeviceSlots, DeviceTier
from models.experts.expert_cache import ExpertCache
from models.experts.expert_eviction import EvictionKind
from models.experts.expert_format import CheckpointFormat, slot_format
from models.experts.expert_half import ExpertRouter, RoutedTokens, assemble_half, expert_sum_steps
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import CheckpointParts, ExpertMemory
from models.prediction.expert_predictor import (
    DevicePrediction,
    ExpertPredictor,
    PredictedRouting,
    Speculation,
)
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint, check_checkpoint
from tests.support.fake_device import FakeLane, WatchedTier
from tests.support.local_model import LocalModel
from tests.support.quantised_models import make_fp8, make_mxfp4
from tests.support.tiny_models import FAMILIES, Checkpoints

LS, BE = Priority
P = TypeVar("P", CachedPending, DevicePending)
ODD = {"hidden_size": 150, "moe_intermediate_size": 140}  # no multiples of a block of fp8
GROUPS = {"hidden_size": 64, "intermediate_size": 96}  # multiples of a group of MXFP4


class AnyGuess(ExpertPredictor):
    """Predicts at random, wrong or repeated, or nothing; returns some of the predictions only."""

    def __init__(self, half: AttentionHalf, seed: int) -> None:
        super().__init__(half, None)
        self._dice = random.Random(seed)

    def experts(self, predicted: PredictedRouting) -> list[PredictedExpert]:
        found = super().experts(predicted)
        return found[: self._dice.randrange(len(found) + 1)]

    def predict_first(self, token_ids_T: torch.Tensor) -> PredictedRouting:
        ids = [self._ids() for _ in token_ids_T]
        return PredictedRouting(self._half.spec.moe_layers[0], ids)

    def predict_on_device(
        self, layer: int, hidden_TD: torch.Tensor, routed: RoutedTokens
    ) -> DevicePrediction | None:
        following = self._next_of.get(layer)
        if following is None or self._dice.random() < 0.2:
            return None
        ids_TK = torch.tensor([self._ids() for _ in hidden_TD])
        guessed = RoutedTokens(hidden_TD, ids_TK, routed.topk_weights_TK)
        return DevicePrediction(following, guessed, False)

    def _ids(self) -> list[int]:
        spec = self._half.spec
        return self._dice.choices(range(spec.num_experts), k=spec.top_k)


def routed_tokens(spec: ModelSpec, tokens: int, seed: int) -> RoutedTokens:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(tokens, spec.hidden_size, generator=generator)
    logits_TE = torch.randn(tokens, spec.num_experts, generator=generator)
    weights_TK, ids_TK = logits_TE.softmax(-1).topk(spec.top_k)
    return RoutedTokens(x_TD, ids_TK, weights_TK)


class BackendRig(Generic[P]):
    """A model and backends of it."""

    def __init__(self, folder: Path) -> None:
        self.local = LocalModel.load(folder, dtype="float32")
        self.spec = self.local.spec
        self.backends: list[Any] = []

    def begin(
        self,
        backend: ExpertBackend[P],
        layer: int,
        routed: RoutedTokens,
        number: int = 0,
        *,
        decodes: bool = False,
    ) -> P:
        """number: of the micro-batch; odd ones are best-effort."""
        key = TaskKey(0, layer, number, BE if number % 2 else LS, decodes)
        if layer == self.spec.moe_layers[0]:
            backend.prepare(key, torch.zeros(len(routed.x_TD), dtype=torch.int64))
        return backend.dispatch(key, routed.x_TD, routed, Plan())


class Rig(BackendRig[CachedPending]):
    def __init__(self, folder: Path, store: Path) -> None:
        super().__init__(folder)
        self._folder, self._store = folder, store
        self._identity_E = local_index(list(range(self.spec.num_experts)), self.spec.num_experts)

    def backend(
        self,
        slots: int,
        *,
        kind: EvictionKind = "lru",
        seed: int | None = None,
        predictor: ExpertPredictor | None = None,
        stored: bool = False,
    ) -> CachedBackend:
        layout = ExpertLayout(self.spec, torch.float32, torch.device("cpu"))
        form = slot_format(Checkpoint(self._folder), layout, stored)
        file = open_expert_file(self._folder, form, store=self._store, deadline_s=20.0)
        cache = ExpertCache(FileTier(file), form.slots(slots), kind, deadline_s=20.0)
        half = self.local.attention
        ahead = predictor if seed is None else AnyGuess(half, seed)
        backend = CachedBackend("prefill-0", half, cache, Timeline(10), ahead)
        self.backends.append(backend)
        return backend

    def expected(self, layer: int, routed: RoutedTokens) -> torch.Tensor:
        return run_to_end(
            expert_sum_steps(routed, self.local.experts[0].layer_experts(layer), self._identity_E)
        )

    def finish(self, backend: CachedBackend, pending: CachedPending) -> torch.Tensor:
        hidden_TD = torch.zeros_like(pending.sum.out_UD)
        run_to_end(backend.combine(hidden_TD, pending, None))
        return hidden_TD

    def check_bits(self, backend: CachedBackend) -> None:
        """Compare with resident experts for several batch sizes."""
        with torch.inference_mode():
            for seed, tokens in enumerate((1, 3, 40, 700, 1)):
                for layer in self.spec.moe_layers:
                    routed = routed_tokens(self.spec, tokens, seed)
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
    with pytest.raises(CheckpointError, match=f"{name}_scale_inv .* is not part of"):
        check_checkpoint(folder)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(folder)
    form = CheckpointFormat(checkpoint, check_checkpoint(folder), torch.float32)
    with pytest.raises(
        CheckpointError, match=r"expert 2 of layer 1 .* experts.storage_format to false"
    ):
        open_expert_file(folder, form, store=tmp_path, deadline_s=20.0)
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
    kind: EvictionKind,
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
            routed = routed_tokens(rig.spec, sizes[number], seed + number + layer)
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


def test_predictions_of_dropped_batches_are_bounded(opened: Callable[..., Rig]) -> None:
    rig = opened()
    backend, layer = rig.backend(100, seed=2), rig.spec.moe_layers[0]
    with torch.inference_mode():
        for number in range(200):
            rig.finish(
                backend, rig.begin(backend, layer, routed_tokens(rig.spec, 1, number), number)
            )
    assert len(backend._prefetcher._predicted) < 100
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
        one = routed_tokens(rig.spec, 4, 1)
        rig.finish(backend, rig.begin(backend, first, one, decodes=True))
        guessed, routed = _router(half, second)(one.x_TD), routed_tokens(rig.spec, 4, 2)
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


DEVICE_FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
FEW, MANY = (1, 2, 7), (40, 300)


class RightHint(ExpertPredictor):
    """Predicts the next layer's `requested` experts."""

    requested: torch.Tensor

    def predict_on_device(
        self, layer: int, hidden_TD: torch.Tensor, routed: RoutedTokens
    ) -> DevicePrediction | None:
        following = self._next_of.get(layer)
        if following is None:
            return None
        return DevicePrediction(
            following, RoutedTokens(hidden_TD, self.requested, routed.topk_weights_TK), False
        )


class DeviceRig(BackendRig[DevicePending]):
    """A model, its experts in host memory, and backends over them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.layout = ExpertLayout(self.spec, torch.float32, torch.device("cpu"), packed=False)
        parts, experts = CheckpointParts(Checkpoint(folder), self.layout), self.spec.num_experts
        stored = [self.layout.empty(experts) for _ in self.spec.moe_layers]
        for layer, tensors in zip(self.spec.moe_layers, stored, strict=True):
            parts.copy_part(layer, 0, experts, self.layout.pieces(tensors, 0, experts))
        self.host = ExpertMemory(stored, self.layout)

    def held(
        self, slots: int, lane: DeviceLane, *, kind: EvictionKind = "walk", deadline_s: float = 20.0
    ) -> DeviceCache:
        part_bytes = self.layout.num_bytes(1) // 3
        tier = DeviceTier(self.host, self.layout, lane, part_bytes=part_bytes)
        if isinstance(lane, FakeLane):
            tier = watched = WatchedTier(self.host, self.layout, lane, part_bytes=part_bytes)
            watched.watch(lane)
        memory = DeviceSlots(self.layout, slots)
        cache = ExpertCache(tier, memory, kind, deadline_s=deadline_s)
        return DeviceCache(cache, memory, tier, lane)

    def backend(
        self,
        slots: int,
        lane: DeviceLane,
        *,
        predictor: ExpertPredictor | None = None,
        deadline_s: float = 20.0,
        **more: Any,
    ) -> DeviceBackend:
        held = self.held(slots, lane, deadline_s=deadline_s, **more)
        backend = DeviceBackend(
            "prefill-0", self.local.attention, held, Timeline(10), predictor, deadline_s=deadline_s
        )
        self.backends.append(backend)
        return backend

    def expected(self, layer: int, routed: RoutedTokens) -> torch.Tensor:
        """Return the result of resident experts on a GPU."""
        held = self.local.experts[0].layer_experts(layer)
        ids_TK, weights_TK = routed.topk_ids_TK, routed.topk_weights_TK
        return gpu_experts(routed.x_TD, ids_TK, weights_TK, held.gate_up, held.down, held.clamped)

    def check(self, backend: DeviceBackend, layer: int, pending: DevicePending) -> None:
        hidden_TD = torch.zeros_like(pending.routed.x_TD)
        run_to_end(backend.combine(hidden_TD, pending, None))
        assert torch.equal(hidden_TD, self.expected(layer, pending.routed)), layer

    def check_bits(self, backend: DeviceBackend, sizes: tuple[int, ...] = (*FEW, *MANY, 1)) -> None:
        with torch.inference_mode():
            for seed, tokens in enumerate(sizes):
                for layer in self.spec.moe_layers:
                    self.check(
                        backend,
                        layer,
                        self.begin(backend, layer, routed_tokens(self.spec, tokens, seed)),
                    )


@pytest.fixture
def opened_on_device(tiny_checkpoint: Checkpoints) -> Iterator[Callable[..., DeviceRig]]:
    rigs: list[DeviceRig] = []

    def make(family: str = "qwen3_moe", **overrides: int) -> DeviceRig:
        rigs.append(DeviceRig(tiny_checkpoint(family, **overrides)))
        return rigs[-1]

    yield make
    for rig in rigs:
        for backend in rig.backends:
            backend._cache.check()
            assert not backend._pending
            backend._held.close()


@pytest.mark.parametrize("family", DEVICE_FAMILIES)
@pytest.mark.parametrize("slots", [4, 6, 100])
def test_every_family_is_bit_equal_on_device(
    opened_on_device: Callable[..., DeviceRig], family: str, slots: int
) -> None:
    rig = opened_on_device(family)
    predictor = AnyGuess(rig.local.attention, 1)
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
    shared: DeviceRig,
    slots: int,
    seed: int,
    hints: bool,
    kind: EvictionKind,
    batches: list[tuple[int, int]],
) -> None:
    """Micro-batches of both classes, some dropped, with random delays of copies and ids."""
    dice = random.Random(seed)
    predictor = AnyGuess(shared.local.attention, seed) if hints else None
    backend = shared.backend(slots, FakeLane(seed), kind=kind, predictor=predictor)
    with torch.inference_mode():
        for layer in shared.spec.moe_layers * 3:
            dispatched = []
            for number, (tokens, routing) in enumerate(batches):
                routed = routed_tokens(shared.spec, tokens, routing)
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
def shared(tiny_checkpoint: Checkpoints) -> DeviceRig:
    return DeviceRig(tiny_checkpoint("qwen3_moe", num_hidden_layers=3))


def test_host_does_not_wait_for_copies(opened_on_device: Callable[..., DeviceRig]) -> None:
    rig = opened_on_device()
    lane = FakeLane(0)
    backend, layer = rig.backend(100, lane), rig.spec.moe_layers[0]
    with torch.inference_mode():
        pending = rig.begin(backend, layer, routed_tokens(rig.spec, 2, 0))
        while not pending.is_complete:
            pass
        lane.stalls = True
        hidden_TD = torch.zeros_like(pending.routed.x_TD)
        run_to_end(backend.combine(hidden_TD, pending, None))
    assert lane.waits == 1, "the compute does, once for all that was missing"


def test_requested_experts_are_copied_before_predicted_ones(
    opened_on_device: Callable[..., DeviceRig],
) -> None:
    rig = opened_on_device()
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
        # A hint that is wanted is a demand.
        assert len(backend._cache.acquire_ready(request_hinted)) == 2
        for each in (request, request_hinted):
            backend._cache.cancel(each)
        backend._cache.forget_hints("somebody")


def test_hints_have_the_priority_of_their_batch(
    opened_on_device: Callable[..., DeviceRig], opened: Callable[..., Rig]
) -> None:
    rig, on_device = opened(num_hidden_layers=3), opened_on_device(num_hidden_layers=3)
    predictor = RightHint(rig.local.attention, None)
    backend = rig.backend(100, predictor=predictor)
    check_priorities(rig, backend, backend._cache, predictor)
    device = on_device.backend(100, FakeLane(0), predictor=predictor)
    check_priorities(on_device, device, device._cache, predictor)


def check_priorities(
    rig: BackendRig[P], backend: ExpertBackend[P], cache: ExpertCache, predictor: RightHint
) -> None:
    routed = routed_tokens(rig.spec, 1, 3)
    predictor.requested = routed.topk_ids_TK
    for number, priority in enumerate((LS, BE)):
        with patch.object(cache, "hint") as hint, torch.inference_mode():
            pending = rig.begin(backend, rig.spec.moe_layers[0], routed, number)
            while not pending.is_complete:
                backend.poll(0.01, idle=True)
            run_to_end(backend.combine(torch.zeros_like(routed.x_TD), pending, None))
        assert [call.args[3:] for call in hint.call_args_list] == [(priority,)]


def test_right_hints_avoid_waiting(opened_on_device: Callable[..., DeviceRig]) -> None:
    rig = opened_on_device(num_hidden_layers=3)
    lane, predictor = FakeLane(0), RightHint(rig.local.attention, None)
    backend, (first, second, _) = rig.backend(100, lane, predictor=predictor), rig.spec.moe_layers
    routed = routed_tokens(rig.spec, 1, 3)
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


def test_stalled_device_is_named_in_error(opened_on_device: Callable[..., DeviceRig]) -> None:
    rig = opened_on_device()
    lane = FakeLane(0)
    backend, layer = rig.backend(100, lane, deadline_s=0.05), rig.spec.moe_layers[0]
    lane.stalls = True
    pending = rig.begin(backend, layer, routed_tokens(rig.spec, 2, 0))
    expected_error = (
        rf"ids of layer {layer} have not arrived from cpu for 0\..* s; "
        "see channel.connect_timeout_s=0.05"
    )
    with pytest.raises(ChannelError, match=expected_error):
        run_to_end(backend.combine(pending.routed.x_TD, pending, None))
    with pytest.raises(ChannelError, match=expected_error):
        backend.poll(0.02, idle=False)
    backend.drop(pending)


def rank_packet(dice: random.Random, layer: int, rows: int, own: int, dim: int) -> Packet:
    """Rows with experts of a rank, some elsewhere."""
    pairs_CK = [dice.sample([*range(own), own, own], 3) for _ in range(rows)]
    local_CK = torch.tensor(pairs_CK, dtype=torch.int32).view(rows, 3)
    generator = torch.Generator().manual_seed(dice.randrange(1000))
    weights_CK = torch.rand(rows, 3, generator=generator)
    counts_e = torch.bincount(local_CK.flatten(), minlength=own + 1)[:own].int()
    pairs_CM = torch.cat([local_CK, weights_CK.view(torch.int32)], 1)
    header = Header(PacketKind.A2E, 1, dice.randrange(9), layer, 0, 0, dice.choice([LS, BE]))
    x_CD = torch.randn(rows, dim, generator=generator)
    return Packet("attention-0", header, [x_CD, pairs_CM, counts_e], 0.0, None)


@settings(max_examples=25)
@given(
    st.integers(2, 14),
    st.integers(0, 1 << 16),
    st.lists(st.sampled_from([0, 1, 3, 40]), min_size=1, max_size=4),
)
def test_packets_of_a_rank_give_the_bits_of_resident_experts(
    shared: DeviceRig, slots: int, seed: int, sizes: list[int]
) -> None:
    """Experts in any order, and counts that arrive late."""
    dice, spec = random.Random(seed), shared.spec
    held = shared.held(slots, FakeLane(seed))
    own = {layer: dice.sample(range(spec.num_experts), 5) for layer in spec.moe_layers}
    experts, resident = (
        DeviceCachedExperts(held, own),
        assemble_half(shared.local.experts[0], own, {}),
    )
    with torch.inference_mode():
        for layer in spec.moe_layers * 2:
            first = rank_packet(dice, layer, 2, 5, spec.hidden_size)
            packets = [first, *(rank_packet(dice, layer, n, 5, spec.hidden_size) for n in sizes)]
            packets = [each for each in packets if each.header.priority is first.header.priority]
            for packet in packets:
                experts.enqueue(packet)
            while experts.missing(packets) is None:
                assert experts.needs_polling
                experts.poll()
            dropped = packets.pop() if len(packets) > 1 else None
            if dropped is not None:
                experts.discard(dropped)
            pairs = merge(packets).pairs
            assert isinstance(pairs, DevicePairs)
            found_CD = run_to_end(experts.begin(packets, pairs).steps)
            assert torch.equal(found_CD, run_to_end(resident.device_steps(layer, *pairs)))
            held.cache.check()
    assert not held.cache._requests
    experts.close()


def test_a_packet_waits_for_its_counts_and_can_be_discarded_before(shared: DeviceRig) -> None:
    lane = FakeLane(0)
    experts = DeviceCachedExperts(shared.held(4, lane), {1: [4, 2, 0]})
    packet = rank_packet(random.Random(0), 1, 3, 3, shared.spec.hidden_size)
    lane.stalls = True
    experts.enqueue(packet)
    experts.poll()
    assert experts.missing([packet]) is None
    experts.discard(packet)
    assert not experts.needs_polling
    experts.close()
