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
from typing import Protocol

import torch
from torch import Tensor

from kernels import fused_ops
from kernels.experts import clamped_gated
from kernels.gpu_experts import Pairs, slot_experts, supports_slots
from models.experts.cache_requests import AcquiredExpert
from models.experts.device_lanes import DeviceLane
from models.experts.device_tier import DeviceTier
from models.experts.expert_loading import ExpertLayer
from models.experts.router import RoutedTokens


class DeviceSum(Protocol):
    """The sum of one layer and micro-batch."""

    def start(self) -> Collection[int]:
        """Queue the experts in slots, and return them: they need not be acquired."""

    def experts_of(self, ids_TK: Tensor) -> Sequence[int]:
        """Return the layer's experts in ascending order. ids_TK: on the host."""

    def compute(self, acquired: Sequence[AcquiredExpert]) -> None:
        """Queue the products of acquired experts."""

    def result(self) -> Tensor:
        """Return [T, D] float32, after all experts are queued."""


def device_sum(
    routed: RoutedTokens, layer: int, slots: ExpertLayer, tier: DeviceTier, lane: DeviceLane
) -> DeviceSum:
    """slots: the contents of the slots."""
    if supports_slots(routed.x_TD, routed.topk_ids_TK, slots.gate_up, slots.clamped):
        return _FewPairsSum(routed, layer, slots, tier, lane)
    return _ManyPairsSum(routed, slots, tier)


def _output(routed: RoutedTokens) -> Tensor:
    pairs, dim = routed.topk_ids_TK.numel(), routed.x_TD.shape[1]
    return torch.empty(pairs, dim, dtype=routed.x_TD.dtype, device=routed.x_TD.device)


def _weighted_sum(y_ND: Tensor, places_TK: Tensor, routed: RoutedTokens) -> Tensor:
    out_TD = torch.empty(routed.x_TD.shape, dtype=torch.float32, device=y_ND.device)
    fused_ops.weighted_sum(y_ND, places_TK, routed.topk_weights_TK, out_TD)
    return out_TD


class _FewPairsSum:
    def __init__(
        self,
        routed: RoutedTokens,
        layer: int,
        slots: ExpertLayer,
        tier: DeviceTier,
        lane: DeviceLane,
    ) -> None:
        self._routed, self._layer, self._slots = routed, layer, slots
        self._tier, self._lane = tier, lane
        self._y_ND = _output(routed)
        self._ids_TK: Tensor | None = None

    def start(self) -> Collection[int]:
        in_slots = self._tier.in_slots(self._layer)
        if in_slots.slots:
            self._multiply(in_slots.slots_E[self._routed.topk_ids_TK])
            self._tier.mark_layer_used(self._layer)
        return in_slots.slots.keys()

    def experts_of(self, ids_TK: Tensor) -> Sequence[int]:
        self._ids_TK = ids_TK
        return sorted(set(ids_TK.flatten().tolist()))

    def compute(self, acquired: Sequence[AcquiredExpert]) -> None:
        assert self._ids_TK is not None
        slots_TK = torch.full(self._ids_TK.shape, -1, dtype=torch.int32)
        for expert, slot in acquired:
            slots_TK[self._ids_TK == expert] = slot
        slots = [slot for _, slot in acquired]
        self._tier.wait_for(slots)
        self._multiply(self._lane.upload(slots_TK))
        self._tier.mark_used(slots)

    def result(self) -> Tensor:
        ids_TK = self._routed.topk_ids_TK
        places_TK = torch.arange(ids_TK.numel(), device=ids_TK.device).view(ids_TK.shape)
        return _weighted_sum(self._y_ND, places_TK, self._routed)

    def _multiply(self, slots_TK: Tensor) -> None:
        slots = self._slots
        slot_experts(self._routed.x_TD, slots_TK, slots.gate_up, slots.down, self._y_ND)


class _ManyPairsSum:
    def __init__(self, routed: RoutedTokens, slots: ExpertLayer, tier: DeviceTier) -> None:
        self._routed, self._slots, self._tier = routed, slots, tier
        self._y_ND = _output(routed)
        self._pairs: Pairs | None = None
        self._ends: list[int] = []

    def start(self) -> Collection[int]:
        return ()

    def experts_of(self, ids_TK: Tensor) -> Sequence[int]:
        counts = torch.bincount(ids_TK.flatten()).tolist()
        self._ends = list(itertools.accumulate(counts))
        self._pairs = Pairs(self._routed.topk_ids_TK, len(counts))
        return [expert for expert, count in enumerate(counts) if count]

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
        return _weighted_sum(self._y_ND, self._pairs.places_TK, self._routed)
