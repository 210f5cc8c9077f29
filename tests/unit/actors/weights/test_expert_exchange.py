"""Expert ranks give each other experts: right bytes, and what silent or strange peers do."""

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
from actors.experts.bringing import Pace, StoppedError
from actors.experts.rank_experts import AllThere
from actors.ranks.rendezvous import Formation, Seat, contiguous_placements, make_specs
from actors.weights.expert_exchange import HERE, REPLY, ExpertExchange
from actors.weights.weight_wire import Terms, digest
from contracts.clock import ManualClock
from contracts.config import TandemConfig
from contracts.errors import ChannelError, HandshakeError, PeerDeadError, PeerHungError
from contracts.loading import config_from
from contracts.worker import Group, WorkerSpec
from models.experts.expert_layout import ExpertLayout
from models.experts.moe import ExpertHalf
from models.experts.moved import PackedExpert, expert_of
from models.spec.model import read_spec
from models.weights.checkpoint import Checkpoint
from tests.support.channels_support import nothing_leaks  # noqa: F401

Checkpoints = Callable[..., Path]
TOKEN = b"a token of 32 random bytes......"


class Free:
    def took(self, num_bytes: int) -> None:
        """At any rate."""


def specs(folder: Path) -> list[WorkerSpec]:
    config: TandemConfig = config_from(
        {"channel": {"silence_s": 0.5, "heartbeat_s": 0.1}}, source="test"
    )
    placements = contiguous_placements(str(folder), expert_ranks=2)
    formation = Formation(config, str(folder), TOKEN, 1, "shm", placements=placements)
    seats = [Seat("cpu", "127.0.0.1", 1)] * 2
    made = make_specs(formation, seats[:1], seats)
    return [spec for spec in made if spec.group is Group.EXPERT]


class Pair:
    """Rank 1 gives to rank 0."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = read_spec(folder)
        self.layout = ExpertLayout(self.model, dtype, torch.device("cpu"))
        self.spec, giver = specs(folder)
        self.half = ExpertHalf.load(Checkpoint(folder), self.model, giver.own_experts, dtype=dtype)
        store = AllThere(self.half)
        self.taker = ExpertExchange(self.spec, self.layout, AllThere(self.half).memory_of)
        self.giver = ExpertExchange(giver, self.layout, store.memory_of)
        self.taker.introduce({"expert-1": self.giver.listen("127.0.0.1")})

    def close(self) -> None:
        self.taker.close()
        self.giver.close()


@pytest.fixture(params=["qwen3_moe", "gpt_oss"])
def pair(tiny_checkpoint: Checkpoints, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(tiny_checkpoint(request.param), torch.float32)
    if not made.layout.packed:
        pytest.skip("experts are not packed on this machine")
    yield made
    made.close()


def test_an_expert_that_came_computes_the_same_bits(pair: Pair, nothing_leaks: None) -> None:  # noqa: F811
    layer = pair.model.moe_layers[-1]
    expert = pair.half.expert_ids[layer][1]
    into = PackedExpert(pair.layout)
    pair.taker.fetch(1, (layer, expert), into.memory, Free())
    there = expert_of(pair.half, layer, expert)
    assert there is not None
    x_TD, h_TF = torch.randn(5, pair.model.hidden_size), torch.randn(5, pair.model.expert_ffn_size)
    assert torch.equal(into.layer.gate_up[0](x_TD), there.gate_up[0](x_TD))
    assert torch.equal(into.layer.down[0](h_TF), there.down[0](h_TF))
    assert pair.taker.taker.received_bytes == pair.layout.num_bytes(1)


def test_an_expert_that_is_not_there_is_refused_by_name_and_the_next_is_given(pair: Pair) -> None:
    layer = pair.model.moe_layers[-1]
    into = PackedExpert(pair.layout)
    for wrong in ((layer, 0), (layer, 1 << 20), (1 << 20, 0)):
        with pytest.raises(ChannelError, match="is not on expert-1"):
            pair.taker.fetch(1, wrong, into.memory, Free())
    pair.taker.fetch(1, (layer, pair.half.expert_ids[layer][0]), into.memory, Free())


def test_a_rank_that_was_not_introduced_or_is_gone_gives_nothing(pair: Pair) -> None:
    into = PackedExpert(pair.layout)
    with pytest.raises(ChannelError, match="expert-7 gives no experts"):
        pair.taker.fetch(7, (0, 0), into.memory, Free())
    layer = pair.model.moe_layers[-1]
    pair.taker.fetch(1, (layer, pair.half.expert_ids[layer][0]), into.memory, Free())
    pair.giver.close()
    with pytest.raises(ChannelError):
        pair.taker.fetch(1, (layer, pair.half.expert_ids[layer][0]), into.memory, Free())


def test_another_dtype_is_refused_in_the_handshake(
    tiny_checkpoint: Checkpoints, pair: Pair
) -> None:
    other = ExpertLayout(pair.model, torch.bfloat16, torch.device("cpu"))
    stranger = ExpertExchange(pair.spec, other, lambda layer, expert: None)
    stranger.introduce({"expert-1": pair.giver.listen("127.0.0.1")})
    with pytest.raises(HandshakeError, match="another model or dtype"):
        stranger.fetch(1, (0, 0), [torch.zeros(1)], Free())
    stranger.close()


@pytest.mark.parametrize("says", ["nothing", "half", "other size", "end"])
def test_a_peer_that_hangs_or_answers_strangely_is_given_up(pair: Pair, says: str) -> None:
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
        if says == "half":
            link.sendall(REPLY.pack(HERE, size) + bytes(size // 2))
        elif says == "other size":
            link.sendall(REPLY.pack(HERE, size + 1))
        elif says == "end":
            link.sendall(REPLY.pack(HERE, size))
            link.shutdown(socket.SHUT_RDWR)
        released.wait(5.0)
        link.close()

    thread = threading.Thread(target=answer)
    thread.start()
    pair.taker.introduce({"expert-1": address})
    wanted = {"other size": ChannelError, "end": PeerDeadError}.get(says, PeerHungError)
    with pytest.raises(wanted):
        pair.taker.fetch(1, (0, 0), PackedExpert(pair.layout).memory, Free())
    assert not pair.taker.taker._links
    released.set()
    thread.join()
    sock.close()


def test_a_pace_waits_for_what_was_taken_and_ends_when_it_is_stopped() -> None:
    clock, stopped = ManualClock(), threading.Event()
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        clock.advance(seconds)
        return stopped.is_set()

    gate = threading.Event()
    gate.wait = wait  # type: ignore[method-assign, assignment]
    pace = Pace(1000.0, gate, clock)
    for _ in range(10):
        pace.took(100)
    assert abs(clock() - 1.0) < 0.02
    clock.advance(60.0)  # what was not used is not made up for
    pace.took(1000)
    assert waited[-1] > 0.9
    stopped.set()
    with pytest.raises(StoppedError):
        pace.took(1)
