"""Data-parallel attention with expert parallelism in lockstep (MoE-Prefill, Section 2: DP+EP).

    worker 0   attend | ── rows ──> | experts 0..3 on all rows | ── sums ──> | combine | attend
    worker 1   attend | <─ rows ─── | experts 4..7 on all rows | <─ sums ─── | combine | attend
                        all wait                                 all wait

The paper's baseline, built as serving systems build it. Each worker has 1/N of the experts; at
every MoE layer activations travel there and back. A worker without a batch takes part with no rows.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.channels.base import (
    ChannelEvent,
    Header,
    Packet,
    PacketKind,
    PeerLost,
    transfer_span,
    transfers,
)
from actors.channels.endpoint import Endpoint, send_tensors
from actors.moe.backend import ExpertBackend, TaskKey
from actors.moe.dispatch import (
    DispatchCounts,
    PacketPlanner,
    Piece,
    RankSlice,
    empty_slice,
    send_slice,
)
from actors.moe.expert_server import merge
from actors.telemetry.telemetry import Timeline
from contracts.errors import ChannelError, PeerError, PeerHungError
from contracts.placement import Placement
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.device import runs_on_device
from kernels.steps import Steps, run_to_end
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import ExpertHalf, RoutedTokens
from planner.placement.slots import ExpertPlacement

PEER_TIMEOUT_S = 60.0  # for a live peer, which may attend to a long batch
_POLL_S = 0.2


class AllToAll:
    """One worker's side. Owned by one thread, except `connect` before it starts."""

    def __init__(
        self,
        endpoint: Endpoint,
        workers: Sequence[str],
        half: ExpertHalf,
        placement: Placement,
        timeline: Timeline,
    ) -> None:
        """half: this worker's experts under `placement`. workers: all names, by rank."""
        self.rank = workers.index(endpoint.name)
        self.counts = DispatchCounts(len(workers), own_rank=self.rank)
        self._packets = PacketPlanner(self.counts, None, endpoint.clock)
        self._endpoint, self._half = endpoint, half
        self._timeline, self._clock = timeline, endpoint.clock
        self.names = tuple(workers)
        self._peers = [name for name in workers if name != endpoint.name]
        self._slots_per_rank = placement.slots_per_rank
        self.placement = ExpertPlacement(placement)
        self._pass = 0
        self._arrived: dict[tuple[PacketKind, int, int, str], Packet] = {}
        self._lost: PeerError | None = None

    def connect(self, addresses: dict[str, str]) -> None:
        """Join the workers of lower rank; those of higher rank join us. Raises ChannelError."""
        for peer in self.names[: self.rank]:
            if peer in addresses and peer not in self._endpoint.peers():
                self._endpoint.connect(peer, addresses[peer])

    def sums(self, layer: int, routed: RoutedTokens) -> Steps[Tensor]:
        """Return each token's weighted sum over its experts, [T, D] float32. Raises PeerError."""
        self._wait_for_links()
        key, whole = TaskKey(self._pass, layer, 0, Priority.LS), [(0, len(routed.x_TD))]
        pieces = self._packets.plan(key, routed, whole, self.placement.layer(layer))
        slices = {piece.rank: piece for piece in pieces}
        return (yield from self._exchange(layer, routed.x_TD, slices))

    def participate(self, layer: int, like: Tensor) -> Steps[None]:
        """Take part in a layer without own rows; `like` is [0, D]. Raises PeerError."""
        self._wait_for_links()
        yield from self._exchange(layer, like, {})

    def wait_for_pass(self, timeout_s: float) -> bool:
        """Wait for the next pass of the others; return whether it has begun. Raises PeerError."""
        if not self._pass_started():
            self._poll(timeout_s)
        return self._pass_started()

    def wake(self) -> None:
        """End a wait of `wait_for_pass`. Thread-safe."""
        self._endpoint.wake()

    def end_pass(self) -> None:
        self._pass += 1

    def _pass_started(self) -> bool:
        return any(number == self._pass for _, number, _, _ in self._arrived)

    def _exchange(self, layer: int, x_TD: Tensor, slices: dict[int, Piece]) -> Steps[Tensor]:
        own: Packet | None = None
        for rank, worker in enumerate(self.names):
            piece = slices.get(rank) or self._empty(rank, x_TD.device)
            header = self._header(PacketKind.A2E, layer)
            if worker == self._endpoint.name:
                own = Packet(worker, header, _packed(piece, x_TD), self._clock(), None)
            else:
                send_slice(self._endpoint, worker, header, piece, x_TD)
        assert own is not None
        packets = yield from self._receive(PacketKind.A2E, layer)
        local = yield from self._run_experts(layer, {**packets, own.peer: own})
        replies = yield from self._receive(PacketKind.E2A, layer)
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for rank, worker in enumerate(self.names):
            if rank in slices:
                y_UD = local if worker == own.peer else replies[worker].tensors[0]
                run_to_end(slices[rank].add_to(out_TD, y_UD))
        for packet in replies.values():
            packet.release()
        return out_TD

    def _run_experts(self, layer: int, packets: dict[str, Packet]) -> Steps[Tensor]:
        """Run our experts on all rows in one call; answer the others, return our own sums."""
        ordered = [packets[worker] for worker in self.names]
        try:
            groups = merge(ordered)
            y_UD = yield from groups.pairs.steps(self._half, layer)
            local = y_UD[:0]
            for number, packet in enumerate(ordered):
                rows = y_UD[groups.first_row[number] : groups.first_row[number + 1]]
                if packet.peer == self._endpoint.name:
                    local = rows
                else:
                    header, dtype = self._header(PacketKind.E2A, layer), packet.tensors[0].dtype
                    send_tensors(self._endpoint, packet.peer, header, [rows], dtype)
        finally:
            for packet in ordered:
                packet.release()
        return local

    def _empty(self, rank: int, device: torch.device) -> Piece:
        experts = self._slots_per_rank[rank]
        if runs_on_device(device):
            return empty_slice(rank, experts, self._half.spec.top_k, device)
        counts_e = np.zeros(experts, np.int32)
        none = np.zeros(0, np.int64)
        return RankSlice(rank, 0, 0, 0, none, none.astype(np.int32), none.astype("f4"), counts_e)

    def _header(self, kind: PacketKind, layer: int) -> Header:
        now_s = self._clock()
        return Header(kind, self._endpoint.epoch, self._pass, layer, 0, 0, sent_s=now_s)

    # --- waiting

    def _wait_for_links(self) -> None:
        end_s = self._clock() + PEER_TIMEOUT_S
        while missing := [peer for peer in self._peers if peer not in self._endpoint.peers()]:
            if self._clock() > end_s:
                raise PeerHungError(
                    f"{missing[0]} has not joined in {PEER_TIMEOUT_S:g} s", missing[0]
                )
            self._poll(_POLL_S)

    def _receive(
        self, kind: PacketKind, layer: int, peers: Sequence[str] | None = None
    ) -> Steps[dict[str, Packet]]:
        """Return the packet of every peer, or of some. A step is a wait."""
        senders = self._peers if peers is None else peers
        keys = {peer: (kind, self._pass, layer, peer) for peer in senders}
        end_s = self._clock() + PEER_TIMEOUT_S
        while missing := [peer for peer, key in keys.items() if key not in self._arrived]:
            if self._clock() > end_s:
                peer = missing[0]
                raise PeerHungError(
                    f"{peer} has not reached layer {layer} in {PEER_TIMEOUT_S:g} s", peer
                )
            yield  # other work may run, and receive packets
            if any(key not in self._arrived for key in keys.values()):
                self._poll(_POLL_S)
        return {peer: self._arrived.pop(key) for peer, key in keys.items()}

    def _poll(self, timeout_s: float) -> None:
        """Receive packets. Raises the loss of a peer, now and on every later call."""
        start_s = self._clock()
        channel_events: list[ChannelEvent] = self._endpoint.poll(timeout_s)
        self._packets.poll()
        self._timeline.record_wait(start_s, self._clock(), transfers(channel_events))
        for channel_event in channel_events:
            if isinstance(channel_event, Packet):
                self._take(channel_event)
            elif isinstance(channel_event, PeerLost):
                self._note_loss(channel_event.error)
        if self._lost is not None:
            raise type(self._lost)(self._lost.message, self._lost.peer)

    def _note_loss(self, error: PeerError) -> None:
        self._lost = self._lost or error

    def _take(self, packet: Packet) -> None:
        header = packet.header
        if header.batch < self._pass:
            packet.release()
            return
        self._timeline.add(transfer_span(packet, self._endpoint.name))
        self._arrived[header.kind, header.batch, header.layer, packet.peer] = packet


def _packed(piece: Piece, x_TD: Tensor) -> list[Tensor]:
    parts = piece.parts(x_TD)
    tensors = [torch.empty(p.shape, dtype=p.torch_dtype, device=x_TD.device) for p in parts]
    piece.fill(x_TD, tensors)
    return tensors


class LockstepPending(NamedTuple):
    """Rows that are sent when all workers reach their layer."""

    layer: int
    routed: RoutedTokens
    is_complete: bool = True


class LockstepBackend(ExpertBackend[LockstepPending]):
    """Expert backend of all-to-all mode. The loss of a worker ends it."""

    yields = interleaves = False  # all workers reach a layer together

    def __init__(self, half: AttentionHalf, all_to_all: AllToAll) -> None:
        self._all_to_all = all_to_all
        self._layers = half.spec.moe_layers
        size = (0, half.spec.hidden_size)
        self._empty = torch.empty(size, dtype=half.dtype, device=half.device)
        self._layer_index: int | None = None  # into `_layers`
        self._failed = False
        self._woken = threading.Event()

    @property
    def is_engaged(self) -> bool:
        return self._layer_index is not None

    def wake(self) -> None:
        self._woken.set()
        self._all_to_all.wake()

    def dispatch(
        self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan
    ) -> LockstepPending:
        return LockstepPending(key.layer, routed)

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        """Take part in one layer if this worker has no batch and others have one."""
        if self._failed:
            self._woken.wait(timeout_s)
            self._woken.clear()
        elif idle:
            try:
                self._participate(timeout_s)
            except ChannelError:
                self._layer_index, self._failed = None, True
                raise
        return False

    def combine(
        self, hidden_TD: Tensor, pending: LockstepPending, shared_TD: Tensor | None
    ) -> Steps[None]:
        try:
            hidden_TD.add_((yield from self._all_to_all.sums(pending.layer, pending.routed)))
        except ChannelError:
            self._failed = True
            raise
        if shared_TD is not None:
            hidden_TD.add_(shared_TD)
        if pending.layer == self._layers[-1]:
            self._all_to_all.end_pass()

    def _participate(self, timeout_s: float) -> None:
        if self._layer_index is None:
            self._layer_index = 0 if self._all_to_all.wait_for_pass(timeout_s) else None
            return
        run_to_end(self._all_to_all.participate(self._layers[self._layer_index], self._empty))
        self._layer_index += 1
        if self._layer_index == len(self._layers):
            self._layer_index = None
            self._all_to_all.end_pass()
