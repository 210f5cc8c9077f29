"""Slices that are resent after the loss of an expert rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.channels.base import Header, Packet, PacketKind
from actors.moe.backend import TaskKey
from actors.moe.dispatch import RankSlice, plan_dispatch
from actors.moe.remote_pending import RemotePending
from contracts.placement import Placement
from contracts.requests import Priority
from planner.placement.failover import failover_placement
from planner.placement.slots import ExpertPlacement, LayerSlots

LAUNCH = Placement(num_experts=6, slots_per_rank=(2, 2, 2), expert_of_slot=(tuple(range(6)),))


def layer_of(placement: Placement | None) -> LayerSlots:
    assert placement is not None
    return ExpertPlacement(placement).layer(0)


@pytest.fixture
def pending() -> RemotePending:
    """Return two token groups with slices of three ranks each."""
    ids_TK = np.array([[0, 2, 4], [1, 3, 5]])
    weights_TK = np.ones((2, 3), np.float32)
    slices = plan_dispatch(ids_TK, weights_TK, [(0, 1), (1, 2)], layer_of(LAUNCH))
    key = TaskKey(1, 0, 0, Priority.LS)
    return RemotePending(key, torch.zeros(2, 4), slices, layer_of(LAUNCH), 0, 0)


def answer(pending: RemotePending, piece: RankSlice) -> None:
    header = Header(PacketKind.E2A, 1, 1, 0, 0, piece.token_group)
    packet = Packet(f"expert-{piece.rank}", header, (), 0.0, None)
    pending.replies[piece.token_group, piece.rank] = packet
    pending.missing -= 1


def names(pieces: list[RankSlice]) -> list[tuple[int, int]]:
    return [(piece.token_group, piece.rank) for piece in pieces]


def test_only_unanswered_slices_of_lost_rank_are_resent(pending: RemotePending) -> None:
    for piece in pending.slices:
        if piece.token_group == 0:
            answer(pending, piece)
    assert not pending.waits
    pending.lose(1)
    assert pending.waits
    assert names(list(pending.under_way())) == [(1, 0), (1, 2)]
    (again,) = pending.cut(layer_of(LAUNCH), 0)
    assert names([again]) == [(1, 1)]  # the same, to another in its place
    assert not pending.waits
    assert pending.missing == 3


def test_slices_are_recut_for_failover_ranks_and_replies_kept(
    pending: RemotePending,
) -> None:
    standing = failover_placement(LAUNCH, [1])
    pending.lose(1)
    again = pending.cut(layer_of(standing), 77)
    assert names(again) == [(2, 0), (3, 2)]
    assert pending.missing == 6
    assert pending.in_use == {0, 77}
    assert [piece.start for piece in again] == [0, 1]
    for piece in list(pending.under_way()):
        answer(pending, piece)
    assert pending.is_complete


def test_second_loss_recuts_original_and_resent_slices(pending: RemotePending) -> None:
    pending.lose(1)
    pending.cut(layer_of(failover_placement(LAUNCH, [1])), 77)
    pending.lose(2)
    again = pending.cut(layer_of(failover_placement(LAUNCH, [1, 2])), 78)
    assert {piece.rank for piece in again} == {0}
    assert len({piece.token_group for piece in pending.slices if piece.rank == 0}) == len(
        [piece for piece in pending.slices if piece.rank == 0]
    )
    for piece in list(pending.under_way()):
        answer(pending, piece)
    assert pending.is_complete


def test_slices_are_held_until_they_can_be_sent(pending: RemotePending) -> None:
    held = next(piece for piece in pending.slices if piece.rank == 2)
    pending.hold(held)
    assert held not in list(pending.under_way())
    assert pending.cut(layer_of(LAUNCH), 0) == [held]
    assert pending.missing == 6
