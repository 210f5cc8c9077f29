"""Transfer of experts between ranks, and failing peers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from actors.channels.handshake import Identity, accept
from actors.channels.listener import listen_tcp
from actors.gather.expert_exchange import DATA, REPLY, ExpertExchange
from actors.gather.protocol import Terms, digest
from actors.moe.rank_experts import ResidentExperts
from actors.ranks.rendezvous import GroupSpec, Seat, contiguous_placements, make_specs
from actors.rebalance.expert_loading import RateLimiter, StoppedError
from contracts.config import TandemConfig
from contracts.errors import ChannelError, HandshakeError, PeerDeadError, PeerHungError
from contracts.loading import config_from
from contracts.ranks import Group, RankSpec
from models.experts.expert_half import ExpertHalf, PackedExpert, extract_expert
from models.experts.expert_layout import ExpertLayout
from models.spec.model import read_spec
from models.weights.checkpoint import Checkpoint
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.manual_clock import ManualClock

Checkpoints = Callable[..., Path]
TOKEN = b"a token of 32 random bytes......"


class Free:
    def acquire(self, num_bytes: int) -> None:
        """Never wait."""


def specs(folder: Path) -> list[RankSpec]:
    config: TandemConfig = config_from(
        {"channel": {"heartbeat_timeout_s": 0.5, "heartbeat_interval_s": 0.1}}, source="test"
    )
    placements = contiguous_placements(str(folder), expert_ranks=2)
    group_spec = GroupSpec(config, str(folder), TOKEN, 1, "shm", placements=placements)
    seats = [Seat("cpu", "127.0.0.1", 1)] * 2
    made = make_specs(group_spec, seats[:1], seats)
    return [spec for spec in made if spec.group is Group.EXPERT]


class Pair:
    """Rank 1 serves rank 0."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = read_spec(folder)
        self.layout = ExpertLayout(self.model, dtype, torch.device("cpu"))
        self.spec, sender = specs(folder)
        self.half = ExpertHalf.load(Checkpoint(folder), self.model, sender.own_experts, dtype=dtype)
        store = ResidentExperts(self.half)
        self.receiver = ExpertExchange(self.spec, self.layout, ResidentExperts(self.half).memory_of)
        self.sender = ExpertExchange(sender, self.layout, store.memory_of)
        self.receiver.introduce({"expert-1": self.sender.listen("127.0.0.1")})

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture(params=["qwen3_moe", "gpt_oss"])
def pair(tiny_checkpoint: Checkpoints, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(tiny_checkpoint(request.param), torch.float32)
    if not made.layout.packed:
        pytest.skip("experts are not packed on this machine")
    yield made
    made.close()


def test_received_expert_computes_identical_bits(pair: Pair, nothing_leaks: None) -> None:  # noqa: F811
    layer = pair.model.moe_layers[-1]
    expert = pair.half.expert_ids[layer][1]
    into = PackedExpert(pair.layout)
    pair.receiver.fetch(1, (layer, expert), into.memory, Free())
    there = extract_expert(pair.half, layer, expert)
    assert there is not None
    x_TD, h_TF = torch.randn(5, pair.model.hidden_size), torch.randn(5, pair.model.expert_ffn_size)
    assert torch.equal(into.layer.gate_up[0](x_TD), there.gate_up[0](x_TD))
    assert torch.equal(into.layer.down[0](h_TF), there.down[0](h_TF))
    assert pair.receiver.receiver.received_bytes == pair.layout.num_bytes(1)


def test_missing_expert_is_refused_by_name_and_the_link_stays(pair: Pair) -> None:
    layer = pair.model.moe_layers[-1]
    into = PackedExpert(pair.layout)
    for wrong in ((layer, 0), (layer, 1 << 20), (1 << 20, 0)):
        with pytest.raises(ChannelError, match="is not on expert-1"):
            pair.receiver.fetch(1, wrong, into.memory, Free())
    pair.receiver.fetch(1, (layer, pair.half.expert_ids[layer][0]), into.memory, Free())


def test_fetch_from_unknown_or_closed_rank_fails(pair: Pair) -> None:
    into = PackedExpert(pair.layout)
    with pytest.raises(ChannelError, match="expert-7 does not serve experts"):
        pair.receiver.fetch(7, (0, 0), into.memory, Free())
    layer = pair.model.moe_layers[-1]
    pair.receiver.fetch(1, (layer, pair.half.expert_ids[layer][0]), into.memory, Free())
    pair.sender.close()
    with pytest.raises(ChannelError):
        pair.receiver.fetch(1, (layer, pair.half.expert_ids[layer][0]), into.memory, Free())


def test_dtype_mismatch_is_refused_in_the_handshake(
    tiny_checkpoint: Checkpoints, pair: Pair
) -> None:
    other = ExpertLayout(pair.model, torch.bfloat16, torch.device("cpu"))
    stranger = ExpertExchange(pair.spec, other, lambda layer, expert: None)
    stranger.introduce({"expert-1": pair.sender.listen("127.0.0.1")})
    with pytest.raises(HandshakeError, match="another model or dtype"):
        stranger.fetch(1, (0, 0), [torch.zeros(1)], Free())
    stranger.close()


@pytest.mark.parametrize("reply", ["nothing", "half", "other size", "end"])
def test_hung_or_malformed_peer_is_disconnected(pair: Pair, reply: str) -> None:
    sock, address = listen_tcp("127.0.0.1")
    released = threading.Event()
    size = pair.layout.num_bytes(1)
    terms = Terms(1, digest(pair.model, str(pair.layout.dtype)), pair.layout.digest)

    def answer() -> None:
        link, _ = sock.accept()
        me = Identity(name="expert-1", token=TOKEN, epoch=None)
        accept(link, me, answer=lambda _: msgspec.msgpack.encode(terms), deadline_s=5.0)
        link.settimeout(5.0)
        link.recv(8, socket.MSG_WAITALL)
        if reply == "half":
            link.sendall(REPLY.pack(DATA, size) + bytes(size // 2))
        elif reply == "other size":
            link.sendall(REPLY.pack(DATA, size + 1))
        elif reply == "end":
            link.sendall(REPLY.pack(DATA, size))
            link.shutdown(socket.SHUT_RDWR)
        released.wait(5.0)
        link.close()

    thread = threading.Thread(target=answer)
    thread.start()
    pair.receiver.introduce({"expert-1": address})
    wanted = {"other size": ChannelError, "end": PeerDeadError}.get(reply, PeerHungError)
    with pytest.raises(wanted):
        pair.receiver.fetch(1, (0, 0), PackedExpert(pair.layout).memory, Free())
    assert not pair.receiver.receiver._links
    released.set()
    thread.join()
    sock.close()


def test_rate_limiter_waits_and_ends_when_stopped() -> None:
    clock, stopped = ManualClock(), threading.Event()
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        clock.advance(seconds)
        return stopped.is_set()

    gate = threading.Event()
    gate.wait = wait  # type: ignore[method-assign, assignment]
    limiter = RateLimiter(1000.0, gate, clock)
    for _ in range(10):
        limiter.acquire(100)
    assert abs(clock() - 1.0) < 0.02
    clock.advance(60.0)  # what was not used is not made up for
    limiter.acquire(1000)
    assert waited[-1] > 0.9
    stopped.set()
    with pytest.raises(StoppedError):
        limiter.acquire(1)
