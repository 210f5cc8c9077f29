"""The two sockets of a link, in either order."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

import msgspec
import pytest

from actors.channels.handshake import Identity, Remote
from actors.channels.link import LinkSockets
from actors.channels.link_setup import _DATA, _HEARTBEAT, LinkSetup, _Extra
from contracts.clock import monotonic_s


@pytest.fixture
def joined() -> list[LinkSockets]:
    return []


@pytest.fixture
def joiner(joined: list[LinkSockets]) -> Iterator[LinkSetup]:
    me = Identity(name="expert-0", token=secrets.token_bytes(16), epoch=1)
    made = LinkSetup(
        me, "shm", 5.0, monotonic_s, linked=lambda name, epoch: False, joined=joined.append
    )
    yield made
    made.close()


def half(purpose: str, link_id: bytes, name: str = "attention-0") -> tuple[socket.socket, Remote]:
    extra = msgspec.msgpack.encode(_Extra("shm", link_id, b"offer"))
    return socket.socketpair()[0], Remote(name=name, epoch=1, purpose=purpose, extra=extra)


@pytest.mark.parametrize("order", [(_DATA, _HEARTBEAT), (_HEARTBEAT, _DATA)])
def test_data_and_heartbeat_sockets_join_in_either_order(
    joiner: LinkSetup, joined: list[LinkSockets], order: tuple[str, str]
) -> None:
    link_id = secrets.token_bytes(16)
    halves = {purpose: half(purpose, link_id) for purpose in order}
    for sock, remote in halves.values():
        joiner._on_accepted(sock, remote)
    (link_sockets,) = joined
    assert link_sockets.peer == "attention-0"
    assert link_sockets.offer == b"offer"
    assert link_sockets.data is halves[_DATA][0]
    assert link_sockets.heartbeat is halves[_HEARTBEAT][0]
    link_sockets.data.close()
    link_sockets.heartbeat.close()


@pytest.mark.parametrize("purpose", [_DATA, _HEARTBEAT])
def test_two_sockets_of_one_kind_do_not_join(
    joiner: LinkSetup, joined: list[LinkSockets], purpose: str
) -> None:
    link_id = secrets.token_bytes(16)
    halves = [half(purpose, link_id) for _ in range(2)]
    for sock, remote in halves:
        joiner._on_accepted(sock, remote)
    assert joined == []
    assert [sock.fileno() for sock, _ in halves] == [-1, -1], "both are closed"


def test_second_socket_of_another_peer_does_not_join(
    joiner: LinkSetup, joined: list[LinkSockets]
) -> None:
    link_id = secrets.token_bytes(16)
    for sock, remote in (half(_DATA, link_id), half(_HEARTBEAT, link_id, name="attention-1")):
        joiner._on_accepted(sock, remote)
    assert joined == []
