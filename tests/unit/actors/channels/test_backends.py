"""TCP lanes, pieces and buffers; shared-memory segments."""

import contextlib
import itertools
import os
import queue
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.channels import tcp
from actors.channels.base import Packet, TensorSpec
from actors.channels.factory import spin_seconds
from actors.channels.link import LinkSockets, PayloadFrame, encode
from actors.channels.shm import IDLE_S, check_memfd, create_memfd
from actors.channels.tcp import (
    BEST_EFFORT_INTERVAL,
    DIRECT_BYTES,
    INITIAL_PIECE_BYTES,
    PIECE,
    TcpLink,
)
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, PeerError
from contracts.loading import config_from
from contracts.ranks import Group
from contracts.requests import Priority
from tests.support.channels_support import (
    DEADLINE_S,
    endpoint,
    first_packet,
    header,
    linked,
    nothing_leaks,  # noqa: F401
    send,
    wait_for,
)
from tests.support.manual_clock import ManualClock
from tests.support.rank_specs import rank_spec

KERNEL_BYTES = 64 << 10  # asked for on either side: a few times as much is what it takes
LS, BE = Priority.LS, Priority.BE


class Link(TcpLink):
    """A link of this process whose other end is the socket `far`."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
            near = socket.create_connection(server.getsockname())
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
            self.far = server.accept()[0]
        self.far.settimeout(DEADLINE_S)
        self.news: queue.SimpleQueue[Packet | PeerError] = queue.SimpleQueue()
        self._heartbeats = socket.socketpair()
        link_sockets = LinkSockets(
            peer="far", data=near, heartbeat=self._heartbeats[0], initiator=True, offer=b""
        )
        super().__init__(link_sockets, monotonic_s, self.news.put)
        self.start()

    def send(self, batch: int, priority: Priority, num_bytes: int) -> None:
        reservation = self.reserve([TensorSpec("uint8", (num_bytes,))])
        reservation.tensors[0].fill_(batch)
        self.commit(reservation, header(batch, priority=priority))

    def close(self) -> None:
        super().close()
        self.far.close()
        for heartbeat in self._heartbeats:
            heartbeat.close()


@pytest.fixture
def link() -> Iterator[Link]:
    with contextlib.closing(Link()) as link:
        yield link


class Reader:
    """Pieces at the far end: (lane, batch, is the packet complete)."""

    def __init__(self, far: socket.socket) -> None:
        self._far = far
        self._arriving: dict[int, tuple[int, int]] = {}  # lane -> batch, bytes that are missing
        self.taken = 0

    def piece(self) -> tuple[int, int, bool]:
        word, body_size = PIECE.unpack(self._exactly(PIECE.size))
        lane, size = divmod(word, 1 << 31)
        self.taken += size
        if body_size:
            assert lane not in self._arriving
            frame = msgspec.msgpack.decode(self._exactly(body_size), type=PayloadFrame)
            self._arriving[lane] = frame.header.batch, frame.parts[0].num_bytes
        batch, missing = self._arriving.pop(lane)
        assert self._exactly(size) == bytes([batch]) * size
        if missing > size:
            self._arriving[lane] = batch, missing - size
        return lane, batch, missing == size

    def until_whole(self, packets: int) -> list[tuple[int, int, bool]]:
        found: list[tuple[int, int, bool]] = []
        while sum(is_whole for _, _, is_whole in found) < packets:
            found.append(self.piece())
        return found

    def _exactly(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            taken += (part := self._far.recv(size - len(taken)))
            assert part, "the link has closed"
        return taken


def test_ls_packet_overtakes_be_packet_under_way(link: Link) -> None:
    reader = Reader(link.far)
    link.send(1, BE, 8 << 20)
    assert reader.piece() == (BE, 1, False)
    link.send(2, LS, 4096)
    link.send(3, BE, 64)
    link.send(4, LS, 1 << 20)
    reader.until_whole(1)
    assert reader.taken <= 3 << 20, "what the kernel held and a piece, and no more"
    assert [batch for _, batch, is_whole in reader.until_whole(3) if is_whole] == [4, 1, 3]


def test_every_eighth_piece_is_be_while_ls_fills_the_line(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "BUFFERED_S", 1e-6)  # pieces of LEAST_BYTES, on a fast line too
    reader = Reader(link.far)
    link.send(1, BE, 8 << 20)
    link.send(2, LS, 24 << 20)
    found = reader.until_whole(2)
    between = found[found.index(next(p for p in found if p[0] == LS)) : found.index((LS, 2, True))]
    turns = [number for number, piece in enumerate(between) if piece[0] == BE]
    assert len(turns) >= 3
    gaps = {b - a for a, b in itertools.pairwise(turns)}
    assert gaps == {BEST_EFFORT_INTERVAL}


def test_ls_waits_for_the_rest_of_a_piece_started_by_commit(link: Link) -> None:
    """`commit` sends by itself on a free line, and the kernel accepts a part."""
    batch = 0
    while link.blocked_since_s is None:
        batch += 1
        link.send(batch, BE, DIRECT_BYTES)
    link.send(batch + 1, LS, 64)
    found = Reader(link.far).until_whole(batch + 1)
    assert sorted(n for _, n, _ in found) == list(range(1, batch + 2))


PACKETS = st.lists(
    st.tuples(st.sampled_from(Priority), st.integers(0, 4 * INITIAL_PIECE_BYTES // 64)), max_size=20
)


@settings(max_examples=30)
@given(PACKETS)
def test_packets_arrive_complete_and_in_order_within_their_lane(
    packets: list[tuple[Priority, int]],
) -> None:
    with linked("tcp") as (left, right):
        for number, (priority, rows) in enumerate(packets):
            send(left, "right", [torch.full((rows, 16), number)], header(number, priority=priority))
        arrived: dict[Priority, list[int]] = {LS: [], BE: []}
        for packet in wait_for(right, Packet, len(packets)) if packets else []:
            assert bool((packet.tensors[0] == packet.header.batch).all())
            arrived[packet.header.priority].append(packet.header.batch)
            packet.release()
    for lane, numbers in arrived.items():
        assert numbers == [n for n, (priority, _) in enumerate(packets) if priority is lane]


CUTS = st.lists(st.tuples(st.sampled_from(Priority), st.integers(1, 3000)), max_size=60)


@settings(max_examples=30)
@given(CUTS)
def test_packets_can_be_cut_anywhere(cuts: list[tuple[Priority, int]]) -> None:
    with contextlib.closing(Link()) as link:
        left: dict[Priority, int] = {LS: 0, BE: 0}
        sent = 0
        for lane, size in cuts:
            body = b""
            if not left[lane]:
                body, left[lane] = first_body(64 * 100, lane), 64 * 100
                sent += 1
            size = min(size, left[lane])
            left[lane] -= size
            link.far.sendall(PIECE.pack(lane << 31 | size, len(body)) + body + bytes([lane]) * size)
        for lane, missing in left.items():
            if missing:
                link.far.sendall(PIECE.pack(lane << 31 | missing, 0) + bytes([lane]) * missing)
        for _ in range(sent):
            packet = link.news.get(timeout=DEADLINE_S)
            assert isinstance(packet, Packet)
            assert bool((packet.tensors[0] == int(packet.header.priority)).all())
            packet.release()


def first_body(num_bytes: int, lane: Priority = LS) -> bytes:
    return encode(PayloadFrame(header(priority=lane), (TensorSpec("uint8", (num_bytes,)),)))


BODY = first_body(640)
HOSTILE = {
    "continued a packet that it never started": PIECE.pack(64, 0) + bytes(64),
    "that it never started": PIECE.pack(64, len(BODY))
    + BODY
    + bytes(64)
    + PIECE.pack(1 << 31 | 64, 0),
    "before the last 576 bytes of the previous one in its lane": (
        PIECE.pack(64, len(BODY)) + BODY + bytes(64) + PIECE.pack(64, len(BODY))
    ),
    "sent 641 bytes of a packet with 640 left": PIECE.pack(641, len(BODY)) + BODY,
    "continued a packet with no byte": PIECE.pack(0, len(BODY)) + BODY + PIECE.pack(0, 0),
    "sent a header of 4294967295 bytes": PIECE.pack(0, 0xFFFFFFFF),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_malformed_pieces_lose_the_peer_by_name(link: Link, what: str) -> None:
    link.far.sendall(HOSTILE[what])
    news = link.news.get(timeout=DEADLINE_S)
    assert isinstance(news, PeerError)
    assert str(news).startswith("far ")
    assert what in str(news)


def test_link_to_lost_peer_closes_with_unsent_packets_in_both_lanes(link: Link) -> None:
    link.send(1, BE, 8 << 20)
    link.send(2, LS, 8 << 20)
    link.far.close()
    assert isinstance(link.news.get(timeout=DEADLINE_S), PeerError)
    link.close()
    assert not any(thread.is_alive() for thread in threading.enumerate() if "far" in thread.name)


def test_payload_is_received_into_reused_memory() -> None:
    with linked("tcp") as (left, right):
        pointers = set()
        for number in range(20):
            send(left, "right", [torch.full((50_000,), float(number))], header(number))
            packet = first_packet(right)
            pointers.add(packet.tensors[0].data_ptr())
            assert bool((packet.tensors[0] == number).all())
            packet.release()
        assert len(pointers) == 1


def test_listen_error_names_the_foreign_address() -> None:
    with contextlib.closing(endpoint("one", "tcp")) as end:
        with pytest.raises(ChannelError, match=r"cannot listen on 203\.0\.113\.7"):
            end.listen("203.0.113.7")
        assert end.listen("127.0.0.1").startswith("tcp:127.0.0.1:")
        with pytest.raises(ChannelError, match="listens already"):
            end.listen()


SEGMENT_BYTES = 64 << 10


def segments() -> int:
    """Mappings of segments in this process."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:tandem-segment" in line for line in maps)


def test_sender_and_receiver_see_the_same_pages() -> None:
    with linked("shm") as (left, right):
        reservation = left.reserve("right", [TensorSpec("int64", (1000,))])
        written = reservation.tensors[0]
        written.fill_(1)
        left.commit(reservation, header())
        packet = first_packet(right)
        written[0] = 77  # not for users: shows that nothing was copied
        assert packet.tensors[0][:2].tolist() == [77, 1]
        packet.release()


def test_full_segment_adds_another_and_large_payload_gets_its_own() -> None:
    before = segments()
    with linked("shm", segment_bytes=SEGMENT_BYTES) as (left, right):
        for number in range(10):  # nobody releases: 10 x 40 KiB in segments of 64 KiB
            send(left, "right", [torch.full((10 << 10,), float(number))], header(number))
        send(left, "right", [torch.ones(1 << 20)], header(10))
        packets = wait_for(right, Packet, 11)
        assert segments() - before == 2 * 11  # both ends of the link are in this process
        for packet in packets[:10]:
            assert bool((packet.tensors[0] == packet.header.batch).all())
        for packet in reversed(packets):
            packet.release()


def test_empty_tensor_can_follow_the_end_of_the_segment() -> None:
    with linked("shm", segment_bytes=5000) as (left, right):
        send(left, "right", [torch.ones(79 * 64 // 8, dtype=torch.int64), torch.ones(0)], header())
        packet = first_packet(right)
        assert [t.numel() for t in packet.tensors] == [632, 0]
        packet.release()


def test_idle_segments_are_freed_by_both_sides() -> None:
    before, clock = segments(), ManualClock()
    with linked("shm", segment_bytes=SEGMENT_BYTES, clock=clock) as (left, right):
        for number in range(5):
            send(left, "right", [torch.ones(1 << 18)], header(number))
        for packet in wait_for(right, Packet, 5):
            packet.release()
        del packet
        clock.advance(1.5)
        assert left.poll(0) == []
        clock.advance(IDLE_S)
        assert left.poll(0) == []
        assert right.poll(1.0) == []
        assert segments() - before == 2
        send(left, "right", [torch.full((1 << 18,), 3.0)], header(9))
        packet = first_packet(right)
        assert bool((packet.tensors[0] == 3.0).all())
        packet.release()


def test_lack_of_memory_is_an_error_with_both_numbers() -> None:
    with (
        linked("shm") as (left, _),
        pytest.raises(ChannelError, match=r"segment of \d+ bytes exceeds .*segment_bytes"),
    ):
        left.reserve("right", [TensorSpec("uint8", (1 << 50,))])


def test_segment_cannot_shrink() -> None:
    fd = create_memfd(4096)
    try:
        assert check_memfd(fd, 4096)
        assert not check_memfd(fd, 8192)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC)
    try:
        os.ftruncate(plain, 8192)
        assert not check_memfd(plain, 4096)
    finally:
        os.close(plain)


@pytest.mark.parametrize(("threads", "cores", "spins"), [(1, 2, True), (2, 2, False), (2, 4, True)])
def test_waiting_rank_spins_only_on_a_core_that_no_thread_needs(
    threads: int, cores: int, spins: bool
) -> None:
    config = config_from({"groups": {"torch_threads": threads}}, source="test")
    spec = rank_spec(Group.EXPERT, attention_ranks=1, expert_ranks=1, config=config)
    assert bool(spin_seconds(spec, cores)) is spins
