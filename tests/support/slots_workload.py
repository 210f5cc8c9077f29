"""An expert rank with experts in slots of its GPU, on the model of the CUDA runtime.

The real lane, tier, cache, sums and `DeviceCachedExperts` run; products are kernels that read a
slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from actors.channels.base import Header, Packet, PacketKind
from actors.moe import rank_experts
from models.experts import device_lanes, device_sum, device_tier
from models.experts.expert_cache import ExpertCache
from tests.support.cuda_model import CudaModel, Host, ModelError, Runtime, model, range_of
from tests.support.gather_workload import REQUIRED_HIDDEN, GpuLayout, SmallSpec, code_of
from tests.support.spans import length, union

CHAIN = (device_lanes, device_tier, device_sum, rank_experts)
DIM = 32


class SlotsWork(NamedTuple):
    """packets: of a call. own: experts of a layer. empty: chance of a packet without pairs."""

    layers: int = 2
    own: int = 6
    slots: int = 7
    packets: int = 2
    calls: int = 8
    compute_us: float = 300.0
    part_bytes: int = 4096
    empty: float = 0.3


BATTERY = (
    SlotsWork(),
    SlotsWork(slots=3, compute_us=20.0),
    SlotsWork(layers=3, slots=9, packets=1, compute_us=2000.0, part_bytes=1 << 20),
)
HIDDEN = SlotsWork(own=4, slots=8, layers=3, calls=12, compute_us=600.0, empty=0.0)


def slots_code(file: str = "", old: str = "", new: str = "") -> dict[str, ModuleType]:
    """Modules of a rank with slots that run on the model, with `old` of a file replaced."""
    made = code_of(CHAIN, file, old, new)
    made["device_sum"].supports_slots = lambda *_: False  # type: ignore[attr-defined]
    return made


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    addresses = target.data_ptr(), source.data_ptr()
    stream = model().host.current
    Runtime().memcpyAsync(*addresses, target.nbytes, 4, stream.cuda_stream)
    if not non_blocking:
        stream.synchronize()
    return target


def _empty(make: Any, *size: Any, pin_memory: bool = False, **more: Any) -> Tensor:
    made: Tensor = make(*size, **more)
    if not pin_memory:
        return made
    return Runtime.blocks[Runtime().malloc(made.nbytes)].view(made.dtype).view(made.shape)


class SlotsWorld:
    """A run of one rank."""

    def __init__(self, work: SlotsWork, code: dict[str, ModuleType]) -> None:
        self.work, self._code = work, code
        self._layout = GpuLayout(SmallSpec(tuple(range(work.layers)), work.own, DIM, DIM))

    def run(self, seed: int, **machine: Any) -> CudaModel:
        run = CudaModel(seed, **machine)
        with (
            mock.patch.object(torch.Tensor, "copy_", _copy),
            mock.patch.object(torch, "empty", partial(_empty, torch.empty)),
        ):
            run.run({"expert-0": self._serve})
        return run

    @staticmethod
    def mark(layer: int, expert: int) -> int:
        return 1 + 17 * layer + expert

    def _serve(self, host: Host) -> None:
        held, work = self._held(host), self.work
        own = {layer: list(reversed(range(work.own))) for layer in range(work.layers)}
        experts = self._code["rank_experts"].DeviceCachedExperts(held, own)
        for call in range(work.calls):
            layer = call % work.layers
            packets = [self._packet(host, own[layer], layer) for _ in range(work.packets)]
            for packet in packets:
                experts.enqueue(packet)
            experts.poll()
            while experts.missing(packets) is None:
                host.pause(5.0)
                experts.poll()
            tensors = zip(*(packet.tensors for packet in packets), strict=True)
            x_CD, pairs_CM, counts_e = map(torch.cat, tensors)
            counts_e = counts_e.view(work.packets, -1).sum(0, dtype=torch.int32)
            pairs = self._code["rank_experts"].DevicePairs(x_CD, pairs_CM, counts_e)
            computation = experts.begin(packets, pairs)
            found = self._finish(host, computation)
            if not torch.equal(found, x_CD):
                raise ModelError("corrupt", "a row has another expert's sum")
        held.cache.check()
        if held.cache._requests:
            raise ModelError("leak", "requests that are complete")

    def _finish(self, host: Host, computation: Any) -> Tensor:
        while True:
            try:
                next(computation.steps)
            except StopIteration as done:
                found: Tensor = done.value
                return found
            host.pause(5.0)

    def _held(self, host: Host) -> Any:
        tiers, lane = (
            self._code["device_tier"],
            self._code["device_lanes"].CudaLane(self._layout.device, _now_s),
        )
        memory = SimpleNamespace(expert=self._stored)
        tier = tiers.DeviceTier(memory, self._layout, lane, part_bytes=self.work.part_bytes)
        slots = tiers.DeviceSlots(self._layout, self.work.slots)
        cache = ExpertCache(tier, slots, "lru", deadline_s=5.0, clock=_now_s)
        products = [
            [partial(self._product, host, piece[slot]) for slot in range(self.work.slots)]
            for piece in slots.buffer.pieces
        ]
        contents = SimpleNamespace(gate_up=products[0], down=products[1], clamped=None)
        return tiers.DeviceCache(cache, SimpleNamespace(layer=contents), tier, lane)

    def _stored(self, layer: int, expert: int) -> Sequence[Tensor]:
        pieces = []
        for shape in self._layout.shapes:
            size = torch.Size(shape).numel() * 4
            block = Runtime.blocks[Runtime().malloc(size)].fill_(self.mark(layer, expert))
            pieces.append(block.view(torch.float32).view(1, *shape))
        return pieces

    def _product(self, host: Host, weight: Tensor, x_ND: Tensor) -> Tensor:
        """Launch a kernel that reads a slot. All rows have the mark of their expert."""
        mark = int(x_ND[0, 0])
        check = partial(_check, weight, mark)
        host.launch("experts", self.work.compute_us, reads=[range_of(weight)], ends=check)
        rows = x_ND.new_full((len(x_ND), len(weight)), float(mark))
        if len(weight) > DIM:  # halves whose gated product is the mark again
            rows[:, :DIM], rows[:, DIM:] = 100.0, mark / 100.0
        return rows

    def _packet(self, host: Host, own: Sequence[int], layer: int) -> Packet:
        """Return a packet that has arrived: each row has one expert, or all have none."""
        local = [host.model.dice.randrange(self.work.own) for _ in range(4)]
        marks = [[float(self.mark(layer, own[place]))] for place in local]
        if host.model.dice.random() < self.work.empty:
            local, marks = [self.work.own] * 4, [[0.0]] * 4
        counts = torch.bincount(torch.tensor(local), minlength=self.work.own + 1)[:-1].int()
        arrived = Runtime.blocks[Runtime().malloc(counts.nbytes)]
        transfer = self._code["device_lanes"].new_stream(self._layout.device)
        source = Runtime.blocks[Runtime().malloc(counts.nbytes)]
        source.view(torch.int32)[:] = counts
        addresses = arrived.data_ptr(), source.data_ptr()
        Runtime().memcpyAsync(*addresses, counts.nbytes, 4, transfer.cuda_stream)
        transfer.synchronize()
        weights = torch.ones(4, 1).view(torch.int32)
        pairs = torch.cat([torch.tensor(local, dtype=torch.int32).view(4, 1), weights], 1)
        header = Header(PacketKind.A2E, 1, 0, layer, 0, 0)
        tensors = [torch.tensor(marks).expand(4, DIM), pairs, arrived.view(torch.int32)]
        return Packet("attention-0", header, tensors, 0.0, None)


def _now_s() -> float:
    return 1e-6 * model().now_us


def _check(weight: Tensor, mark: int) -> None:
    pointer, size = range_of(weight)
    if {*ctypes.string_at(pointer, size)} != {mark}:
        raise ModelError("corrupt", "a slot has another expert")


def slots_symptom(code: dict[str, ModuleType], seeds: range) -> str:
    """The first failure of a rank with slots on this code, or "" if there is none."""
    for seed in seeds:
        for work in BATTERY:
            try:
                SlotsWorld(work, code).run(seed)
            except ModelError as failure:
                return failure.kind
            except Exception as error:  # noqa: BLE001 - what the code itself notices
                return f"error: {type(error).__name__}"
        if seed == seeds[0] and hidden_slots(code) < REQUIRED_HIDDEN:
            return "lost overlap"
    return ""


def hidden_slots(code: dict[str, ModuleType], seed: int = 0) -> float:
    """Share of the copies' time in which the rank computes, from the first expert on."""
    run = SlotsWorld(HIDDEN, code).run(seed, host_us=(1.0, 5.0))
    busy = [(start, end) for _, start, end in run.hosts["expert-0"].device.busy]
    copies = [(start, end) for _, start, end in run.received if start > busy[0][0]]
    return 1.0 - (length(union([*copies, *busy])) - length(union(busy))) / length(union(copies))
