"""Frames stay below the receiver's limit; a larger event ends its own request only."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import actors.rpc.client_server
import cluster.routing.rank_client
from actors.channels.handshake import Identity
from actors.channels.heartbeat import LoopWatchdog
from actors.rpc.client_server import ClientServer, event_frames
from benchmarks.support.rank_stream import open_stream
from cluster.routing.rank_client import RankClient
from contracts.clock import monotonic_s
from contracts.errors import ChannelError, TooCostlyError
from contracts.messages import Event, Events, Failed, RankState, Scored, Submit
from contracts.requests import Usage
from tests.support.api_harness import QUICK
from tests.support.async_tests import run_async

TOKEN = b"a token for tests"
SMALL_BYTES = 2_000


def answer(request_id: int, scores: int) -> Scored:
    return Scored(request_id, Usage(prompt_tokens=1), token_logprobs=[-0.5] * scores)


def decoded(frames: list[bytes]) -> list[Event]:
    events: list[Event] = []
    for frame in frames:
        size = int.from_bytes(frame[:4], "little")
        assert size == len(frame) - 4
        assert size <= SMALL_BYTES
        events += msgspec.msgpack.decode(frame[4:], type=Events).items
    return events


@given(sizes=st.lists(st.integers(0, 400), max_size=30))
def test_events_arrive_complete_and_in_order_in_bounded_frames(sizes: list[int]) -> None:
    events: list[Event] = [answer(number, size) for number, size in enumerate(sizes)]
    got = decoded(event_frames(events, SMALL_BYTES))
    assert len(got) == len(events)
    for before, after in zip(events, got, strict=True):
        fits = len(msgspec.msgpack.encode(Events([before]))) <= SMALL_BYTES
        assert isinstance(before, Scored)
        if fits:
            assert after == before
        else:
            assert isinstance(after, Failed)
            assert (after.request_id, after.status) == (before.request_id, 413)


def test_log_entry_above_the_limit_is_an_error() -> None:
    state = RankState(rank="a", healthy=False, reason="x" * SMALL_BYTES)
    with pytest.raises(ChannelError, match="RankState"):
        event_frames([state], SMALL_BYTES)


class _Rank:
    """A rank's client socket that answers by script."""

    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)
        self._submits: deque[tuple[int, Submit]] = deque()
        watch = LoopWatchdog("attention-0", 60.0, monotonic_s)
        self.server = ClientServer(
            "attention-0", token=TOKEN, wake=self._woken.release, watch=watch
        )
        self.address = self.server.listen("127.0.0.1", deadline_s=10.0)
        self.server.publish(RankState(rank="attention-0", healthy=True))

    def next_submit(self) -> tuple[int, Submit]:
        while not self._submits:
            assert self._woken.acquire(timeout=10)
            for client, message in self.server.receive():
                if isinstance(message, Submit):
                    self._submits.append((client, message))
        return self._submits.popleft()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Rank]:
    monkeypatch.setattr(actors.rpc.client_server, "MAX_FRAME_BYTES", SMALL_BYTES)
    monkeypatch.setattr(cluster.routing.rank_client, "MAX_FRAME_BYTES", SMALL_BYTES)
    rank = _Rank()
    yield rank
    rank.server.close()


@run_async
async def test_message_above_the_limit_fails_its_request_only(rank: _Rank) -> None:
    me = Identity(name="ingress-0", token=TOKEN, epoch=None)
    client = RankClient("attention-0", rank.address, me, QUICK)
    client.start()
    await client.wait_until(lambda client: client.problem is None)
    submit = Submit(request_id=0, token_ids=[1], sampling=None)
    large, small = await open_stream(client, submit), await open_stream(client, submit)
    with pytest.raises(TooCostlyError, match="2000"):
        await open_stream(client, Submit(request_id=0, token_ids=[1] * 3_000, sampling=None))
    number, first = await asyncio.to_thread(rank.next_submit)
    _, second = await asyncio.to_thread(rank.next_submit)
    events: list[Event] = [answer(first.request_id, 1_000), answer(second.request_id, 3)]
    rank.server.send(number, Events(events))
    (failed,) = await large.next_batch()
    (scored,) = await small.next_batch()
    assert isinstance(failed, Failed)
    assert "bytes" in failed.message
    assert isinstance(scored, Scored)
    assert client.connections == 1
    await client.close()
