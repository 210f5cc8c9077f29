"""Experts of an expert rank in slots of its GPU; missing ones are copied from pinned memory.

    counts    |to the host|                                          3 is in a slot, 7 is not
    host                  request 3 and 7, queue all that follows
    copies                   |== 7 ==|
    compute   … another call     |#### 3 ####|#### 7 ####|           7 waits for a mark

A packet has arrived when it is delivered, so its counts are copied to the host beside compute that
is queued. The host waits for nothing: it runs other calls until the counts are there, and compute
waits for copies by marks. Slots are overwritten after compute that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from actors.channels.base import Packet
from actors.moe.rank_experts import CachedComputation, CachedExperts, DevicePairs, MergedPairs
from models.experts.device_lanes import Arrival
from models.experts.device_sum import PacketSum
from models.experts.device_tier import DeviceCache
from models.experts.expert_half import RoutedTokens


class DeviceCachedExperts(CachedExperts):
    """`CachedExperts` of a GPU. Hints are not used."""

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

    def prefetch(self, packet: Packet) -> None:
        """Do nothing: attention ranks on GPUs do not predict."""

    def close(self) -> None:
        self._held.close()

    def _request(self, packet: Packet, counts: list[int]) -> None:
        header, self._counts[packet] = packet.header, counts
        self._requests[packet] = self._cache.request(
            header.layer, list(self._pair_counts(header, counts)), header.priority
        )
