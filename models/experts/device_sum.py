"""Weighted sums over experts in a device's slots, in any order of arrival.

Few pairs (generated tokens): experts in slots are computed before the host knows the ids, the rest
once it is queued (kernels/gpu_experts.py). Many pairs (prompts): sorted by expert, each a product
of its own, experts in slots first. In both a row of y is one pair's output, and a token's rows are
summed at the end in the order of choice: bits depend neither on slots nor on arrival.

Shapes: T tokens, D model dim, E experts, K top-k, N = T * K pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kernels import fused_ops
from kernels.experts import clamped_gated
from kernels.gpu_experts import Pairs, slot_experts, supports_slots
from models.experts.cache_requests import AcquiredExpert, ExpertRequest
from models.experts.device_tier import DeviceCache
from models.experts.expert_cache import ExpertCache
from models.experts.expert_half import RoutedTokens


def device_sum(routed: RoutedTokens, layer: int, held: DeviceCache) -> DeviceSum:
    """Return the sum of a micro-batch whose ids will be on the host."""
    if _has_few_pairs(routed, held):
        return _FewPairsSum(routed, layer, held)
    return _ManyPairsSum(routed, held)


class PacketSum:
    """The sum of packets on a device, computed like a `CachedSum`.

    The ids of `routed` are places in `own`, the rank's experts; len(own): the expert is elsewhere.
    """

    def __init__(
        self,
        routed: RoutedTokens,
        counts_e: Tensor,
        counts: Sequence[int],
        own: Sequence[int],
        held: DeviceCache,
    ) -> None:
        """Sort the pairs. counts: the numbers in counts_e, pairs of each expert."""
        self._place_of = {expert: place for place, expert in enumerate(own)}
        self._sum: DeviceSum
        if _has_few_pairs(routed, held):
            self._sum = _FewPairsSum(routed, 0, held, len(own))
        else:
            self._sum = _ManyPairsSum(routed, held)
            self._sum.sort(counts, counts_e)

    def advance(self, cache: ExpertCache, request: ExpertRequest) -> bool:
        """Queue the products of available experts. Raises ChannelError if one cannot be read."""
        acquired = cache.acquire_ready(request)
        if acquired:
            placed = [AcquiredExpert(self._place_of[expert], slot) for expert, slot in acquired]
            self._sum.compute(placed)
            cache.complete(request, acquired)
        return bool(acquired)

    def result(self) -> Tensor:
        """Return [C, D] float32, after all experts are queued."""
        return self._sum.result()


def _has_few_pairs(routed: RoutedTokens, held: DeviceCache) -> bool:
    slots = held.slots.layer
    return supports_slots(routed.x_TD, routed.topk_ids_TK, slots.gate_up, slots.clamped)


def _weighted_sum(
    y_ND: Tensor, places_TK: Tensor, routed: RoutedTokens, count: Tensor | None = None
) -> Tensor:
    out_TD = torch.empty(routed.x_TD.shape, dtype=torch.float32, device=y_ND.device)
    fused_ops.weighted_sum(y_ND, places_TK, routed.topk_weights_TK, out_TD, count)
    return out_TD


class _FewPairsSum:
    def __init__(
        self, routed: RoutedTokens, layer: int, held: DeviceCache, elsewhere: int | None = None
    ) -> None:
        """elsewhere: id of pairs that count as zeros, above those of all experts."""
        self._routed, self._layer, self._slots = routed, layer, held.slots.layer
        self._tier, self._lane = held.tier, held.lane
        self._ids = 1 + (held.tier.num_experts if elsewhere is None else elsewhere)
        pairs = routed.topk_ids_TK.numel()
        self._y_ND = routed.x_TD.new_zeros(pairs, routed.x_TD.shape[1])

    def start(self) -> Collection[int]:
        """Queue the experts in slots, and return them: they need not be acquired."""
        in_slots = self._tier.in_slots(self._layer)
        if in_slots.slots:
            self._multiply(in_slots.slots_E[self._routed.topk_ids_TK])
            self._tier.mark_layer_used(self._layer)
        return in_slots.slots.keys()

    def experts_of(self, ids_TK: Tensor) -> Sequence[int]:
        """Return the layer's experts in ascending order. ids_TK: on the host."""
        return sorted(set(ids_TK.flatten().tolist()))

    def compute(self, acquired: Sequence[AcquiredExpert]) -> None:
        """Queue the products of acquired experts."""
        slots_E = torch.full((self._ids,), -1, dtype=torch.int32)
        for expert, slot in acquired:
            slots_E[expert] = slot
        slots = [slot for _, slot in acquired]
        self._tier.wait_for(slots)
        self._multiply(self._lane.upload(slots_E)[self._routed.topk_ids_TK])
        self._tier.mark_used(slots)

    def result(self) -> Tensor:
        """Return [T, D] float32, after all experts are queued."""
        ids_TK = self._routed.topk_ids_TK
        places_TK = torch.arange(ids_TK.numel(), device=ids_TK.device).view(ids_TK.shape)
        return _weighted_sum(self._y_ND, places_TK, self._routed)

    def _multiply(self, slots_TK: Tensor) -> None:
        slots = self._slots
        slot_experts(self._routed.x_TD, slots_TK, slots.gate_up, slots.down, self._y_ND)


class _ManyPairsSum:
    def __init__(self, routed: RoutedTokens, held: DeviceCache) -> None:
        self._routed, self._slots, self._tier = routed, held.slots.layer, held.tier
        pairs = routed.topk_ids_TK.numel()
        self._y_ND = routed.x_TD.new_empty(pairs, routed.x_TD.shape[1])
        self._pairs: Pairs | None = None
        self._count: Tensor | None = None
        self._ends: list[int] = []

    def start(self) -> Collection[int]:
        return ()

    def experts_of(self, ids_TK: Tensor) -> Sequence[int]:
        counts = torch.bincount(ids_TK.flatten()).tolist()
        self.sort(counts)
        return [expert for expert, count in enumerate(counts) if count]

    def sort(self, counts: Sequence[int], counts_e: Tensor | None = None) -> None:
        """Sort the pairs by expert. counts_e: on the device, if pairs of other ids are zeros."""
        self._ends = list(itertools.accumulate(counts))
        self._pairs = Pairs(self._routed.topk_ids_TK, len(counts), counts_e)
        self._count = None if counts_e is None else self._pairs.ends_e[-1:]

    def compute(self, acquired: Sequence[AcquiredExpert]) -> None:
        assert self._pairs is not None
        gate_up, down, clamped = self._slots.gate_up, self._slots.down, self._slots.clamped
        for expert, slot in sorted(acquired, key=lambda each: self._tier.arrival_order(each.slot)):
            rows = slice(self._ends[expert - 1] if expert else 0, self._ends[expert])
            self._tier.wait_for([slot])
            x_nD = fused_ops.gather_rows(self._routed.x_TD, self._pairs.rows_N[rows])
            h_nF2 = gate_up[slot](x_nD)
            h_nF = fused_ops.gated(h_nF2) if clamped is None else clamped_gated(h_nF2, clamped)
            self._y_ND[rows] = down[slot](h_nF)
            self._tier.mark_used([slot])

    def result(self) -> Tensor:
        assert self._pairs is not None
        return _weighted_sum(self._y_ND, self._pairs.places_TK, self._routed, self._count)


DeviceSum = _FewPairsSum | _ManyPairsSum
"""The sum of one layer and micro-batch."""
