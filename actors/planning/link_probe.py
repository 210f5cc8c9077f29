"""Measurement of a channel to a child process that echoes payloads.

The child runs this module. A transfer's time runs from just before `commit` until the receiver has
the payload; filling it belongs to the sender.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import torch

from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.channels.endpoint import Endpoint
from actors.channels.factory import make_endpoint
from actors.channels.handshake import new_token
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError
from contracts.import_path import module_command

log = logging.getLogger(f"tandem.{__name__}")

_PROBE, _ECHO = "attention-0", "expert-0"
_TIMEOUT_S = 20.0
_CONFIG = ChannelConfig(heartbeat_timeout_s=10.0)  # tolerates a busy machine


class LinkTransfer(NamedTuple):
    """One payload in both directions."""

    num_bytes: int
    a2e_s: float
    e2a_s: float


class _Options(msgspec.Struct):
    """device: of the end's payloads."""

    backend: str
    token: bytes
    device: str


_decode_options = msgspec.json.Decoder(_Options).decode


@contextmanager
def link_probe(backend: str, devices: tuple[str, str] = ("cpu", "cpu")) -> Iterator[LinkProbe]:
    """Open a link over `backend` to a child process. Raises ChannelError.

    devices: of this process and of the child.
    """
    token = new_token()
    options, echoing = (_Options(backend, token, device) for device in devices)
    process = subprocess.Popen(
        module_command("actors.planning.link_probe"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only the parent, which ends the child
    )
    assert process.stdin is not None
    assert process.stdout is not None
    end = _endpoint(_PROBE, options)
    try:
        process.stdin.write(msgspec.json.encode(echoing) + b"\n")  # not an argument: has the token
        process.stdin.flush()
        address = process.stdout.readline().decode().strip()
        if not address:
            raise ChannelError(f"channel.backend={backend}: the echoing process did not start")
        end.connect(_ECHO, address)
        yield LinkProbe(end)
    finally:
        end.close()
        process.stdin.close()
        try:
            process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class LinkProbe:
    """The measuring side."""

    def __init__(self, end: Endpoint) -> None:
        self._end = end
        self._sent = 0

    def transfer(self, num_bytes: int) -> LinkTransfer:
        """Send `num_bytes` and wait for as many. Raises PeerError or ChannelError."""
        self._sent += 1
        parts = [TensorSpec("uint8", (num_bytes,))]
        _send(self._end, _ECHO, parts, PacketKind.A2E, self._sent, [])
        packet = _next_packet(self._end, _TIMEOUT_S)
        seconds = packet.arrived_s - packet.header.sent_s
        a2e_s = float(packet.tensors[1][0])
        packet.release()
        return LinkTransfer(num_bytes, a2e_s, seconds)


def _send(
    end: Endpoint,
    peer: str,
    parts: Sequence[TensorSpec],
    kind: PacketKind,
    number: int,
    values: list[float],
) -> None:
    """Send parts; the first is filled with `number`, the second, if any, with `values`."""
    reservation = end.reserve(peer, parts)
    reservation.tensors[0].fill_(number % 256)
    if values:
        reservation.tensors[1].copy_(torch.tensor(values, dtype=torch.float64))
    end.commit(reservation, Header(kind, end.epoch, number, 0, 0, 0, sent_s=monotonic_s()))


def _next_packet(end: Endpoint, timeout_s: float) -> Packet:
    deadline_s = monotonic_s() + timeout_s
    while (left_s := deadline_s - monotonic_s()) > 0:
        for event_ in end.poll(left_s):
            if isinstance(event_, Packet):
                return event_
            if isinstance(event_, PeerLost):
                raise event_.error
    raise ChannelError(f"no payload arrived within {timeout_s} s")


def _endpoint(name: str, options: _Options) -> Endpoint:
    return make_endpoint(
        name=name,
        token=options.token,
        epoch=1,
        config=msgspec.structs.replace(_CONFIG, backend=options.backend),
        clock=monotonic_s,
        device=torch.device(options.device),
    )


def _echo() -> None:
    """Answer every payload with one of its size and its transfer time, until the peer is gone."""
    options = _decode_options(sys.stdin.readline())
    torch.set_num_threads(1)
    end = _endpoint(_ECHO, options)
    sys.stdout.write(end.listen() + "\n")
    sys.stdout.flush()
    try:
        while True:
            packet = _next_packet(end, 10 * _TIMEOUT_S)
            seconds = packet.arrived_s - packet.header.sent_s
            size, number = packet.tensors[0].shape[0], packet.header.batch
            packet.release()
            parts = [TensorSpec("uint8", (size,)), TensorSpec("float64", (1,))]
            _send(end, _PROBE, parts, PacketKind.E2A, number, [seconds])
    except ChannelError as error:
        log.debug("the probe is gone: %s", error.message)
    finally:
        end.close()


if __name__ == "__main__":
    _echo()
