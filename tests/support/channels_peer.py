"""Peer process of the channel tests. Argument: options as JSON, see `Options`."""

import sys
from collections.abc import Iterator

import msgspec
import torch

from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.channels.endpoint import Endpoint
from actors.channels.factory import make_endpoint
from actors.channels.link import PayloadFrame, encode
from actors.channels.tcp import PIECE, TcpLink
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig

POLL_S = 30.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    role: str
    address: str
    token: str
    name: str = "peer"
    epoch: int = 1
    packets: int = 0
    elements: int = 0
    heartbeat_timeout_s: float = 1.5
    heartbeat_interval_s: float = 0.2


def echo(end: Endpoint, options: Options) -> None:
    """Echo every packet until main is gone."""
    for packet in _packets(end):
        parts = [
            TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in packet.tensors
        ]
        answer = end.reserve("main", parts)
        for target, source in zip(answer.tensors, packet.tensors, strict=True):
            target.copy_(source)
        packet.release()
        head = msgspec.structs.replace(packet.header, kind=PacketKind.E2A)
        end.commit(answer, head)


def flood(end: Endpoint, options: Options) -> None:
    """Send all packets before receiving any; print the number of correct ones."""
    for index in range(options.packets):
        reservation = end.reserve("main", [TensorSpec("int32", (options.elements,))])
        reservation.tensors[0].fill_(index)
        end.commit(reservation, Header(PacketKind.E2A, options.epoch, index, 0, 0, 0))
    sound = 0
    for packet in _packets(end):
        sound += bool((packet.tensors[0] == packet.header.batch).all())
        packet.release()
        if packet.header.batch == options.packets - 1:
            _report(f"sound {sound}")


def hold(end: Endpoint, options: Options) -> None:
    """Answer packets with others and keep those received."""
    held = []
    for packet in _packets(end):
        held.append(packet)
        reservation = end.reserve("main", [TensorSpec("int32", (options.elements,))])
        end.commit(reservation, Header(PacketKind.E2A, options.epoch, 0, 0, 0, 0))
        _report("holding")


def half(end: Endpoint, options: Options) -> None:
    """Send half of a TCP payload."""
    link = end._links["main"]  # type: ignore[attr-defined]
    assert isinstance(link, TcpLink)
    frame = PayloadFrame(
        Header(PacketKind.E2A, options.epoch, 0, 0, 0, 0),
        (TensorSpec("uint8", (options.elements,)),),
    )
    body = encode(frame)
    link._sock.sendall(PIECE.pack(options.elements, len(body)) + body)
    link._sock.sendall(bytes(options.elements // 2))
    _report("half")
    assert not list(_packets(end))


def _packets(end: Endpoint) -> Iterator[Packet]:
    """Yield packets until main is gone."""
    while True:
        for channel_event in end.poll(POLL_S):
            if isinstance(channel_event, Packet):
                yield channel_event
            elif isinstance(channel_event, PeerLost):
                return


def _report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    options = msgspec.json.decode(sys.argv[1], type=Options)
    end = make_endpoint(
        name=options.name,
        token=bytes.fromhex(options.token),
        epoch=options.epoch,
        config=ChannelConfig(
            backend=options.backend,  # type: ignore[arg-type]
            heartbeat_timeout_s=options.heartbeat_timeout_s,
            heartbeat_interval_s=options.heartbeat_interval_s,
        ),
        clock=monotonic_s,
        device=torch.device("cuda" if options.backend in ("ipc", "nccl") else "cpu"),
    )
    end.connect("main", options.address)
    {"echo": echo, "flood": flood, "hold": hold, "half": half}[options.role](end, options)
    end.close()


if __name__ == "__main__":
    main()
