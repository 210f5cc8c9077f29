"""A link's two sockets become one joint, whichever handshake ends first."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

import msgspec
import pytest

from actors.channels.handshake import Identity, Remote
from actors.channels.joiner import _DATA, _PULSE, Joiner, _Extra
from actors.channels.link import Joint
from contracts.clock import monotonic_s


@pytest.fixture
def joined() -> list[Joint]:
    return []


@pytest.fixture
def joiner(joined: list[Joint]) -> Iterator[Joiner]:
    me = Identity(name="expert-0", token=secrets.token_bytes(16), epoch=1)
    made = Joiner(
        me, "shm", 5.0, monotonic_s, linked=lambda name, epoch: False, joined=joined.append
    )
    yield made
    made.close()


def half(purpose: str, link_id: bytes, name: str = "attention-0") -> tuple[socket.socket, Remote]:
    extra = msgspec.msgpack.encode(_Extra("shm", link_id, b"offer"))
    return socket.socketpair()[0], Remote(name=name, epoch=1, purpose=purpose, extra=extra)


@pytest.mark.parametrize("order", [(_DATA, _PULSE), (_PULSE, _DATA)])
def test_data_and_pulse_join_in_either_order(
    joiner: Joiner, joined: list[Joint], order: tuple[str, str]
) -> None:
    link_id = secrets.token_bytes(16)
    halves = {purpose: half(purpose, link_id) for purpose in order}
    for sock, remote in halves.values():
        joiner._accepted(sock, remote)
    (joint,) = joined
    assert joint.peer == "attention-0"
    assert joint.offer == b"offer"
    assert joint.data is halves[_DATA][0]
    assert joint.pulse is halves[_PULSE][0]
    joint.data.close()
    joint.pulse.close()


@pytest.mark.parametrize("purpose", [_DATA, _PULSE])
def test_two_sockets_of_one_kind_do_not_join(
    joiner: Joiner, joined: list[Joint], purpose: str
) -> None:
    link_id = secrets.token_bytes(16)
    halves = [half(purpose, link_id) for _ in range(2)]
    for sock, remote in halves:
        joiner._accepted(sock, remote)
    assert joined == []
    assert [sock.fileno() for sock, _ in halves] == [-1, -1], "both are closed"


def test_another_peer_cannot_supply_the_second_half(joiner: Joiner, joined: list[Joint]) -> None:
    link_id = secrets.token_bytes(16)
    for sock, remote in (half(_DATA, link_id), half(_PULSE, link_id, name="attention-1")):
        joiner._accepted(sock, remote)
    assert joined == []
