"""What an attention rank wants of an expert rank, and what that says to it, as packets: those of a
rank that keeps no rule cut its link."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.channels.base import Header, Kind, Packet, Part, PeerLost
from actors.experts.brought import Brought
from actors.experts.following import Following
from actors.experts.generation_packets import Speaker
from actors.experts.generations import Tell
from actors.experts.moving import Moving
from actors.experts.wanted import MOST
from contracts.errors import PeerDeadError
from contracts.placement import Placement
from contracts.requests import Priority
from planner.placement.stand_in import MAX_RANKS, stand_in

LAUNCH = Placement(num_experts=2, slots_per_rank=(1, 1), expert_of_slot=((0, 1),))
NUMBER = 1 << MAX_RANKS | 1 << 1  # of what stands in for the second, in the launch's placement
STAND_IN = stand_in(LAUNCH, [1]) or LAUNCH


class Wire:
    """One end: what it sends is in `sent`, as whoever it goes to receives it."""

    def __init__(self, name: str) -> None:
        self.name, self.epoch = name, 1
        self.sent: list[Packet] = []
        self.dropped: list[tuple[str, str]] = []

    def peers(self) -> list[str]:
        return ["attention-0", "expert-0"]

    def reserve(self, peer: str, parts: tuple[Part, ...]) -> Any:
        tensors = [torch.empty(part.shape, dtype=part.torch_dtype) for part in parts]
        return SimpleNamespace(peer=peer, tensors=tensors)

    def commit(self, reservation: Any, header: Header) -> None:
        self.sent.append(Packet(self.name, header, reservation.tensors, 0.0, None))

    def drop(self, peer: str, reason: str) -> None:
        self.dropped.append((peer, reason))

    def wake(self) -> None: ...


class Rank:
    """An expert rank, and what it has been told to read."""

    def __init__(self) -> None:
        self.wire = Wire("expert-0")
        endpoint: Any = self.wire
        self.there: set[int] = {0}
        self.begun: list[Any] = []
        store: Any = SimpleNamespace(
            holds=lambda generation: generation in self.there,
            place=lambda generation, experts: self.there.add(generation),
            free=self.there.discard,
        )
        at_once: Any = SimpleNamespace(
            misfit=lambda placement: "", begin=lambda *told: self.begun.append(told)
        )
        at_once.stop = lambda: None
        self.moving = Moving[str](
            endpoint, LAUNCH, store, at_once, at_once, deadline_s=60.0, clock=time.monotonic
        )

    def reads(self) -> None:
        """What it was told to."""
        placement, done = self.begun.pop()
        done(Brought(placement.generation, "experts"))
        self.moving.look()


@pytest.fixture
def rank() -> Rank:
    return Rank()


def packets(*tells: Tell, placement: Placement | None = None) -> list[Packet]:
    wire: Any = Wire("attention-0")
    for tell in tells:
        Speaker(wire, time.monotonic).say(tell, placement)
    return list(wire.sent)


def wants(attempt: int) -> Packet:
    tell = Tell("expert-0", Kind.WANTED, NUMBER, attempt)
    (packet,) = packets(tell, placement=STAND_IN)
    return packet


def test_an_answer_says_the_attempt_of_the_want_that_it_answers(rank: Rank) -> None:
    rank.moving.joined("attention-0")
    rank.moving.heard(wants(3))
    rank.reads()
    assert [(one.header.kind, one.header.batch) for one in rank.wire.sent] == [
        (Kind.HELD, 0),  # by itself
        (Kind.HELD, 3),
    ]
    assert not rank.wire.dropped


@pytest.mark.parametrize("attempt", [0, -1])
def test_a_want_without_an_attempt_is_refused_by_name(rank: Rank, attempt: int) -> None:
    rank.moving.heard(wants(attempt))
    ((peer, reason),) = rank.wire.dropped
    assert peer == "attention-0"
    assert f"sent WANTED of generation {NUMBER} as attempt {attempt}: 1 or more" in reason
    assert not rank.begun


def test_whoever_leaves_without_end_what_it_never_wanted_loses_its_link(rank: Rank) -> None:
    generations = [(number << MAX_RANKS) | 1 for number in range(1, MOST + 2)]
    for packet in packets(*(Tell("expert-0", Kind.LEFT, one) for one in generations)):
        rank.moving.heard(packet)
    assert {peer for peer, _ in rank.wire.dropped} == {"attention-0"}
    assert f"leaves them before it wants them: {MOST} at most" in rank.wire.dropped[0][1]
    assert not rank.begun


def test_an_attention_rank_takes_no_stand_in_for_there_that_answers_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wire: Any = Wire("attention-0")
    following = Following(
        wire, LAUNCH, deadline_s=60.0, check=lambda placement: None, clock=time.monotonic
    )

    def said(expert: str, placement: Placement, attempt: int) -> None:
        sender: Any = Wire(expert)
        tell = Tell("attention-0", Kind.HELD, placement.generation, attempt)
        Speaker(sender, time.monotonic).say(tell, placement)
        following.heard(sender.sent[0])

    for expert in ("expert-0", "expert-1"):
        following.joined(expert)
        said(expert, LAUNCH, 0)
    following.lost(PeerLost("expert-1", PeerDeadError("gone", "expert-1"), 1))
    (wanted,) = [one for one in wire.sent if one.header.kind is Kind.WANTED]
    said("expert-0", STAND_IN, 0)
    assert f"expert-0 sent HELD of generation {NUMBER} as attempt 0" in caplog.text
    said("expert-0", STAND_IN, wanted.header.batch + 1)
    assert not following.stands_in
    said("expert-0", STAND_IN, wanted.header.batch)
    assert following.stands_in
    assert wanted.header.priority is Priority.LS
