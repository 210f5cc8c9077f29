"""The experts of an expert rank: all resident, or a cache that loads them on demand.

On a GPU missing experts are copied from pinned memory to slots:

    counts    |to the host|                                          3 is in a slot, 7 is not
    host                  request 3 and 7, queue all that follows
    copies                   |== 7 ==|
    compute   … another call     |#### 3 ####|#### 7 ####|           7 waits for a mark

A packet has arrived when it is delivered, so its counts are copied to the host beside compute that
is queued. The host waits for nothing: it runs other calls until the counts are there, and compute
waits for copies by marks. Slots are overwritten after compute that reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from actors.channels.base import Header, Packet
from actors.moe.direct_calls import CallServer
from kernels.experts import ClampedGate
from kernels.steps import Steps
from models.experts.cache_requests import ExpertRequest, PredictedExpert
from models.experts.cached_sum import CachedSum
from models.experts.device_lanes import Arrival
from models.experts.device_sum import PacketSum
from models.experts.device_tier import DeviceCache
from models.experts.expert_cache import ExpertCache
from models.experts.expert_half import ExpertHalf, RoutedTokens, missing_experts

MAX_PREFETCHED: Final = 16  # micro-batches with hints; older hints are dropped

_Owner = tuple[str, int, int]  # attention rank, batch, micro-batch


class MergedPairs(NamedTuple):
    """(token, expert) pairs of a merged call, as arguments of `ExpertHalf.steps`."""

    x_UD: Tensor
    rows_N: Tensor
    weights_N: Tensor
    counts_e: Tensor

    def steps(self, half: ExpertHalf, layer: int) -> Steps[Tensor]:
        """Return the weighted sums."""
        return half.steps(layer, *self)


class DevicePairs(NamedTuple):
    """Packets of a device, one after the other (actors/moe/dispatch.py)."""

    x_CD: Tensor
    pairs_CM: Tensor
    counts_e: Tensor

    def steps(self, half: ExpertHalf, layer: int) -> Steps[Tensor]:
        """Return the weighted sums."""
        return half.device_steps(layer, *self)


class Computation:
    """Computation of one merged call, by default with resident experts."""

    def __init__(self, steps: Steps[Tensor]) -> None:
        self.steps = steps

    @property
    def missing(self) -> int | None:
        """Number of experts not loaded yet; None: no progress before one is loaded."""
        return 0

    def close(self) -> None:
        """Cancel it and release its resources."""
        self.steps.close()


class RankExperts:
    """Interface with the defaults of resident experts. Owned by the server's thread.

    calls: serves direct calls with these experts, if they can be.
    """

    calls: CallServer | None = None

    @property
    def needs_polling(self) -> bool:
        """True while copies from a device are under way, which no descriptor reports."""
        return False

    def holds(self, generation: int) -> bool:
        """Return True if the experts of that generation can be used."""
        raise NotImplementedError

    def enqueue(self, packet: Packet) -> None:
        """Request the experts of a token group that waits."""

    def missing(self, packets: Sequence[Packet]) -> int | None:
        """`Computation.missing` of waiting token groups."""
        return 0

    def begin(self, packets: Sequence[Packet], pairs: MergedPairs | DevicePairs) -> Computation:
        """Start the computation of waiting token groups."""
        raise NotImplementedError

    def discard(self, packet: Packet) -> None:
        """Cancel a waiting token group."""

    def prefetch(self, packet: Packet) -> None:
        """Handle a hint about a later layer."""

    def forget(self, peer: str) -> None:
        """Drop the hints of a lost attention rank."""

    def poll(self) -> None:
        """Receive loaded experts without waiting. Raises ChannelError if loading fails."""

    def record_wait(self, seconds: float) -> None:
        """Count time in which all work waited for experts."""

    def close(self) -> None: ...


class ResidentExperts(RankExperts):
    """One half per generation, sharing common experts. on_free: receives halves that are freed."""

    def __init__(
        self, half: ExpertHalf, generation: int = 0, calls: CallServer | None = None
    ) -> None:
        self._halves = {generation: half}
        self.calls = calls
        self._halves_changed()
        self.on_free: Callable[[ExpertHalf], None] = lambda half: None

    def holds(self, generation: int) -> bool:
        return generation in self._halves

    def place(self, generation: int, half: ExpertHalf) -> None:
        self._halves[generation] = half
        self._halves_changed()

    def free(self, generation: int) -> None:
        half = self._halves.pop(generation)
        self._halves_changed()
        self.on_free(half)

    def _halves_changed(self) -> None:
        if self.calls is not None:
            self.calls.place(self._halves)

    def nearest(self, ids_of: Mapping[int, Sequence[int]]) -> ExpertHalf:
        """Return the half that lacks the fewest of these experts. Thread-safe."""
        return min(list(self._halves.values()), key=lambda half: len(missing_experts(half, ids_of)))

    @property
    def count(self) -> int:
        """Number of distinct experts. Thread-safe."""
        halves = list(self._halves.values())
        return len({(n, e) for half in halves for n, ids in half.expert_ids.items() for e in ids})

    def close(self) -> None:
        if self.calls is not None:
            self.calls.close()

    def begin(self, packets: Sequence[Packet], pairs: MergedPairs | DevicePairs) -> Computation:
        header = packets[0].header
        return Computation(pairs.steps(self._halves[header.generation], header.layer))


class CachedComputation(Computation):
    """Computation of a merged call whose experts are loaded on demand."""

    def __init__(
        self, cache: ExpertCache, request: ExpertRequest, pairs_sum: CachedSum | PacketSum
    ) -> None:
        self._cache, self._request, self._sum = cache, request, pairs_sum
        super().__init__(self._steps())

    @property
    def missing(self) -> int | None:
        return _missing([self._request])

    def close(self) -> None:
        super().close()
        self._cache.cancel(self._request)

    def _steps(self) -> Steps[Tensor]:
        while self._request.left:
            self._sum.advance(self._cache, self._request)
            yield
        return self._sum.result()


class CachedExperts(RankExperts):
    """Experts in a cache: requested when a token group arrives; hints have lower priority."""

    def __init__(
        self,
        cache: ExpertCache,
        own: Mapping[int, Sequence[int]],
        clamped: ClampedGate | None = None,
        generation: int = 0,
    ) -> None:
        """own: the rank's experts by layer, in local order."""
        self._cache, self._clamped = cache, clamped
        self._own = {generation: own}
        self._requests: dict[Packet, ExpertRequest] = {}
        self._prefetched: OrderedDict[_Owner, int] = OrderedDict()  # layer of the latest hint

    def holds(self, generation: int) -> bool:
        return generation in self._own

    @property
    def count(self) -> int:
        """Number of distinct experts. Thread-safe."""
        owns = list(self._own.values())
        return len({(layer, e) for own in owns for layer, ids in own.items() for e in ids})

    def place(self, generation: int, own: Mapping[int, Sequence[int]]) -> None:
        """Register a generation; its experts are loaded on demand."""
        self._own[generation] = own

    def free(self, generation: int) -> None:
        del self._own[generation]

    def enqueue(self, packet: Packet) -> None:
        header = packet.header
        experts = self._pair_counts(header, packet.tensors[-1].tolist())
        self._requests[packet] = self._cache.request(
            header.layer, list(experts), header.priority, _owner(packet)
        )

    def missing(self, packets: Sequence[Packet]) -> int | None:
        return _missing([self._requests[packet] for packet in packets])

    def begin(
        self, packets: Sequence[Packet], pairs: MergedPairs | DevicePairs
    ) -> CachedComputation:
        assert isinstance(pairs, MergedPairs)
        x_UD, rows_N, weights_N, counts_e = pairs
        pairs_of = self._pair_counts(packets[0].header, counts_e.tolist())
        request = self._merged_request(packets, list(pairs_of))
        return CachedComputation(
            self._cache, request, CachedSum(x_UD, rows_N, weights_N, pairs_of, self._clamped)
        )

    def _merged_request(self, packets: Sequence[Packet], experts: Sequence[int]) -> ExpertRequest:
        requests = [self._requests.pop(packet) for packet in packets]
        return requests[0] if len(requests) == 1 else self._cache.merge(requests, experts)

    def discard(self, packet: Packet) -> None:
        self._cache.cancel(self._requests.pop(packet))

    def prefetch(self, packet: Packet) -> None:
        """Hint experts of a later layer; unknown ones are ignored."""
        layer, owner = packet.header.layer, _owner(packet)
        own = self._own[packet.header.generation].get(layer, ())
        index_n, confidence_n = packet.tensors
        guesses = [
            PredictedExpert(own[index], confidence)
            for index, confidence in zip(index_n.tolist(), confidence_n.tolist(), strict=True)
            if 0 <= index < len(own)
        ]
        if self._prefetched.get(owner, layer) != layer:  # the earlier layer has passed
            self._cache.forget_hints(owner)
        self._cache.hint(owner, layer, guesses, packet.header.priority)
        self._prefetched[owner] = layer
        self._prefetched.move_to_end(owner)
        if len(self._prefetched) > MAX_PREFETCHED:
            self._cache.forget_hints(self._prefetched.popitem(last=False)[0])

    def forget(self, peer: str) -> None:
        for owner in [owner for owner in self._prefetched if owner[0] == peer]:
            del self._prefetched[owner]
            self._cache.forget_hints(owner)

    def poll(self) -> None:
        self._cache.wait(0.0)

    def record_wait(self, seconds: float) -> None:
        self._cache.traffic.waited_s += seconds

    def close(self) -> None:
        self._cache.close()

    def _pair_counts(self, header: Header, counts: Sequence[int]) -> dict[int, int]:
        """Return the pairs of each used expert, in the order of the rank's experts."""
        own = self._own[header.generation][header.layer]
        return {expert: count for expert, count in zip(own, counts, strict=True) if count}


class DeviceCachedExperts(CachedExperts):
    """`CachedExperts` of a GPU. Attention ranks on GPUs send no hints."""

    def __init__(
        self, held: DeviceCache, own: Mapping[int, Sequence[int]], generation: int = 0
    ) -> None:
        super().__init__(held.cache, own, generation=generation)
        self._held = held
        self._arriving: dict[Packet, Arrival] = {}
        self._counts: dict[Packet, list[int]] = {}

    @property
    def needs_polling(self) -> bool:
        return bool(self._arriving)

    def enqueue(self, packet: Packet) -> None:
        self._arriving[packet] = self._held.lane.fetch(packet.tensors[-1], is_complete=True)

    def poll(self) -> None:
        for packet, counts in list(self._arriving.items()):
            if counts.is_ready:
                del self._arriving[packet]
                self._request(packet, counts.tensor.tolist())
        super().poll()
        self._held.count_exposed()

    def missing(self, packets: Sequence[Packet]) -> int | None:
        if any(packet in self._arriving for packet in packets):
            return None
        return super().missing(packets)

    def begin(
        self, packets: Sequence[Packet], pairs: MergedPairs | DevicePairs
    ) -> CachedComputation:
        assert isinstance(pairs, DevicePairs)
        header, (x_CD, pairs_CM, counts_e) = packets[0].header, pairs
        counts = [sum(each) for each in zip(*map(self._counts.pop, packets), strict=True)]
        request = self._merged_request(packets, list(self._pair_counts(header, counts)))
        if not request.left:  # all pairs are of other ranks
            self._cache.cancel(request)
        local_CK, bits_CK = pairs_CM.chunk(2, dim=1)
        routed = RoutedTokens(x_CD, local_CK, bits_CK.view(torch.float32))
        own = self._own[header.generation][header.layer]
        return CachedComputation(
            self._cache, request, PacketSum(routed, counts_e, counts, own, self._held)
        )

    def discard(self, packet: Packet) -> None:
        if self._arriving.pop(packet, None) is None:
            del self._counts[packet]
            super().discard(packet)

    def close(self) -> None:
        self._held.close()

    def _request(self, packet: Packet, counts: list[int]) -> None:
        header, self._counts[packet] = packet.header, counts
        self._requests[packet] = self._cache.request(
            header.layer, list(self._pair_counts(header, counts)), header.priority
        )


def _owner(packet: Packet) -> _Owner:
    return packet.peer, packet.header.batch, packet.header.micro_batch


def _missing(requests: Iterable[ExpertRequest]) -> int | None:
    requests = list(requests)
    if not any(request.is_ready for request in requests):
        return None
    return sum(len(request.left) - len(request.ready) for request in requests)
