"""Direct calls between an attention rank and the expert ranks of its machine.

Decode batches of an attention rank that has no other batch in flight call expert ranks through
memory (kernels/direct_calls.py). Everything else, and any layer that a direct call does not
complete, uses packets (remote_backend.py); results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.channels.endpoint import Endpoint
from actors.channels.link import CallArea
from actors.moe.backend import Topology, TopologySource
from actors.moe.dispatch import DispatchCounts
from actors.moe.routing_sample import RoutingSample
from actors.telemetry.telemetry import SpanGroup, Timeline
from contracts.errors import ChannelError
from contracts.traces import Stage, TaskSpan
from kernels.direct_calls import (
    CALL_FIELDS,
    CHOICE_FIELDS,
    CLOCK_FIELDS,
    DONE,
    LATE,
    PEER_FIELDS,
    READY,
    RECORD_FIELDS,
    REPLY,
    REQUEST,
    AreaLayout,
    decode_remote_layers,
    serve_calls,
)
from kernels.experts import RUN_PAIRS, expert_fields
from kernels.layer_ops import EXPERT_FIELDS
from kernels.thread_pool import shared_pool
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch
from models.decoder.decoder import AttentionHalf
from models.decoder.layer_decoder import CallOwner, DecodedLayers, LayerDecoder, most_rows
from models.experts.expert_half import ExpertHalf, RoutedTokens
from models.spec.model import ModelSpec
from planner.placement.slots import FewestRanksChooser, LayerSlots, RoundRobinChooser

WAIT_S: Final = 0.005  # then the loop of the attention rank runs
GIVE_UP_S: Final = 0.5  # then the layer uses packets
_MOST_RECORDS: Final = 256
_PAIR_BYTES: Final = 12  # row and weight


def area_layout(spec: ModelSpec) -> AreaLayout:
    """Return the layout of a model's call areas, with room for float32 rows."""
    return AreaLayout.of(most_rows(spec), RUN_PAIRS, 4 * spec.hidden_size, spec.num_experts)


class DirectCalls(NamedTuple):
    """Parts of an attention rank that direct calls use."""

    endpoint: Endpoint
    half: AttentionHalf
    counts: DispatchCounts
    timeline: Timeline
    sample: RoutingSample | None
    source: TopologySource


class RemoteLayerDecoder(LayerDecoder):
    """Runs layers whose experts are on expert ranks, in one call with direct calls of them."""

    uses_loop = True
    stages = Stage.ATTENTION, Stage.SEND, Stage.SHARED, Stage.WAIT

    def __init__(self, parts: DirectCalls, kv: KvPool, topology: Topology) -> None:
        super().__init__(parts.half, kv)
        self._parts = parts
        self._clock = np.zeros((len(self._layers), CLOCK_FIELDS), np.int64)
        self._call = np.zeros(CALL_FIELDS + 1, np.int64)
        self._row_bytes = self._x_TD[0].nbytes
        self._areas: tuple[CallArea, ...] = ()
        self._since_s = 0.0  # while it waits
        self._lease = 0  # while it waits
        self._use(topology)

    @staticmethod
    def supports(half: AttentionHalf) -> bool:
        """Return whether the call has all steps of a decoder's layers but the experts."""
        spec = half.spec
        is_even = spec.hidden_size % 2 == 0  # rows are copied in units of four bytes
        return half.device.type == "cpu" and is_even and half.decode_table() is not None

    def use(self, topology: Topology) -> None:
        """Call the ranks of this topology from now on. A layer that waits is left to packets."""
        self._next_topology = topology

    def accepts(self, batch: AttentionBatch) -> bool:
        """Return whether a batch has few sequences, and all expert ranks can be called."""
        if not super().accepts(batch):
            return False
        if self._is_outdated:
            self._use(self._next_topology)
        return not self._topology.unreachable and self._can_call()

    def run(
        self,
        layers: tuple[int, int],
        hidden_TD: Tensor,
        batch: AttentionBatch,
        owner: CallOwner,
        *,
        is_alone: bool,
    ) -> DecodedLayers:
        first, last = layers
        resumes, rows = self.waits, batch.num_tokens
        if resumes:
            is_late = self._parts.endpoint.clock() - self._since_s > GIVE_UP_S
            if is_late or self._is_outdated or not is_alone:
                return self._fall_back(first, rows)
        self._fill(hidden_TD, batch)
        self._call[:] = self._topology.generation, 0, 0, 0, *owner, 0
        if not resumes:
            self._lease = self._parts.source.begin_layer()
        times_ns = int(1e9 * WAIT_S), int(1e9 * self._parts.endpoint.spin_s)
        addresses = self._addresses
        reached = decode_remote_layers(shared_pool(), *addresses, first, last, resumes, *times_ns)
        self._stop[0] = 0
        self._count(first, reached, rows, owner)
        done = DecodedLayers(self._stage_ends(first, reached))
        if self._call[CALL_FIELDS] == DONE:
            self.end()
            return done
        if not resumes or reached > first:
            self.waits, self._since_s = True, self._parts.endpoint.clock()
        if self._call[CALL_FIELDS] == LATE:
            return done
        return self._fall_back(reached, rows)._replace(ends=done.ends)

    def end(self) -> None:
        self._parts.source.end_layer(self._lease)
        self.waits = False

    @property
    def _is_outdated(self) -> bool:
        is_same = self._next_topology is self._topology
        return not is_same or self._parts.endpoint.call_areas != self._areas

    def _fall_back(self, layer: int, rows: int) -> DecodedLayers:
        """Return the input of a layer's experts, for packets."""
        self.end()
        ids_TK = self._ids_LTK[layer].view(-1)[: rows * self._half.spec.top_k].view(rows, -1)
        parts = self._experts_TD, self._weights_TK, self._x_TD
        x_TD, weights_TK, plain_TD = (part[:rows].clone() for part in parts)
        plain = plain_TD if self._half.spec.family.weighs_input else None
        return DecodedLayers((), RoutedTokens(x_TD, ids_TK.clone(), weights_TK, plain))

    def _use(self, topology: Topology) -> None:
        """Make the tables of places and peers; open areas of ranks that have none."""
        self._topology = self._next_topology = topology
        spec = self._half.spec
        slots = [topology.slots.layer(layer) for layer in range(spec.num_layers)]
        bounds = slots[0].bounds
        ranks = len(bounds)
        self._peers = np.zeros((ranks, PEER_FIELDS), np.int64)
        self._words: list[NDArray[np.int64]] = []
        self._areas = self._parts.endpoint.call_areas
        self._transfers = [f"{name}>{self._parts.endpoint.name}" for name in topology.experts]
        choices = [slots[layer].choice for layer in spec.moe_layers]
        if any(isinstance(choice, RoundRobinChooser) for choice in choices):
            return
        layout = area_layout(spec)
        areas = {area.peer: area for area in self._areas}
        for entry, (low, high), name in zip(self._peers, bounds, topology.experts, strict=False):
            try:
                area = areas.get(name) or self._parts.endpoint.open_call_area(
                    name, layout.num_bytes
                )
            except ChannelError:
                area = None  # lost, or no memory
            if area is None:
                self._words = []
                break
            entry[:] = *layout.place(area.memory.data_ptr()), area.event, high - low
            self._words.append(area.memory[: READY + 8].numpy().view(np.int64))
        self._areas = self._parts.endpoint.call_areas
        self._local_RS = _local_indices(bounds)
        self._places = np.array([row.ctypes.data for row in self._local_RS])
        self._choose_among(slots)
        self._sent = np.zeros((spec.num_layers, ranks, 2), np.int64)
        self._answered = np.zeros((spec.num_layers, ranks), np.int64)
        self._sent_rows = np.zeros((ranks, self._most_rows), np.int64)
        tables = (
            self._layers, self._batches, self._choices, self._places, self._peers, self._call,
            self._sent, self._sent_rows, self._answered, self._clock,
        )  # fmt: skip
        self._tables = np.array([ranks, *(table.ctypes.data for table in tables)])
        self._addresses = self._tables.ctypes.data, self._stop.ctypes.data

    def _choose_among(self, slots: Sequence[LayerSlots]) -> None:
        """Make the tables by which the call chooses the slot of each pair."""
        self._slots_LTK = np.zeros(self._ids_LTK.shape, np.int64)
        self._choices = np.zeros((len(slots), CHOICE_FIELDS), np.int64)
        self._chosen = list[NDArray[np.int64]]()  # whose memory the table points to
        for layer in self._half.spec.moe_layers:
            placed, experts = slots[layer], self._half.spec.num_experts
            if isinstance(placed.choice, FewestRanksChooser):
                sets, slots_E = placed.choice.sets_E.ctypes.data, placed.choice.slot_ER
            else:
                sets, slots_E = 0, placed.of_pairs(np.arange(experts)).astype(np.int64)
            pairs_S = self._parts.counts.pairs_of(layer, placed)
            self._chosen += slots_E, pairs_S
            results = self._slots_LTK[layer].ctypes.data, pairs_S.ctypes.data
            self._choices[layer] = experts, sets, slots_E.ctypes.data, *results

    def _can_call(self) -> bool:
        """Return whether all ranks serve calls, and none computes one that was given up."""
        return len(self._words) == len(self._peers) and all(
            words[READY // 8] and words[REQUEST // 8] == words[REPLY // 8] for words in self._words
        )

    def _count(self, first: int, reached: int, rows: int, owner: CallOwner) -> None:
        """Record the routing of complete layers, and their transfers."""
        sample, top_k = self._parts.sample, self._half.spec.top_k
        sent_R2 = self._sent[first:reached].sum(0)
        copies, pairs = sent_R2.sum(0).tolist()
        row_bytes = copies * self._row_bytes
        self._parts.endpoint.count_bytes(row_bytes + pairs * _PAIR_BYTES, row_bytes)
        self._parts.counts.add_direct(pairs // top_k, sent_R2)
        if sample is not None:
            ids_LN = self._ids_LTK.view(len(self._layers), -1)[:, : rows * top_k].numpy()
            for layer in filter(self._half.spec.is_moe, range(first, reached)):
                sample.routed((owner.batch, owner.micro_batch), ids_LN[layer].reshape(rows, -1))
        if self._parts.timeline.keeps:
            self._add_transfers(first, reached, owner)

    def _add_transfers(self, first: int, reached: int, owner: CallOwner) -> None:
        names, layers = self._transfers, range(first, reached)
        sent_LR = self._sent[first:reached, :, 0].tolist()
        answered_LR = (1e-9 * self._answered[first:reached]).tolist()
        arrived_L = (1e-9 * self._clock[first:reached, -1]).tolist()
        replies = [
            (names[rank], answered_s, arrived_s, layer, rows)
            for layer, sent, answered, arrived_s in zip(
                layers, sent_LR, answered_LR, arrived_L, strict=True
            )
            for rank, (rows, answered_s) in enumerate(zip(sent, answered, strict=True))
            if rows
        ]

        def make() -> Iterator[TaskSpan]:
            for name, start_s, end_s, layer, rows in replies:
                task = owner.batch, layer, owner.micro_batch, 0, rows
                yield TaskSpan(name, Stage.E2A, start_s, end_s, *task)

        if replies:
            seconds = {Stage.E2A: [end_s - start_s for _, start_s, end_s, _, _ in replies]}
            self._parts.timeline.add(SpanGroup(Stage.E2A, arrived_L[-1], seconds, make))


def _local_indices(bounds: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return each slot's index on each rank [R, S], as of `group_pairs`."""
    low_R1, high_R1 = np.array(bounds, np.int64).T[:, :, None]
    slot_S = np.arange(high_R1.max())
    is_there = (slot_S >= low_R1) & (slot_S < high_R1)
    local_RS: NDArray[np.int64] = np.where(is_there, slot_S - low_R1, high_R1 - low_R1)
    return local_RS


class ServedCall(NamedTuple):
    """A direct call that was answered. Times are on the monotonic clock."""

    peer: str
    batch: int
    micro_batch: int
    layer: int
    rows: int
    sent_s: float
    start_s: float
    done_s: float


class CallServer:
    """Serves the call areas of an endpoint with resident experts. Owned by the server's thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        endpoint.accepts_calls = True
        self._halves: Mapping[int, ExpertHalf] = {}
        self._opened: tuple[CallArea, ...] = ()
        self._areas: Sequence[CallArea] = ()
        self._peers = np.empty((0, PEER_FIELDS), np.int64)
        self._tables: list[NDArray[np.int64]] = []
        self._generations = np.empty((0, 3), np.int64)
        self._records = np.zeros((_MOST_RECORDS, RECORD_FIELDS), np.int64)
        self._has_served = False  # in the last `serve`
        self._row_bytes = 0

    def place(self, halves: Mapping[int, ExpertHalf]) -> None:
        """Use these experts, by generation."""
        self._halves = dict(halves)  # whose memory the tables point to
        self._tables = [_expert_table(half) for half in halves.values()]
        numbered = zip(halves, self._tables, strict=True)
        rows = [(number, table.ctypes.data, _layers(table)) for number, table in numbered]
        self._generations = np.array(rows, np.int64).reshape(-1, 3)

    def close(self) -> None:
        """Release the memory of the areas."""
        self._areas = self._opened = ()
        self._endpoint.accepts_calls = False

    @property
    def has_callers(self) -> bool:
        opened = self._endpoint.call_areas
        if opened != self._opened:
            self._use(opened)
        return bool(self._areas)

    def serve(self, priority: int, timeout_s: float) -> Iterator[ServedCall]:
        """Serve calls of classes up to `priority`; wait for the first one up to timeout_s.

        Returns at other events of the endpoint. Only if `has_callers`.
        """
        calls = serve_calls(
            shared_pool(),
            self._peers.ctypes.data,
            len(self._areas),
            self._generations.ctypes.data,
            len(self._generations),
            priority,
            self._endpoint.epoll_fd,
            int(1e3 * timeout_s),
            int(1e9 * self._endpoint.spin_s * self._has_served),  # an idle rank sleeps
            self._records.ctypes.data,
            _MOST_RECORDS,
        )
        self._has_served = calls > 0
        for record in self._records[:calls].tolist():
            number, batch, micro_batch, layer, rows, pairs, *times_ns = record
            sent_s, start_s, done_s = (1e-9 * each for each in times_ns)
            peer, row_bytes = self._areas[number].peer, rows * self._row_bytes
            self._endpoint.count_bytes(row_bytes, row_bytes + _PAIR_BYTES * pairs)
            yield ServedCall(peer, batch, micro_batch, layer, rows, sent_s, start_s, done_s)

    def _use(self, opened: tuple[CallArea, ...]) -> None:
        """Make the entries of the areas, which callers may use from then on."""
        if not self._halves:
            return
        spec = next(iter(self._halves.values())).spec
        layout, self._opened = area_layout(spec), opened
        is_wide = any(bool(table[:, 15].any()) for table in self._tables)
        self._row_bytes = spec.hidden_size * (4 if is_wide else 2)
        self._areas = [area for area in opened if area.memory.numel() >= layout.num_bytes]
        self._peers = np.zeros((len(self._areas), PEER_FIELDS), np.int64)
        for entry, area in zip(self._peers, self._areas, strict=True):
            place = layout.place(area.memory.data_ptr())
            entry[:] = *place, most_rows(spec), RUN_PAIRS
            area.memory[READY] = 1


def _layers(table: NDArray[np.int64]) -> int:
    """Return the number of layers up to the last one with experts."""
    return 1 + int(np.flatnonzero(table.any(1)).max(initial=-1))


def _expert_table(half: ExpertHalf) -> NDArray[np.int64]:
    """Return the EXPERT_FIELDS of each layer, zeros where experts have no panels of one kind."""
    table = np.zeros((half.spec.num_layers, EXPERT_FIELDS), np.int64)
    for layer, each in half.layers().items():
        if each.gate_up.kind is not None and each.gate_up.kind == each.down.kind:
            table[layer] = expert_fields(each.gate_up, each.down, each.clamped)
    return table
