"""Experts gathered from other workers."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import actors.gather.peer_source
from actors.channels.listener import ADDRESS_SEPARATOR
from actors.gather.weight_link import WeightLink
from contracts.errors import ChannelError, HandshakeError
from models.experts.host_experts import HostSource
from models.weights.checkpoint import check_checkpoint
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.group_harness import group_config
from tests.support.prefill_workers import (
    check_copy,
    gathering,
    join_all,
    layout_of,
    make_source,
    new_buffer,
    unlinked,
    worker_spec,
)
from tests.support.tiny_models import Checkpoints


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture
def deep(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3_moe", num_hidden_layers=4)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_workers_at_different_layers_share_a_window_of_one(deep: Path, backend: str) -> None:
    layers = check_checkpoint(deep).moe_layers[1:]
    with gathering(deep, 3, backend=backend, window=1) as sources:
        for step in range(2 * len(layers)):
            for shift, source in enumerate(sources):
                check_copy(deep, source, layers[(step + shift) % len(layers)])


def test_more_workers_than_experts_leave_some_without_a_part(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("mixtral", num_local_experts=2, num_experts_per_tok=1)
    with gathering(folder, 3) as sources:
        for source in sources:
            check_copy(folder, source, 1)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_stranger_is_refused(folder: Path, backend: str) -> None:
    stranger = make_source(worker_spec(folder, 1, 2, backend=backend, token=b"guessed" * 5))
    with gathering(folder, 2, backend=backend) as sources:
        with pytest.raises(HandshakeError, match=r"cannot join prefill-0: .*wrong token"):
            stranger.connect({"prefill-0": sources[0].address})
        check_copy(folder, sources[0], 1)
    stranger.close()


@pytest.mark.parametrize(
    ("workers", "num_experts", "message"),
    [
        (3, 7, "prefill-1 has its experts placed as [0-9a-f]{16}, here .* as [0-9a-f]{16}: launch"),
        (2, 9, "another model or dtype"),
    ],
)
def test_model_or_placement_mismatch_is_refused(
    tiny_checkpoint: Checkpoints, folder: Path, workers: int, num_experts: int, message: str
) -> None:
    other = tiny_checkpoint("qwen3_moe", num_experts=num_experts)
    stray = make_source(worker_spec(other, 1, workers, backend="tcp"))
    expected = pytest.raises(HandshakeError, match=message)
    with gathering(folder, 2) as sources, expected:
        stray.connect({"prefill-0": sources[0].address})
    stray.close()


def test_layout_mismatch_is_refused(folder: Path) -> None:
    """A layout of another processor; plain matrices fit any processor."""
    other = layout_of(folder)
    other.digest = b"of another processor"
    stray = make_source(worker_spec(folder, 1, 2, backend="tcp"), layout=other)
    expected = pytest.raises(HandshakeError, match=r"set prefill\.packed_experts=false on all")
    with gathering(folder, 2) as sources, expected:
        stray.connect({"prefill-0": sources[0].address})
    stray.close()
    with gathering(folder, 2, layout=layout_of(folder, packed=False)) as sources:
        check_copy(folder, sources[0], 1, packed=False)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_replaced_worker_is_rejoined_at_its_new_address(deep: Path, backend: str) -> None:
    folder = deep
    with gathering(folder, 2, backend=backend) as (first, second):
        second.close()
        check_copy(folder, first, 1)
        assert list(first.lost) == ["prefill-1"]
        assert first.fallbacks == 1
        third = make_source(worker_spec(folder, 1, 2, backend=backend, epoch=2))
        first.connect({"prefill-1": third.listen("127.0.0.1")})
        third.connect({"prefill-0": first.address})
        for source in (first, third):
            check_copy(folder, source, 2)
        assert not first.lost
        assert first.fallbacks == 1
        late = make_source(worker_spec(folder, 1, 2, backend=backend, epoch=1))
        with pytest.raises(HandshakeError, match="epoch 1, which has been replaced by 2"):
            first.connect({"prefill-1": late.listen("127.0.0.1")})
        late.close()
        third.close()


def test_layer_that_the_host_store_cannot_read_comes_from_the_fallback(deep: Path) -> None:
    folder = deep

    class Broken(HostSource):
        def copy_part(self, layer: int, first: int, last: int, into: object) -> None:
            raise ChannelError("the disk is gone")

    good = make_source(worker_spec(folder, 0, 2, backend="tcp"))
    broken = make_source(worker_spec(folder, 1, 2, backend="tcp"), window=2, host=Broken())
    join_all([good, broken])
    check_copy(folder, good, 1)
    assert "the disk is gone" in good.lost["prefill-1"]
    with pytest.raises(ChannelError, match="the disk is gone"):
        broken.copy(1, new_buffer(folder))
    good.close()
    broken.close()


@contextlib.contextmanager
def mute(*, hangs_up: bool) -> Iterator[str]:
    """Address of a peer that is silent or disconnects at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed below
                while True:
                    taken.append(server.accept()[0])
                    if hangs_up:
                        taken[-1].close()

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"tcp:127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(20.0)
        for sock in taken:
            sock.close()


@pytest.mark.long
@pytest.mark.parametrize("hangs_up", [False, True])
def test_unresponsive_peer_is_skipped_and_others_are_joined(folder: Path, hangs_up: bool) -> None:
    config = group_config(
        prefill={"experts": "gathered"},
        channel={"heartbeat_timeout_s": 1.0, "heartbeat_interval_s": 0.2, "connect_timeout_s": 3.0},
    )
    with mute(hangs_up=hangs_up) as address, unlinked(folder, 3, config=config) as made:
        first, _, third = made
        first.connect({"prefill-1": address, "prefill-2": third.listen("127.0.0.1")})
        check_copy(folder, first, 1)
        assert list(first.lost) == ["prefill-1"]
        assert first.fallbacks == 1


def test_worker_moved_to_another_node_uses_tcp(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.gather.peer_source, "_is_far", lambda host: True)
    with unlinked(folder, 2, backend="shm") as (stayed, moved):
        for source in (stayed, moved):
            source.listen("127.0.0.1")
        stayed.connect({"prefill-1": elsewhere(moved.address)})
        moved.connect({"prefill-0": elsewhere(stayed.address)})
        for source in (stayed, moved):
            check_copy(folder, source, 1)
            assert not source.lost
            assert source.fallbacks == 0
        (link,) = stayed._links.values()
        assert link._sock.family == socket.AF_INET


def elsewhere(address: str) -> str:
    """The address as seen from another node, without the Unix socket."""
    unix, tcp = address.split(ADDRESS_SEPARATOR)
    assert unix.startswith("unix:@")
    return ADDRESS_SEPARATOR.join((unix + "-gone", tcp))


def test_running_local_peer_is_lost_after_four_timeouts(folder: Path) -> None:
    with unlinked(folder, 2) as (source, _):
        ours, theirs = socket.socketpair()  # the process behind it is this one: it runs
        link = WeightLink("prefill-1", ours, 1, None)
        source._links["prefill-1"] = link
        heartbeat_timeout_s = source._config.heartbeat_timeout_s
        link.progress_s = time.monotonic() - 2 * heartbeat_timeout_s
        assert not source._advance(link, overdue=True)
        assert "prefill-1" in source._links
        link.progress_s = time.monotonic() - 4 * heartbeat_timeout_s
        assert source._advance(link, overdue=True)
        assert "sent nothing" in source.lost["prefill-1"]
        theirs.close()
